"""C++ sources that PyTorch has no operator for, and how they become callable.

What lives here: the sources, and `build`, which compiles one on first use and keeps it on disk; in `gpu/` their twins
in Triton. What may not: tensors, operators, decisions. The fused kernels of `encore.lower` are generated, and live
there.
"""

from encore.kernels.build import BuildError, library

__all__ = ["BuildError", "library"]
