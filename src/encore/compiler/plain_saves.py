"""What autograd saves while a compiled model runs code that Dynamo leaves to Python, in fewer bytes.

Such code (a custom autograd function, a disabled function, layers in a frame that Dynamo skips) runs as plain PyTorch,
and saves activations as they are. Where the plans of the captured graphs alone cannot keep the budget, saved-tensor
hooks keep these activations in lossless codes (`LOSSLESS`), or, with `tiers=`, outside of memory. They decode to the
same bits, so gradients do not change. Plain code is never recomputed: nothing is known of what it does.

Captured graphs save through autograd, too. While one runs, the hooks are off (`paused`). Hooks that are innermost alone
see a tensor: those of the user's own code (`save_on_cpu`, checkpoints) take the place of these, and if there are some
around the model already, these are not used.

A code is shared by all tensors that are saved of the same memory, in the same version, with the same size and strides.
Autograd checks no version of what hooks return, so the check is here. `torch.func` rejects hooks, so they are only used
if a step whose Python calls were recorded did not switch them off (`StepPlanner._saves_less`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from encore.capture import torch_private
from encore.codecs import CODECS, Codec
from encore.cost.density import PLANNED
from encore.graph.torch_private import FakeTensor, pytree
from encore.lower import Transport

LEAST_BYTES = 4096
"""Smaller tensors are kept as they are."""
WORTH_IT = 0.875
"""The share of its bytes that a code may take at most."""
LOSSLESS = ("bits", "integers", "sparse")
CODES, OFFLOADED = 1, 2
"""Levels: lossless codes; then, what has none goes to a tier."""


class SavedActivation:
    """An activation that plain code saved: itself, its code, or its token in a tier."""

    def __init__(self, tensor: torch.Tensor, codec: Codec | None, code: torch.Tensor, tier: Transport | None) -> None:
        self.codec, self.code, self.tier = codec, code, tier
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.storage = StorageWeakRef(tensor.untyped_storage())
        """Keeps the address of the memory from being used again."""

    def restored(self) -> torch.Tensor:
        if self.tier is not None:
            return self.tier.load(self.code, self.size, self.stride, self.dtype)
        assert self.codec is not None
        made: torch.Tensor = self.codec.decode(*self.codec.decode_args(self.code, self.size, self.stride, self.dtype))
        return made


class PackedActivation:
    """What autograd keeps for one saved tensor: the activation, or the tensor itself, and its version."""

    __slots__ = ("counter", "held", "name", "version")

    def __init__(self, tensor: torch.Tensor, saved: SavedActivation | None) -> None:
        self.version = tensor._version
        self.counter = tensor.detach()  # shares the version with the tensor
        self.held = saved
        self.name = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if saved is not None:
            self.counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # and not its memory

    def unpacked(self) -> torch.Tensor:
        if self.counter._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.name}] is at version {self.counter._version}; expected version {self.version} instead. Hint: "
                "enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
        return self.counter if self.held is None else self.held.restored()


class PlainSaves:
    """The saved-tensor hooks of one session."""

    def __init__(self, transports: Callable[[], Mapping[str, Transport]]) -> None:
        self.level = 0
        """0: what plain code saves is kept as it is."""
        self.transports = transports
        """The tiers that activations may be offloaded to, by name."""
        self.saved_bytes = self.kept_bytes = 0
        """Of the latest call of the model: what was saved in codes or offloaded, and what these take in memory."""
        self._resident: set[int] = set()
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], SavedActivation] = weakref.WeakValueDictionary()

    def hooks(self, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """The hooks, around one call of the model with these arguments, if they are used."""
        if not self.level or torch_private.top_saved_tensors_hooks() is not None:
            return contextlib.nullcontext()
        given = pytree.tree_leaves((args, kwargs))
        self._resident = {one.untyped_storage()._cdata for one in given if _is_plain(one)}
        self.saved_bytes = self.kept_bytes = 0
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @property
    def may_save_less(self) -> bool:
        return self.level == 0 or (self.level == CODES and bool(self.transports()))

    def save_less(self) -> bool:
        """Have later calls save less; False if they save as little as they can."""
        more = self.may_save_less
        self.level += more
        return more

    def paused(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A captured graph, which runs without these hooks."""

        def paused(*args: Any) -> Any:
            with self.off():
                return run(*args)

        return paused

    def off(self) -> contextlib.AbstractContextManager[None]:
        """What runs inside saves without these hooks: graphs, and AOTAutograd while it traces one."""
        top = torch_private.top_saved_tensors_hooks() if self.level else None
        if top is None or top[0] != self.pack:
            return contextlib.nullcontext()
        return torch_private.without_top_saved_tensors_hooks()

    @torch.compiler.disable
    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.is_inference():
            return tensor  # which autograd rejects
        if not _is_plain(tensor) or tensor.nbytes < LEAST_BYTES:
            return PackedActivation(tensor, None)
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        storage = tensor.untyped_storage()
        stays = (base.is_leaf and base.requires_grad) or storage._cdata in self._resident
        with torch.no_grad():
            return PackedActivation(tensor, None if stays else self._saved(tensor, storage._cdata))

    @torch.compiler.disable
    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.unpacked() if isinstance(packed, PackedActivation) else packed

    def _saved(self, tensor: torch.Tensor, storage: int) -> SavedActivation | None:
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and not known.storage.expired() and torch.equal(known.restored(), tensor):
            return known  # `tensor.data` can be written to without a new version
        plain = tensor.detach()
        found = self._encoded(plain) or self._offloaded(plain)
        if found is not None:
            self._known[key] = found
            self.saved_bytes += tensor.nbytes
            self.kept_bytes += found.code.nbytes
        return found

    def _encoded(self, tensor: torch.Tensor) -> SavedActivation | None:
        for name in LOSSLESS:
            codec = CODECS[name]
            if codec.accepts(tensor.shape, tensor.dtype):
                density = None if codec.exact_size else PLANNED[codec.share](tensor)
                expected = codec.nbytes(tensor.shape, tensor.stride(), tensor.dtype, density)
                if expected <= WORTH_IT * min(tensor.nbytes, tensor.untyped_storage().nbytes()):
                    code = codec.encode(*codec.encode_args(tensor))
                    return SavedActivation(tensor, codec, code, None)
        return None

    def _offloaded(self, tensor: torch.Tensor) -> SavedActivation | None:
        if self.level < OFFLOADED or not _fills_memory(tensor):
            return None
        tier = next(iter(self.transports().values()))
        return SavedActivation(tensor, None, tier.store_now(tensor), tier)


def _is_plain(tensor: Any) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter)
    plain = type(tensor) in kinds and not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
    return plain and not (tensor.is_complex() or tensor.is_quantized or tensor.is_meta or tensor.is_neg())


def _fills_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
