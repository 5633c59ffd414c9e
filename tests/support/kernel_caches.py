"""Caches for tests, with the precompiled header of this run, which takes seconds to compile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from encore.lower.header import kernel_header


def with_header(cache: Path) -> Path:
    """The same cache, with the compiled header in it."""
    header = kernel_header().parent
    cache.mkdir(0o700, parents=True, exist_ok=True)
    shutil.copytree(header, cache / header.name, copy_function=_link_or_copy)
    (cache / header.name).chmod(0o700)
    return cache


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
