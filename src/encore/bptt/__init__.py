"""Backpropagation through time in any memory.

`scan` is what users call. `actions` are the instructions of a schedule; `revolve`, `online`, `multistage` and `keep`
make them, and `choose` takes the cheapest that fits. `probe` runs the first step for its facts, `loop` is what a scan
runs, `run` follows the actions: `source` has the inputs, `snapshot` is one state, `states` has those that are stored,
`gradients` is backward. `replay` checks and counts every action independently, `witness` and `reach` detect steps that
do not repeat. `layers` takes recurrent layers piece by piece. What may not live here: how bytes move (`tiers/`),
graphs, plans.
"""

from encore.bptt.layers import over_time
from encore.bptt.report import ScanReport
from encore.bptt.scanning import scan

__all__ = ["ScanReport", "over_time", "scan"]
