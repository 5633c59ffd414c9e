"""Dynamo: calling it, why it ended a graph, what it guards on, and errors that pass through it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.external_utils
import torch._dynamo.trace_rules
from torch import fx
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, TorchRuntimeError
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper, GuardBuilder
from torch._dynamo.utils import counters as dynamo_counters
from torch._guards import TracingContext, compile_context, tracing
from torch.fx.traceback import _get_memory_budget_annotation
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("encore")


def is_forced_eager() -> bool:
    """Return whether `torch.compiler.set_stance` has compiled functions run as plain PyTorch."""
    return eval_frame._stance.stance == "force_eager"


def region_budgets(module: fx.GraphModule) -> list[float]:
    """What `torch.autograd.graph.region_activation_memory_budget` is given in the code of a Dynamo graph."""
    found = map(_get_memory_budget_annotation, module.graph.nodes)
    return sorted({budget for budget in found if budget is not None})


def drop_results(module: fx.GraphModule) -> None:
    """Drop the fake results of a graph that has been compiled: PyTorch keeps the module, and with each result the
    autograd graph of Dynamo's own run, which grows with the length of a recurrent layer."""
    erased = [one for one in module.graph._graph_namespace._obj_to_name if isinstance(one, fx.Node)]
    for node in (*module.graph.nodes, *erased):
        if node.op != "placeholder":
            node.meta.pop("example_value", None)


def traced_code() -> list[CodeType]:
    """The code of every function that Dynamo has traced for the graph that the backend is called with."""
    return TracingContext.get_traced_code() or []


GIVEN_REASON = re.compile(r"wrapped with `torch.compiler.disable` \(reason: (encore: .*?)\)|Message: (encore: .*)")
"""A reason that Encore itself gave for a graph break."""


def break_reason(module: fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph before the function's end: (reason, `file.py:line`), or None."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    line = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" if frame else ""
    given = GIVEN_REASON.search(str(reason.reason))
    if given is not None:
        return ((given[1] or given[2]).strip().removeprefix("encore: "), line)
    lines = [text.strip() for text in str(reason.reason).splitlines()]
    reasons = [
        text for text in lines if text and not text.startswith(("Hint:", "Developer debug context:", "For more"))
    ]
    return ("; ".join(reasons[:2]) or "unknown", line)


NO_LIMIT = sys.maxsize


def dynamo_compile(function: Callable[..., Any], backend: Callable[..., Any], limit: int | None) -> Callable[..., Any]:
    """`torch.compile` with one graph a shape, in a region of Dynamo's cache of its own, and a limit of its own on their
    number, if any."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module) and torch._dynamo.trace_rules.check(owner.forward):
        # The forward of a class of PyTorch's own (nn.Sequential, nn.LSTM): Dynamo skips such frames unless inlined.
        function = torch._dynamo.external_utils.wrap_inline(function)
    compile_: Callable[..., Any] = torch.compile  # its type stubs miss the last two arguments
    limit = NO_LIMIT if limit is None else limit
    planned = compile_(function, backend=backend, dynamic=False, recompile_limit=limit, isolate_recompiles=True)
    for key, known in list(eval_frame.cached_backends.items()):  # kept for `torch._dynamo.reset`, for good
        if getattr(known, "compiler_fn", None) is backend:
            del eval_frame.cached_backends[key]
    return planned


def region_of(planned: Callable[..., Any]) -> int:
    """The number of the region of Dynamo's cache that has the graphs of a callable from `dynamo_compile`."""
    context: Any = getattr(planned, "dynamo_ctx", planned)
    number: int = context._isolate_recompiles_id
    return number


def drop_regions(regions: Collection[int]) -> None:
    """Drop all graphs in these regions of Dynamo's cache, of whatever code they are."""
    metrics = dynamo_utils.get_metrics_context()
    if not metrics.in_progress():  # it keeps a traceback of every compilation, whose frames keep what they ran
        metrics._edits.clear()
    codes = [code for reference in list(convert_frame.input_codes.seen) if (code := reference()) is not None]
    dropped = set()
    for code in codes if regions else ():
        for region in regions:
            for entry in eval_frame._get_cache_entries_for_region(code, region):
                manager = entry.guard_manager
                if manager.extra_state is not None:
                    dropped.add(id(manager))
                    manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("its shape was dropped"))
    _forget_finalizers(dropped)


def _forget_finalizers(dropped: Collection[int]) -> None:
    """Remove what would invalidate dropped guards, by `id`, at the end of the objects that they look at: it keeps them
    alive as long as the model."""
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    # A copy of the whole dictionary: while a list of it is made, the collector may run and remove some.
    for finalizer, entry in registry.copy().items() if dropped else ():
        owner = getattr(getattr(entry.func, "func", None), "__self__", None)
        if isinstance(owner, CheckFunctionManager) and id(owner.guard_manager) in dropped:
            finalizer.detach()


