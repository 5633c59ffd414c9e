"""Encore compared with other systems on the workloads of this repository: `python -m benchmarks SUITE`.

A suite is a row in `results`: a module that measures (`spine`, `fast`, `plan`, `contest`, `layers`, `accuracy`,
`bptt`), one that shows it (`*_table`), and, if there is one, a picture in `plots`. `markdown` has what pages share,
`schema` how results become JSON, `command` reads the arguments. Models and data are in `workloads/`; the systems and
the interleaved rounds are in `encore/compare/`. The package `encore` imports nothing of it.
"""
