"""Notes of the report on graphs for which a promise may not hold.

- Operators whose workspace could not be measured: the prediction counts a bound.
- Recurrent layers whose time loop is several launches a step on a GPU, where others' is one.
- Tensors on several accelerators: predictions and budgets are of their bytes together.
- Outputs that are views of inputs: AOTAutograd runs part of their backward outside the graph, where it is not counted.
- Annotations of PyTorch's for its own partitioner, which the planner does not use.
- Code that asks whether it is being compiled. It is while Dynamo traces, and a model may then compute otherwise than in
  eager, with sums in another order. Mamba in transformers runs an associative scan instead of its loop over
  time steps, which changes the last bits of most of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import CodeType

import torch
from torch import fx

from encore.capture.torch_private import region_budgets
from encore.cost import Workspaces
from encore.devices import kind_of
from encore.graph import Graph
from encore.graph.on_shapes import shaped_arguments
from encore.rnn.gpu_loops import FORWARD, steps_why_of_call

COMPILE_QUERIES = frozenset({"is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling"})
"""Functions that return whether code is being compiled, by name."""
PYTORCH = str(Path(torch.__file__).parent)


def workspace_notes(graph: Graph, workspaces: Workspaces) -> list[str]:
    """Notes on the operators of a planned graph."""
    return [
        f"the workspace of {operator} is a bound ({reason}): the measured peak may differ from the predicted one"
        for operator, reason in workspaces.bounded(graph).items()
    ]


def loop_notes(graph: Graph) -> list[str]:
    """Notes on recurrent layers of a planned graph that run step by step on a GPU."""
    calls = [op for op in graph.ops if op.forward and op.target in FORWARD]
    reasons = [steps_why_of_call(op.target, shaped_arguments(graph, op)) for op in calls]
    return [
        f"a recurrent layer runs step by step, with several launches for each: {reason}"
        for reason in dict.fromkeys(reasons)
        if reason is not None
    ]


def device_notes(graph: Graph) -> list[str]:
    """Notes on a planned graph with tensors on several accelerators."""
    devices = sorted({storage.device for storage in graph.storages if kind_of(storage.device) != "cpu"})
    if len(devices) < 2:
        return []
    return [
        f"the step peak is that of {', '.join(devices)} together; a budget is one of each device, whose peaks are in "
        "`report.devices`"
    ]


def capture_notes(module: fx.GraphModule, traced: Iterable[CodeType]) -> list[str]:
    """Notes on a graph as Dynamo traced it, from the code of some functions."""
    found = []
    if views := views_of_inputs(module):
        found.append(
            f"{views} of its outputs are views of inputs: part of their backward runs outside the graph, and the "
            "prediction does not count it"
        )
    if budgets := region_budgets(module):
        found.append(unused_budgets(budgets))
    if askers := asks_for_compilation(traced):
        found.append(
            f"code that asks whether it is compiled ({', '.join(askers)}) may compute in another order than in eager"
        )
    return found


def unused_budgets(budgets: Iterable[float]) -> str:
    """What is said of `region_activation_memory_budget` in a model."""
    given = ", ".join(f"{budget:g}" for budget in budgets)
    return (
        f"torch.autograd.graph.region_activation_memory_budget({given}) is not used: it is a share of what PyTorch's "
        'partitioner would save; give encore.compile budget= (bytes, or "60%" of the unplanned step) or overhead='
    )


def views_of_inputs(module: fx.GraphModule) -> int:
    """The number of differentiable outputs of a Dynamo graph that are views of inputs."""
    given = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    owned = {_memory(tensor) for tensor in given if isinstance(tensor, torch.Tensor)} - {None}
    (output,) = module.graph.find_nodes(op="output")
    returned = [node.meta.get("example_value") for node in output.all_input_nodes]
    differentiable = [one for one in returned if isinstance(one, torch.Tensor) and one.requires_grad]
    return sum(_memory(tensor) in owned for tensor in differentiable)


def _memory(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def asks_for_compilation(traced: Iterable[CodeType]) -> list[str]:
    """Functions outside PyTorch that call one of these, as `file.py:function`."""
    askers = [
        code for code in traced if COMPILE_QUERIES.intersection(code.co_names) and code.co_name not in COMPILE_QUERIES
    ]
    own = [code for code in askers if not code.co_filename.startswith(PYTORCH)]
    return list(dict.fromkeys(f"{Path(code.co_filename).name}:{code.co_name}" for code in own))