def outermost_codes(function: Callable[..., Any]) -> frozenset[CodeType]:
    """Return the code in which Dynamo begins if it captures the whole of a callable."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    functions = [function, torch._dynamo.external_utils.wrap_inline(function)]
    if isinstance(owner, torch.nn.Module):
        functions += [type(owner).forward, owner.forward]
    functions += [inspect.unwrap(one) for one in functions]
    codes = (getattr(getattr(one, "__func__", one), "__code__", None) for one in functions)
    return frozenset(code for code in codes if code is not None)


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """Inside a Dynamo backend: suspend what is compiled, with PyTorch's metrics of it, so that other functions run and
    are compiled."""
    logger = dynamo_utils.get_chromium_event_logger()
    metrics = [vars(one) for one in (dynamo_utils._metrics_context_tls, dynamo_utils._dynamo_timed_tls, logger.tls)]
    before = [dict(one) for one in metrics]
    for one in metrics:
        one.clear()
    try:
        with compile_context(None), tracing(None), _disable_current_modes():
            yield
    finally:
        for one, entries in zip(metrics, before, strict=True):
            one.clear()
            one.update(entries)


def whole_graphs() -> Any:
    """Set Dynamo, for this thread alone, to trace `nn.LSTM`, `nn.GRU` and `nn.RNN` instead of breaking the graph there,
    not to cut the graph into DDP's buckets, since a plan covers the whole model, to guard on hooks of modules, and to
    have no limit over the graphs of all callables together."""
    return torch._dynamo.config.patch(
        allow_rnn=True, optimize_ddp=False, skip_nnmodule_hook_guards=False, accumulated_recompile_limit=NO_LIMIT
    )


HOOKS_OF_ALL_MODULES = re.compile(r"\b_global_(forward|backward)(_pre)?_hooks\b\W*$")
"""The end of the name of a source: the hooks of `register_module_forward_hook` and similar functions."""


def guard_hooks() -> None:
    """Inside a Dynamo backend: trace again once hooks are added to a module or to all modules, or removed. Dynamo's
    default is to assume that modules without hooks stay without (`skip_nnmodule_hook_guards`), and it has no guard for
    hooks of all modules."""
    context = TracingContext.try_get()
    if context is None:  # the backend was called without Dynamo
        return
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        none_yet = guard.inner_create_fn() is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
        if none_yet or HOOKS_OF_ALL_MODULES.search(guard.name):
            guards.add(guard.originating_source.make_guard(GuardBuilder.SEQUENCE_LENGTH))


def warn_of_recurrent_layers(backend: Callable[..., Any], warn: Callable[[], None]) -> None:
    """Call `warn` once Dynamo has skipped `nn.LSTM`, `nn.GRU` or `nn.RNN` in a process that runs `torch.compile` for
    this backend. Dynamo skips the whole function around such a layer, and never calls the backend for it."""
    warned = False
    seen = _skipped_layers()

    def look(_: Any) -> None:
        nonlocal warned, seen
        before, seen = seen, _skipped_layers()
        more = seen > before or 0 < seen < before  # less: the counters were reset
        asked_for = any(getattr(known, "compiler_fn", None) is backend for known in eval_frame.cached_backends.values())
        if asked_for and more and not warned and not torch._dynamo.config.allow_rnn:
            warned = True
            try:
                warn()
            except Warning as warning:  # made an error: raised here, it would leave Dynamo's callbacks pending for good
                log.warning("%s", warning)

    torch._dynamo.callback.callback_handler.register_end_callback(look)


RECURRENT_LAYER = "Attempted to wrap RNN, GRU, or LSTM"


def _skipped_layers() -> int:
    """How often Dynamo has skipped a recurrent layer, for any backend, since it was reset."""
    return sum(count for reason, count in dynamo_counters["unimplemented"].items() if RECURRENT_LAYER in reason)


class BackendError(ShortenTraceback):
    """Carries an error of a backend through Dynamo, which wraps all others in `BackendCompilerFailed`: where the
    compiled function was called, Dynamo raises what `remove_dynamo_frames` returns."""

    def __init__(self, error: Exception, *, keep_frames: bool) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error
        self.keep_frames = keep_frames or torch._dynamo.config.verbose

    def remove_dynamo_frames(self) -> Any:
        if not self.keep_frames:  # frames keep the tensors of the failed call alive
            self.__traceback__ = self.error.__traceback__ = None
        return self.error


TraceFailed = TorchRuntimeError
"""An operator of the user's code rejected its operands while it was traced."""
CaptureFailed = TorchDynamoException
"""Anything that Dynamo could not trace, or a backend not compile."""
