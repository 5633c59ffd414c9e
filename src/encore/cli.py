"""The command line: `encore demo | env | estimate | plan | train | tune | bench`.

Exit codes: 0 done; 1 an error, told in one line on stderr; 2 a budget that cannot be met, and nothing else.
Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import encore
from encore.api import estimate_with
from encore.errors import BudgetError, EncoreError, OptionError, listed
from encore.options import make_options
from encore.units import bytes_text
from encore.whole_files import check_file, check_folder, write_whole

DONE, FAILED, DOES_NOT_FIT = 0, 1, 2
TARGET = "package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device"

TIERS = "where feature maps may go between forward and backward, such as disk or host,disk"


class TargetError(EncoreError):
    """`package.module:factory` does not lead to a model."""


class _Parser(argparse.ArgumentParser):
    """argparse leaves with 2 when it does not understand; here 2 means a budget that cannot be met."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BudgetError as error:
        print(f"encore: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    except EncoreError as error:
        print(f"encore: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:  # a disk that is full, a pipe that is closed: nothing that a trace of ours would explain
        print(f"encore: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("encore: interrupted", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = _Parser(prog="encore", description="A training-memory compiler for PyTorch.")
    top.add_argument("--version", action="version", version=f"encore {encore.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        added.set_defaults(run=run)
        return added

    demo = command("demo", run_demo, "train a translator in eager and, in half of the memory, through Encore")
    demo.add_argument("--steps", type=int, metavar="N", help="training steps of either side (default: 200)")
    demo.add_argument("--output", type=Path, metavar="FOLDER", help="where the page goes (default: encore-demo)")
    demo.add_argument("--json", action="store_true", help="print the numbers as JSON")

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

    train = command("train", run_train, "train a workload within a budget; a run that was killed goes on")
    train.add_argument("workload", metavar="WORKLOAD", help="its name; a wrong one lists those there are")
    train.add_argument("--budget", metavar="B", help="bytes, 2GiB, 500MB, 60%% or min; exit code 2 if out of reach")
    train.add_argument("--overhead", type=float, metavar="F", help="extra time allowed, as a fraction (default: 0.05)")
    train.add_argument("--eager", action="store_true", help="plain PyTorch, to compare with")
    train.add_argument(
        "--lowering", metavar="L", help="fused or eager: whose gradients are plain PyTorch's, bit for bit"
    )
    train.add_argument("--tiers", metavar="T", help=TIERS)
    train.add_argument("--steps", type=int, default=100, metavar="N", help="steps to train in all (default: 100)")
    train.add_argument("--batch-size", type=int, metavar="N", help="examples a step (default: the workload's)")
    train.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="a size, such as hidden=512, or tiny"
    )
    train.add_argument("--source", metavar="FILE", help="your own text, a sentence a line (nmt)")
    train.add_argument("--target", metavar="FILE", help="its translation, line by line (nmt)")
    train.add_argument("--learning-rate", type=float, metavar="R", help="Adam's (default: the workload's)")
    train.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and dropout (default: 0)")
    train.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="keep checkpoints there, and go on from the newest"
    )
    train.add_argument("--every", type=int, default=50, metavar="N", help="steps between checkpoints (default: 50)")
    train.add_argument(
        "--largest-batch", action="store_true", help="find the largest batch that fits, with and without Encore"
    )
    train.add_argument("--json", action="store_true", help="print the numbers as JSON")

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

    bench = command("bench", run_bench, "compare Encore with eager PyTorch and with torch.compile")
    suites = "spine, fast, plan, echo, gist, rnn, rnn-workloads, accuracy or bptt (default: echo)"
    bench.add_argument("suite", nargs="?", default="echo", help=suites)
    bench.add_argument("--quick", action="store_true", help="tiny sizes: does everything work?")
    bench.add_argument("--minutes", type=float, help="leave systems out to be done in about so many minutes")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE as JSON")
    bench.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the suite into FOLDER, as PNG and as a page")
    bench.add_argument("--docs", action="store_true", help="write the suite's page in docs")
    bench.add_argument("--schema", action="store_true", help="print the JSON Schema of the suite's JSON; nothing runs")
    return top


def run_demo(arguments: argparse.Namespace) -> int:
    from encore import demo

    folder = demo.FOLDER if arguments.output is None else arguments.output
    check_folder(folder)  # a minute before it is needed
    found = demo.run(demo.STEPS if arguments.steps is None else arguments.steps)
    written = found.write(folder)
    print(found.to_json() if arguments.json else found)
    print(f"\nto look at: {', '.join(map(str, written))}", file=sys.stderr)
    for problem in found.problems:
        print(f"encore: {problem}", file=sys.stderr)
    return FAILED if found.problems else DONE


def run_env(arguments: argparse.Namespace) -> int:
    from encore.bench.machine import this_machine
    from encore.bench.table import machine_rows
    from encore.folders import cache_directory

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


def run_train(arguments: argparse.Namespace) -> int:
    from encore.train.command import run

    found = run(arguments)
    print(found.to_json() if arguments.json else found)
    return DONE


def run_tune(arguments: argparse.Namespace) -> int:
    from encore import tune

    found = tune.run(arguments)
    print(tune.to_json(found) if arguments.json else tune.render(found))
    return DONE


def run_bench(arguments: argparse.Namespace) -> int:
    from encore.bench import results

    if arguments.suite not in results.SUITES:
        raise OptionError(f"no suite is called {arguments.suite!r}; known suites: {', '.join(results.SUITES)}")
    if arguments.schema:
        print(json.dumps(results.schema(arguments.suite), indent=2))
        return DONE
    if arguments.plots is not None and arguments.suite not in results.DRAWN:
        raise OptionError(f"the suite {arguments.suite!r} has no picture; leave --plots out")
    if arguments.minutes is not None and arguments.suite not in results.LIMITED:
        limited = ", ".join(results.LIMITED)
        raise OptionError(f"the suite {arguments.suite!r} leaves nothing out; --minutes is for {limited}")
    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        raise OptionError(f"--minutes {arguments.minutes:g} is no time to run a suite in; give a positive number")
    docs = results.docs_page(arguments.suite).parent if arguments.docs else None
    folder = None if arguments.json is None else arguments.json.parent
    for option, needed in {"--json": folder, "--plots": arguments.plots, "--docs": docs}.items():
        if needed is not None and not needed.is_dir():  # a benchmark takes minutes: say so before, not after
            raise OptionError(f"{option} writes into {str(needed)!r}, but there is no such folder here; make it first")
        if needed is not None:
            check_folder(needed)
    if arguments.json is not None:
        check_file(arguments.json)
    found = results.run(arguments.suite, quick=arguments.quick, minutes=arguments.minutes)
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
