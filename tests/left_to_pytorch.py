"""What Encore leaves to plain PyTorch among PyTorch's own samples, and why; and where bits differ from eager's.

Every entry is a class with one reason. A sample that runs as plain PyTorch, in part or as a whole, for a reason that is
not here fails its test.
"""

from __future__ import annotations

REFUSALS = {
    "Dynamic shape operator": "the shape of a result depends on data: Dynamo ends the graph at the operator",
    "Data dependent operator": "a number is read from a tensor: Dynamo ends the graph at the operator",
    "Unsupported Tensor.item() call": "a number is read from a tensor: Dynamo ends the graph there",
    "Attempted to call function marked as skipped": "Dynamo does not trace the function",
    "Attempted to inline function marked as skipped": "Dynamo does not trace the function",
    "Backend compiler exception": "the operator has no fake kernel: AOTAutograd cannot trace it",
    "Unsupported function call": "Dynamo does not trace the function",
    "Operator does not support running with fake tensors": "the operator has no fake kernel",
    "Failed to convert args/kwargs to proxy": "an argument is not a tensor or a constant",
    "Failed to trace builtin operator": "Dynamo does not trace the function",
    "Missing FakeTensor": "the operator has no fake kernel",
    "torch.* op returned non-Tensor": "an operator returns a number",
    "Attempted to call torch in-graph function": "Dynamo does not trace these arguments",
    "Dynamo cannot trace": "Dynamo does not trace the function",
    "no graph reached Encore": "Dynamo leaves sparse tensors to eager",
}
"""Beginnings of the reasons that Dynamo gives for the end of a graph."""

DIFFERENT_BITS = {
    "addcdiv": "Dynamo takes torch.addcdiv(value=...) apart into div, mul and add before Encore sees it",
}
"""Operators whose bits differ from eager's in the eager lowering; they are as close to float64 as eager."""
