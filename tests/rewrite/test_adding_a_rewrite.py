"""The pass of docs/architecture.md does what the page says."""

from __future__ import annotations

import re
import types
from pathlib import Path

import torch

from encore.graph import verify_graph
from encore.rewrite.rules import apply_rules
from support.captured_graphs import captured_graph, operators

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_abs_reads_no_negated_tensor() -> None:
    (block,) = re.findall(r"## Adding a rewrite\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("drop_negations")
    exec(compile(block, "drop_negations.py", "exec", dont_inherit=True), module.__dict__)
    graph = captured_graph(lambda x: x.sin().neg().abs(), torch.randn(4, 6, requires_grad=True))
    changed = apply_rules(graph, module.__dict__["RULES"])
    verify_graph(changed)
    (negation,) = (op for op in operators(graph, torch.ops.aten.neg) if op.forward)
    (absolute,) = operators(changed, torch.ops.aten.abs)
    assert negation.reads
    assert absolute.reads == negation.reads
