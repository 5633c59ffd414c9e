"""The plain recurrent layer, h' = tanh or ReLU of W x + U h + b, over a whole sequence as one operator.

Its output is all that backward needs, 4 bytes a unit and step in float32, so that there is nothing to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from encore.rnn import reference
from encore.rnn.cell import RecurrentCell
from encore.rnn.operators import define_operators
from encore.rnn.passes import BackwardPass, ForwardPass
from encore.rnn.sequence import Chunk
from encore.rnn.steps import BackwardSteps, ForwardSteps


class ElmanForward(ForwardPass):
    def steps(self, part: Chunk, *tensors: Any) -> ForwardSteps:
        steps = super().steps(part, *tensors)
        steps.relu = bool(self.call.option)
        return steps


class ElmanBackward(BackwardPass):
    def complete(self, steps: BackwardSteps, chunk: Chunk) -> BackwardSteps:
        steps.relu = bool(self.call.option)
        return steps


class Elman(RecurrentCell):
    name = "elman"
    gates = columns = 1
    keeps_gates = False

    def reference(self, reverse: bool, option: int, resets: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(reference.elman, bool(option), reverse, resets)


define_operators(Elman(), ElmanForward, ElmanBackward)
