"""The private API of PyTorch that comparisons use: the compiler behind `torch.compile`, and how a module shows that it
has no `forward`."""

import torch._functorch.config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch.nn.modules.module import _forward_unimplemented as forward_unimplemented

__all__ = ["compile_fx", "forward_unimplemented", "functorch_config"]
