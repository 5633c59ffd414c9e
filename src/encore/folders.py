"""Where Encore keeps files between processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Measurements and compiled code: `$ENCORE_CACHE_DIR`, else `$XDG_CACHE_HOME/encore`, else `~/.cache/encore`."""
    chosen = os.environ.get("ENCORE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "encore"
