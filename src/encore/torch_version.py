"""The versions of PyTorch that Encore works with: its private API, which the `torch_private` of each room uses, changes
between minor versions. `make test-torch VERSION=...` tests one of them."""

from __future__ import annotations

import re

from encore.errors import UnsupportedTorchError

OLDEST, NEWEST = (2, 13), (2, 15)


def check_torch(version: str) -> None:
    """Raise `UnsupportedTorchError` for a version of PyTorch that Encore was not written for."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers <= NEWEST:
        raise UnsupportedTorchError(
            f"Encore works with PyTorch {_text(OLDEST)} to {_text(NEWEST)}, and PyTorch {version} is installed: it "
            "uses private API, which changes between minor versions; "
            f"pip install 'torch>={_text(OLDEST)},<{_text((NEWEST[0], NEWEST[1] + 1))}', or an Encore made for it"
        )


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
