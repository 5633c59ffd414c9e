"""Sequences that lie one behind the other, each run on its own by `torch.nn`, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from support.recurrent_pairs import everything

States = tuple[Tensor, ...]


def segments(resets: Tensor) -> list[tuple[int, int]]:
    """The first and the last step, one beyond, of the segments of a row: those that begin with zeros, and the first."""
    starts = [step for step in range(len(resets)) if step == 0 or resets[step]]
    return list(zip(starts, [*starts[1:], len(resets)], strict=True))


class SegmentBySegment(nn.Module):
    """The layers of a module of `torch.nn`, each on one segment of one row at a time."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, states: States, resets: Tensor) -> tuple[Tensor, States]:
        """Of a time-major input; states are `[layers * directions, batch, width]`."""
        module: Any = self.module
        directions = 2 if module.bidirectional else 1
        last: list[States] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                initial = tuple(state[layer * directions + direction] for state in states)
                rows = [
                    self._row(layer, direction, x[:, row], tuple(state[row] for state in initial), resets[:, row])
                    for row in range(x.shape[1])
                ]
                outputs.append(torch.stack([output for output, _ in rows], 1))
                last.append(tuple(map(torch.stack, zip(*(ended for _, ended in rows), strict=True))))
            x = torch.cat(outputs, -1)
        return x, tuple(map(torch.stack, zip(*last, strict=True)))

    def _row(self, layer: int, direction: int, x: Tensor, initial: States, resets: Tensor) -> tuple[Tensor, States]:
        """One row: forwards, the initial state is for the first segment, unless that is reset; backwards, for the last
        one."""
        outputs, ended = [], {}
        parts = segments(resets)
        for first, last in parts:
            state = tuple(one * 0 for one in initial)
            if (not direction and first == 0 and not resets[0]) or (direction and last == len(x)):
                state = initial
            output, ended[first] = self._sequence(layer, direction, x[first:last], state)
            outputs.append(output)
        return torch.cat(outputs), ended[0 if direction else parts[-1][0]]

    def _sequence(self, layer: int, direction: int, x: Tensor, initial: States) -> tuple[Tensor, States]:
        module: Any = self.module
        suffix = f"_l{layer}{'_reverse' if direction else ''}"
        names = [name.removesuffix(suffix) for name, _ in module.named_parameters() if name.endswith(suffix)]
        names = [name for name in names if f"{name}{suffix}" in dict(module.named_parameters())]
        options = {"bias": module.bias, "dtype": x.dtype}
        if module.proj_size:
            options["proj_size"] = module.proj_size
        if isinstance(module, nn.RNN):
            options["nonlinearity"] = module.nonlinearity
        plain = getattr(nn, module.mode.partition("_")[0])(x.shape[-1], module.hidden_size, **options)
        weights = {f"{name}_l0": getattr(module, f"{name}{suffix}") for name in names}
        x = x.flip(0) if direction else x
        given = tuple(one.unsqueeze(0) for one in initial)
        output, ended = torch.func.functional_call(plain, weights, (x, given if len(given) > 1 else given[0]))
        ended = ended if isinstance(ended, tuple) else (ended,)
        return output.flip(0) if direction else output, tuple(one.squeeze(0) for one in ended)


def some_states(module: Any, batch: int, dtype: torch.dtype) -> list[Tensor]:
    count = module.num_layers * (2 if module.bidirectional else 1)
    widths = [module.proj_size or module.hidden_size, *([module.hidden_size] if isinstance(module, nn.LSTM) else [])]
    return [torch.randn(count, batch, width, dtype=dtype, requires_grad=True) for width in widths]


def expected(module: nn.Module, x: Tensor, states: list[Tensor], resets: Tensor) -> list[Tensor]:
    """Outputs, last states and gradients, in float64."""
    twin = SegmentBySegment(copy.deepcopy(module).double())
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, *states)]
    return everything(twin, wide[0], tuple(wide[1:]), resets, wanted=wide)


def found_by(module: nn.Module, x: Tensor, states: list[Tensor], resets: Tensor) -> list[Tensor]:
    hx = tuple(states) if len(states) > 1 else states[0]
    return everything(module, x, hx, resets, wanted=[x, *states])


def some_resets(steps: int, batch: int, share: float = 0.3) -> Tensor:
    return torch.rand(steps, batch) < share
