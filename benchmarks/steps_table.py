"""The suite `steps` as people read it."""

from __future__ import annotations

from benchmarks.markdown import markdown_table, suite_page
from benchmarks.steps import StepOutcome, StepSuite
from encore.compare.table import spread_text
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = (
    "workload", "system", "graphs x calls", "budget", "predicted", "measured", "within", "floor", "gradient error",
    "step", "/ eager",
)  # fmt: skip
READING = """\
Five training steps: an attention translator whose decoder is called in a loop with coin flips (`seq2seq`), blocks
behind hooks that are not captured (`blocks`), and GPT-2, T5 and Whisper of Hugging Face's transformers from small
configurations. Eager PyTorch, `torch.utils.checkpoint` around every block (around the decoder's step in `seq2seq`) and
Encore run in one process for each workload, interleaved, on the same seed and batch; a step is forward and backward.
Budgets are shares of the step with everything kept, or the lowest peak (`min`). **Graphs x calls** are the graphs of a
step and how often they are called in it, all together. **Budget**, **predicted**, **measured** and **floor** (the
lowest peak there is) are without the resident bytes. **Gradient error** is the distance of all gradients from those of
a float64 copy of the model, relative to their size. **/ eager** is the median of the rounds' ratios to eager's step,
with the lowest and the highest round, "within noise" where these are further apart than the median is from 1. A budget
below the floor has no figures: it raises an error before the step runs, or after the step is known."""


def cells(workload: str, found: StepOutcome) -> tuple[str, ...]:
    """One row, in the order of `COLUMNS`."""
    within = {None: "", True: "yes", False: "**no**"}[found.is_within]
    ratio = ""
    if found.spread is not None and found.against_eager is not None:
        ratio = spread_text(found.against_eager, *found.spread)
    return (
        workload,
        found.system,
        "" if found.graphs is None else f"{found.graphs} x {found.calls}",
        _bytes(found.budget),
        _bytes(found.predicted),
        "cannot be met" if found.measured is None else bytes_text(found.measured),
        within,
        _bytes(found.floor),
        "" if found.gradient_error is None else f"{found.gradient_error:.1e}",
        "" if found.seconds is None else seconds_text(found.seconds),
        "1.00" if found.system == "eager" else ratio,
    )


def _bytes(size: int | None) -> str:
    return "" if size is None else bytes_text(size)


def rows(suite: StepSuite) -> list[tuple[str, ...]]:
    return [cells(workload, found) for workload, outcomes in suite.outcomes.items() for found in outcomes]


def render(suite: StepSuite) -> str:
    """The table for a terminal."""
    return "\n".join([terminal_table(COLUMNS, rows(suite), words=2), *notes(suite)])


def notes(suite: StepSuite) -> list[str]:
    """What a reader must know before quoting a number."""
    tiny = ["tiny sizes: times are those of operator calls, not of arithmetic"] if suite.quick else []
    return [*tiny, f"{suite.rounds} rounds a workload, after warm-up"]


def page(suite: StepSuite) -> str:
    """`docs/benchmarks-steps.md`."""
    table = markdown_table(COLUMNS, rows(suite))
    sections = [*READING.splitlines(), "", *table, "", *(f"- {note}" for note in notes(suite)), ""]
    title = "Steps of several calls within one budget"
    return suite_page(title, "steps", suite.quick, sections, suite.machine, suite.seconds)
