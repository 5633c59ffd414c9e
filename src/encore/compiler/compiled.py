"""The replacement of a user's callable: planned with gradients enabled, unchanged without."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from encore.capture import torch_private
from encore.capture.packing import packed_arguments, traced_packing
from encore.compiler.backend import GraphCompilation, GraphCompiler
from encore.compiler.session import Session
from encore.compiler.shapes import CompiledShapes
from encore.compiler.sharded import session_of_step
from encore.graph.torch_private import pytree
from encore.rnn.packed_rows import as_tensors
from encore.rnn.packing import ShorterSequencesError


class CompiledCall:
    """Runs the plan of a function; under `no_grad`, `inference_mode` and the stance "force_eager", the
    function itself."""

    def __init__(
        self,
        plain: Callable[..., Any],
        session: Session,
        compilation: Callable[..., GraphCompilation] = GraphCompilation,
    ) -> None:
        functools.update_wrapper(self, plain, updated=())
        self.plain = plain
        self.session = session
        session.codes |= torch_private.outermost_codes(plain)
        self._planned = CompiledShapes(plain, session, GraphCompiler(session, compilation))
        self._pads_whole = True
        """Whether every batch so far was padded no further than to its longest sequence."""
        self._compilation = compilation
        self._looked_for_shards: type | None = None
        """The class of the module when that was asked: `fully_shard` changes it."""
        self._has_run = False
        self._warned_it_ran_plain = False
        self._inside_another = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `is_compiling` alone is true in all threads while one of them traces.
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and torch_private.traces_here()):
            self._warn_inside_another()
            return self.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if torch_private.is_forced_eager():
            if self.session.bypass is not None:
                self.session.bypass.stop()
            return self.plain(*args, **kwargs)
        if self.session.plan_again:
            self.session.plan_again = False
            self._planned.clear()
        self._find_shards(args, kwargs)
        forwards_before = self.session.forwards_run
        with self.session.planned_call(self.plain, args, kwargs):
            result = self._run(args, kwargs)
        if self.session.forwards_run == forwards_before and not self._warned_it_ran_plain:
            self._warn_if_it_ran_plain(result)
        return result

    def _find_shards(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take part in the session of a sharded model, if the module belongs to one."""
        module = getattr(self.plain, "__self__", None)
        if isinstance(module, torch.nn.Module) and type(module) is not self._looked_for_shards:
            self._looked_for_shards = type(module)
            session = session_of_step(module, self.session) if self.session.runs else self.session
            if session is not self.session:
                if self.session.bypass is not None:
                    self.session.bypass.stop()
                session.codes |= self.session.codes
                self.session = session
                self._planned = CompiledShapes(self.plain, session, GraphCompiler(session, self._compilation))
        if self.session.sharded is not None and not self.session.begins_with_root:
            self.session.sharded.note_inputs(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = packed_arguments(args, kwargs, self.session)
        packing = traced_packing(whole=self._pads_whole, session=self.session)
        layers = torch_private.captured_layers(wanted=self.session.step.is_wanted)
        state = _generator_state() if self._may_start_again() else b""
        try:
            hooks, shapes = self.session.plain_saves.hooks(args, kwargs), torch_private.recurrent_shapes()
            with torch_private.whole_graphs(), shapes, torch_private.messages_after_graphs(), layers, packing, hooks:
                result = self._planned(args, kwargs)
        except ShorterSequencesError:
            torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        else:
            self._has_run = True
            return as_tensors(result) if self.session.packs else result
        self._pads_whole = False
        self._planned.clear()
        self.session.begin_call()
        return self._run(args, kwargs)

    def _may_start_again(self) -> bool:
        """Return whether a batch may be padded further than the captured graph assumes."""
        return self._pads_whole and (self.session.packs or not self._has_run) and self.session.runs

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled function in a class body is a method, like any other."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledCall:
        """The copy of a method is a method of the copied module; a function is not copied, as in `copy`."""
        owner = getattr(self.plain, "__self__", None)
        if id(owner) not in memo:
            return self
        return CompiledCall(self.plain.__func__.__get__(memo[id(owner)]), copy.deepcopy(self.session, memo))  # type: ignore[attr-defined]

    def __reduce__(self) -> str | tuple[Any, ...]:
        """The pickle of a method is the plain method; that of a function is its name, as for every function."""
        owner = getattr(self.plain, "__self__", None)
        return self.plain.__qualname__ if owner is None else (getattr, (owner, self.plain.__name__))

    @torch.compiler.assume_constant_result
    def _warn_inside_another(self) -> bool:
        """Called by Dynamo, while it traces a function around this one."""
        if self._inside_another or self.session.is_called:
            return True
        self._inside_another = True
        if self.session.bypass is not None:
            self.session.bypass.warned = True
        warnings.warn(
            f"encore: {self.session.name} is traced as a part of another compiled function, so its own options have no "
            "effect: compile one of the two",
            stacklevel=2,
        )
        return True

    def _warn_if_it_ran_plain(self, result: Any) -> None:
        """Warn of a call that leads to gradients and has run no compiled graph, with the reason."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.requires_grad for tensor in tensors):
            return
        limit = self.session.options.recompile_limit
        if limit is not None and len(self.session.graphs) >= limit:
            why = (
                f"has been planned for {limit} variants (shapes, modes), its limit; others run as plain eager PyTorch. "
                "Pad inputs to fewer shapes, or raise recompile_limit="
            )
        elif not self.session.plain:
            why = "ran as plain eager PyTorch: Dynamo captured nothing of it. TORCH_LOGS=graph_breaks shows why"
        else:
            return  # a warning was given for each part that runs as plain PyTorch
        self._warned_it_ran_plain = True
        self.session.why_plain = why
        warnings.warn(f"encore: {self.session.name} {why}", stacklevel=3)


def _generator_state() -> bytes:
    """The state of the CPU's generator, outside of the memory that steps are measured in."""
    return bytes(torch.get_rng_state().numpy())
