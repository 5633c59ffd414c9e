"""The suite `lengths` as people read it."""

from __future__ import annotations

from benchmarks.lengths import LengthOutcome, LengthSuite
from benchmarks.markdown import markdown_table, suite_page
from encore.compare.table import spread_text
from encore.terminal import terminal_table
from encore.units import seconds_text

COLUMNS = (
    "workload", "lengths", "first step", "new length", "/ first", "slowest", "all batches", "torch.compile", "eager",
    "again / eager", "torch.compile again", "/ one length", "within", "predicted above", "error / eager's",
    "late kernels",
)  # fmt: skip
READING = """\
Seven models that are trained on batches of many lengths: a tagger of bidirectional LSTMs, a translator whose decoder
is a loop over an LSTM cell with attention, the tutorial's translator with coin flips (`seq2seq`), BERT, Llama and T5 of
Hugging Face's transformers with masked rows, and a recogniser of speech with CTC. Encore plans for 60 % of the largest
step seen. It and `torch.compile(dynamic=True)` begin with empty caches, and get the same lengths in the same
order. **New length** is the median of what a length that was not seen before costs beyond its later steps, **/ first**
the same over the first step, **slowest** the most. **All batches** is the first pass, compile time included, next to
that of `torch.compile` and of eager PyTorch. **Again** are steps of known lengths over eager's, interleaved, with the
lowest and the highest length. **/ one length** compares with a copy of the model that has seen this one length only.
**Within** counts lengths whose measured peak keeps the budget, of those that were looked at; **predicted above** is how
far predictions are above measurements there, from the least to the most. **Error / eager's** is the distance of
gradients from float64 over that of eager's gradients, the largest of these lengths. **Late kernels** were compiled
after the third length."""


def cells(workload: str, found: LengthOutcome) -> tuple[str, ...]:
    """One row, in the order of `COLUMNS`."""
    compiled = found.compiled_failed if found.compiled_total is None else seconds_text(found.compiled_total)
    return (
        workload,
        str(found.distinct),
        seconds_text(found.first),
        seconds_text(found.new),
        f"{found.against_first:.3f}",
        seconds_text(found.slowest),
        seconds_text(found.total),
        compiled,
        seconds_text(found.eager_total),
        spread_text(found.again, *found.again_spread),
        "" if found.compiled_again is None else f"{found.compiled_again:.2f}",
        spread_text(found.single, *found.single_spread),
        f"{found.kept} of {found.looked_at}",
        f"{found.least_apart:+.2%} to {found.apart:+.2%}",
        f"{found.gradient_error:.2f}",
        str(found.late_kernels),
    )


def rows(suite: LengthSuite) -> list[tuple[str, ...]]:
    return [cells(workload, found) for workload, found in suite.outcomes.items()]


def render(suite: LengthSuite) -> str:
    """The table for a terminal."""
    return "\n".join([terminal_table(COLUMNS, rows(suite), words=2), *notes(suite)])


def notes(suite: LengthSuite) -> list[str]:
    """What a reader must know before quoting a number."""
    few = ["few batches: later lengths would cost less"] if suite.quick else []
    return [*few, f"{suite.batches} batches a workload"]


def page(suite: LengthSuite) -> str:
    """`docs/benchmarks-lengths.md`."""
    table = markdown_table(COLUMNS, rows(suite))
    sections = [*READING.splitlines(), "", *table, "", *(f"- {note}" for note in notes(suite)), ""]
    return suite_page("Batches of many lengths", "lengths", suite.quick, sections, suite.machine, suite.seconds)
