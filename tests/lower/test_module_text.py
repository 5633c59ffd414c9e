"""What a module's `call` holds aside, read off its text; what it may not do."""

from __future__ import annotations

import textwrap

import pytest

from encore.lower.extension import LoweringError
from encore.lower.module_text import read_module


def module(body: str) -> str:
    """A module as Inductor writes them, with other functions around its `call`."""
    indented = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    return f"import torch\n\nclass Runner:\n    def call(self, args):\n{indented}\n\ndef call(args):\n    return 1\n"


def test_results_are_not_aside() -> None:
    body = """
        arg0_1, = args
        args.clear()
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        cpp_fused_0(arg0_1, buf0)
        del arg0_1
        return (buf0, )
    """
    assert read_module(module(body)).workspace == 0


def test_a_buffer_that_is_not_returned_is_aside() -> None:
    body = """
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, ), (1, ), torch.float64)
        buf1 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        cpp_fused_0(arg0_1, buf0, buf1)
        del buf0
        return (buf1, )
    """
    assert read_module(module(body)).workspace == 32


def test_only_what_is_alive_together_counts() -> None:
    body = """
        arg0_1, = args
        args.clear()
        buf0 = empty_strided_cpu((100, ), (1, ), torch.int8)
        cpp_fused_0(arg0_1, buf0)
        buf1 = empty_strided_cpu((10, ), (1, ), torch.int8)
        cpp_fused_1(buf0, buf1)
        del buf0
        buf2 = empty_strided_cpu((60, ), (1, ), torch.int8)
        cpp_fused_2(buf1, buf2)
        return (buf2, )
    """
    assert read_module(module(body)).workspace == 110 - 60


def test_a_buffer_lives_on_under_another_name() -> None:
    body = """
        arg0_1, = args
        args.clear()
        buf0 = empty_strided_cpu((100, ), (1, ), torch.int8)
        buf1 = reinterpret_tensor(buf0, (10, 10), (10, 1), 0); del buf0  # reuse
        buf2 = buf1
        del buf1
        buf3 = empty_strided_cpu((7, ), (1, ), torch.int8)
        cpp_fused_0(arg0_1, buf2, buf3)
        del buf2
        return (buf3, )
    """
    assert read_module(module(body)).workspace == 100


def test_a_window_of_an_operand_takes_nothing() -> None:
    body = """
        arg0_1, = args
        args.clear()
        buf0 = reinterpret_tensor(arg0_1, (2, 2), (2, 1), 0)
        buf1 = empty_strided_cpu((2, 2), (2, 1), torch.bfloat16)
        cpp_fused_0(buf0, buf1)
        return (reinterpret_tensor(buf1, (4, ), (1, ), 0), )
    """
    assert read_module(module(body)).workspace == 0


def test_memory_is_counted_by_strides() -> None:
    body = """
        args.clear()
        buf0 = empty_strided_cpu((3, 2), (10, 1), torch.float32)
        buf1 = empty_strided_cpu((0, 5), (5, 1), torch.float32)
        buf2 = empty_strided_cpu((), (), torch.bool)
        cpp_fused_0(buf0, buf1, buf2)
        return (buf1, )
    """
    assert read_module(module(body)).workspace == 4 * (2 * 10 + 1 + 1) + 1


def test_a_kernel_that_writes_over_its_operands_returns_nothing() -> None:
    body = """
        arg0_1, = args
        args.clear()
        cpp_fused_0(arg0_1, arg0_1)
        del arg0_1
        return ()
    """
    assert read_module(module(body)).workspace == 0


def test_a_triton_kernel_is_run_by_its_own_method() -> None:
    body = """
        arg0_1, = args
        args.clear()
        buf0 = empty_strided_cuda((8, ), (1, ), torch.float16)
        triton_poi_fused_0.run(arg0_1, buf0, 8, stream=stream0)
        return (buf0, )
    """
    assert read_module(module(body)).workspace == 0


REFUSED = {
    "an operator outside its kernel": (
        "buf0 = torch.ops.aten.mm.default(arg0_1, arg0_1)\nreturn (buf0, )",
        "does more",
    ),
    "an operator's statement": ("torch.ops.aten.copy_.default(arg0_1, arg0_1)\nreturn ()", "does more"),
    "an extern kernel": ("extern_kernels.mm(arg0_1, arg0_1, out=buf0)\nreturn (buf0, )", "does more"),
    "a branch": ("if arg0_1 is None:\n    return ()\nreturn ()", "does more"),
    "an unpacked result": ("buf0, buf1 = something(arg0_1)\nreturn (buf0, )", "does more"),
    "an operand returned": ("return (arg0_1, )", "returns something it did not allocate: arg0_1"),
    "an expression returned": ("return (torch.zeros(3), )", "returns something it did not allocate"),
    "a buffer twice": (
        "buf0 = empty_strided_cpu((2, ), (1, ), torch.int8)\nbuf1 = buf0\nreturn (buf0, buf1, )",
        "returns one buffer twice",
    ),
    "windows of one buffer": (
        "buf0 = empty_strided_cpu((2, ), (1, ), torch.int8)\nreturn (buf0, reinterpret_tensor(buf0, (1, ), (1, ), 1))",
        "returns one buffer twice",
    ),
    "no return": ("args.clear()", "returns nothing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    body, reason = REFUSED[what]
    with pytest.raises(LoweringError, match=reason):
        read_module(module(body))


def test_operands_of_cuda_kernels_are_checked_for_alignment() -> None:
    body = """
        arg0_1, = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            arg0_1 = copy_if_misaligned(arg0_1)
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(arg0_1, buf0, 32, stream=raw_stream0)
            del arg0_1
        return (buf0, )
    """
    assert read_module(module(body)).workspace == 0
