"""The largest flow through a network, and the smallest cut that it proves (Dinic 1970).

Each phase finds, by breadth-first search, how far every node is from the source, and then fills all shortest paths at
once. Flows between neighbouring operators have short paths, so a graph of thousands of them takes a few phases.
"""

from __future__ import annotations


class Network:
    """Nodes are numbers from 0; edges lie in pairs, each followed by its reverse."""

    def __init__(self) -> None:
        self._edges_of: list[list[int]] = []
        self._end: list[int] = []
        self._room: list[int] = []

    def node(self) -> int:
        self._edges_of.append([])
        return len(self._edges_of) - 1

    def edge(self, begin: int, end: int, capacity: int) -> None:
        for node, other, room in ((begin, end, capacity), (end, begin, 0)):
            self._edges_of[node].append(len(self._end))
            self._end.append(other)
            self._room.append(room)

    def fill(self, source: int, sink: int) -> int:
        """Send as much as fits; returns how much that is."""
        total = 0
        while (level := self._levels(source))[sink] >= 0:
            total += self._fill_shortest(source, sink, level)
        return total

    def before(self, sink: int) -> set[int]:
        """After filling: nodes that could still send more to the sink. Full edges into this set are the smallest cut
        closest to the sink."""
        found = {sink}
        pending = [sink]
        while pending:
            for edge in self._edges_of[pending.pop()]:
                other = self._end[edge]
                if self._room[edge ^ 1] and other not in found:
                    found.add(other)
                    pending.append(other)
        return found

    def _levels(self, source: int) -> list[int]:
        """How many edges with room lead from the source to each node; -1 where none do."""
        level = [-1] * len(self._edges_of)
        level[source] = 0
        queue = [source]
        for node in queue:
            for edge in self._edges_of[node]:
                if self._room[edge] and level[self._end[edge]] < 0:
                    level[self._end[edge]] = level[node] + 1
                    queue.append(self._end[edge])
        return level

    def _fill_shortest(self, source: int, sink: int, level: list[int]) -> int:
        """Fill paths on which every edge leads one level on, until none is left."""
        tried = [0] * len(level)
        path: list[int] = []
        node, total = source, 0
        while True:
            if node == sink:
                sent = min(self._room[edge] for edge in path)
                total += sent
                for edge in path:
                    self._room[edge] -= sent
                    self._room[edge ^ 1] += sent
                full = next(position for position, edge in enumerate(path) if not self._room[edge])
                node = self._end[path[full] ^ 1]
                del path[full:]
            edges = self._edges_of[node]
            while tried[node] < len(edges):
                edge = edges[tried[node]]
                if self._room[edge] and level[self._end[edge]] == level[node] + 1:
                    path.append(edge)
                    node = self._end[edge]
                    break
                tried[node] += 1
            else:
                if not path:
                    return total
                node = self._end[path.pop() ^ 1]
                tried[node] += 1
