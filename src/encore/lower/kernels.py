"""Kernels compiled once per structure, many in one C++ file, and kept on disk for the next process.

PyTorch's vector headers take a compiler seconds, a kernel fractions of one: the headers are compiled once a machine,
and kernels in batches, as many at a time as there are cores, while the next batch is being lowered. On disk lies one
JSON file a kernel (Inductor's module text, where its functions are, what memory it wants aside) and one extension
module a batch, in a folder named after everything a compiled kernel depends on.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from encore.cost.cache import machine_key
from encore.folders import cache_directory
from encore.lower import inductor_private
from encore.lower.inductor_private import CppFunction, LoweringError
from encore.lower.module_text import bytes_aside, returned_strides
from encore.progress import progress
from encore.schedule.kernel import Kernel

KERNELS_A_FILE, KERNELS_WORTH_A_FILE = 12, 5
"""At most, and at least where there are as many: a file takes the compiler 0.9 seconds and 0.1 more for each kernel."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel that can run: `call([operands])` returns the outputs that are not written over an operand."""

    call: Callable[[list[Any]], tuple[Any, ...]]
    workspace: int
    """Bytes it allocates and gives back while it runs."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """What became of the kernels that were asked for, by their keys."""

    compiled: Mapping[str, CompiledKernel]
    refused: Mapping[str, str]
    """Kernels whose operators must run one by one, and why."""
    fresh: int
    """How many had to be compiled: they were neither in memory nor on disk."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A kernel as it lies on disk."""

    source: str
    workspace: int
    extension: str
    """The extension module that holds its C++ functions; empty where it has none."""
    functions: dict[str, str]
    """Their names in the kernel's own module -> in the extension."""


