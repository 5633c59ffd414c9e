"""The pair of operators of a recurrent cell: kernels, shapes without data, workspaces, and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Arena, buffer_bytes
from encore.rnn.cell import LayerCall, Needs, RecurrentCell
from encore.rnn.layer import copied_bytes, with_contiguous_rows
from encore.rnn.passes import BackwardPass, ForwardPass
from encore.rnn.registry import MADE_UP, define
from encore.rnn.sequence import Walk, fill_sizes


def define_operators(
    cell: RecurrentCell, forward_pass: type[ForwardPass], backward_pass: type[BackwardPass]
) -> None:  # fmt: skip
    """Register a cell's operators with PyTorch."""
    pair = OperatorPair(cell, forward_pass, backward_pass)
    define(
        cell.forward_schema(), pair.forward, pair.fake_forward, pair.forward_workspace, pair.differentiate, pair.save
    )
    define(
        cell.backward_schema(), pair.backward, pair.fake_backward, pair.backward_workspace, pair.differentiate_twice,
        pair.save_backward,
    )  # fmt: skip
    MADE_UP[getattr(torch.ops.encore, f"{cell.name}_forward").default] = pair.made_up(0)
    MADE_UP[getattr(torch.ops.encore, f"{cell.name}_backward").default] = pair.made_up(pair.grads)


class OperatorPair:
    """The functions behind a cell's operators."""

    def __init__(
        self, cell: RecurrentCell, forward_pass: type[ForwardPass], backward_pass: type[BackwardPass]
    ) -> None:  # fmt: skip
        self.cell, self.forward_pass, self.backward_pass = cell, forward_pass, backward_pass
        self.tensors = len(cell.operands)
        self.taken = self.tensors + 3
        """Arguments of forward without resets: also batch_sizes, reverse and the option."""
        self.grads = len(cell.state_names) + 1
        """Gradients that backward takes: those of the output and of the last states."""
        self.given = self.grads + self.taken + 1 + len(cell.kept)
        """Arguments of backward before what is needed, of which there are two, and resets."""

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        call = self.cell.call(*args)
        results = self.cell.results(call)
        if call.sizes.rows:  # else an empty batch
            arena = Arena(self.cell.forward_buffers(call), call.x.device)
            run = self.forward_pass(self.cell, call, arena, results)
            run.run()
            for result in (results[0], *results[self.grads :]):
                _clear_behind(run.walk, call, result)
        return results

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        return self.cell.results(self.cell.call(*args))

    def forward_workspace(self, *args: Any) -> int:
        call = self.cell.call(*args)
        return buffer_bytes(self.cell.forward_buffers(call)) + _temporary_bytes(call) if call.sizes.rows else 0

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kept = output[self.grads :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        resets = inputs[self.taken] if len(inputs) > self.taken else None
        ctx.save_for_backward(resets, *inputs[: self.tensors + 1], output[0], *kept)
        ctx.others = inputs[self.tensors + 1 : self.taken]
        ctx.count = len(inputs)

    def differentiate(self, ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        (resets, *saved), need, operands = ctx.saved_tensors, ctx.needs_input_grad, self.cell.operands
        found = getattr(torch.ops.encore, f"{self.cell.name}_backward").default(
            *given[: self.grads], *saved[: self.tensors + 1], *ctx.others, *saved[self.tensors + 1 :], need[0],
            any(need[self.grads : self.tensors]), *(() if resets is None else (resets,)),
        )  # fmt: skip
        by_name = dict(zip(self.cell.gradients, found, strict=True))
        if "bias" in by_name:
            both = need[operands.index("b_ih")] and need[operands.index("b_hh")]
            by_name["b_ih"] = by_name["bias"]
            by_name["b_hh"] = by_name["bias"].clone() if both else by_name["bias"]  # two parameters share no memory
        chosen = [by_name[name] if needed else None for name, needed in zip(operands, need, strict=False)]
        return (*chosen, *[None] * (ctx.count - len(chosen)))

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _backward_call(self, args: tuple[Any, ...]) -> tuple[LayerCall, Needs]:
        need_x, need_weights, *resets = args[self.given :]
        return self.cell.call(*args[self.grads :][: self.taken], *resets), Needs(need_x, need_weights)

    def backward(self, *args: Any) -> tuple[Tensor, ...]:
        call, needs = self._backward_call(args)
        results = self.cell.empty_gradients(call, needs)
        if call.sizes.rows == 0:
            return tuple(result.zero_() for result in results.values())
        grad_output = with_contiguous_rows(args[0])
        arena = Arena(self.cell.backward_buffers(call, needs), call.x.device)
        totals = {name: arena.get(f"grad_{name}", result) for name, result in results.items()}
        for name, grad in zip(self.cell.state_names, args[1 : self.grads], strict=True):
            _ = totals[name].zero_() if grad is None else totals[name].copy_(grad)
        kept = args[self.grads + self.taken : self.given]
        run = self.backward_pass(self.cell, call, arena, needs, grad_output, kept, totals)
        run.run()
        _clear_behind(run.walk, call, results["x"])
        for name, result in results.items():
            if result is not totals[name] and result.numel():  # without a bias, its sum is there and its gradient not
                result.copy_(totals[name])
        return tuple(results.values())

    def fake_backward(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(self.cell.empty_gradients(*self._backward_call(args)).values())

    def backward_workspace(self, *args: Any) -> int:
        call, needs = self._backward_call(args)
        if call.sizes.rows == 0:
            return 0
        return buffer_bytes(self.cell.backward_buffers(call, needs)) + _temporary_bytes(call) + copied_bytes(args[0])

    def save_backward(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        resets = inputs[self.given + 2] if len(inputs) > self.given + 2 else None
        ctx.save_for_backward(resets, *inputs[: self.grads + self.tensors + 1])
        ctx.others = inputs[self.grads + self.tensors + 1 : self.grads + self.taken]
        ctx.count = len(inputs)

    def differentiate_twice(self, ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        resets, *saved, batch_sizes = ctx.saved_tensors
        operands = self.cell.operands
        wanted = [operands.index("b_ih" if name == "bias" else name) for name in self.cell.gradients]
        reverse, option = ctx.others
        layer = self.cell.reference(reverse, option, resets)
        found = reference.differentiate_twice(
            layer, saved[: self.grads], saved[self.grads :], batch_sizes, given, wanted
        )  # fmt: skip
        return (*found, *[None] * (ctx.count - len(found)))

    def made_up(self, first: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Made-up operands, of which x is the first of forward's: batch sizes that go with them."""

        def fill(args: tuple[Any, ...]) -> tuple[Any, ...]:
            sizes = args[first + self.tensors]
            if sizes is not None:
                fill_sizes(sizes, len(args[first]), len(args[first + 1]))
            return args

        return fill


def _clear_behind(walk: Walk, call: LayerCall, rows: Tensor) -> None:
    """Rows of a block that belong to no sequence are zero."""
    if walk.rows < call.sizes.rows == rows.shape[0]:
        rows[walk.rows :].zero_()


def _temporary_bytes(call: LayerCall) -> int:
    return call.kernels.temporary_bytes(call.sizes.batch, call.sizes.hidden, call.sizes.real)
