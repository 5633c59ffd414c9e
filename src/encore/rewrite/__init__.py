"""Graph -> graph: the same step with fewer, larger or better laid out matrix products and convolutions.

Each pass is one module with one function, named as in `PASSES`, that takes a graph and returns another (or the same
one, where it finds nothing). Sums come out in another order, so results differ from eager's in the last bits: only the
fused lowering runs them. Whether a pass pays is measured; what it does to the peak is simulated, and a pass that would
raise it is not applied.
"""

from encore.rewrite.heads import find_heads
from encore.rewrite.judge import ConvolutionShape, Judge
from encore.rewrite.passes import PASSES, Rewritten, rewrite
from encore.rewrite.split_head import split_head

__all__ = ["PASSES", "ConvolutionShape", "Judge", "Rewritten", "find_heads", "rewrite", "split_head"]
