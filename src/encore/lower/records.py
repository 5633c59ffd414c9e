"""What the cache of kernels has on disk, checked field by field: records of kernels and of their structures.

The record of a kernel has Inductor's module text, the names of its functions and its workspace. That of a kernel with
symbols has the rules by which it runs for other sizes, too. The record of a structure names its kernels with symbols,
and has the sizes that were compiled for their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.cached_files import CachedFileError, read_record

EXTENSION, SHA256 = re.compile(r"encore_kernels_[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[0-9a-f]{24}")
"""Names that a record may have, none of which leads out of its folder."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A compiled extension module."""

    folder: Path
    name: str
    sha256: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}-{self.sha256[:16]}.so"


@dataclass(frozen=True, slots=True)
class Rules:
    """For which sizes a kernel with symbols runs, and with which values."""

    structure: str
    symbols: tuple[int, ...]
    """For each symbol `s0`, `s1`, ..., the position of the size that is its value."""
    expressions: tuple[str, ...]
    """What each size of the structure must be."""
    guards: tuple[str, ...]
    """What must be true of the symbols."""

    @classmethod
    def parse(cls, found: Any) -> Rules | None:
        """Rules as JSON has them; None if they are something else."""
        match found:
            case {"structure": str(key), "symbols": [*symbols], "expressions": [*texts], "guards": [*guards]}:
                numbers = all(type(one) is int and 0 <= one < len(texts) for one in symbols)
                if numbers and len(found) == len(cls.__slots__) and all(isinstance(one, str) for one in texts + guards):
                    return cls(key, tuple(symbols), tuple(texts), tuple(guards))
        return None


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A kernel in the cache."""

    key: str
    source: str
    workspace: int
    """Zero if it has symbols, whose values it depends on."""
    extension: str
    """The extension module with its C++ functions; empty if it has none."""
    extension_sha256: str
    functions: dict[str, str]
    """Their names in the kernel's own module -> in the extension."""
    rules: Rules | None = None

    @classmethod
    def read(cls, path: Path, key: str, *, symbolic: bool) -> KernelRecord:
        """Check every field; raise `CachedFileError` if one is not what `write_record` was given."""
        found = read_record(path)
        rules = Rules.parse(found.get("rules"))
        if rules is None and found.get("rules") is not None:
            raise CachedFileError("its rules are damaged")
        try:
            record = cls(**{**found, "rules": rules})
        except TypeError as error:
            raise CachedFileError(f"it has other fields than a kernel ({error})") from error
        if not record._is_sound() or record.key != key or (rules is not None) is not symbolic:
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

    def extension_in(self, folder: Path) -> Extension:
        return Extension(folder, self.extension, self.extension_sha256)


@dataclass(frozen=True, slots=True)
class StructureRecord:
    """What was compiled of a structure, the latest last."""

    structure: str
    samples: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Kernels that were compiled for their own sizes, or that made a kernel with symbols necessary: key and sizes."""
    symbolic: tuple[str, ...] = ()
    """The keys of its kernels with symbols."""
    failures: int = 0
    """How often no kernel with symbols could be compiled."""

    @classmethod
    def read(cls, path: Path, structure: str) -> StructureRecord:
        """Check every field; raise `CachedFileError` if one is not what `write_record` was given."""
        match read_record(path):
            case {"structure": key, "samples": [*samples], "symbolic": [*keys], "failures": int(failures), **others}:
                if key == structure and not others and all(map(_is_key, keys)) and all(map(_is_sample, samples)):
                    return cls(structure, tuple((key, tuple(sizes)) for key, sizes in samples), tuple(keys), failures)
        raise CachedFileError(f"it is not a record of the structure {structure}")


def _is_key(found: Any) -> bool:
    return isinstance(found, str) and KEY.fullmatch(found) is not None


def _is_sample(found: Any) -> bool:
    match found:
        case [key, [*sizes]]:
            return _is_key(key) and all(type(size) is int for size in sizes)
    return False
