"""`import encore` loads PyTorch and three small modules; everything else is imported where it is first used."""

from __future__ import annotations

import ast
import json
import pickle
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import encore
from encore.torch_version import NEWEST, OLDEST, check_torch

PACKAGE = Path(encore.__file__).parent
HEAVY = {
    "torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.utils.cpp_extension", "triton", "sympy",
    "networkx", "jinja2", "rich", "matplotlib", "setuptools",
}  # fmt: skip
"""What takes a second or more together, some of it in PyTorch, some in other packages."""
USES = """
import json, sys
import torch
found = {"torch": sorted(sys.modules)}
import encore
found["encore"] = sorted(sys.modules)
encore.nn.LSTM(3, 4)(torch.zeros(1, 2, 3))[0].sum().backward()
found["encore.nn"] = sorted(sys.modules)
encore.scan, encore.bptt, encore.tiers.Disk, encore.devices.find_profile("A100"), encore.Report, encore.SavedPlan
found["other rooms"] = sorted(sys.modules)
print(json.dumps(found))
"""


def run(program: str, *arguments: str) -> str:
    """What a program writes in a process of its own."""
    line = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules there are after each use."""
    return {use: set(modules) for use, modules in json.loads(run(USES)).items()}


def test_importing_encore_adds_three_modules(loaded: dict[str, set[str]]) -> None:
    assert loaded["encore"] - loaded["torch"] == {"encore", "encore.errors", "encore.torch_version"}


@pytest.mark.parametrize("use", ["encore.nn", "other rooms"])
def test_what_needs_no_compiler_loads_none(loaded: dict[str, set[str]], use: str) -> None:
    assert not HEAVY & (loaded[use] - loaded["torch"])


def listed_for_checkers() -> dict[str, str]:
    """Public names and the modules that type checkers look them up in."""
    tree = ast.parse(Path(encore.__file__).read_text())
    imports = [(node.module or "", node.names) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.name: module for module, names in imports if module.startswith("encore") for name in names}


def test_every_public_name_is_what_type_checkers_see() -> None:
    listed = listed_for_checkers()
    assert sorted(listed) == sorted([*encore.__all__, "check_torch"])
    for name, module in listed.items():
        found = getattr(encore, name)
        home = import_module(module)
        assert found is (import_module(f"encore.{name}") if home is encore else getattr(home, name))
    assert set(encore.__all__) <= set(dir(encore))


def test_no_module_takes_the_name_of_a_public_function() -> None:
    modules = {path.stem for path in PACKAGE.iterdir()}
    public = {name for name in encore.__all__ if not isinstance(getattr(encore, name), ModuleType)}
    assert not modules & public


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'encore' has no attribute 'complie'"):
        encore.complie  # noqa: B018


BY_TORCH_COMPILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
x = torch.randn(16, 4)
plain = torch.autograd.grad(model(x).sum(), model.parameters())
compiled = torch.compile(model, backend="encore")
planned = torch.autograd.grad(compiled(x).sum(), model.parameters())
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, planned))
import encore
print(encore.report(compiled).graphs[0].operators)
"""


def test_torch_compile_alone_finds_the_backend() -> None:
    assert int(run(BY_TORCH_COMPILE)) > 0


UNPICKLE = """
import pathlib, pickle, sys
model, error = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
print(type(model).__module__, type(error).__name__, error.floor)
"""


def test_unpickling_imports_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps((encore.nn.LSTM(2, 3), encore.BudgetError("too small", floor=7))))
    assert run(UNPICKLE, str(file)).split() == ["encore.rnn.modules", "BudgetError", "7"]


OLDER = """
import torch
torch.__version__ = "2.12.1"
try:
    import encore
except ImportError as error:
    print(error)
"""


def test_another_version_of_pytorch_is_an_error_at_import() -> None:
    message = run(OLDER)
    assert "works with PyTorch 2.13 to 2.15, and PyTorch 2.12.1 is installed" in message
    assert "pip install 'torch>=2.13,<2.16'" in message


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0.dev20261001+cu132"])
def test_these_versions_of_pytorch_are_accepted(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.12.1+cpu", "2.16.0", "2.130.0", "3.0.0"])
def test_other_versions_of_pytorch_are_rejected(version: str) -> None:
    with pytest.raises(encore.UnsupportedTorchError, match=f"PyTorch {re.escape(version)} is installed"):
        check_torch(version)


def test_the_package_depends_on_the_same_versions() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())
    assert f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}" in project["project"]["dependencies"]
