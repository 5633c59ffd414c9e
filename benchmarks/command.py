"""`python -m benchmarks SUITE`: from the arguments to a suite and its files."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from encore.cli.command_line import DONE, FAILED, CommandParser, run_command
from encore.errors import OptionError
from encore.whole_files import check_file, check_folder, write_whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run one suite and return the exit code."""
    return run_command(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """The suite and its options."""
    summary = "Compare Encore with eager PyTorch and with torch.compile."
    top = CommandParser(prog="python -m benchmarks", description=summary)
    top.set_defaults(run=run)
    *names, last = results.SUITES
    suites = f"{', '.join(names)} or {last} (default: echo)"
    top.add_argument("suite", nargs="?", default="echo", help=suites)
    top.add_argument("--quick", action="store_true", help="tiny sizes: does everything work?")
    top.add_argument("--minutes", type=float, help="leave systems out to be done in about so many minutes")
    top.add_argument("--only", metavar="PART", action="append", help="run one part of the suite; may be given again")
    top.add_argument("--parts", type=Path, metavar="FOLDER", help="keep parts in FOLDER, and continue a run from there")
    top.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE as JSON")
    top.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the suite into FOLDER, as PNG and as a page")
    top.add_argument("--docs", action="store_true", help="write the suite's page in docs")
    top.add_argument("--schema", action="store_true", help="print the JSON Schema of the suite's JSON; nothing runs")
    return top


def run(arguments: argparse.Namespace) -> int:
    """Run the suite, print it, and write what was asked for."""
    suite = results.SUITES.get(arguments.suite)
    if suite is None:
        raise OptionError(f"no suite is called {arguments.suite!r}; known suites: {', '.join(results.SUITES)}")
    if arguments.schema:
        print(json.dumps(suite.found.schema(), indent=2))
        return DONE
    if arguments.plots is not None and suite.draw is None:
        raise OptionError(f"the suite {arguments.suite!r} has no picture; leave --plots out")
    if arguments.minutes is not None and not suite.takes_minutes:
        limited = ", ".join(name for name, one in results.SUITES.items() if one.takes_minutes)
        raise OptionError(f"the suite {arguments.suite!r} leaves nothing out; --minutes is for {limited}")
    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        raise OptionError(f"--minutes {arguments.minutes:g} is no time to run a suite in; give a positive number")
    _check_parts(arguments, suite)
    docs = results.docs_page(arguments.suite).parent if arguments.docs else None
    folder = None if arguments.json is None else arguments.json.parent
    for option, needed in {
        "--json": folder,
        "--plots": arguments.plots,
        "--docs": docs,
        "--parts": arguments.parts,
    }.items():
        if needed is not None and not needed.is_dir():  # a benchmark takes minutes: say so before, not after
            raise OptionError(f"{option} writes into {str(needed)!r}, but there is no such folder here; make it first")
        if needed is not None:
            check_folder(needed)
    if arguments.json is not None:
        check_file(arguments.json)
    only = tuple(arguments.only or ())
    found = results.run(
        arguments.suite, quick=arguments.quick, minutes=arguments.minutes, only=only, parts=arguments.parts
    )
    print(found.text)
    if found.interrupted:
        print("encore: interrupted; this is what was done before, and nothing of it was written", file=sys.stderr)
        return FAILED
    if arguments.json is not None:
        write_whole(arguments.json, found.json + "\n")
    if arguments.plots is not None:
        found.write_plots(arguments.plots)
    if arguments.docs:
        found.write_docs()
    return DONE


def _check_parts(arguments: argparse.Namespace, suite: results.Suite) -> None:
    """Raise unless the suite has the parts that were asked for."""
    for option, given in {"--only": arguments.only, "--parts": arguments.parts}.items():
        if given is not None and not suite.parts:
            divided = ", ".join(name for name, one in results.SUITES.items() if one.parts)
            raise OptionError(f"the suite {arguments.suite!r} has no parts; {option} is for {divided}")
    for part in arguments.only or ():
        if part not in suite.parts:
            raise OptionError(
                f"the suite {arguments.suite!r} has no part {part!r}; its parts: {', '.join(suite.parts)}"
            )
    if arguments.only is not None and arguments.docs:
        raise OptionError("--docs writes the page of a whole suite; leave --only out")
