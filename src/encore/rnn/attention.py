"""`encore.nn.AdditiveAttention`: Bahdanau's attention on the scoring operator that `scores.py` defines."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encore.errors import OptionError
from encore.rnn.modules import autocast


class AdditiveAttention(nn.Module):
    """Looks keys up by queries: `weight . tanh(W query + U key + b)`, a softmax over keys, and a mean of values.

    With `layer_norm=True` the sum under the tanh is normalised first. Of all pairs of a query and a key, only scores
    and weights are ever in memory, not the `hidden_size` numbers between them: backward recomputes these.
    """

    def __init__(
        self, query_size: int, key_size: int, hidden_size: int, layer_norm: bool = False, *, bias: bool = True,
        eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"query_size": query_size, "key_size": key_size, "hidden_size": hidden_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise OptionError(f"{name} must be an integer, 1 or more; got {size!r}")
        self.query_size, self.key_size, self.hidden_size = query_size, key_size, hidden_size
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(query_size, hidden_size, bias=bias, **where)
        self.keys = nn.Linear(key_size, hidden_size, bias=False, **where)
        self.weight = nn.Parameter(torch.empty(hidden_size, **where))
        self.norm = nn.LayerNorm(hidden_size, eps, **where) if layer_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as `nn.Linear` does; `weight` is one from `hidden_size` to 1."""
        for module in (self.query, self.keys, self.norm):
            if module is not None:
                module.reset_parameters()
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)

    def project(self, keys: Tensor) -> Tensor:
        """What `forward` makes of the keys, `[B, Tk, hidden_size]`: for a decoder, once for all its steps."""
        return F.linear(keys, self.keys.weight)

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor | None = None, *, lengths: Tensor | None = None,
        key_padding_mask: Tensor | None = None, projected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Context `[B, Tq, values]` and weights `[B, Tq, Tk]` of queries `[B, Tq, query_size]`; without Tq for `[B,
        query_size]`, one step of a decoder.

        `values` are the keys if not given. Keys from a sequence's `lengths` on get no weight, nor do those where
        `key_padding_mask`, `[B, Tk]` or `[B, Tq, Tk]`, is true; a query that is left with none gets zeros. `projected`
        is `project(keys)`, computed before.
        """
        single = query.dim() == 2
        queries = query.unsqueeze(1) if single else query
        values = keys if values is None else values
        self._check(queries, keys, values, projected)
        hidden = self.project(keys) if projected is None else projected
        norm, affine = self.norm, (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)
        projections = F.linear(queries, self.query.weight, self.query.bias), hidden
        scores = torch.ops.encore.additive_scores(
            *autocast([*projections, self.weight, None, *affine]), None if norm is None else norm.eps
        )
        hidden_keys = self._hidden_keys(scores, lengths, key_padding_mask)
        if hidden_keys is not None:
            scores = scores.masked_fill(hidden_keys, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if hidden_keys is not None:
            weights = weights.masked_fill(hidden_keys, 0)
        context = torch.bmm(weights, values)
        return (context.squeeze(1), weights.squeeze(1)) if single else (context, weights)

    def extra_repr(self) -> str:
        return f"{self.query_size}, {self.key_size}, {self.hidden_size}, layer_norm={self.norm is not None}"

    def _check(self, queries: Tensor, keys: Tensor, values: Tensor, projected: Tensor | None) -> None:
        if queries.dim() != 3 or queries.shape[2] != self.query_size:
            wanted = f"[B, {self.query_size}] or [B, Tq, {self.query_size}]"
            raise OptionError(f"AdditiveAttention takes a query {wanted}; got {tuple(queries.shape)}")
        if keys.dim() != 3 or keys.shape[2] != self.key_size:
            raise OptionError(f"AdditiveAttention takes keys [B, Tk, {self.key_size}]; got {tuple(keys.shape)}")
        if keys.shape[0] != queries.shape[0]:
            raise OptionError(f"the query has a batch of {queries.shape[0]}, the keys one of {keys.shape[0]}")
        if values.dim() != 3 or values.shape[:2] != keys.shape[:2]:
            raise OptionError(f"values must be [B, Tk, size], as many as keys; got {tuple(values.shape)}")
        if projected is not None and projected.shape != (*keys.shape[:2], self.hidden_size):
            raise OptionError(
                f"projected must be project(keys), {(*keys.shape[:2], self.hidden_size)}; got {tuple(projected.shape)}"
            )

    @staticmethod
    def _hidden_keys(scores: Tensor, lengths: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """True for keys that are hidden from a query, broadcastable to `[B, Tq, Tk]`."""
        batch, _, keys = scores.shape
        hidden = None
        if lengths is not None:
            if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
                raise OptionError(
                    f"lengths must be {batch} integers, one a sequence; got {tuple(lengths.shape)} in {lengths.dtype}"
                )
            positions = torch.arange(keys, device=scores.device)
            hidden = (positions >= lengths.to(scores.device).unsqueeze(1)).unsqueeze(1)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape not in ((batch, keys), scores.shape):
                raise OptionError(
                    f"key_padding_mask must be boolean, {(batch, keys)} or {tuple(scores.shape)}, true where a key is "
                    f"not to be looked at; got {tuple(mask.shape)} in {mask.dtype}"
                )
            mask = mask.unsqueeze(1) if mask.dim() == 2 else mask
            hidden = mask if hidden is None else hidden | mask
        return hidden
