"""A training run from end to end: `python -m examples.train WORKLOAD --budget 2GiB --checkpoint DIR`.

`settings` says what a run is, `state` what it carries from step to step, `loop` trains; `checkpoint` keeps files that
survive a kill, `history` the losses, `signals` lets a step end before the run does. `search` and `batches` look for the
largest batch that a budget holds, `outcome` shows what came of a run, `command` reads what was typed.

What may not live here: models and data (`benchmarks/workloads/`), and anything that decides or runs plans.
"""
