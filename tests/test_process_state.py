"""Importing Encore and training compiled models leaves PyTorch and Python as they were, for all other code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, logging, os, signal, sys, threading, warnings
import torch
import torch._decomp, torch._dynamo, torch._functorch.config, torch._inductor.config
import torch._dynamo.callback
import torch.utils._config_module
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder

aten = torch.ops.aten
CONFIGS = {"dynamo": torch._dynamo.config, "functorch": torch._functorch.config, "inductor": torch._inductor.config}
OPERATORS = [
    getattr(getattr(aten, packet), overload)
    for packet in ("lstm", "gru", "rnn_tanh", "rnn_relu", "dropout", "matmul", "linear", "upsample_nearest2d")
    for overload in getattr(aten, packet).overloads()
]


def look():
    found = {}
    for name, config in CONFIGS.items():
        for key, value in config.get_config_copy().items():  # sets that are equal may be written in another order
            found[f"{name}.{key}"] = repr(sorted(value, key=repr) if isinstance(value, set) else value)
    for operator in OPERATORS:
        found[f"kernels of {operator}"] = torch._C._dispatch_dump(operator.name())
        found[f"Python kernels of {operator}"] = {str(key): id(kernel) for key, kernel in operator.py_kernels.items()}
    handler = torch._dynamo.callback.callback_handler
    modules = torch.nn.modules.module
    return found | {
        "decompositions": {str(op): id(kernel) for op, kernel in torch._decomp.decomposition_table.items()},
        "callbacks of Dynamo": [list(handler.start_callbacks), list(handler.end_callbacks)],
        "what Dynamo builds by identity": {key: id(one) for key, one in VariableBuilder._id_dispatch().items()},
        "global hooks": {name: repr(value) for name, value in vars(modules).items() if name.startswith("_global")},
        "nn.Module": {name: id(value) for name, value in vars(nn.Module).items() if name != "__doc__"},
        "nn.LSTM": {name: id(value) for name, value in vars(nn.LSTM).items() if name != "__doc__"},
        "torch.compile": id(torch.compile),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "threads": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warning filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "handlers of the root logger": list(logging.getLogger().handlers),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "excepthook": sys.excepthook,
        "collector": gc.isenabled(),
        "environment": dict(os.environ),
        "threads of Python": sorted(one.name for one in threading.enumerate() if not one.daemon),
    }


def compare(when, before):
    after = look()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{when}: {name} changed from {str(before.get(name))[:300]} to {str(after.get(name))[:300]}")


x = nn.Parameter(torch.randn(2, 3))
(x @ x.t()).sum().backward()  # PyTorch's own first use
torch.compile(lambda x: x * 2, backend="eager")(x)
before = look()
import encore

compare("import", before)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.packed, self.padded = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, lengths):
        x = nn.functional.dropout(self.embed(tokens), 0.1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.packed(packed)[0], batch_first=True)
        return self.head(self.padded(x)[0]).sum()


batch = torch.randint(0, 10, (2, 5)), torch.tensor([5, 3])
for lowering in LOWERINGS:
    model = encore.compile(Model(), lowering=lowering, budget="min")
    for _ in range(2):
        model(*batch).backward()
    encore.estimate(nn.Linear(4, 4), torch.randn(2, 4))
    compare(lowering, before)
try:
    encore.compile(Model(), budget=16, lowering="eager")(*batch)
except encore.BudgetError:
    compare("a refused budget", before)
else:
    print("the budget was not refused")
"""


@pytest.mark.parametrize("lowerings", [("eager",), pytest.param(("fused",), marks=pytest.mark.slow)], ids=str)
def test_nothing_changes_for_other_code(lowerings: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("LOWERINGS", repr(lowerings)))
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    assert done.stderr == "", "measuring memory writes nothing"
