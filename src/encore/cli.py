"""The `encore` command: `encore env | estimate | plan | tune`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import encore
from encore.api import estimate_with
from encore.command_line import DONE, TIERS, CommandParser, run_command
from encore.errors import BudgetError, EncoreError, listed
from encore.options import make_options
from encore.units import bytes_text
from encore.whole_files import check_file

TARGET = "package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device"


class TargetError(EncoreError):
    """`package.module:factory` does not lead to a model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_command(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = CommandParser(prog="encore", description="A training-memory compiler for PyTorch.")
    top.add_argument("--version", action="version", version=f"encore {encore.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        added.set_defaults(run=run)
        return added

    env = command("env", run_env, "show what Encore finds on this machine")
    env.add_argument("--json", action="store_true", help="print the facts as JSON")

    estimate = command("estimate", run_estimate, "predict what a training step takes; nothing runs")
    estimate.add_argument("target", metavar="TARGET", help=TARGET)
    estimate.add_argument("--budget", metavar="B", help="bytes, 2GiB, 500MB, 60%% or min; exit code 2 if out of reach")
    estimate.add_argument("--tiers", metavar="T", help=TIERS)
    estimate.add_argument("--json", action="store_true", help="print the estimate as JSON")

    plan = command("plan", run_plan, "show the plan that a budget gets, and all others; nothing runs")
    plan.add_argument("target", metavar="TARGET", help=TARGET)
    plan.add_argument("--budget", metavar="B", default="min", help="bytes, 2GiB, 500MB, 60%% or min (default: min)")
    plan.add_argument("--tiers", metavar="T", help=TIERS)
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the plan to FILE, for encore.compile(plan=FILE)")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the plan's page to FILE, for a browser")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    tune = command("tune", run_tune, "measure the layouts of recurrent layers, and keep the fastest of each size")
    tune.add_argument("--cell", nargs="+", default=["LSTM"], metavar="CELL", help="LSTM, GRU, RNN (default: LSTM)")
    tune.add_argument("--hidden", nargs="+", type=int, default=[256, 512], metavar="N", help="units (256 512)")
    tune.add_argument("--inputs", type=int, metavar="N", help="width of the input (default: the units)")
    tune.add_argument("--batch", nargs="+", type=int, default=[8, 64], metavar="N", help="sequences at a time (8 64)")
    tune.add_argument("--steps", nargs="+", type=int, default=[35, 100], metavar="N", help="their length (35 100)")
    tune.add_argument("--stash", nargs="+", default=["fast", "lean"], metavar="S", help="fast, lean (default: both)")
    tune.add_argument("--dtype", default="float32", metavar="T", help="such as bfloat16 (default: float32)")
    tune.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default: cpu)")
    tune.add_argument("--again", action="store_true", help="measure what is known already once more")
    tune.add_argument("--json", action="store_true", help="print the figures as JSON")
    return top


def run_env(arguments: argparse.Namespace) -> int:
    from encore.folders import cache_directory
    from encore.machine import machine_rows, this_machine

    machine, directory = this_machine(), str(cache_directory())
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(machine), "cache_directory": directory}, indent=2))
    else:
        for name, value in [*machine_rows(machine), ("cache directory", directory)]:
            print(f"{name:<16} {value}")
    return DONE


def run_estimate(arguments: argparse.Namespace) -> int:
    estimate = _estimate(arguments)
    shown: dict[str, Any] = {**estimate.report.to_dict(), "floor": estimate.floor, "pareto": estimate.pareto}
    refusal: BudgetError | None = None
    if arguments.budget is not None:
        try:
            estimate.plan(arguments.budget)
        except BudgetError as error:
            refusal = error
        shown |= {"budget": arguments.budget, "fits": refusal is None}
    if arguments.json:
        print(json.dumps(shown, indent=2))
    else:
        print(estimate)
        if arguments.budget is not None and refusal is None:
            print(f"  fits a budget of {arguments.budget}")
    if refusal is not None:
        raise refusal
    return DONE


def _estimate(arguments: argparse.Namespace) -> encore.Estimate:
    """Of the target; tiers are checked before it is loaded."""
    options = make_options({"tiers": arguments.tiers and arguments.tiers.split(",")})
    return estimate_with(options, *load_target(arguments.target))


def run_plan(arguments: argparse.Namespace) -> int:
    for file in (arguments.save, arguments.html):
        if file is not None:  # planning may take a while: say so before
            check_file(file)
    estimate = _estimate(arguments)
    pareto = estimate.pareto  # which the report then tells exactly
    report = estimate.plan(arguments.budget)
    if arguments.save is not None:
        report.plan.save(arguments.save)
    if arguments.html is not None:
        report.to_html(arguments.html)
    if arguments.json:
        print(report.to_json())
        return DONE
    print(report)
    print("\nplans, fastest first (resident + step peak, extra time):")
    for total, overhead in pareto:
        print(f"  {bytes_text(total):>12}  {overhead:>6.1%}")
    return DONE


def run_tune(arguments: argparse.Namespace) -> int:
    from encore import tune

    found = tune.run(arguments)
    print(tune.to_json(found) if arguments.json else tune.render(found))
    return DONE


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The model and arguments that `package.module:factory` makes."""
    path, colon, name = target.partition(":")
    if not (path and colon and name):
        raise TargetError(f"{target!r} is not a target; write package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the folder one stands in can be named
    module = _users(f"cannot import {path!r}", lambda: importlib.import_module(path))
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [known for known, thing in vars(module).items() if callable(thing) and not known.startswith("_")]
        raise TargetError(f"{path!r} has no factory {name!r}; it has {listed(known) or 'no callable at all'}")
    made = _users(f"{target} failed", factory)
    match made:
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return model, tuple(args), kwargs
    raise TargetError(f"{target} must return (model, args) or (model, args, kwargs), not {type(made).__name__}")


def _users(what: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; where it fails, say how and where in a line, without our own frames."""
    try:
        return call()
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and not frame.filename.startswith("<") and "importlib" not in frame.filename
        ]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        raise TargetError(f"{what}: {type(error).__name__}: {text}{where}") from None
