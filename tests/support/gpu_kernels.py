"""GPU kernels without a GPU: run by Triton's interpreter on CPU tensors, and compiled for GPUs not in this machine."""

from __future__ import annotations

import functools
import gc
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encore.cost.allocations import measure_cpu

PACKAGE = "encore.kernels.gpu"
TARGETS = (80, 90)
"""Compute capabilities that kernels are compiled for."""

triton = pytest.importorskip("triton", reason="Triton is not installed: `make install` does it")


@functools.cache
def interpreted(name: str) -> ModuleType:
    """A module of the package once more, with kernels that the interpreter runs."""
    package = importlib.import_module(PACKAGE)
    importlib.import_module(f"{PACKAGE}.{name}")
    compiled = {each: module for each, module in sys.modules.items() if each.startswith(f"{PACKAGE}.")}
    try:
        for each in compiled:
            del sys.modules[each]
        _round_as_gpus_do()
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            return importlib.import_module(f"{PACKAGE}.{name}")
    finally:
        sys.modules.update(compiled)
        for each, module in compiled.items():
            setattr(package, each.rpartition(".")[2], module)


@functools.cache
def _round_as_gpus_do() -> None:
    """The interpreter cuts off what does not fit into bfloat16; kernels for GPUs round to nearest."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            wide = torch.from_numpy(np.ascontiguousarray(values))
            return wide.to(torch.bfloat16).view(torch.uint16).numpy()
        return convert(values, source, target, rounding)

    interpreter._convert_float = converted


def kernels_of(name: str) -> dict[str, Any]:
    """The kernels of a module, which are those functions that others do not call: they begin with a letter."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    return {
        each: value
        for each, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and value.__module__ == module.__name__ and not each.startswith("_")
    }


def compiled(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int) -> Any:
    """The kernel for a GPU of this compute capability: `asm` holds every stage from TTIR to machine code."""
    return triton.compile(_source(kernel, types, constants), target=_target(capability))


def ttir(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """The first stage of compiling, with all functions inlined: a tenth of the time."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    source, target = _source(kernel, types, constants), _target(TARGETS[0])
    backend: Any = make_backend(target)
    context, stages = ir.context(), dict[str, Any]()
    options = backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    return str(stages["ttir"](module, {}))


def _target(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


def _source(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> Any:
    from triton.compiler import ASTSource

    wanted = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in wanted else types[name] for name in kernel.arg_names}
    return ASTSource(kernel, signature, constexprs=wanted)


def narrow_offsets(ttir: str) -> list[str]:
    """Lines that add an offset of fewer than 64 bits to a pointer, or widen a product that was made in fewer."""
    made_by = dict(re.findall(r"^\s*(%\S+) = (\S+) ", ttir, re.MULTILINE))
    found = []
    for line in ttir.splitlines():
        if "tt.addptr" in line and not re.search(r"(xi64>|, i64)( loc.*)?$", line):
            found.append(line.strip())
        widened = re.search(r"arith\.ext[su]i (%\S+) : ", line)
        if widened and made_by.get(widened[1]) in ("arith.muli", "arith.shli"):
            found.append(line.strip())
    return found


@contextmanager
def only_program(*numbers: int) -> Iterator[None]:
    """One program of a grid, the one with these numbers, for tensors that are too large to go through."""
    import triton.language as tl
    from triton.runtime import interpreter

    def number(axis: int) -> Any:
        return interpreter.TensorHandle(np.array([numbers[axis]], dtype=np.int32), tl.int32)

    run = interpreter.InterpretedFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", lambda *args, **kw: run(*args, **{**kw, "grid": (1,)}))
        patch.setattr(interpreter.interpreter_builder, "create_get_program_id", number)
        # Tensors are on the CPU and need not come back from there; a copy would touch all of their memory.
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


def taken_aside(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that a call allocated at its worst moment beyond what it returned, and its result.

    The interpreter leaves cycles behind, which hold tensors.
    """
    gc.collect()
    measured = measure_cpu(lambda: (call(), gc.collect())[0])
    return measured.step_peak - measured.left, measured.result


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bytes_of(ours) == bytes_of(theirs)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
