"""The Dynamo backend: it traces the joint graph of each graph and compiles it by `pipeline.py`.

AOTAutograd traces forward and backward and calls a partition function; there the joint graph is compiled. The logger
`encore` gets one INFO line for each graph; `ENCORE_LOG=1` shows it on stderr.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from encore.capture import torch_private
from encore.capture.call_trace import NotRepeatableError
from encore.capture.recurrent import lifting
from encore.capture.repeats import Repeats, trace_repeats
from encore.capture.symbolic_joint import SymbolicJoint, UnsizedError
from encore.capture.unused_outputs import NotOptionalError, Tangents, Used, can_run_again
from encore.compiler.call_plans import CallPlans
from encore.compiler.captured import Captured
from encore.compiler.first_call import CheckedCall
from encore.compiler.notes import capture_notes, unused_budgets
from encore.compiler.pipeline import compile_captured, plan_calls
from encore.compiler.session import CapturedGraph, PlainGraph, Session
from encore.compiler.sized_runner import SizedRunner
from encore.compiler.stage_clock import StageClock, collector_paused
from encore.compiler.variants import GraphRunner, Variant, next_number
from encore.errors import EncoreError, IllegalGraphError, OptionError
from encore.graph import Graph, Primal, UnsupportedGraphError, build_graph
from encore.options import Options, make_options
from encore.plan import without_saved_weights

if TYPE_CHECKING:
    from encore.compiler.recording import RecordedGraph

ONCE = ("dynamo", "capture", "capture of repeats")
"""Stages that another plan for the same graph does not repeat."""

log = logging.getLogger("encore")
if os.environ.get("ENCORE_LOG"):
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="encore", options={"budget": "2GiB"})`."""
    with _encore_errors_unwrapped():
        checked = make_options({**(options or {}), **unknown})
        if checked.strict:
            raise OptionError("strict=True measures whole steps, which torch.compile does not show; use encore.compile")
        if "largest" in {**(options or {}), **unknown}:
            raise OptionError("largest= is a batch of a model, which torch.compile does not show; use encore.compile")
        session = Session("torch.compile", checked, one_graph=True)
    return GraphCompiler(session)(module, inputs)


@contextlib.contextmanager
def _encore_errors_unwrapped() -> Iterator[None]:
    """Pass errors of Encore's through Dynamo to the caller of the compiled function, unwrapped."""
    try:
        yield
    except EncoreError as error:
        raise torch_private.BackendError(error, keep_frames=isinstance(error, IllegalGraphError)) from None


