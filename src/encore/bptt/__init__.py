"""Backpropagation through time in any memory.

`scan` is what users call. `actions` are the instructions of a schedule; `revolve`, `online`, `multistage` and `keep`
make them, `choose` picks the cheapest that fits, and `replay` checks them without believing any of the others. `probe`
looks at the first step, `snapshot` holds a state, `source` hands out inputs, `run` follows the actions, `layers` takes
recurrent layers piece by piece. What may not live here: where bytes go when they leave (`tiers/`), graphs, plans.
"""

from encore.bptt.layers import over_time
from encore.bptt.report import ScanReport
from encore.bptt.scan import scan

__all__ = ["ScanReport", "over_time", "scan"]
