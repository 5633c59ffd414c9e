"""Work of a layer on two threads that hardly ever meet.

The steps of a recurrent layer follow one another; the large products before and behind them (inputs, weight gradients)
do not. If all of a processor's threads join in every product, they meet some hundred times a layer, and each time the
slower one is waited for. With two **lanes** the caller walks the steps while another thread multiplies for the chunk
ahead and the chunks behind; whoever has nothing else to do takes the next piece. A lane has half of the threads. On two
cores of a shared server, four products of 13 GFLOP each took 0.28 to 0.30 s as two on either thread, and 0.37 to 0.43 s
one after the other on both.

With one lane everything happens at once and in order. With two, pieces that add to the same sum carry its name: they
run one at a time and in order, so that results do not depend on who came first.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch

from encore.rnn.arena import Arena
from encore.rnn.sequence import Chunk

Prepare = Callable[[Chunk, Arena], object]
"""What is done for a chunk before its steps, with its set of buffers."""


def lanes(count: int) -> OneLane:
    """The threads of one call of an operator, as a context."""
    return TwoLanes() if count == 2 else OneLane()


class OneLane:
    """The caller alone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Everything has been done."""

    def later(self, work: Callable[[], object], into: str | None = None) -> None:
        """Have it done before the end; `into` names the sum that it adds to."""
        work()

    def over(
        self, chunks: Sequence[Chunk], arena: Arena, turns: int, prepare: Prepare | None = None
    ) -> Iterator[tuple[Chunk, Arena]]:
        """Go through chunks, each with one of so many sets of buffers, which they use in turns.

        A chunk comes when its preparation is done, and when all pieces are done that were put off while its set had
        its last turn.
        """
        for number, chunk in enumerate(chunks):
            own = arena.of(number % turns)
            if prepare is not None:
                prepare(chunk, own)
            yield chunk, own


class Piece:
    """Something to be done by either lane."""

    __slots__ = ("done", "into", "soon", "work")

    def __init__(self, work: Callable[[], object], into: str | None, soon: bool) -> None:
        self.work, self.into, self.soon, self.done = work, into, soon, False


class TwoLanes(OneLane):
    """The caller and a thread beside it, with half of the caller's threads each."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Piece] = []
        self._summing: set[str | None] = set()
        self._latest: list[Piece] = []
        self._error: BaseException | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        each = max(1, self._threads // 2)
        self._helper = _helpers().submit(self._serve, each, torch.is_inference_mode_enabled())
        torch.set_num_threads(each)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish(self._waiting.copy())
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            concurrent.futures.wait([self._helper])  # it may be writing into the caller's buffers
            torch.set_num_threads(self._threads)
        if kind is None and self._error is not None:
            raise self._error

    def later(self, work: Callable[[], object], into: str | None = None) -> None:
        self._latest.append(self._put(Piece(work, into, soon=False)))

    def over(
        self, chunks: Sequence[Chunk], arena: Arena, turns: int, prepare: Prepare | None = None
    ) -> Iterator[tuple[Chunk, Arena]]:
        """With more than one set of buffers, the next chunk is prepared meanwhile."""
        users: list[list[Piece]] = [[] for _ in range(turns)]
        prepared: dict[int, Piece] = {}

        def begin(number: int) -> None:
            if number < len(chunks) and number not in prepared:
                self._finish(users[number % turns])
                if prepare is not None:
                    work = functools.partial(prepare, chunks[number], arena.of(number % turns))
                    prepared[number] = self._put(Piece(work, None, soon=True))

        for number, chunk in enumerate(chunks):
            begin(number)
            if prepare is not None:
                if turns > 1:
                    begin(number + 1)
                self._finish([prepared.pop(number)])
            self._latest = users[number % turns] = []
            yield chunk, arena.of(number % turns)

    # ---- both lanes --------------------------------------------------------------------------------------------------

    def _put(self, piece: Piece) -> Piece:
        """In order, those that somebody will wait for soon before the others."""
        with self._changed:
            ahead = sum(other.soon for other in self._waiting) if piece.soon else len(self._waiting)
            self._waiting.insert(ahead, piece)
            self._changed.notify()
        return piece

    def _finish(self, pieces: Sequence[Piece]) -> None:
        """Return when these are done; meanwhile take part."""
        while (piece := self._take(lambda: all(piece.done for piece in pieces))) is not None:
            self._run(piece)
        if self._error is not None:
            raise self._error

    def _take(self, enough: Callable[[], bool]) -> Piece | None:
        """The next piece that may run now; nothing if there is enough done, or if something went wrong."""
        with self._changed:
            while self._error is None and not enough():
                for piece in self._waiting:
                    if piece.into is None or piece.into not in self._summing:
                        self._waiting.remove(piece)
                        self._summing.add(piece.into)
                        return piece
                self._changed.wait()
        return None

    def _run(self, piece: Piece) -> None:
        """What goes wrong is kept for the caller, on whichever lane."""
        try:
            piece.work()
        except BaseException as error:
            self._error = error
        with self._changed:
            piece.done = True
            self._summing.discard(piece.into)
            self._changed.notify_all()

    def _serve(self, threads: int, inference: bool) -> None:
        """The other lane, until the call ends."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while (piece := self._take(lambda: self._closed)) is not None:
                    self._run(piece)
        finally:
            torch.set_num_threads(before)


@functools.cache
def _helpers() -> concurrent.futures.ThreadPoolExecutor:
    """Threads that stand by: one for each of the user's threads that run layers at the same time."""
    return concurrent.futures.ThreadPoolExecutor(max_workers=32, thread_name_prefix="encore-lane")


os.register_at_fork(after_in_child=_helpers.cache_clear)
