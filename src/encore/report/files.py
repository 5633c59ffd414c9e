"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from encore.errors import OptionError


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file and return its path. What stood there before stays until the new content is complete."""
    target = Path(path)
    if not target.parent.is_dir():
        raise OptionError(f"{target} cannot be written: there is no folder {str(target.parent)!r}; make it first")
    if target.is_dir():
        raise OptionError(f"{target} is a folder; name a file in it")
    beside = target.with_name(f"{target.name}.part")
    beside.write_bytes(content)
    return beside.replace(target)
