"""Graph -> graph: the same step with less to keep for backward, and with better matrix products and convolutions.

Each pass is one module, named as in `PASSES`, whose function `apply` takes a graph and returns another (or the same
one, where it finds nothing). Where a pass is a pattern, it is a table of rules (`rules.py`) over one small matcher
(`matching.py`); docs/architecture.md shows how to add one.

Passes that keep less (`EXACT`) change no bit and run in both lowerings. Those that change products sum up in another
order, so results differ from eager's in the last bits: only the fused lowering runs them. Whether such a pass pays is
measured; what any of them does to the peak is simulated, and a pass that would raise it is not applied.
"""

from encore.rewrite.head_slices import split_head
from encore.rewrite.heads import find_heads
from encore.rewrite.judge import ComparedJudge, ConvolutionShape, Judge, LeanJudge
from encore.rewrite.known_ratios import KnownRatios
from encore.rewrite.passes import PASSES, Rewritten, rewrite

__all__ = [
    "PASSES", "ComparedJudge", "ConvolutionShape", "Judge", "KnownRatios", "LeanJudge", "Rewritten", "find_heads",
    "rewrite", "split_head",
]  # fmt: skip
