"""The private API of PyTorch that capture and the compiler use; torch is pinned to one minor version for its sake.

`docs/architecture.md` lists what each file is for. Other files of `capture/` and `compiler/` import from here alone.
"""

from torch._dynamo import graph_break

from encore.capture.torch_private.autograd_node import (
    Chain,
    Groups,
    at_end_of_backward,
    backward_number,
    chain_of,
    in_backward,
    keeps_graph,
    running_node,
)
from encore.capture.torch_private.dynamo import (
    BackendError,
    TraceFailed,
    break_reason,
    dynamo_compile,
    guard_hooks,
    is_forced_eager,
    outermost_codes,
    outside_compilation,
    pin_sizes,
    traced_code,
    warn_of_recurrent_layers,
    whole_graphs,
)
from encore.capture.torch_private.eager_kernels import TRACED_KERNELS, composite, eager_operators
from encore.capture.torch_private.fake_tensors import DataDependent, WatchedFakeMode, fake_window, is_plain_fake
from encore.capture.torch_private.joint_graph import (
    checkpointed,
    given,
    graph_in_place_of,
    plain_partition,
    primals,
    returned_outputs,
    saves_unchecked,
    shell,
    takes_apart_tensors,
    unchecked_last,
)
from encore.capture.torch_private.layer_shapes import recurrent_shapes
from encore.capture.torch_private.layers import captured_layers
from encore.capture.torch_private.messages import messages_after_graphs
from encore.capture.torch_private.process import first_value, has_ranks
from encore.capture.torch_private.replacements import Replacement, constructed_as, replaced_readers, traced_as
from encore.capture.torch_private.saved_tensors import top_saved_tensors_hooks, without_top_saved_tensors_hooks
from encore.capture.torch_private.tracing import (
    boxed,
    casts_automatically,
    compile_settings,
    is_transformed,
    last_traced_node,
    outside_tracing,
    plain_callable,
    real_tensors,
    tangent_like,
    trace_functional,
    trace_joint,
    traces_here,
    was_written,
)

__all__ = [
    "TRACED_KERNELS",
    "BackendError",
    "Chain",
    "DataDependent",
    "Groups",
    "Replacement",
    "TraceFailed",
    "WatchedFakeMode",
    "at_end_of_backward",
    "backward_number",
    "boxed",
    "break_reason",
    "captured_layers",
    "casts_automatically",
    "chain_of",
    "checkpointed",
    "compile_settings",
    "composite",
    "constructed_as",
    "dynamo_compile",
    "eager_operators",
    "fake_window",
    "first_value",
    "given",
    "graph_break",
    "graph_in_place_of",
    "guard_hooks",
    "has_ranks",
    "in_backward",
    "is_forced_eager",
    "is_plain_fake",
    "is_transformed",
    "keeps_graph",
    "last_traced_node",
    "messages_after_graphs",
    "outermost_codes",
    "outside_compilation",
    "outside_tracing",
    "pin_sizes",
    "plain_callable",
    "plain_partition",
    "primals",
    "real_tensors",
    "recurrent_shapes",
    "replaced_readers",
    "returned_outputs",
    "running_node",
    "saves_unchecked",
    "shell",
    "takes_apart_tensors",
    "tangent_like",
    "top_saved_tensors_hooks",
    "trace_functional",
    "trace_joint",
    "traced_as",
    "traced_code",
    "traces_here",
    "unchecked_last",
    "warn_of_recurrent_layers",
    "was_written",
    "whole_graphs",
    "without_top_saved_tensors_hooks",
]
