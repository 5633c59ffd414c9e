"""Codecs in C++: `kernels/*.cpp`, called through ctypes on tensors' addresses; on GPUs, the functions of `gpu.py`."""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from encore.kernels import BuildError, library
from encore.kernels.build import compile_command
from encore.kernels.gpu import has_gpu_kernels

SUFFIX = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
"""How functions for a type of numbers end."""

ON_GPUS = ("bits", "floats", "integers", "pool_map", "sparse")
"""Files whose functions have counterparts in `gpu.py`."""

INSTEAD = "activations are encoded by PyTorch's own operators"

CODED = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double}


def has_kernels(name: str, device: torch.device) -> bool:
    """Return whether compiled code runs on a device. If it should and cannot be built, one warning says why."""
    if device.type == "cuda":
        return name in ON_GPUS and has_gpu_kernels(device, INSTEAD)
    return device.type == "cpu" and _compiled(name) is not None


@functools.cache
def is_compiled(device: str) -> bool:
    """Return whether compiled code will run on a device (`cuda:0`, or a kind of device). Compiles nothing."""
    kind = torch.device(device).type
    if kind == "cuda":
        return has_gpu_kernels(torch.device(device), INSTEAD)
    try:
        compile_command()
    except BuildError:
        return False
    return kind in ("cpu", "meta")


def call(name: str, function: str, *arguments: Any) -> int:
    """Call a function of `kernels/<name>.cpp`; its last argument is the number of threads."""
    if on_gpu(*arguments):
        from encore.codecs import gpu  # imports Triton

        return gpu.call(name, function, *arguments)
    threads = ctypes.c_int64(torch.get_num_threads())
    return _function(name, function)(*(_coded(argument) for argument in arguments), threads)


def on_gpu(*arguments: Any) -> bool:
    """Return whether kernels for GPUs run a call with these arguments."""
    return any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments)


@functools.cache
def _function(name: str, function: str) -> Any:
    loaded = _compiled(name)
    assert loaded is not None
    found = getattr(loaded, function)
    found.restype = ctypes.c_int64
    return found


def _coded(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    coded = CODED.get(type(argument))
    return argument if coded is None else coded(argument)


@functools.cache
def _compiled(name: str) -> ctypes.CDLL | None:
    try:
        return library(name)
    except BuildError as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(_error: str) -> None:
    warnings.warn(
        f"encore: activations are encoded by PyTorch's own operators, several times slower: {_error}. "
        "Install a C++ compiler, or set CXX to one",
        stacklevel=2,
    )
