"""The private API of PyTorch that lowering uses: Inductor, which compiles kernels, and the dispatcher.

What is relied upon: `compile_fx_inner` turns a graph of aten operators into the text of a Python module, in which
`call(args)` allocates the results and calls C++ functions that the text defines through `AsyncCompile.cpp_pybinding`
(Triton kernels on CUDA through `AsyncCompile.triton`); `CppBuilder` knows the compiler and its flags. Each kernel is
lowered under a tracing context of its own, or its strides would leak into AOTAutograd's. Inductor writes each module to
a file and executes what it finds under that name: here in a private directory, not in its own under `/tmp`.

A kernel with symbols is traced with operands whose sizes are symbols of a `ShapeEnv`, which notes as guards what
tracing and Inductor assume of them; its module takes the values of the symbols before the operands, and its C++
functions take them as `const int64_t`. Inductor decides from the sizes of the kernel that is lowered whether a loop
runs in several threads, and notes no guard of it: here it becomes one.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.codecache as inductor_codecache
import torch._inductor.config as inductor_config
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.cpp import CppKernel
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.loop_body import LoopBody
from torch._inductor.utils import sympy_product
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from encore.folders import private_directory
from encore.graph.torch_private import FakeTensorMode, OpOverload
from encore.graph.values import map_refs
from encore.lower.decompositions import with_sums_in_stages
from encore.lower.extension import CppFunction, LoweringError
from encore.schedule.kernel import Kernel, Operand, each_result


@contextmanager
def _settings() -> Iterator[None]:
    """Checks of every operand at every call are off: the schedule is verified as a whole. The processor's vector unit
    is assumed to work, instead of being checked by compiling four small programs."""
    with inductor_config.patch({
        "size_asserts": False, "alignment_asserts": False, "nan_asserts": False, "scalar_asserts": False,
        "fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "cpp_wrapper": False,
        "cpp.vec_isa_ok": True, "cpp.descriptive_names": False, "triton.unique_kernel_names": False,
    }):  # fmt: skip
        yield


def missing_compiler() -> str:
    """Return why no C++ kernel can be compiled on this machine; empty if one can."""
    try:
        command = get_cpp_compiler()
        subprocess.run([*shlex.split(command), "--version"], capture_output=True, check=True)
    except Exception as error:  # Inductor raises its own errors, the shell others: each means no compiler
        return f"no C++ compiler works here ({error})"
    return ""


@functools.cache
def compiler_version() -> str:
    """The first line of the C++ compiler's `--version`; it cannot use a header that another compiler has compiled."""
    command = [*shlex.split(get_cpp_compiler()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout.partition("\n")[0]


def module_source(kernel: Kernel) -> str:
    """The Python module that Inductor writes for a kernel."""
    return _lowered(kernel, (), lambda _: kernel)[0]


def symbolic_module_source(
    kernel: Kernel, hints: Sequence[int], kernel_of: Callable[[Sequence[Any]], Kernel]
) -> tuple[str, tuple[str, ...]]:
    """The module for a kernel with symbols, and guards: what must be true of the symbols `s0`, `s1`, ...

    `hints` are their values for the kernel itself; `kernel_of` gives the kernel for other values, which may be
    symbolic.
    """
    return _lowered(kernel, hints, kernel_of)


def _lowered(
    kernel: Kernel, hints: Sequence[int], kernel_of: Callable[[Sequence[Any]], Kernel]
) -> tuple[str, tuple[str, ...]]:
    environment = ShapeEnv(duck_shape=False) if hints else None
    mode = FakeTensorMode(shape_env=environment)
    symbols = _symbols(environment, hints) if environment else []
    names = {symbol.node.expr: f"s{number}" for number, symbol in enumerate(symbols)}
    on_cpu = "cpu" in kernel.devices
    with tracing(TracingContext(mode)), _settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Inductor's, of PyTorch's own names
        try:
            given = [*symbols, *(_fake(mode, operand) for operand in kernel_of(symbols).operands)]
            run = _as_function(kernel, kernel_of, len(symbols))
            with _no_functions_compiled(), _nests_noted() as nests:
                with mode, enable_python_dispatcher() if symbols else contextlib.nullcontext():
                    # decompositions create constants: fake ones
                    traced = make_fx(run, decomposition_table=_decompositions(on_cpu))(*given)
                (end,) = traced.graph.find_nodes(op="output")
                end.meta["user_visible_output_idxs"] = list(range(len(end.args[0])))
                compiled = compile_fx_inner(traced, given, is_inference=True)
            guards = _guards(environment, names, nests) if environment else ()
        except Exception as error:  # of any kind: the kernel's operators run one by one
            raise LoweringError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return compiled.source_code, guards  # type: ignore[attr-defined]


# -- symbols ---------------------------------------------------------------------------------------------------------


def _symbols(environment: ShapeEnv, hints: Sequence[int]) -> list[Any]:
    """Symbols of at least two, each of its own."""
    made = []
    for number, hint in enumerate(hints):
        source = ConstantSource(f"s{number}")
        symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        made.append(environment.create_symintnode(symbol, hint=hint, source=source))
    return made


class _GuardPrinter(PythonPrinter):
    """Guards with other names of symbols."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self.names = names

    def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802 - sympy's name
        return self.names[symbol]


@dataclass(frozen=True, slots=True)
class _Nest:
    """A loop nest of a C++ kernel."""

    iterations: Any
    hint: int
    is_parallel: bool


def _guards(environment: ShapeEnv, names: Mapping[Any, str], nests: Sequence[_Nest]) -> tuple[str, ...]:
    """Everything that was assumed of the symbols, as text."""
    if environment.deferred_runtime_asserts:
        raise LoweringError("a size depends on data")
    printer = _GuardPrinter(names)
    texts = [printer.doprint(guard.expr) for guard in environment.guards]
    texts += [f"{printer.doprint(a)} == {printer.doprint(b)}" for a, b in environment.replacements.items()]
    least = torch.get_num_threads() * inductor_config.cpp.min_chunk_size
    largest = max((nest for nest in nests if nest.is_parallel), key=lambda nest: nest.hint, default=None)
    for nest in nests:
        if nest.iterations.free_symbols and (nest is largest or not nest.is_parallel):
            bound = f">= {least // LENIENT}" if nest.is_parallel else f"< {least * LENIENT}"
            texts.append(f"({printer.doprint(nest.iterations)}) {bound}")
    return tuple(dict.fromkeys(texts))


LENIENT = 4
"""A kernel whose largest loop Inductor splits among threads also runs with a fourth of the iterations that Inductor
asks for, and a loop in a single thread with four times as many, before another kernel is compiled."""


@contextmanager
def _nests_noted() -> Iterator[list[_Nest]]:
    """Collect how many iterations each loop nest has, and whether they are split among threads."""
    found: list[_Nest] = []
    decide = CppKernel.decide_parallel_depth

    def noted(kernel: CppKernel, most: Any, threads: int) -> Any:
        depth = decide(kernel, most, threads)
        if threads > 1:
            nest = _Nest(sympy_product(kernel.call_ranges or ()), kernel.size_hint(), depth.parallel_depth > 0)
            found.append(nest)
        return depth

    with _patching, mock.patch.object(CppKernel, "decide_parallel_depth", noted):
        yield found


@functools.cache
def _decompositions(on_cpu: bool) -> dict[Any, Callable[..., Any]]:
    """Sums in stages are for the vector units of a processor; each would be a launch of its own on a GPU."""
    return with_sums_in_stages(select_decomp_table()) if on_cpu else dict(select_decomp_table())


def _fake(mode: FakeTensorMode, operand: Operand) -> torch.Tensor:
    with mode:
        if operand.aligned:
            return torch.empty_strided(operand.shape, operand.stride, dtype=operand.dtype, device=operand.device)
        span = 2 + sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True))
        memory = torch.empty(span, dtype=operand.dtype, device=operand.device)
        return memory.as_strided(operand.shape, operand.stride, 1)


def _as_function(kernel: Kernel, kernel_of: Callable[[Sequence[Any]], Kernel], symbols: int) -> Callable[..., Any]:
    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        operands: Sequence[torch.Tensor] = given[symbols:]
        values = list(operands)
        for call in kernel_of(given[:symbols]).calls:
            args, kwargs = map_refs((call.args, dict(call.kwargs)), values.__getitem__)
            values += each_result(call, call.target(*args, **kwargs))
        outputs = [
            _laid_out(values[number], layout) for number, layout in zip(kernel.outputs, kernel.layouts, strict=True)
        ]
        for position, operand in kernel.over:
            operands[operand].copy_(outputs[position])
        taken = {position for position, _ in kernel.over}
        return tuple(output for position, output in enumerate(outputs) if position not in taken)

    return run


def _laid_out(output: torch.Tensor, layout: tuple[int, ...]) -> torch.Tensor:
    """The output with the strides of the graph, whatever strides its decomposition gives it."""
    if tuple(map(_hint, output.stride())) == layout:
        return output
    order = sorted(range(output.dim()), key=lambda position: (-layout[position], position))
    dense = output.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(position) for position in range(output.dim())])


def _hint(size: Any) -> int:
    """A size, symbolic or not, of the kernel that is lowered. No guard: what a kernel returns is checked for its
    sizes."""
    return size if isinstance(size, int) else int(size.node.hint)


_patching = threading.RLock()
"""Two threads that replace the same function could restore each other's replacement."""


_read_expression = LoopBody.get_read_expr


def _any_if_unread(body: LoopBody, buffer: str) -> Any:
    """The index at which a loop reads a buffer; equal to every index if it does not read it. Inductor asks all users of
    a buffer, and one that writes over an operand of another loop only waits for that loop's buffer."""
    try:
        return _read_expression(body, buffer)
    except KeyError:
        return mock.ANY


@contextmanager
def _no_functions_compiled() -> Iterator[list[CppFunction]]:
    """Collect C++ functions instead of compiling each by itself, and write modules to the private directory."""
    collected: list[CppFunction] = []

    def collect(_: Any, argument_types: Sequence[str], source: str) -> CppFunction:
        function = CppFunction(f"f{len(collected)}", tuple(argument_types), source)
        collected.append(function)
        return function

    folder = str(private_directory())
    with (
        _patching,
        mock.patch.object(AsyncCompile, "cpp_pybinding", collect),
        mock.patch.object(inductor_codecache, "cache_dir", return_value=folder),
        mock.patch.object(LoopBody, "get_read_expr", _any_if_unread),
    ):
        yield collected


def execute(source: str) -> tuple[Callable[[list[Any]], Any], dict[str, Any], list[CppFunction]]:
    """Run a module's text: return its `call`, its globals, and the C++ functions to replace by compiled ones."""
    scope: dict[str, Any] = {"__name__": "encore_kernel"}
    with _settings(), _no_functions_compiled() as functions:
        exec(compile(source, "<encore kernel>", "exec"), scope)  # the text is Inductor's
    return scope["call"], scope, functions


def tensor_address_function() -> int:
    """The address of PyTorch's function that returns a tensor's memory, for `set_address_of`."""
    return int(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]


def build_command(source: Path, module: str, header: Path) -> list[str]:
    """The compiler's command line for such a file; running it writes `module`.so next to it."""
    with _settings():
        options = CppTorchOptions(vec_isa=pick_vec_isa(), include_pytorch=False)
        options.precompiled_header = "/encore-header"
        builder = CppBuilder("encore-module", "/encore-source", options, "/")
        target = source.with_name(f"{module}.so")
        paths = {"/encore-header": header, "/encore-source": source, "/encore-module.so": target}
        return _words(builder.get_command_line(), paths)


def header_command(header: Path) -> list[str]:
    """The compiler's command line that compiles the header, to a `.gch` next to it."""
    with _settings():
        options = CppTorchOptions(vec_isa=pick_vec_isa(), include_pytorch=False, precompiling=True)
        command = CppBuilder("/encore-header", "/encore-header", options).get_command_line()
        compiled = {f"/encore-header{kind}": header.with_name(header.name + kind) for kind in (".gch", ".pch")}
        return _words(command, {"/encore-header": header, **compiled})


def _words(command: str, paths: Mapping[str, Path]) -> list[str]:
    """Without line numbers for debuggers, which take a tenth of the time. Inductor does not quote paths: it was given
    plain words, which they replace here."""
    return [str(paths.get(word, word)) for word in shlex.split(command) if word != "-g1"]


@functools.cache
def dispatcher_call(target: Any) -> Callable[..., Any]:
    """The dispatcher's own callable of an operator, which `OpOverload.__call__` only forwards to: thousands of small
    operators feel the extra Python frame."""
    return target._op if isinstance(target, OpOverload) else target


def takes_cudnn_batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, eps: float
) -> bool:
    """Return whether eager PyTorch gives this normalisation to cuDNN. With channels last, cuDNN keeps a reserve for
    backward, which no graph has."""
    if not x.is_cuda or not x.is_contiguous() or weight is None or bias is None:
        return False
    mean, variance = (weight if one is None else one for one in (mean, variance))  # in training, both or neither
    found = torch._C._select_batch_norm_backend(x, weight, bias, mean, variance, training, eps)  # type: ignore[attr-defined]
    return bool(found == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


def below_autograd() -> Any:
    """A context in which autograd does not see operators, whatever the grad mode."""
    return torch._C._AutoDispatchBelowAutograd()
