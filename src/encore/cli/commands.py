"""The commands, their options, and what each of them runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import encore
from encore.api import estimate_with
from encore.cli.command_line import DOES_NOT_FIT, DONE, TIERS, CommandParser, run_command
from encore.cli.targets import BATCHES, TARGET, load_batches, load_target
from encore.compiler.device_estimate import DEVICE
from encore.devices import find_profile
from encore.errors import BudgetError, OptionError
from encore.options import make_options, parse_budget
from encore.units import bytes_text
from encore.whole_files import check_file, write_whole


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
    estimate.add_argument("--device", metavar="D", help="a GPU that need not be here, such as RTX3060 or A100-40GB")
    estimate.add_argument("--optimizer", metavar="O", help="with --device: its class in torch.optim, such as AdamW")
    estimate.add_argument("--json", action="store_true", help="print the estimate as JSON")

    largest = command("largest", run_largest, "find the largest batch that fits a budget; nothing runs")
    largest.add_argument("target", metavar="TARGET", help=BATCHES)
    largest.add_argument("--budget", metavar="B", required=True, help="bytes, 2GiB, 500MB; exit code 2 if none fits")
    largest.add_argument("--tiers", metavar="T", help=TIERS)
    largest.add_argument("--json", action="store_true", help="print the result as JSON")

    plan = command("plan", run_plan, "show the plan that a budget gets, and all others; nothing runs")
    plan.add_argument("target", metavar="TARGET", help=TARGET)
    plan.add_argument("--budget", metavar="B", default="min", help="bytes, 2GiB, 500MB, 60%% or min (default: min)")
    plan.add_argument("--tiers", metavar="T", help=TIERS)
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the plan to FILE, for encore.compile(plan=FILE)")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the plan's page to FILE, for a browser")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    compare = command("compare", run_compare, "run eager, torch.compile, checkpoints and Encore; recommend one")
    compare.add_argument("target", metavar="TARGET", help=TARGET)
    compare.add_argument("--budget", metavar="B", help="bytes, 2GiB, 500MB, 60%% or min; exit code 2 if nothing fits")
    compare.add_argument("--minutes", type=float, metavar="N", help="leave systems out to be done in about N minutes")
    compare.add_argument("--plot", type=Path, metavar="FILE", help="draw peaks and step times into FILE, as PNG")
    compare.add_argument("--json", action="store_true", help="print the figures as JSON")

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
    if arguments.device is not None:
        return _estimate_on_device(arguments)
    if arguments.optimizer is not None:
        raise OptionError("--optimizer goes with --device: it is a part of the step there")
    estimate = _estimate(arguments)
    shown: dict[str, Any] = {**estimate.report.to_dict(), "floor": estimate.floor, "pareto": estimate.pareto}
    missed: BudgetError | None = None
    if arguments.budget is not None:
        try:
            estimate.plan(arguments.budget)
        except BudgetError as error:
            missed = error
        shown |= {"budget": arguments.budget, "fits": missed is None}
    if arguments.json:
        print(json.dumps(shown, indent=2))
    else:
        print(estimate)
        if arguments.budget is not None and missed is None:
            print(f"  fits a budget of {arguments.budget}")
    if missed is not None:
        raise missed
    return DONE


def _estimate_on_device(arguments: argparse.Namespace) -> int:
    """Plain PyTorch on a device, and, if that does not fit with the margin, the plan that does."""
    find_profile(arguments.device)  # before the target is loaded
    model, args, kwargs = load_target(arguments.target)
    found = encore.estimate(model, *args, device=arguments.device, optimizer=arguments.optimizer, **kwargs)
    budget = arguments.budget or DEVICE
    fits = found.fits(budget)
    plan = None if fits else found.plan(budget)
    if arguments.json:
        planned = plan and {"reserved": plan.reserved, **plan.report.to_dict()}
        print(json.dumps({**found.to_dict(), "budget": budget, "fits": fits, "plan": planned}, indent=2))
        return DONE
    print(found)
    if plan is not None:
        print(f"\nwith encore.compile, {bytes_text(plan.reserved)} reserved:\n{plan.report}")
    return DONE


def _estimate(arguments: argparse.Namespace) -> encore.Estimate:
    """Of the target; tiers are checked before it is loaded."""
    options = make_options({"tiers": arguments.tiers and arguments.tiers.split(",")})
    return estimate_with(options, *load_target(arguments.target))


def run_largest(arguments: argparse.Namespace) -> int:
    tiers = make_options({"tiers": arguments.tiers and arguments.tiers.split(",")}).tiers
    found = encore.largest_batch(*load_batches(arguments.target), budget=arguments.budget, tiers=tiers)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return DONE


def run_plan(arguments: argparse.Namespace) -> int:
    for file in (arguments.save, arguments.html):
        if file is not None:  # planning may take a while: say so before
            check_file(file)
    estimate = _estimate(arguments)
    pareto = estimate.pareto  # exact in the report from here on
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


def run_compare(arguments: argparse.Namespace) -> int:
    from encore.compare import plots
    from encore.compare.run import compare_systems

    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        raise OptionError(f"--minutes {arguments.minutes:g} is not accepted; give a positive number")
    if arguments.plot is not None:
        plots.require_matplotlib()
        check_file(arguments.plot)
    if arguments.budget is not None:
        parse_budget(arguments.budget)
    model, args, kwargs = load_target(arguments.target)
    found = compare_systems(arguments.target, model, args, kwargs, budget=arguments.budget, minutes=arguments.minutes)
    print(found.to_json() if arguments.json else found)
    if arguments.plot is not None:
        write_whole(arguments.plot, plots.png(plots.tradeoffs({arguments.target: found.outcomes})))
    if found.budget_error is not None:
        raise found.budget_error
    return DONE if found.fits else DOES_NOT_FIT


def run_tune(arguments: argparse.Namespace) -> int:
    from encore.cli import tune

    found = tune.run(arguments)
    print(tune.to_json(found) if arguments.json else tune.render(found))
    return DONE
