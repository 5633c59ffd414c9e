"""Kernels compiled once per structure, many in one C++ file, and kept on disk for the next process.

PyTorch's vector headers take a compiler seconds, a kernel fractions of one: the headers are compiled once a machine,
and kernels in batches, as many at a time as there are cores, while the next batch is being lowered. On disk lies one
record a kernel (Inductor's module text, where its functions are, its workspace) and one extension module a batch, in a
folder named after everything a compiled kernel depends on. A record has its own hash and the one of its extension
(`cached_files.py`): what is damaged or not trusted is compiled again. An extension has its hash in its name, so that
processes which compile the same batch at the same time do not replace each other's.
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
from encore.lower.module_text import bytes_aside, returned_strides
from encore.measurements import machine_key
from encore.schedule.kernel import Kernel
from encore.terminal import progress

KERNELS_A_FILE, KERNELS_WORTH_A_FILE = 12, 5
"""At most, and at least where there are as many: a file takes the compiler 0.9 seconds and 0.1 more for each kernel."""
EXTENSION, SHA256 = re.compile(r"encore_kernels_[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}")
"""What a record may name: nothing that leads out of its folder."""


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
    """A kernel as it lies on disk."""

    key: str
    source: str
    workspace: int
    extension: str
    """The extension module that holds its C++ functions; empty where it has none."""
    extension_sha256: str
    functions: dict[str, str]
    """Their names in the kernel's own module -> in the extension."""

    @classmethod
    def parse(cls, found: Mapping[str, Any], key: str) -> _Record:
        """Raises `CachedFileError` where a field is not what `write_record` was given."""
        try:
            record = cls(**found)
        except TypeError as error:
            raise CachedFileError(f"other fields than a kernel's ({error})") from error
        if not record._is_sound() or record.key != key:
            raise CachedFileError(f"not a record of the kernel {key}")
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
        missing = torch_private.missing_compiler() if any("cpu" in kernel.devices for kernel in kernels) else ""
        if missing:
            return {kernel.key: missing for kernel in kernels}
        refused: dict[str, str] = {}
        with (
            progress("encore: compiling kernels", len(kernels), lines=False) as advance,
            concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):
            header = pool.submit(kernel_header)
            batches = [pool.submit(self._build, batch, header) for batch in self._lowered(kernels, refused, advance)]
            for batch in concurrent.futures.as_completed(batches):
                records, failures = batch.result()
                refused.update(failures)
                for key, (record, folder) in records.items():
                    if folder == self.folder:
                        self._write(record)
                    try:
                        self._make_ready(record, folder)
                    except Exception as error:  # a file system from which nothing may be loaded, for one
                        refused[key] = f"it cannot be loaded from {folder} ({error})"
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

    def _build(
        self, batch: Mapping[str, _Lowered], header: concurrent.futures.Future[Path]
    ) -> tuple[dict[str, tuple[_Record, Path]], dict[str, str]]:
        """Compile a batch: records, with the folders of their extensions, and failed kernels, with the reasons."""
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
        """Compile functions into one extension module of the folder, or of a private one where that takes no file."""
        text = extension_source("MODULE", functions)
        name = f"encore_kernels_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            private = Path(tempfile.mkdtemp(dir=private_directory()))
            source = private / f"{name}.cpp"
            source.write_text(extension_source(name, functions))
            command = torch_private.build_command(source, name, header)
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
                raise LoweringError(f"the C++ compiler refused it: {said}")
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
        """Make a kernel ready from disk; a record that is damaged or has lost its extension is as good as none."""
        try:
            record = _Record.parse(read_record(self._path(key)), key)
            self._make_ready(record, self.folder)
        except Exception:  # it holds code: whatever that does, it is compiled again
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
    """A kernel on its way: Inductor's module and the C++ functions in it."""

    source: str
    functions: tuple[CppFunction, ...]
    workspace: int


def _lower(kernel: Kernel) -> _Lowered:
    source = torch_private.module_source(kernel)
    if not kernel.accepts(returned_strides(source)):
        raise LoweringError("its results came out in another layout than the graph wants")
    _, _, functions = torch_private.execute(source)
    return _Lowered(source, tuple(functions), bytes_aside(source))


@functools.cache
def _load_extension(extension: _Extension) -> ModuleType:
    """Load an extension module whose hash is right: the system would map one that was cut off, and crash later."""
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
    """Of the code that turns kernels into modules: what it made before it was changed is not used again."""
    makers = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(maker.read_bytes() for maker in makers)).hexdigest()[:8]
