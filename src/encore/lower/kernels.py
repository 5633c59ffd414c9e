"""Kernels compiled once per structure, many in one C++ file, and cached on disk.

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
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from encore.cached_files import (
    CachedFileError,
    is_intact,
    read_record,
    warn_unwritable,
    write_cached,
    write_record,
)  # fmt: skip
from encore.folders import cache_folder, private_directory
from encore.lower import torch_private
from encore.lower.extension import CppFunction, LoweringError, extension_source
from encore.lower.header import kernel_header
from encore.lower.module_text import returned_strides, workspace_bytes
from encore.measurements import machine_key
from encore.schedule.kernel import Kernel
from encore.terminal import progress

KERNELS_A_FILE, KERNELS_WORTH_A_FILE = 12, 5
"""The most kernels in a file, and the fewest if there are as many: a file takes the compiler 0.9 seconds, and each
kernel 0.1."""
EXTENSION, SHA256 = re.compile(r"encore_kernels_[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}")
"""Names that a record may have, none of which leads out of its folder."""


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


@dataclass(frozen=True, slots=True)
class _Extension:
    """A compiled extension module."""

    folder: Path
    name: str
    sha256: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}-{self.sha256[:16]}.so"


@dataclass(frozen=True, slots=True)
class _Record:
    """A kernel in the cache."""

    key: str
    source: str
    workspace: int
    extension: str
    """The extension module with its C++ functions; empty if it has none."""
    extension_sha256: str
    functions: dict[str, str]
    """Their names in the kernel's own module -> in the extension."""

    @classmethod
    def parse(cls, found: Mapping[str, Any], key: str) -> _Record:
        """Check every field; raise `CachedFileError` if one is not what `write_record` was given."""
        try:
            record = cls(**found)
        except TypeError as error:
            raise CachedFileError(f"it has other fields than a kernel ({error})") from error
        if not record._is_sound() or record.key != key:
            raise CachedFileError(f"it is not a record of the kernel {key}")
        return record

    def _is_sound(self) -> bool:
        texts = (self.key, self.source, self.extension, self.extension_sha256)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.functions, dict):
            return False
        named = EXTENSION.fullmatch(self.extension) and SHA256.fullmatch(self.extension_sha256)
        return (
            type(self.workspace) is int
            and self.workspace >= 0
            and bool(named or not (self.extension or self.extension_sha256 or self.functions))
            and all(isinstance(name, str) and name.isidentifier() for name in self.functions.values())
        )

    def extension_in(self, folder: Path) -> _Extension:
        return _Extension(folder, self.extension, self.extension_sha256)


