"""Kernels compiled once per structure, many in one C++ file, and cached on disk.

The first sizes of a structure have a kernel of their own, later ones share a kernel with symbols (`structures.py`), to
which each is bound (`symbolic.py`).

PyTorch's vector headers take a compiler seconds, a kernel fractions of one: the headers are compiled once a machine,
and kernels in batches, in as many processes as there are cores, while the next batch is lowered. The cache has a record
for each kernel (Inductor's module text, the names of its functions, its workspace) and an extension module for each
batch, in a folder named after everything that a compiled kernel depends on. A record has its own hash and that of its
extension (`cached_files.py`): what is damaged or not trusted is compiled again. The name of an extension has its hash,
so that processes which compile the same batch at the same time do not replace each other's.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from encore.cached_files import (
    CachedFileError,
    is_intact,
    warn_unwritable,
    write_cached,
    write_record,
)  # fmt: skip
from encore.folders import cache_folder, private_directory
from encore.lower import torch_private
from encore.lower.extension import CppFunction, LoweringError, extension_source
from encore.lower.header import kernel_header
from encore.lower.module_text import read_module
from encore.lower.records import Extension, KernelRecord, Rules
from encore.lower.structures import Structures
from encore.lower.symbolic import SymbolicKernel, SymbolicSource, lower_symbolic
from encore.measurements import machine_key
from encore.schedule.kernel import Kernel
from encore.terminal import progress

log = logging.getLogger("encore")

KERNELS_A_FILE, KERNELS_WORTH_A_FILE = 12, 5
"""The most kernels in a file, and the fewest if there are as many: a file takes the compiler 0.9 seconds, and each
kernel 0.1."""
MOST_BOUND = 4096
"""Sizes for which kernels with symbols are kept ready. Others take a fraction of a millisecond."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel that can run: `call([operands])` returns the outputs that are not written over an operand."""

    call: Callable[[list[Any]], tuple[Any, ...]]
    workspace: int
    """Bytes that it allocates and frees while it runs."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """The results of compiling some kernels, by their keys."""

    compiled: Mapping[str, CompiledKernel]
    failed: Mapping[str, str]
    """Kernels whose operators must run one by one, and why."""
    fresh: int
    """How many were compiled, since they were neither in memory nor on disk."""


class KernelStore:
    """Kernels of this machine, torch version and number of threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ready: dict[str, CompiledKernel] = {}
        self._symbolic: dict[str, SymbolicKernel] = {}
        self._bound: OrderedDict[str, CompiledKernel] = OrderedDict()
        """Kernels with symbols for certain sizes, those used last at the end."""
        self._structures = Structures(folder)
        self._lock = threading.Lock()

    def compile(self, kernels: Iterable[Kernel]) -> Compilation:
        """Load these kernels from memory or disk, and compile those that are in neither."""
        wanted = {kernel.key: kernel for kernel in kernels}
        with self._lock:
            self._structures.begin()
            compiled = self._found(wanted.values())
            missing = [kernel for key, kernel in wanted.items() if key not in compiled]
            failed: dict[str, str] = {}
            fresh = self._compile(missing, failed) if missing else 0
            compiled.update(self._found(missing))
        return Compilation(compiled, failed, fresh)

    def workspace(self, kernel: Kernel) -> int | None:
        """The workspace of a kernel, if one that is right for its sizes has been compiled on this machine."""
        found = self._find(kernel)
        return None if found is None else found.workspace

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _compile(self, kernels: Sequence[Kernel], failed: dict[str, str]) -> int:
        """Compile and load kernels; return how many were compiled. Those that cannot be are `failed`."""
        missing = torch_private.missing_compiler() if any("cpu" in kernel.devices for kernel in kernels) else ""
        if missing:
            failed.update({kernel.key: missing for kernel in kernels})
            return 0
        fresh = self._compile_all(kernels, failed, symbolic=True)
        # a kernel with symbols may have been lowered and not compiled
        left = [kernel for kernel in kernels if kernel.key not in failed and self._find(kernel) is None]
        if left:
            fresh += self._compile_all(left, failed, symbolic=False)
        self._structures.save()
        return fresh

    def _compile_all(self, kernels: Sequence[Kernel], failed: dict[str, str], *, symbolic: bool) -> int:
        fresh = 0
        with (
            progress("encore: compiling kernels", len(kernels), lines=False) as advance,
            concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):
            header = pool.submit(kernel_header)
            lowered = self._lowered(kernels, failed, advance, symbolic=symbolic)
            batches = {pool.submit(self._build, batch, header): batch for batch in lowered}
            for done in concurrent.futures.as_completed(batches):
                batch = batches[done]
                records, failures = done.result()
                for key, (record, folder) in records.items():
                    if folder == self.folder:
                        self._write(record)
                    try:
                        self._make_ready(record, folder)
                    except Exception as error:  # for example a file system that is mounted noexec
                        failures[key] = f"it cannot be loaded from {folder} ({error})"
                    else:
                        fresh += 1
                        self._note(batch[key])
                for key, why in failures.items():
                    if batch[key].rules is None:
                        failed[key] = why
                    else:
                        self._structures.add_failure(batch[key].kernel.structure)
        return fresh

    def _note(self, lowered: _Lowered) -> None:
        """Remember which sizes were compiled."""
        if lowered.rules is not None:
            self._structures.add_symbolic(lowered.kernel.structure, lowered.key)
        else:
            self._structures.see(lowered.kernel)
        self._structures.add_sample(lowered.kernel)

    def _lowered(
        self, kernels: Sequence[Kernel], failed: dict[str, str], advance: Callable[[str], None], *, symbolic: bool
    ) -> Iterator[dict[str, _Lowered]]:
        """Lower kernels to module texts, in batches."""
        batch: dict[str, _Lowered] = {}
        shared: list[SymbolicSource] = []
        share = max(KERNELS_WORTH_A_FILE, min(KERNELS_A_FILE, -(-len(kernels) // (os.cpu_count() or 1))))
        for kernel in kernels:
            advance("")
            if any(source.fits(kernel) for source in shared):
                continue
            try:
                lowered = (self._lower_symbolic(kernel, shared) if symbolic else None) or _lower(kernel)
            except LoweringError as error:
                failed[kernel.key] = str(error)
                continue
            batch[lowered.key] = lowered
            if len(batch) == share:
                yield batch
                batch = {}
        if batch:
            yield batch

    def _lower_symbolic(self, kernel: Kernel, shared: list[SymbolicSource]) -> _Lowered | None:
        """Lower a kernel with symbols, if it is time for that and if it can be."""
        samples = self._structures.samples(kernel)
        if not samples:
            self._structures.expect(kernel)
            return None
        try:
            source = lower_symbolic(kernel, samples)
            _, _, functions = torch_private.execute(source.text)
        except LoweringError as error:
            log.info("a kernel is compiled for its own sizes: %s", error)
            self._structures.add_failure(kernel.structure)
            return None
        shared.append(source)
        key = hashlib.sha256(repr(source.rules).encode()).hexdigest()[:24]
        return _Lowered(key, kernel, source.text, tuple(functions), 0, source.rules)

    def _build(
        self, batch: Mapping[str, _Lowered], header: concurrent.futures.Future[Path]
    ) -> tuple[dict[str, tuple[KernelRecord, Path]], dict[str, str]]:
        """Compile a batch: return records with the folders of their extensions, and failed kernels with the reasons."""
        try:
            return self._build_together(batch, header.result()), {}
        except LoweringError as error:
            if len(batch) == 1:
                return {}, dict.fromkeys(batch, str(error))
        records: dict[str, tuple[KernelRecord, Path]] = {}
        failures: dict[str, str] = {}
        for key, lowered in batch.items():
            built, failed = self._build({key: lowered}, header)
            records.update(built)
            failures.update(failed)
        return records, failures

    def _build_together(self, batch: Mapping[str, _Lowered], header: Path) -> dict[str, tuple[KernelRecord, Path]]:
        functions: list[CppFunction] = []
        names: dict[str, dict[str, str]] = {}
        for key, lowered in batch.items():
            for function in lowered.functions:
                unique = f"{function.name}_{len(functions)}"
                names.setdefault(key, {})[function.name] = unique
                functions.append(dataclasses.replace(function, name=unique))
        extension = self._build_extension(functions, header) if functions else None
        records: dict[str, tuple[KernelRecord, Path]] = {}
        for key, lowered in batch.items():
            if extension is None or key not in names:
                records[key] = lowered.record("", "", {}), self.folder
            else:
                records[key] = lowered.record(extension.name, extension.sha256, names[key]), extension.folder
        return records

    def _build_extension(self, functions: Sequence[CppFunction], header: Path) -> Extension:
        """Compile functions to an extension module in the folder, or in a private one if that cannot be written to."""
        text = extension_source("MODULE", functions)
        name = f"encore_kernels_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            private = Path(tempfile.mkdtemp(dir=private_directory()))
            source = private / f"{name}.cpp"
            source.write_text(extension_source(name, functions))
            command = torch_private.build_command(source, name, header)
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                output = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
                raise LoweringError(f"the C++ compiler rejects it: {output}")
            made = source.with_suffix(".so")
            library = made.read_bytes()
            built = Extension(private, name, hashlib.sha256(library).hexdigest())
            made.rename(built.path)
        except OSError as error:
            raise LoweringError(f"it cannot be compiled: {error}") from error
        kept = dataclasses.replace(built, folder=self.folder)
        try:
            if not is_intact(kept.path, kept.sha256):
                write_cached(kept.path, library)
        except OSError as error:
            warn_unwritable(self.folder, error)
            return built
        shutil.rmtree(private, ignore_errors=True)
        return kept

    # -- disk --------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _write(self, record: KernelRecord) -> None:
        try:
            write_record(self._path(record.key), dataclasses.asdict(record))
        except OSError as error:
            warn_unwritable(self.folder, error)

    def _found(self, kernels: Iterable[Kernel]) -> dict[str, CompiledKernel]:
        found = {kernel.key: self._find(kernel) for kernel in kernels}
        return {key: kernel for key, kernel in found.items() if kernel is not None}

    def _find(self, kernel: Kernel) -> CompiledKernel | None:
        """A kernel that was compiled for these sizes or is right for them, from memory or disk."""
        if kernel.key in self._ready:
            return self._ready[kernel.key]
        if kernel.key not in self._bound:
            loaded = self._load(kernel.key)
            if not loaded and not self._bind(kernel):
                return None
            self._structures.see(kernel)
            if loaded:
                return self._ready[kernel.key]
        self._bound.move_to_end(kernel.key)
        return self._bound[kernel.key]

    def _load(self, key: str, *, symbolic: bool = False) -> bool:
        """Load a kernel from disk; return False if its record or extension is missing or damaged."""
        try:
            self._make_ready(KernelRecord.read(self._path(key), key, symbolic=symbolic), self.folder)
        except Exception:  # of any kind, since a record has code: it is compiled again
            return False
        return True

    def _bind(self, kernel: Kernel) -> bool:
        """Have a kernel with symbols run for these sizes; return False if none is right for them."""
        for key in self._structures[kernel.structure].symbolic:
            if key not in self._symbolic and not self._load(key, symbolic=True):
                self._structures.drop_symbolic(kernel.structure, key)
                continue
            bound = self._symbolic[key].bind(kernel)
            if bound is not None:
                self._bound[kernel.key] = CompiledKernel(*bound)
                if len(self._bound) > MOST_BOUND:
                    self._bound.popitem(last=False)
                return True
        return False

    def _make_ready(self, record: KernelRecord, folder: Path) -> None:
        call, scope, functions = torch_private.execute(record.source)
        if functions:
            extension = _load_extension(record.extension_in(folder))
            compiled = {function.name: getattr(extension, record.functions[function.name]) for function in functions}
            for name, thing in scope.items():
                if isinstance(thing, CppFunction):
                    scope[name] = compiled[thing.name]
        if record.rules is None:
            self._ready[record.key] = CompiledKernel(call, record.workspace)
        else:
            self._symbolic[record.key] = SymbolicKernel(SymbolicSource(record.rules, record.source), call)


@dataclass(frozen=True, slots=True)
class _Lowered:
    """Inductor's module for a kernel, and the C++ functions in it."""

    key: str
    kernel: Kernel
    source: str
    functions: tuple[CppFunction, ...]
    workspace: int
    rules: Rules | None = None

    def record(self, extension: str, sha256: str, functions: dict[str, str]) -> KernelRecord:
        """Its record, once it is compiled."""
        return KernelRecord(self.key, self.source, self.workspace, extension, sha256, functions, self.rules)


def _lower(kernel: Kernel) -> _Lowered:
    source = torch_private.module_source(kernel)
    read = read_module(source)
    if not kernel.accepts(read.strides):
        raise LoweringError("its results have another layout than in the graph")
    _, _, functions = torch_private.execute(source)
    return _Lowered(kernel.key, kernel, source, tuple(functions), read.workspace)


@functools.cache
def _load_extension(extension: Extension) -> ModuleType:
    """Load an extension module if its hash is right: the system would map a truncated one, and crash later."""
    if not is_intact(extension.path, extension.sha256):
        raise CachedFileError(f"{extension.path} is missing, damaged or not trusted")
    loader = importlib.machinery.ExtensionFileLoader(extension.name, str(extension.path))
    spec = importlib.util.spec_from_loader(extension.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    ctypes.CDLL(str(extension.path)).set_address_of(ctypes.c_void_p(torch_private.tensor_address_function()))
    return module


@functools.cache
def _open_store(folder: Path) -> KernelStore:
    return KernelStore(folder)


def kernel_store() -> KernelStore:
    """The store of this machine, torch version and number of threads."""
    facts = f"{machine_key()}-{_fingerprint()}-{torch.get_num_threads()}"
    return _open_store(cache_folder(f"kernels-{facts}"))


@functools.cache
def _fingerprint() -> str:
    """The hash of the code that lowers kernels: what another version of it has compiled is not used."""
    makers = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(maker.read_bytes() for maker in makers)).hexdigest()[:8]
