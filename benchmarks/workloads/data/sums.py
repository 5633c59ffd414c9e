"""Tapes of sums such as `07+85=092;`: the signs are learnt at once, the result only by looking at both summands."""

import math

import torch

from benchmarks.workloads.data.split import is_held_out

ALPHABET = "0123456789+=;"
SUM = "07+85=092;"
RESULT = slice(SUM.index("=") + 1, SUM.index(";"))
"""Where the result of a sum stands in it."""

_PAIRS = {
    held_out: torch.tensor([[a, b] for a in range(100) for b in range(100) if is_held_out(f"{a}+{b}") == held_out])
    for held_out in (False, True)
}


def tape_of_sums(rows: int, length: int, generator: torch.Generator, *, held_out: bool) -> torch.Tensor:
    """Codes of `rows` tapes, each the first `length` characters of a run of sums that are trained on or are not."""
    pairs = _PAIRS[held_out]
    drawn = torch.randint(len(pairs), (rows, math.ceil(length / len(SUM))), generator=generator)
    left, right = pairs[drawn].unbind(-1)
    plus, equals, end = (torch.full_like(left, ALPHABET.index(sign)) for sign in "+=;")

    def digits(number: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [number // 10**power % 10 for power in reversed(range(count))]

    columns = [*digits(left, 2), plus, *digits(right, 2), equals, *digits(left + right, 3), end]
    return torch.stack(columns, dim=-1).flatten(1)[:, :length]
