"""Every GPU kernel compiled, on a machine without one: to machine code, with 64-bit offsets, whatever the batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from encore.kernels import gpu
from support.gpu_kernels import TARGETS, compiled, kernels_of, narrow_offsets, triton, ttir

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET is set: nothing is compiled"
)

BATCH = ("active", "found", "count", "queries", "tiles", "rows", "groups", "begin", "end", "batch", "grad_step")
"""Arguments that grow with the batch or with lengths."""

RECURRENT = {
    **dict.fromkeys(("products", "bias", "cell", "raw", "after", "before", "cells", "left", "initial"), "*fp32"),
    **dict.fromkeys(("grad_state", "grad_gates", "grad_cell", "matrix", "sums", "previous", "total"), "*fp32"),
    **dict.fromkeys(("output", "gates", "grad_output"), "*bf16"),
    "resets": "*i1",
    **dict.fromkeys(("hidden", "width", "grad_stride", *BATCH), "i32"),
}

LOOPS = {
    **RECURRENT,
    **dict.fromkeys(("inputs", "weight", "entering"), "*fp32"),
    "meeting": "*i32",
}

SCORES = {
    **dict.fromkeys(("query", "keys", "weight", "bias", "norm_weight", "norm_bias", "result", "grad"), "*bf16"),
    **dict.fromkeys(("grad_keys", "grad_query"), "*bf16"),
    **dict.fromkeys(("moments", "sums"), "*fp32"),
    **dict.fromkeys(("hidden", "query_batch", "query_row", "key_batch", "key_row", "grad_batch", "grad_row"), "i32"),
    **dict.fromkeys(BATCH, "i32"),
}

BITS = {"source": "*bf16", "code": "*u8", "out": "*bf16", "count": "i32"}

FLOATS = {
    **dict.fromkeys(("source", "out"), "*i16"),
    "code": "*u8",
    "words": "*i32",
    "scales": "*fp32",
    "integers": "*i8",
    "count": "i32",
}
SPARSE = {"source": "*i32", "out": "*i32", "values": "*i32", "bitmap": "*u8", "count": "i32"} | dict.fromkeys(
    ("starts", "counts"), "*i64"
)
SMALLER = {"source": "*i64", "out": "*u8", "base": "i32", "count": "i32"}
POOL = {
    **dict.fromkeys(("x", "y", "grad", "out"), "*bf16"),
    **dict.fromkeys(("channels", "ID", "IH", "IW", "OD", "OH", "OW", "count"), "i32"),
    "map_": "*u8",
}
WINDOW = {f"{name}{axis}": size for name, size in {"K": 3, "S": 2, "P": 1, "D": 1}.items() for axis in "DHW"}

FAMILIES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "recurrent": (RECURRENT, {"ROWS": 4, "UNITS": 256, "RELU": True}),
    "recurrent_loops": (
        LOOPS,
        {"ROWS": 16, "UNITS": 32, "DEPTH": 32, "PROGRAMS": 8, "REVERSE": True, "RELU": True, "PRECISION": "ieee"},
    ),
    "scores": (SCORES, {"KEYS": 4, "UNITS": 256, "EPS": 1e-5, "ADD": True}),
    "bits": (
        BITS,
        {"BYTES": 128, "BLOCK": 1024, "NAN_PASSES": True, "INFINITY": 0x7F80, "SIZE": 0x7FFF, "ONE": 1.5, "OTHER": 0.0}
        | {"LOW": 0.0, "HIGH": 6.0},
    ),
    "floats": (FLOATS, {"KIND": "f16", "E": 4, "M": 3, "INFINITY": 0x7E, "NAN": 0x7F, "BLOCK": 1024, "GROUPS": 16}),
    "sparse": (SPARSE, {"BYTES": 128}),
    "integers": (SMALLER, {"BLOCK": 1024}),
    "pool_map": (POOL, {"NARROW": False, "BLOCK": 512, **WINDOW}),
}
"""Module -> types of the arguments by name, and constants. Kernels take of both what they have."""

SPECIAL = {
    "decode_int8": {"scales": "*i32"},
    "decode_int4": {"scales": "*i32"},
    "widen": {"source": "*u8", "out": "*i64"},
    "pack_bools": {"source": "*u8"},
    "pack_signs": {"source": "*i16"},
}
"""Kernel -> other types."""

EVERY = [(family, name) for family in FAMILIES for name in kernels_of(family)]
FIRST = {family: next(iter(kernels_of(family))) for family in FAMILIES}


def test_every_module_with_kernels_is_compiled() -> None:
    modules = {path.stem for path in Path(gpu.__file__).parent.glob("*.py")} - {"__init__"}
    called_by_others = {"maths", "narrow"}
    assert {module for module in modules if kernels_of(module)} == {*FAMILIES, *called_by_others}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def arguments(family: str, name: str) -> tuple[Any, dict[str, str], dict[str, Any]]:
    types, constants = FAMILIES[family]
    return kernels_of(family)[name], types | SPECIAL.get(name, {}), constants


def check(family: str, name: str, capability: int) -> None:
    kernel = compiled(*arguments(family, name), capability)
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert narrow_offsets(kernel.asm["ttir"]) == []


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles(family: str, capability: int) -> None:
    check(family, FIRST[family], capability)


def at_once(family: str, capability: int) -> bool:
    """Is a kernel compiled in `make test`? Those of recurrent layers and scores are, for one target."""
    return family in ("recurrent", "recurrent_loops", "scores") and capability == TARGETS[0]


@pytest.mark.parametrize(
    ("family", "name", "capability"),
    [
        pytest.param(family, name, capability, marks=() if at_once(family, capability) else pytest.mark.slow)
        for family, name in EVERY
        for capability in TARGETS
    ],
)
def test_every_kernel_compiles(family: str, name: str, capability: int) -> None:
    check(family, name, capability)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), EVERY)
def test_every_kernel_compiles_for_double_precision_and_large_tensors(family: str, name: str) -> None:
    """Counts beyond 2^31 come as 64-bit integers. Codes of small numbers hold no float64."""
    kernel, types, constants = arguments(family, name)
    floats = {"*fp32": "*fp64", "*bf16": "*fp64"} if family != "floats" else {}
    types = {each: "i64" if each in BATCH else floats.get(type_, type_) for each, type_ in types.items()}
    found = compiled(kernel, types, constants, TARGETS[0])
    assert narrow_offsets(found.asm["ttir"]) == []


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_offsets_have_64_bits(family: str, name: str) -> None:
    text = ttir(*arguments(family, name))
    assert "tt.addptr" in text
    assert narrow_offsets(text) == []


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_nothing_is_compiled_anew_for_another_batch(family: str, name: str) -> None:
    """Triton compiles once more where an integer is 1 or divisible by 16, unless told not to look."""
    for parameter in kernels_of(family)[name].params:
        if parameter.name in BATCH:
            assert parameter.do_not_specialize
            assert not parameter.is_constexpr


def test_narrow_offsets_are_found() -> None:
    wrong = """
    %a = arith.muli %x, %y : tensor<4xi32> loc(#loc)
    %b = arith.extsi %a : tensor<4xi32> to tensor<4xi64> loc(#loc)
    %c = tt.addptr %p, %a : tensor<4x!tt.ptr<f32>>, tensor<4xi32> loc(#loc)
    %d = tt.addptr %p, %b : tensor<4x!tt.ptr<f32>>, tensor<4xi64> loc(#loc)
    %e = tt.addptr %q, %s : !tt.ptr<f32>, i32 loc(#loc)
    """
    assert [line.split()[0] for line in narrow_offsets(wrong)] == ["%b", "%c", "%e"]


def test_triton_is_the_one_that_torch_names() -> None:
    named = {"2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
    assert minor_version(triton.__version__) == named[minor_version(torch.__version__)]


def minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])