def _warn_of_recurrent_layers() -> None:
    warnings.warn(
        "encore: torch.compile skips models with nn.LSTM, nn.GRU or nn.RNN, which then run as plain PyTorch; set "
        "torch._dynamo.config.allow_rnn = True before the first step, or use encore.compile(model)",
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    """`encore_backend`, the entry point of `torch.compile(backend="encore")`. Only a process that uses it gets a
    callback in Dynamo."""
    if name != "encore_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch_private.warn_of_recurrent_layers(compile_graph, _warn_of_recurrent_layers)
    globals()[name] = compile_graph
    return compile_graph


class GraphCompiler:
    """A Dynamo backend that adds what it compiles to one session."""

    def __init__(self, session: Session, compilation: Callable[..., GraphCompilation] | None = None) -> None:
        self.session = session
        self.compilation = compilation or GraphCompilation
        self.__name__ = "encore"

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphCompiler:
        """It belongs to one callable. Lightning's `torch.compile` copies its arguments, to keep them."""
        return self

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.session.remember_tensors(inputs)
        torch_private.guard_hooks()
        with _encore_errors_unwrapped(), self.session.plain_saves.off():
            compilation = self.compilation(self.session, module, inputs)
            compiled = compilation.compile()
        kept = compilation.symbolic is not None and torch_private.keeps_marked_dimensions(module, inputs)
        self.session.graphs_keep_symbols.append(kept)
        if self.session.checks and isinstance(compilation.runner, GraphRunner | SizedRunner):
            return CheckedCall(self.session, compilation.runner, module, compiled)
        return self.session.plain_saves.paused(compiled) if compilation.shares else compiled


class GraphCompilation:
    """Compiles one graph of Dynamo's to callables."""

    takes_symbols = True
    """Whether a graph may be traced with symbols, and planned for each size that comes."""

    def __init__(self, session: Session, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.session = session
        self.module = module
        self.inputs = inputs
        self.notes = capture_notes(module, torch_private.traced_code())
        if budgets := torch_private.region_budgets(module):
            warnings.warn(f"encore: {unused_budgets(budgets)}", stacklevel=2)
        self.name = f"graph {session.captured_so_far + len(session.plain)}"
        self.runner: GraphRunner | SizedRunner | RecordedGraph | None = None
        self.symbolic: SymbolicJoint | None = None
        """The joint graph of all sizes, if it was traced with symbols."""
        self.repeats: Repeats | None = None
        self.lifted: list[Any] = []
        self.number = 0
        """Its place among the graphs of the session."""
        self.roles: list[Primal] = []
        self.returned: list[bool] = []
        self.ended = torch_private.break_reason(module) or ("", "")
        """Why the graph ended before the model did, and where."""
        self.recorded: RecordedGraph | None = None
        """The graph of the rehearsed step that is the same."""
        self.shares = bool(self.ended[0]) or not session.is_whole(torch_private.traced_code())
        """Whether the step has other calls than one of this graph, as far as Dynamo shows."""
        since, now = session.waiting_since, time.perf_counter()
        self.clock = StageClock(None if since is None else {"dynamo": now - since})
        is_rehearsed = self.shares and session.step.is_rehearsed
        self.has_symbols = self.takes_symbols and not is_rehearsed and torch_private.has_symbols(module)
        if not self.has_symbols:
            torch_private.pin_sizes(module)

    def compile(self) -> Callable[..., Any]:
        if self.shares:
            self.session.step.rehearse()
            self.clock.lap("rehearsal")
        try:
            with lifting(self.session.options.lowering, self.session.options.skip) as self.lifted:
                return self._traced()
        finally:  # PyTorch keeps the callbacks, and thereby this object, which must not keep parameters alive
            self.inputs = ()
            self.repeats = None
            torch_private.drop_results(self.module)
            self.module = fx.GraphModule({}, fx.Graph())

    def _traced(self) -> Callable[..., Any]:
        self.repeats = None if self.has_symbols else trace_repeats(self.module)
        if self.repeats is not None:
            with contextlib.suppress(NotRepeatableError):
                compiled = self._through_aot_autograd(self.repeats.edges)
                if self.runner is not None:
                    return compiled
            self.repeats = None
        return self._through_aot_autograd(self.module)

    def _through_aot_autograd(self, module: fx.GraphModule) -> Callable[..., Any]:
        return torch_private.trace_joint(
            module,
            self.inputs,
            partition=self.partition,
            forward=self.forward_callable,
            backward=self.backward_callable,
            takes_missing_gradients=lambda: self.runner is not None and self.runner.tangents.may_be_missing,
            groups=lambda inputs: () if self.runner is None else self.runner.groups(inputs),
            marks_outputs=self.shares,
        )

    def partition(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the joint graph; if the calls of the graph were traced apart, AOTAutograd's has only its inputs and
        outputs."""
        if self.repeats is not None:
            joint = self.repeats.joint(joint)
        self.clock.lap("capture" if self.repeats is None else "capture of repeats")
        return self.split(joint, num_outputs)

    def split(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the joint graph; return modules for AOTAutograd with the right inputs and outputs, and no body."""
        self.roles = torch_private.primals(joint, self.module, self.inputs)
        self.returned = torch_private.returned_outputs(joint, num_outputs)
        self.symbolic = self._symbolic_joint(joint)
        primals = torch_private.given(joint, self.inputs)
        sized = joint if self.symbolic is None else self.symbolic.at(self.symbolic.traced)
        try:
            with collector_paused():
                graph = self.facts(sized)
        except UnsupportedGraphError as unsupported:
            self.session.plain.append(PlainGraph(self.name, str(unsupported)))
            warnings.warn(f"encore: {self.name} runs as plain PyTorch: {unsupported}", stacklevel=2)
            return torch_private.plain_partition(joint, num_outputs)
        if self.symbolic is None:
            runner = self.runner = self.plan(sized, graph, primals)
        else:
            runner = self._of_other_sizes(self.clock).plan(sized, graph, primals)
            assert isinstance(runner, GraphRunner)
            self.runner = SizedRunner(self.session, self.symbolic, runner, self._planned_for)
        return torch_private.shell(joint, num_outputs, runner.saved)

    def _symbolic_joint(self, joint: fx.GraphModule) -> SymbolicJoint | None:
        """The joint graph of all sizes; None if it can only be that of the sizes which were traced, which guards then
        ask for."""
        if not self.has_symbols:
            return None
        try:
            if torch_private.takes_apart_tensors(joint.graph):
                raise UnsizedError("it has tensor subclasses")
            return SymbolicJoint(joint)
        except UnsizedError as reason:
            log.info("%s is captured for each size of its inputs: %s", self.name, reason)
            torch_private.pin_sizes(self.module)
            return None

    def _planned_for(self, sizes: tuple[int, ...], primals: Sequence[Any]) -> GraphRunner:
        """Plan the graph for other sizes of its inputs, in a call with them."""
        assert self.symbolic is not None
        other = self._of_other_sizes(StageClock())
        with torch_private.compile_settings():
            with collector_paused():
                joint = self.symbolic.at(sizes)
                other.clock.lap("sizes")
                graph = other.facts(joint)
            runner = other.plan(joint, graph, primals)
        assert isinstance(runner, GraphRunner)
        return runner

    def _of_other_sizes(self, clock: StageClock) -> GraphCompilation:
        """What plans the graph for sizes of their own. It needs neither Dynamo's graph nor the inputs."""
        other = copy.copy(self)
        other.name = f"graph {self.session.captured_so_far + len(self.session.plain)}"
        other.clock, other.inputs, other.module = clock, (), fx.GraphModule({}, fx.Graph())
        return other

    def plan(self, joint: fx.GraphModule, graph: Graph, primals: Sequence[Any]) -> GraphRunner | RecordedGraph:
        """Plan the joint graph with these facts, given the tensors that the step was called with."""
        self.number = self.session.captured_so_far
        tangents = Tangents(joint, len(self.returned))
        rehearsed = self.session.step.rehearsed
        self.recorded = None if rehearsed is None or not self.shares else rehearsed.taken_over(graph, tangents)
        if self.recorded is not None:
            if not self.recorded.tangents.optional:
                tangents.require_all()
            first = self.session.step.first_variant(self.recorded)
            first.captured.name = self.name
        else:
            first = self._first_plan(joint, tangents, graph, primals)
        runner_number = next_number() if self.recorded is None else self.recorded.number
        self.number = self.session.add(first.captured, runner_number)
        self.runner = GraphRunner(
            self.session,
            tangents,
            first,
            functools.partial(self._plan_later, tangents),
            functools.partial(self.plan_calls, tangents),
            is_whole=not self.shares,
            number=runner_number,
        )
        return self.runner

    def _first_plan(self, joint: fx.GraphModule, tangents: Tangents, graph: Graph, primals: Sequence[Any]) -> Variant:
        """Plan the graph before any call of it."""
        used = self._first_used(tangents, graph)
        expected = joint if used == tangents.everything else tangents.only(used)
        graph = graph if expected is joint else self.facts(expected)
        self.clock.lap("facts")
        before = self.session.graphs_of_step_so_far()
        calls = 1 if self.shares and self.session.step.is_wanted else 0
        captured = self._captured(expected, graph, used, primals, before, self.session.options, calls)
        return self._compiled(captured)

    def _compiled(self, captured: Captured) -> Variant:
        """Compile a graph, and forget the tensors that it was captured with: what was captured is part of reference
        cycles, which would keep the first batch until the garbage collector comes by."""
        try:
            return compile_captured(captured, self.clock)
        finally:
            captured.primals.clear()

    def facts(self, joint: fx.GraphModule) -> Graph:
        graph = build_graph(joint, primals=self.roles, returned=self.returned)
        if self.session.gathers:
            graph = without_saved_weights(graph, exact=self.session.options.lowering == "eager")
        return graph

    def _first_used(self, tangents: Tangents, graph: Graph) -> Used:
        """The gradients to expect before any backward: those of a given plan, or of the same graph in earlier steps;
        else those of losses, unless the outputs are inputs of another graph."""
        if not tangents.optional:
            return tangents.everything
        if not can_run_again(graph):
            tangents.require_all()
            return tangents.everything
        given = self.session.options.plan
        if given is not None:
            planned = given.of_graph(self.number).gradients_of
            expected = tangents.everything if planned is None else tangents.numbers(planned)
        else:
            reason, _ = self.ended
            seen = self.session.gradients_seen.get((len(self.session.graphs_of_step_so_far()), tangents.kinds))
            expected = seen or (tangents.everything if reason else tangents.losses())
        try:
            tangents.only(expected)
        except NotOptionalError as reason:
            log.info("%s takes a gradient for every output: %s", self.name, reason)
            tangents.require_all()
            return tangents.everything
        return expected

    def _plan_later(self, tangents: Tangents, used: Used, primals: Sequence[Any], in_backward: bool) -> Variant:
        """Plan the graph for another set of gradients while the step runs; for all, if it cannot be cut down to that
        set."""
        assert isinstance(self.runner, GraphRunner)
        session = self.session
        self.clock = StageClock({stage: taken for stage, taken in self.clock.seconds.items() if stage in ONCE})
        options = dataclasses.replace(session.options, plan=None)  # a plan that was given is for the first set
        mine = self.runner.current.captured
        before = session.graphs_before(mine) if in_backward else session.graphs_of_step_so_far()
        with torch_private.compile_settings(), collector_paused():
            try:
                joint = tangents.only(used)
            except NotOptionalError as reason:
                log.info("%s takes a gradient for every output: %s", self.name, reason)
                used = tangents.everything
                joint = tangents.only(used)
            graph = self.facts(joint)
            self.clock.lap("facts")
            calls = 1 if self.shares and session.step.is_wanted else 0
            captured = self._captured(joint, graph, used, primals, before, options, calls)
            variant = self._compiled(captured)
        session.replan(self.number, variant.captured)
        return variant

    def plan_calls(self, tangents: Tangents, used: Used, count: int) -> CallPlans:
        """Plan so many calls of the graph in one step; those of the rehearsed step are planned already."""
        if self.recorded is not None and (used, count) == (self.recorded.used, self.recorded.calls):
            return self.recorded.plans
        with torch_private.compile_settings(), collector_paused():
            try:
                joint = tangents.only(used)
            except NotOptionalError:
                used = tangents.everything
                joint = tangents.only(used)
            captured = self._captured(joint, self.facts(joint), used, (), (), self.session.options, count)
            return plan_calls(captured, StageClock())

    def _captured(
        self,
        joint: fx.GraphModule,
        graph: Graph,
        used: Used,
        primals: Sequence[Any],
        before: Sequence[CapturedGraph],
        options: Options,
        calls: int = 0,
    ) -> Captured:
        """The joint graph, cut down to a set of gradients, as the pipeline takes it."""
        return Captured(
            session=self.session,
            options=options,
            name=self.name,
            number=self.number,
            joint=joint,
            graph=graph,
            used=used,
            primals=[*primals],
            before=tuple(before),
            break_reason=self.ended[0],
            break_line=self.ended[1],
            lifted=bool(self.lifted),
            notes=tuple(self.notes),
            calls=calls,
        )

    def forward_callable(self, module: fx.GraphModule) -> Callable[..., Any]:
        if self.runner is None:
            return torch_private.plain_callable(module)
        return torch_private.boxed(self.runner.forward)

    def backward_callable(self, module: fx.GraphModule) -> Callable[..., Any]:
        if self.runner is None:
            return torch_private.plain_callable(module)
        return torch_private.boxed(self.runner.backward)
