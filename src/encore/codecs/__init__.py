"""The encodings: how an activation is kept in fewer bytes between its forward and its backward use.

A codec is a pair of operators, `encore::encode_<name>` and `encore::decode_<name>`, known to fake tensors, and an entry
in `CODECS` with its bytes, its workspace and its exactness. A code is one contiguous run of bytes with everything in
it; each module's docstring describes its layout. Next to codecs, operators that read codes where they are: a mask in
bits, a pooling layer's positions.

What lives here: codes and what reads them. What may not: which value is encoded, when, or whether it pays.
"""

from encore.codecs import pool_map
from encore.codecs.bits import BITS
from encore.codecs.codec import Codec, Densities, Share
from encore.codecs.floats import FLOAT_CODECS
from encore.codecs.integers import INTEGER_CODECS
from encore.codecs.operators import WORKSPACES
from encore.codecs.sparse import SPARSE_CODECS

_TABLE = (
    BITS,
    *INTEGER_CODECS,
    *SPARSE_CODECS,
    *FLOAT_CODECS,
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _TABLE}
"""By name, as plans spell them."""

__all__ = ["CODECS", "WORKSPACES", "Codec", "Densities", "Share", "pool_map"]
