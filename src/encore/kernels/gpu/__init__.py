"""GPU kernels in Triton, counterparts of the C++ sources in the folder above.

What lives here: functions under `@triton.jit`, one module a family, and what says whether they can run. What may not:
tensors, operators, decisions; the modules that launch the kernels (`rnn/gpu.py`) own the buffers. Importing this
package does not import Triton, which may be missing; importing one of its modules does.

Rules that hold for every kernel, and are tested without a GPU:

- offsets into tensors are 64-bit: tensors may have more than 2^31 elements;
- the size of a tile depends on the width of a row alone, and nothing is compiled again for another batch;
- narrow types are computed in float32;
- only what Triton's interpreter knows as well is used, so that what is tested is what runs. Sums are `tl.reduce`: the
  interpreter takes `tl.sum` only where it was switched on before Triton was imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings

import torch

from encore.devices import capability, is_here

LEAST_CAPABILITY = (8, 0)
"""Kernels are compiled, in tests, for this one and for 9.0."""


@functools.cache
def has_gpu_kernels(device: torch.device, instead: str) -> bool:
    """Return whether kernels run on this device. If they should and are not available, one warning says why."""
    if device.type != "cuda":
        return False
    reason = _missing(device)
    if reason is not None:
        warnings.warn(f"encore: {instead} on {device}, slower than it could be: {reason}", stacklevel=2)
    return reason is None


def _missing(device: torch.device) -> str | None:
    """What is missing. A device that this machine does not have belongs to an estimate: nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (`pip install 'encore-torch[gpu]'`)"
    if is_here(device) and not any(map(shutil.which, [os.environ.get("CC", ""), "clang", "gcc"])):
        return "Triton needs a C compiler, and finds none (install gcc, or set CC)"
    found = capability(device)
    if found is not None and found < LEAST_CAPABILITY:
        wanted = ".".join(map(str, LEAST_CAPABILITY))
        return f"this GPU has compute capability {found[0]}.{found[1]}, and kernels want {wanted} or newer"
    return None
