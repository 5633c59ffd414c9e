"""Workloads as targets of the `encore` command, run from the repository's root.

`encore estimate benchmarks.workloads.targets:nmt` takes the default sizes; `nmt_tiny` and `nmt_ecornn` take the named
ones, with `_` for `-`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from benchmarks import workloads

if TYPE_CHECKING:
    from torch import nn


def _target(workload: str, **size: str) -> tuple[nn.Module, workloads.Batch]:
    built = workloads.build(workload, seed=0, **size)
    return built.model, built.batch(0)


for _name in workloads.WORKLOADS:
    globals()[_name] = functools.partial(_target, _name)
    for _size in ("tiny", *workloads.NAMED_SIZES.get(_name, {})):
        globals()[f"{_name}_{_size.replace('-', '_')}"] = functools.partial(_target, _name, size=_size)
