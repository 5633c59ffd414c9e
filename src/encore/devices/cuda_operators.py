"""The operators that run on CUDA where the CPU has others: attention, dropout and recurrent layers.

What differs is what they save for backward. A mode replaces the calls while a step runs on fake tensors of the CPU, so
the numbers that they compute do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from encore.devices.profiles import DeviceProfile
from encore.devices.torch_private import RECURRENT, dropout_functions, recurrent_functions

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
STATES_RESERVED = 2
"""What cuDNN reserves for backward besides the gates, in units a step: an assumption, since it is not published."""
FLASH_WIDTH = 256
"""The widest head of flash attention."""


class CudaOperators(TorchFunctionMode):
    """Calls the operators that run on CUDA where the CPU has others."""

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__()
        self._profile = profile
        self._dropouts = dropout_functions()
        self._recurrent = recurrent_functions()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._dropouts:
            return _dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in self._recurrent:
            return _recurrent(self._recurrent[func], *args)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Flash attention for half precision without a mask, memory-efficient attention otherwise."""
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        flash = query.dtype in HALF and self._profile.has_flash_attention and query.size(-1) <= FLASH_WIDTH
        if query.dim() == 3:  # without a dimension of heads, or of batches
            query, key, value = (one.unsqueeze(0) for one in (query, key, value))
            attn_mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            return self._attention(query, key, value, attn_mask, dropout_p, is_causal, scale).squeeze(0)
        if attn_mask is None and flash:
            run = aten._scaled_dot_product_flash_attention
            return run(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
            attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
        saves = any(one.requires_grad for one in (query, key, value))
        run = aten._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0]


def _dropout(func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Dropout on CUDA is one operator, with a mask of a byte an element."""
    names = ("p", "training", "inplace") if func is F.dropout else ("p", "train")
    given = {"p": 0.5, "training": True, **dict(zip(names, args, strict=False)), **kwargs}
    if given.get("inplace") or not 0 < given["p"] < 1 or not given.get("train", given["training"]):
        return func(input, *args, **kwargs)
    return torch.native_dropout(input, given["p"], True)[0]


def _recurrent(kind: str, input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """All layers and time steps are one operator of cuDNN."""
    packed = isinstance(args[1], torch.Tensor) and not isinstance(args[0], Sequence) and len(args) == 8
    state, weights = args[1 if packed else 0], args[2 if packed else 1]
    layers, both = args[-4 if packed else -5], args[-1 if packed else -2]
    states = tuple(state) if kind == "lstm" else (state,)
    directions = 2 if both else 1
    width = states[0].size(-1) * directions
    hidden = states[-1].size(-1)
    rows = math.prod(input.shape[:-1])
    reserved = rows * layers * directions * (RECURRENT[kind] + STATES_RESERVED) * hidden * input.element_size()
    return _CudnnRecurrent.apply((*input.shape[:-1], width), reserved, len(states), input, *states, *weights)


class _CudnnRecurrent(torch.autograd.Function):
    """What a recurrent layer of cuDNN allocates; its weights are one block, so that their gradients are made as one."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], reserved: int, states: int, input: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        output = input.new_empty(shape)
        reserve = input.new_empty(reserved, dtype=torch.uint8)
        ctx.save_for_backward(input, output, reserve, *tensors)
        return (output, *(one.new_empty(one.shape) for one in tensors[:states]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, _, _, *tensors = ctx.saved_tensors
        made = [
            torch.empty_like(one) if needed else None
            for one, needed in zip((input, *tensors), ctx.needs_input_grad[3:], strict=True)
        ]
        return (None, None, None, *made)
