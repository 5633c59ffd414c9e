"""The suite `lengths` as people read it."""

from __future__ import annotations

from benchmarks.lengths import LengthSuite
from benchmarks.lengths_compared import LengthOutcome
from benchmarks.lengths_epoch import EpochOutcome
from benchmarks.lengths_memory import POINTS, ShapeMemory
from benchmarks.markdown import markdown_table, suite_page
from encore.compare.table import spread_text
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = (
    "workload", "lengths", "first step", "new length", "/ first", "slowest", "all batches", "torch.compile", "eager",
    "again / eager", "torch.compile again", "/ one length", "predicted within", "within", "predicted above",
    "error / eager's",
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
**Predicted within** counts lengths whose predicted peak keeps the budget, of all; **within** counts those whose
measured peak does, of those that were looked at; **predicted above** is how far predictions are above measurements
there, from the least to the most. **Error / eager's** is the distance of gradients from float64 over that of eager's
gradients, the largest of these lengths. **Late kernels** were compiled after the
third length."""


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
        f"{found.predicted_kept} of {found.distinct}",
        f"{found.kept} of {found.looked_at}",
        f"{found.least_apart:+.2%} to {found.apart:+.2%}",
        f"{found.gradient_error:.2f}",
        str(found.late_kernels),
    )


def rows(suite: LengthSuite) -> list[tuple[str, ...]]:
    return [cells(workload, found) for workload, found in suite.outcomes.items()]


EPOCH_COLUMNS = (
    "steps", "lengths", "eager's peak", "budget", "peak", "eager", "Encore", "/ eager", "later step / eager",
    "eager's last loss", "last loss", "losses apart",
)  # fmt: skip
EPOCH_READING = """\
An epoch of a language model, an LSTM, on sentences of the project's grammar: texts have lengths of Zipf's law and are
shuffled, each batch is padded to its longest. Encore trains in half of eager's peak on the longest batch, which it
knows from `largest=`, from empty caches: **Encore** is the whole epoch with compile time, **later step** a step of a
length that came before over eager's on the same batch, the median. **Last loss** is the mean of the last tenth of the
epoch, **losses apart** the largest relative difference of the losses of one step."""
SHAPES_COLUMNS = ("shapes", "graphs kept", "before", "half of them", "all of them", "growth", "model deleted")
SHAPES_READING = """\
Resident memory of the process while a small tagger trains on shapes that it has not seen, in both dimensions.
**Growth** is that over the last half of the shapes."""


def epoch_row(found: EpochOutcome) -> tuple[str, ...]:
    """One row, in the order of `EPOCH_COLUMNS`."""
    return (
        str(found.steps),
        str(found.distinct),
        bytes_text(found.eager_peak),
        bytes_text(found.budget),
        bytes_text(found.peak),
        seconds_text(found.eager_seconds),
        seconds_text(found.seconds),
        f"{found.seconds / found.eager_seconds:.2f}",
        f"{found.later:.2f}",
        f"{found.eager_loss:.4f}",
        f"{found.loss:.4f}",
        f"{found.loss_difference:.1e}",
    )


def shapes_row(found: ShapeMemory) -> tuple[str, ...]:
    """One row, in the order of `SHAPES_COLUMNS`."""
    return (
        str(found.shapes),
        str(found.kept),
        bytes_text(found.before),
        bytes_text(found.resident[POINTS // 2 - 1]),
        bytes_text(found.resident[-1]),
        f"{found.growth:+.1%}",
        bytes_text(found.after),
    )


def render(suite: LengthSuite) -> str:
    """The tables for a terminal."""
    tables = [terminal_table(COLUMNS, rows(suite), words=2)] if suite.outcomes else []
    if suite.epoch is not None:
        tables.append(terminal_table(EPOCH_COLUMNS, [epoch_row(suite.epoch)], words=0))
    if suite.shapes is not None:
        tables.append(terminal_table(SHAPES_COLUMNS, [shapes_row(suite.shapes)], words=0))
    return "\n".join(["\n\n".join(tables), *notes(suite)])


def notes(suite: LengthSuite) -> list[str]:
    """What a reader must know before quoting a number."""
    few = ["few batches: later lengths would cost less"] if suite.quick else []
    failed = [f"{part} failed: {why}" for part, why in suite.failures.items()]
    return [*few, f"{suite.batches} batches a workload", *failed]


def page(suite: LengthSuite) -> str:
    """`docs/benchmarks-lengths.md`."""
    sections = [*READING.splitlines(), "", *markdown_table(COLUMNS, rows(suite)), ""]
    sections += [*(f"- {note}" for note in notes(suite)), ""]
    if suite.epoch is not None:
        table = markdown_table(EPOCH_COLUMNS, [epoch_row(suite.epoch)])
        sections += ["## An epoch in half of the memory", "", *EPOCH_READING.splitlines(), "", *table, ""]
    if suite.shapes is not None:
        table = markdown_table(SHAPES_COLUMNS, [shapes_row(suite.shapes)])
        sections += ["## Hundreds of shapes", "", *SHAPES_READING.splitlines(), "", *table, ""]
    return suite_page("Batches of many lengths", "lengths", suite.quick, sections, suite.machine, suite.seconds)
