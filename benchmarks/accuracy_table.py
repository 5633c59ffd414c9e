"""The suite `accuracy` as people read it."""

from __future__ import annotations

from benchmarks.accuracy import BOUNDED, EAGER, LOSSLESS, SEEDS, AccuracySuite, Training, within_seed_noise
from benchmarks.markdown import markdown_table, suite_page
from encore.terminal import terminal_table
from encore.units import bytes_text

COLUMNS = (
    "workload",
    "variant",
    "loss at the end",
    "score",
    "off eager's loss",
    "peak",
    "less than eager",
    "gradient error",
)
READING = """\
Every variant trains from the same weights on the same batches. **Encore** keeps activations as codes between forward
and backward and computes in full precision; **at once** rounds every module's output where it is computed, a cell's
state included, so that forward goes on with it. **Loss at the end** is the mean of the last steps, **score** the
workload's metrics on data that no batch contained, **off eager's loss** the largest relative distance at any step,
**peak** what the allocator reports for one step.

**Eager, one rounding apart** is eager again with one weight changed by its last bit. Training is chaotic: a difference
in one rounding grows with every step, so this row is what two correct runs differ by. A variant whose distance from
eager is of that size computes as well as eager does; lossless codes change no value that backward reads, only the order
of sums."""

SEEDS_READING = """\
These variants train from three seeds each. **Eager's spread** is the distance between the largest and the smallest of
eager's numbers; a variant is within seed noise if its mean is no further from eager's mean than that."""


def cells(workload: str, found: Training, eager_peak: int) -> tuple[str, ...]:
    score = ", ".join(f"{name} {value:.3f}" for name, value in found.score.items())
    return (
        workload,
        found.variant,
        f"diverged at step {len(found.losses)}" if found.diverged else f"{found.loss:.4f}",
        score,
        f"{found.off:.1e}" if found.variant != EAGER else "",
        bytes_text(found.peak),
        f"{eager_peak / found.peak:.2f}x",
        "" if found.gradient_error is None else f"{found.gradient_error:.2g}",
    )


def _rows(suite: AccuracySuite) -> list[tuple[str, ...]]:
    rows = []
    for workload, trainings in suite.trainings.items():
        eager_peak = next(one.peak for one in trainings if one.variant == EAGER)
        rows += [cells(workload, one, eager_peak) for one in trainings if one.seed == SEEDS[0]]
    return rows


NOISE_COLUMNS = ("workload", "variant", "what", "eager, mean", "variant, mean", "eager's spread", "within seed noise")


def noise_rows(suite: AccuracySuite) -> list[tuple[str, ...]]:
    """The end loss and every score over seeds: is a variant further from eager than eager's seeds from each other?"""
    rows: list[tuple[str, ...]] = []
    for workload, trainings in suite.trainings.items():
        for variant in (LOSSLESS, BOUNDED):
            for noise in within_seed_noise(trainings, variant):
                if noise.variant:
                    eager, mine = (sum(numbers) / len(numbers) for numbers in (noise.eager, noise.variant))
                    numbers = (f"{eager:.4f}", f"{mine:.4f}", f"{noise.spread:.4f}")
                    rows.append((workload, variant, noise.what, *numbers, "yes" if noise.within else "NO"))
    return rows


def render(suite: AccuracySuite) -> str:
    """A table for a terminal."""
    seeds = terminal_table(NOISE_COLUMNS, noise_rows(suite), words=3)
    return f"{terminal_table(COLUMNS, _rows(suite), words=2)}\n{seeds}"


def page(suite: AccuracySuite) -> str:
    """`docs/benchmarks-accuracy.md`."""
    sections = [*READING.splitlines(), "", "![The loss of every variant](benchmarks-accuracy.png)", ""]
    sections += [*markdown_table(COLUMNS, _rows(suite)), "", f"- {suite.steps} steps a training", ""]
    sections += ["## Over seeds", "", *SEEDS_READING.splitlines(), ""]
    sections += [*markdown_table(NOISE_COLUMNS, noise_rows(suite)), ""]
    title = "Learning with encoded activations"
    return suite_page(title, "accuracy", suite.quick, sections, suite.machine, suite.seconds)