class KernelStore:
    """Kernels of this machine, torch version and number of threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ready: dict[str, CompiledKernel] = {}
        self._lock = threading.Lock()

    def compile(self, kernels: Iterable[Kernel]) -> Compilation:
        """Have these kernels ready: from memory, from disk, or by compiling them now."""
        wanted = {kernel.key: kernel for kernel in kernels}
        with self._lock:
            missing = [kernel for key, kernel in wanted.items() if key not in self._ready and not self._load(key)]
            refused = self._compile(missing) if missing else {}
            compiled = {key: self._ready[key] for key in wanted if key in self._ready}
        return Compilation(compiled, refused, len(missing) - len(refused))

    def workspace(self, kernel: Kernel) -> int | None:
        """What a kernel wants aside, if it has ever been compiled here."""
        if kernel.key not in self._ready and not self._load(kernel.key):
            return None
        return self._ready[kernel.key].workspace

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _compile(self, kernels: Sequence[Kernel]) -> dict[str, str]:
        """Compile kernels and make them ready; returns those that cannot be, and why."""
        missing = inductor_private.missing_compiler() if any("cpu" in kernel.devices for kernel in kernels) else ""
        if missing:
            return {kernel.key: missing for kernel in kernels}
        self.folder.mkdir(parents=True, exist_ok=True)
        refused: dict[str, str] = {}
        with (
            progress("encore: compiling kernels", len(kernels), lines=False) as advance,
            concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):
            header = pool.submit(self._build_header)
            batches = [pool.submit(self._build, batch, header) for batch in self._lowered(kernels, refused, advance)]
            for batch in concurrent.futures.as_completed(batches):
                records, failures = batch.result()
                refused.update(failures)
                for key, record in records.items():
                    self._write(key, record)
                    self._make_ready(key, record)
        return refused

    def _lowered(
        self, kernels: Sequence[Kernel], refused: dict[str, str], advance: Callable[[str], None]
    ) -> Iterator[dict[str, _Lowered]]:
        """Module texts, in batches."""
        batch: dict[str, _Lowered] = {}
        share = max(KERNELS_WORTH_A_FILE, min(KERNELS_A_FILE, -(-len(kernels) // (os.cpu_count() or 1))))
        for kernel in kernels:
            try:
                batch[kernel.key] = _lower(kernel)
            except LoweringError as error:
                refused[kernel.key] = str(error)
            advance("")
            if len(batch) == share:
                yield batch
                batch = {}
        if batch:
            yield batch

    def _build_header(self) -> Path:
        """The headers of all kernels, compiled if they have not been; without that, compiling takes longer."""
        header = self.folder / "kernels.h"
        if not header.with_name("kernels.h.gch").exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                source = Path(aside) / header.name
                source.write_text(inductor_private.HEADER)
                made = subprocess.run(inductor_private.header_command(source), capture_output=True, check=False)
                source.replace(header)
                if made.returncode == 0:
                    source.with_name("kernels.h.gch").replace(header.with_name("kernels.h.gch"))
        return header

    def _build(
        self, batch: Mapping[str, _Lowered], header: concurrent.futures.Future[Path]
    ) -> tuple[dict[str, _Record], dict[str, str]]:
        """Compile a batch; where that fails, each kernel by itself, to find the one to blame."""
        try:
            return self._build_together(batch, header.result()), {}
        except LoweringError as error:
            if len(batch) == 1:
                return {}, dict.fromkeys(batch, str(error))
        records: dict[str, _Record] = {}
        failures: dict[str, str] = {}
        for key, lowered in batch.items():
            built, failed = self._build({key: lowered}, header)
            records.update(built)
            failures.update(failed)
        return records, failures

    def _build_together(self, batch: Mapping[str, _Lowered], header: Path) -> dict[str, _Record]:
        functions: list[CppFunction] = []
        names: dict[str, dict[str, str]] = {}
        for key, lowered in batch.items():
            for function in lowered.functions:
                unique = f"{function.name}_{len(functions)}"
                names.setdefault(key, {})[function.name] = unique
                functions.append(dataclasses.replace(function, name=unique))
        extension = self._build_extension(functions, header) if functions else ""
        return {
            key: _Record(lowered.source, lowered.workspace, extension if key in names else "", names.get(key, {}))
            for key, lowered in batch.items()
        }

    def _build_extension(self, functions: Sequence[CppFunction], header: Path) -> str:
        """Compile functions into one extension module of the folder; returns its name."""
        text = inductor_private.extension_source("MODULE", functions)
        name = f"encore_kernels_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with tempfile.TemporaryDirectory(dir=self.folder) as aside:
            source = Path(aside) / f"{name}.cpp"
            source.write_text(inductor_private.extension_source(name, functions))
            command = inductor_private.build_command(source, name, header)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
                raise LoweringError(f"the C++ compiler refused it: {said}")
            (Path(aside) / f"{name}.so").replace(self.folder / f"{name}.so")
        return name

    # -- disk --------------------------------------------------------------------------------------------------------

    def _write(self, key: str, record: _Record) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            json.dump(dataclasses.asdict(record), file)
        Path(file.name).replace(self.folder / f"{key}.json")

    def _load(self, key: str) -> bool:
        """Make a kernel ready from disk; a record that is damaged or has lost its extension is as good as none."""
        try:
            record = _Record(**json.loads((self.folder / f"{key}.json").read_text()))
            self._make_ready(key, record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError):
            return False
        return True

    def _make_ready(self, key: str, record: _Record) -> None:
        call, scope, functions = inductor_private.execute(record.source)
        if functions:
            extension = _load_extension(self.folder / f"{record.extension}.so")
            compiled = {function.name: getattr(extension, record.functions[function.name]) for function in functions}
            for name, thing in scope.items():
                if isinstance(thing, CppFunction):
                    scope[name] = compiled[thing.name]
        self._ready[key] = CompiledKernel(call, record.workspace)


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A kernel on its way: Inductor's module and the C++ functions in it."""

    source: str
    functions: tuple[CppFunction, ...]
    workspace: int


def _lower(kernel: Kernel) -> _Lowered:
    source = inductor_private.module_source(kernel)
    if not kernel.accepts(returned_strides(source)):
        raise LoweringError("its results came out in another layout than the graph wants")
    _, _, functions = inductor_private.execute(source)
    return _Lowered(source, tuple(functions), bytes_aside(source))


@functools.cache
def _load_extension(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    ctypes.CDLL(str(path)).set_address_of(ctypes.c_void_p(inductor_private.tensor_address_function()))
    return module


@functools.cache
def _open_store(folder: Path) -> KernelStore:
    return KernelStore(folder)


def kernel_store() -> KernelStore:
    """The store of this machine, torch version and number of threads."""
    facts = f"{machine_key()}-{_fingerprint()}-{torch.get_num_threads()}"
    return _open_store(cache_directory() / f"kernels-{facts}")


@functools.cache
def _fingerprint() -> str:
    """Of the code that turns kernels into modules: what it made before it was changed is not used again."""
    makers = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(maker.read_bytes() for maker in makers)).hexdigest()[:8]
