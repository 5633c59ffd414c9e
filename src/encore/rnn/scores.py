"""Additive attention's scores as one operator that keeps only its operands: partial forward propagation.

    scores[b, q, k] = weight . tanh(normalised(query[b, q] + keys[b, k] + bias))

Bahdanau et al. 2015; with a LayerNorm in front of tanh as in later translators. Operands and
result are small, with a middle of B x Tq x Tk x H numbers between them, which PyTorch computes several times over and
keeps for backward. EcoRNN (Zheng et al. 2018) recomputes it there, in a workspace shared by all steps. Here the middle
is never in memory: a row of it is in registers, or in a row's worth of cache, while its score is added up, and once
more while its gradient is.

`scores_native.py` has the two passes in C++, `scores_gpu.py` in Triton, `scores_plain.py` in blocks of PyTorch's
operators, without a compiler and for other devices; `reference.py` has the formula itself, for second
derivatives. Narrow types are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from encore.errors import OptionError
from encore.rnn import reference, scores_native, scores_plain
from encore.rnn.choice import chosen_kernels, compiled_kernels
from encore.rnn.registry import define
from encore.rnn.score_kernels import ScoreGradients, ScoreKernels, ScoreOperands

OPERANDS = "Tensor query, Tensor keys, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, float? eps"
FORWARD = f"additive_scores({OPERANDS}) -> Tensor"
BACKWARD = (
    f"additive_scores_backward(Tensor? onto, Tensor grad, {OPERANDS}, bool need_query, bool need_keys, "
    "bool need_weights) -> (Tensor keys, Tensor query, Tensor weight, Tensor bias, Tensor norm_weight, "
    "Tensor norm_bias)"
)


PLAIN: ScoreKernels = scores_plain


def kernels_for(device: torch.device) -> ScoreKernels:
    """The functions that compute on this device: compiled ones, if they are available."""
    work = "attention scores are computed in blocks"
    return chosen_kernels(device, _cpu_kernels, _gpu_kernels, PLAIN, work)


def _gpu_kernels() -> ScoreKernels:
    from encore.rnn import scores_gpu  # imports Triton

    return scores_gpu


@functools.cache
def _cpu_kernels() -> ScoreKernels:
    work = "attention scores are computed in blocks"
    return compiled_kernels(scores_native.scores_library, scores_native, scores_plain, work)


# ---- forward -------------------------------------------------------------------------------------------------------


def additive_scores(*args: Any) -> Tensor:
    """The scores of all pairs of a query and a key."""
    operands = ScoreOperands(*args)
    scores = operands.query.new_empty(operands.shape)
    if operands.middle == 0:
        return scores.zero_()
    kernels_for(scores.device).forward(operands, scores)
    return scores


def _fake_forward(*args: Any) -> Tensor:
    operands = ScoreOperands(*args)
    return operands.query.new_empty(operands.shape)


def forward_workspace(*args: Any) -> int:
    """The workspace of `additive_scores` with these arguments, in bytes."""
    operands = ScoreOperands(*args)
    return 0 if operands.middle == 0 else kernels_for(operands.query.device).forward_bytes(operands)


# ---- backward ------------------------------------------------------------------------------------------------------


def additive_scores_backward(onto: Tensor | None, grad: Tensor, *args: Any) -> ScoreGradients:
    """ScoreGradients of what `additive_scores` took; empty ones where they are not needed.

    That of the keys is added to `onto`, where that is given: several may attend to the same keys.
    """
    return _backward(onto, grad, *args, in_place=False)


def additive_scores_backward_(onto: Tensor, grad: Tensor, *args: Any) -> ScoreGradients:
    """The same, with the gradient of the keys added to `onto` in place, which must have no later reader."""
    return _backward(onto, grad, *args, in_place=True)


def _backward(onto: Tensor | None, grad: Tensor, *args: Any, in_place: bool) -> ScoreGradients:
    operands = _checked(onto, grad, *args)
    if in_place and onto is not None and onto.is_contiguous():
        results: ScoreGradients = onto, *_gradients(operands, args[7], False, args[9])[1:]  # type: ignore[assignment]
    else:
        results = _gradients(operands, *args[7:])
        if onto is not None:
            results[0].copy_(onto)
    if operands.middle == 0:
        for result in results[onto is not None :]:
            result.zero_()
        return results
    kernels_for(grad.device).backward(operands, grad, results, onto is not None)
    return results


def _checked(onto: Tensor | None, grad: Tensor, *args: Any) -> ScoreOperands:
    operands = ScoreOperands(*args[:7])
    if tuple(grad.shape) != operands.shape or grad.dtype != operands.query.dtype:
        raise OptionError(
            f"the gradient of these scores is {operands.shape} in {operands.query.dtype}; "
            f"got {tuple(grad.shape)} in {grad.dtype}"
        )
    if onto is not None and (onto.shape != operands.keys.shape or onto.dtype != grad.dtype or not args[8]):
        raise OptionError("onto must be like the keys, and their gradient be needed")
    return operands


def _gradients(operands: ScoreOperands, need_query: bool, need_keys: bool, need_weights: bool) -> ScoreGradients:
    like = operands.query

    def some(tensor: Tensor | None, needed: bool) -> Tensor:
        return like.new_empty(tensor.shape if needed and tensor is not None else (0,))

    return (
        some(operands.keys, need_keys),
        some(operands.query, need_query),
        *(some(each, need_weights) for each in (operands.weight, operands.bias)),
        *(some(each, need_weights) for each in (operands.norm_weight, operands.norm_bias)),
    )  # type: ignore[return-value]


def _fake_backward(onto: Tensor | None, grad: Tensor, *args: Any) -> ScoreGradients:
    return _gradients(_checked(onto, grad, *args), *args[7:])


def backward_workspace(onto: Tensor | None, grad: Tensor, *args: Any) -> int:
    """The workspace of `additive_scores_backward` with these arguments, in bytes."""
    operands = _checked(onto, grad, *args)
    return 0 if operands.middle == 0 else kernels_for(grad.device).backward_bytes(operands)


# ---- autograd ------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.eps = inputs[6]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad
    keys, query, *weights = torch.ops.encore.additive_scores_backward(
        None, grad, *ctx.saved_tensors, ctx.eps, need[0], need[1], any(need[2:6])
    )
    return (*(found if needed else None for found, needed in zip((query, keys, *weights), need, strict=False)), None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:8])
    ctx.eps, ctx.onto = inputs[8], inputs[0] is not None


def _differentiate_again(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """By way of the plain formula: correct, but slow and large."""
    grad, *operands = ctx.saved_tensors
    scores = functools.partial(reference.additive_scores, ctx.eps)
    found = reference.differentiate_twice(scores, [grad], operands, None, grads, (1, 0, 2, 3, 4, 5))
    return (grads[0] if ctx.onto else None, *found, *[None] * 4)


define(FORWARD, additive_scores, _fake_forward, forward_workspace, _differentiate, _save)
define(
    BACKWARD, additive_scores_backward, _fake_backward, backward_workspace, _differentiate_again, _save_backward
)  # fmt: skip
