"""Tiers whose locks, queues and file the order of work knows of, made of the package's modules as they are or changed.

Threads of a tier are set apart: they are behind what other threads have seen only by the tier's lock and its queue.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import encore.tiers.disk
import encore.tiers.host
from encore.tiers import Tier
from encore.tiers.slot_file import SlotFile
from nullcuda.null_device import acquire, note_host, release, set_thread_apart

FOLDER = Path(encore.tiers.host.__file__).parent
MODULES = ("layout", "streams", "tier", "host", "disk")
"""Those through which tensors pass, in the order of their imports."""


class _NotedLock(threading.Condition):
    def __enter__(self) -> bool:
        entered = super().__enter__()
        acquire(id(self))
        return entered

    def __exit__(self, *exception: Any) -> None:
        release(id(self))
        super().__exit__(*exception)

    def wait(self, timeout: float | None = None) -> bool:
        release(id(self))
        notified = super().wait(timeout)
        acquire(id(self))
        return notified


class _NotedQueue(queue.SimpleQueue):
    """Whoever gets a job is behind what put it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        release(id(item))
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        set_thread_apart()
        acquire(id(item))
        return item


class _NotedFile(SlotFile):
    """The host reads the memory that is written to the file, and writes to the one that the file is read into."""

    def write(self, offset: int, block: memoryview) -> None:
        note_host(_address(block), len(block), writes=False, what="file")
        super().write(offset, block)

    def read(self, offset: int, block: memoryview) -> None:
        super().read(offset, block)
        note_host(_address(block), len(block), writes=True, what="file")


def _address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def tree_of(name: str) -> ast.Module:
    """The source of one of the tiers' modules."""
    return ast.parse((FOLDER / f"{name}.py").read_text())


class NotedTiers:
    """The tiers of this package or, if some modules are changed, tiers made of these."""

    def __init__(self, changed: Mapping[str, ast.Module] | None = None) -> None:
        self._host: ModuleType = encore.tiers.host
        self._disk: ModuleType = encore.tiers.disk
        if changed:
            modules = {name: ModuleType(f"encore.tiers.{name}") for name in MODULES}
            with mock.patch.dict(sys.modules, {module.__name__: module for module in modules.values()}):
                for name, module in modules.items():
                    code = compile(changed.get(name) or tree_of(name), f"{FOLDER / name}.py", "exec")
                    exec(code, module.__dict__)
            modules["streams"].__dict__["SideStreams"].alongside = alongside
            self._host, self._disk = modules["host"], modules["disk"]

    def host(self, **options: Any) -> Tier:
        with self._noted():
            made: Tier = self._host.Host(**options)
            return made

    def disk(self, folder: Path, **options: Any) -> Tier:
        with self._noted():
            made: Tier = self._disk.Disk(folder, **options)
            return made

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading, "Condition", _NotedLock))
            stack.enter_context(mock.patch.object(queue, "SimpleQueue", _NotedQueue))
            stack.enter_context(mock.patch.object(self._disk, "SlotFile", _NotedFile))
            yield


@contextlib.contextmanager
def alongside(self: Any, computed: Mapping[torch.device, torch.Event], others: Any = ()) -> Iterator[None]:
    """As `SideStreams.behind`, without waiting for what computes."""
    with contextlib.ExitStack() as stack:
        for device in computed:
            side = self._of(device)
            for other in others:
                side.wait_event(other)
            stack.enter_context(side)
        yield


class Guards(ast.NodeTransformer):
    """Finds the guards of a module: what orders work on streams, and what waits for it. Takes away that of one number.

    Conditions on what a block's fields say are not among them: without one of these a tier raises, or waits for ever.
    """

    def __init__(self, without: int | None = None) -> None:
        self.found: list[str] = []
        self._without = without
        self._function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        name, wholly = node.func.attr, ast.unparse(node)
        if name in ("wait_event", "wait_stream", "record_stream", "synchronize"):
            return ast.Constant(None) if self._guard(wholly) else node
        if name == "query" and self._function == "_poll":
            return ast.Constant(True) if self._guard(wholly) else node
        if name == "copy_" and self._guard(f"a wait in {wholly}"):
            node.keywords = [ast.keyword("non_blocking", ast.Constant(True))]
        if name == "behind":
            if self._guard(f"what computes in {wholly}"):
                node.func.attr = "alongside"
            if len(node.args) > 1 and self._guard(f"other events in {wholly}"):
                del node.args[1:]
        return node

    def _guard(self, what: str) -> bool:
        self.found.append(f"{self._function}: {what}")
        return len(self.found) - 1 == self._without


def all_guards() -> list[tuple[str, int, str]]:
    """Module, number and text of each guard."""
    guards = []
    for name in MODULES:
        finder = Guards()
        finder.visit(tree_of(name))
        guards += [(name, number, text) for number, text in enumerate(finder.found)]
    return guards


def without_guard(name: str, number: int) -> NotedTiers:
    changed = Guards(without=number).visit(tree_of(name))
    return NotedTiers({name: ast.fix_missing_locations(changed)})
