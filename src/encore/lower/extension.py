"""The C++ file of an extension module: the functions of many kernels, each bound to Python.

The headers of one file take the compiler seconds, a function fractions of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CppFunction:
    """A C++ function of a kernel's module, before it is compiled. It takes tensors and sizes."""

    name: str
    argument_types: tuple[str, ...]
    source: str


class LoweringError(Exception):
    """Inductor or the C++ compiler failed on a kernel; its operators run one by one instead."""


BINDING = """
static PyObject* py_{name}(PyObject*, PyObject* const* args, Py_ssize_t given) {{
    if (given != {count}) return PyErr_Format(PyExc_TypeError, "{name} takes {count} arguments, not %zd", given);
{sizes}    try {{
        {name}::kernel({arguments});
    }} catch (std::exception const& error) {{
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }}
    Py_RETURN_NONE;
}}
"""

SIZE = "const int64_t"
READ_SIZE = f"""    {SIZE} size_{{position}} = PyLong_AsLongLong(args[{{position}}]);
    if (PyErr_Occurred()) return NULL;
"""

MODULE = """
static PyMethodDef methods[] = {{
{methods}
    {{NULL, NULL, 0, NULL}}
}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{module}", NULL, -1, methods}};

PyMODINIT_FUNC PyInit_{module}(void) {{ return PyModule_Create(&module); }}
"""

HEADER = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/inductor/cpp_prefix.h>
"""
"""What every file of kernels begins with: a second of reading and five of thinking, unless it is compiled once."""

PREFIX = """
// Set when the module is loaded: PyTorch's function from a tensor object to its memory, called without its headers.
static void* (*address_of)(PyObject*);

extern "C" void set_address_of(void* function) { address_of = reinterpret_cast<void* (*)(PyObject*)>(function); }
"""


def extension_source(module: str, functions: Sequence[CppFunction]) -> str:
    """Return the text of one C++ file with all functions, as the extension module `module`."""
    parts = [PREFIX]
    methods = []
    for function in functions:
        kinds = [kind.strip() for kind in function.argument_types]
        if not all(kind.endswith("*") or kind == SIZE for kind in kinds):
            raise LoweringError(f"a kernel takes {function.argument_types}, not only tensors and sizes")
        body = "\n".join(line for line in function.source.splitlines() if not line.startswith("#include"))
        body = body.replace('extern "C"', "static", 1)
        arguments = ", ".join(
            f"size_{position}" if kind == SIZE else f"static_cast<{kind}>(address_of(args[{position}]))"
            for position, kind in enumerate(kinds)
        )
        sizes = "".join(READ_SIZE.format(position=position) for position, kind in enumerate(kinds) if kind == SIZE)
        parts.append(f"namespace {function.name} {{\n{body}\n}}")
        parts.append(BINDING.format(name=function.name, count=len(kinds), arguments=arguments, sizes=sizes))
        methods.append(f'    {{"{function.name}", (PyCFunction)py_{function.name}, METH_FASTCALL, NULL}},')
    return "\n".join([*parts, MODULE.format(module=module, methods="\n".join(methods))])