class KernelStore:
    """Kernels of this machine, torch version and number of threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ready: dict[str, CompiledKernel] = {}
        self._lock = threading.Lock()

    def compile(self, kernels: Iterable[Kernel]) -> Compilation:
        """Load these kernels from memory or disk, and compile those that are in neither."""
        wanted = {kernel.key: kernel for kernel in kernels}
        with self._lock:
            missing = [kernel for key, kernel in wanted.items() if key not in self._ready and not self._load(key)]
            failed = self._compile(missing) if missing else {}
            compiled = {key: self._ready[key] for key in wanted if key in self._ready}
        return Compilation(compiled, failed, len(missing) - len(failed))

    def workspace(self, kernel: Kernel) -> int | None:
        """The workspace of a kernel, if it has been compiled on this machine."""
        if kernel.key not in self._ready and not self._load(kernel.key):
            return None
        return self._ready[kernel.key].workspace

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _compile(self, kernels: Sequence[Kernel]) -> dict[str, str]:
        """Compile and load kernels; return those that cannot be, and why."""
        missing = torch_private.missing_compiler() if any("cpu" in kernel.devices for kernel in kernels) else ""
        if missing:
            return {kernel.key: missing for kernel in kernels}
        failed: dict[str, str] = {}
        with (
            progress("encore: compiling kernels", len(kernels), lines=False) as advance,
            concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):
            header = pool.submit(kernel_header)
            batches = [pool.submit(self._build, batch, header) for batch in self._lowered(kernels, failed, advance)]
            for batch in concurrent.futures.as_completed(batches):
                records, failures = batch.result()
                failed.update(failures)
                for key, (record, folder) in records.items():
                    if folder == self.folder:
                        self._write(record)
                    try:
                        self._make_ready(record, folder)
                    except Exception as error:  # for example a file system that is mounted noexec
                        failed[key] = f"it cannot be loaded from {folder} ({error})"
        return failed

    def _lowered(
        self, kernels: Sequence[Kernel], failed: dict[str, str], advance: Callable[[str], None]
    ) -> Iterator[dict[str, _Lowered]]:
        """Lower kernels to module texts, in batches."""
        batch: dict[str, _Lowered] = {}
        share = max(KERNELS_WORTH_A_FILE, min(KERNELS_A_FILE, -(-len(kernels) // (os.cpu_count() or 1))))
        for kernel in kernels:
            try:
                batch[kernel.key] = _lower(kernel)
            except LoweringError as error:
                failed[kernel.key] = str(error)
            advance("")
            if len(batch) == share:
                yield batch
                batch = {}
        if batch:
            yield batch

    def _build(
        self, batch: Mapping[str, _Lowered], header: concurrent.futures.Future[Path]
    ) -> tuple[dict[str, tuple[_Record, Path]], dict[str, str]]:
        """Compile a batch: return records with the folders of their extensions, and failed kernels with the reasons."""
        try:
            return self._build_together(batch, header.result()), {}
        except LoweringError as error:
            if len(batch) == 1:
                return {}, dict.fromkeys(batch, str(error))
        records: dict[str, tuple[_Record, Path]] = {}
        failures: dict[str, str] = {}
        for key, lowered in batch.items():
            built, failed = self._build({key: lowered}, header)
            records.update(built)
            failures.update(failed)
        return records, failures

    def _build_together(self, batch: Mapping[str, _Lowered], header: Path) -> dict[str, tuple[_Record, Path]]:
        functions: list[CppFunction] = []
        names: dict[str, dict[str, str]] = {}
        for key, lowered in batch.items():
            for function in lowered.functions:
                unique = f"{function.name}_{len(functions)}"
                names.setdefault(key, {})[function.name] = unique
                functions.append(dataclasses.replace(function, name=unique))
        extension = self._build_extension(functions, header) if functions else None
        records: dict[str, tuple[_Record, Path]] = {}
        for key, lowered in batch.items():
            if extension is None or key not in names:
                records[key] = _Record(key, lowered.source, lowered.workspace, "", "", {}), self.folder
                continue
            name, sha256 = extension.name, extension.sha256
            records[key] = (
                _Record(key, lowered.source, lowered.workspace, name, sha256, names[key]),
                extension.folder,
            )
        return records

    def _build_extension(self, functions: Sequence[CppFunction], header: Path) -> _Extension:
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
            built = _Extension(private, name, hashlib.sha256(library).hexdigest())
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

    def _write(self, record: _Record) -> None:
        try:
            write_record(self._path(record.key), dataclasses.asdict(record))
        except OSError as error:
            warn_unwritable(self.folder, error)

    def _load(self, key: str) -> bool:
        """Load a kernel from disk; return False if its record or extension is missing or damaged."""
        try:
            record = _Record.parse(read_record(self._path(key)), key)
            self._make_ready(record, self.folder)
        except Exception:  # of any kind, since a record has code: it is compiled again
            return False
        return True

    def _make_ready(self, record: _Record, folder: Path) -> None:
        call, scope, functions = torch_private.execute(record.source)
        if functions:
            extension = _load_extension(record.extension_in(folder))
            compiled = {function.name: getattr(extension, record.functions[function.name]) for function in functions}
            for name, thing in scope.items():
                if isinstance(thing, CppFunction):
                    scope[name] = compiled[thing.name]
        self._ready[record.key] = CompiledKernel(call, record.workspace)


@dataclass(frozen=True, slots=True)
class _Lowered:
    """Inductor's module for a kernel, and the C++ functions in it."""

    source: str
    functions: tuple[CppFunction, ...]
    workspace: int


def _lower(kernel: Kernel) -> _Lowered:
    source = torch_private.module_source(kernel)
    if not kernel.accepts(returned_strides(source)):
        raise LoweringError("its results have another layout than in the graph")
    _, _, functions = torch_private.execute(source)
    return _Lowered(source, tuple(functions), workspace_bytes(source))


@functools.cache
def _load_extension(extension: _Extension) -> ModuleType:
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
