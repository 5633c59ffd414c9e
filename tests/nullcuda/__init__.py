"""Tests of CUDA code on a device that computes nothing.

A library, loaded before PyTorch, answers the calls of CUDA's runtime and driver, cuBLAS and cuDNN. Memory is mapped and
has a capacity; copies are real; kernels are counted and do nothing; streams can be threads, with copies that
take effect late. All above it is PyTorch's CUDA build: its allocators, autograd's threads, operators with their
workspaces, Inductor, Triton down to machine code. So these tests show whether code runs, what it allocates and
reserves, on which stream and device, and with how many launches, copies and waits. They cannot show numbers (other than
products of float32 matrices), speed, device assertions, the plans of cuDNN's newer interface, CUDA graphs, or a
context's own memory.

The library is C++: `memory` (devices, memory, copies), `streams` (streams, events, and what tests set), `order` (races,
and a clock), `kernels` (launches, the driver), `libraries` (cuBLAS, cuDNN); `build.py` adds an answer for every other
function that the installed PyTorch asks for. In Python, `null_device` is what tests set and read, `steps` are compiled
steps, `noted_operators` and `noted_tiers` say what those access and wait for, `schedules` has random programs.

`make test-cuda` makes an environment with that build and runs them; everywhere else they are not collected.
"""
