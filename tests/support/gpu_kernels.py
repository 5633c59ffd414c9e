"""GPU kernels without a GPU: run by Triton's interpreter on CPU tensors, and compiled for GPUs not in this machine."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import math
import random
import re
import sys
import threading
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


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, **options: Any
) -> Any:  # fmt: skip
    """The kernel for a GPU of this compute capability: `asm` holds every stage from TTIR to machine code."""
    return triton.compile(_source(kernel, types, constants), target=_target(capability), options=options)


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


@contextmanager
def programs_together(seed: int) -> Iterator[list[int]]:
    """Programs of a grid take turns, at random, wherever they wait for each other or read what others count: at
    barriers and atomic operations. The interpreter runs one after the other to its end. The list has the grids."""
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    call, barrier, atomic = executor.__call__, builder.create_barrier, builder.create_atomic_rmw
    baton = _Baton(builder, random.Random(seed))
    grids: list[int] = []

    def run_grid(self: Any, *args: Any, **kwargs: Any) -> Any:
        programs: list[Callable[[], Any]] = []
        fn = self.fn

        def start(**given: Any) -> None:
            programs.append(functools.partial(fn, **given))
            baton.places.append(builder.grid_idx)
            if len(programs) == math.prod(builder.grid_dim):
                grids.append(len(programs))
                baton.run(programs)

        self.fn = _Started(fn, start)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.fn = fn

    def yielding(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            baton.pass_on()
            return operation(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", run_grid)
        patch.setattr(builder, "create_barrier", yielding(barrier))
        patch.setattr(builder, "create_atomic_rmw", yielding(atomic))
        yield grids


class _Started:
    """A kernel's function for the interpreter, which looks at its arguments and globals."""

    def __init__(self, fn: Any, start: Callable[..., None]) -> None:
        self.__name__, self.__globals__, self.__signature__ = fn.__name__, fn.__globals__, inspect.signature(fn)
        self._start = start

    def __call__(self, **given: Any) -> None:
        self._start(**given)


class _Baton:
    """Threads of which one runs at a time."""

    def __init__(self, builder: Any, chance: random.Random) -> None:
        self.builder, self.chance = builder, chance
        self.places: list[Any] = []
        self._turns: list[threading.Semaphore] = []
        self._back = threading.Semaphore(0)
        self._mine = threading.local()
        self._errors: list[BaseException] = []
        self._done: list[bool] = []

    def run(self, programs: list[Callable[[], Any]]) -> None:
        self._turns, self._done = [threading.Semaphore(0) for _ in programs], [False] * len(programs)
        threads = [threading.Thread(target=self._program, args=each) for each in enumerate(programs)]
        for thread in threads:
            thread.start()
        while alive := [number for number, thread in enumerate(threads) if thread.is_alive()]:
            self._turns[self.chance.choice(alive)].release()
            self._back.acquire()
            for number in alive:
                if self._done[number]:
                    threads[number].join()
        self.places.clear()
        if self._errors:
            raise self._errors[0]

    def pass_on(self) -> None:
        number = getattr(self._mine, "number", None)
        if number is not None:
            self._back.release()
            self._wait(number)

    def _wait(self, number: int) -> None:
        self._turns[number].acquire()
        self.builder.set_grid_idx(*self.places[number])

    def _program(self, number: int, program: Callable[[], Any]) -> None:
        self._mine.number = number
        self._wait(number)
        try:
            program()
        except BaseException as error:  # raised again where the grid was launched
            self._errors.append(error)
        finally:
            self._done[number] = True
            self._back.release()


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
