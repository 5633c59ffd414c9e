"""The suite `devices` as a table for a terminal and as a page."""

from __future__ import annotations

from benchmarks.devices import DevicesSuite, EstimatedRow, offsets, quantiles
from benchmarks.markdown import markdown_table, suite_page
from encore.terminal import terminal_table
from encore.units import bytes_text

COLUMNS = ("model", "GPU", "optimizer", "batch", "measured", "estimate", "error", "xMem's error", "fits")
READING = """\
**Measured** is what others measured on the GPU ([source](../benchmarks/measured/README.md)): the largest device
memory in use, less the first sample of the run. **Estimate** is `encore.estimate(..., device=, optimizer=).reserved`,
on a machine without a GPU; no number of it is fitted to these measurements. **xMem** is the best published estimator,
whose estimates contain an offset that was measured on the GPU. **Fits** is whether the estimate says, with its
margin, that the step fits; every row ran, so a "no" is caution. Repeated measurements differ by 1 to 2 % in
the median and by 6 to 10 % at the 90th percentile."""


def cells(found: EstimatedRow) -> tuple[str, ...]:
    """One row, in the order of `COLUMNS`."""
    row = found.row
    return (
        row.model.partition("(")[0],
        row.gpu,
        row.optimizer,
        str(row.batch),
        bytes_text(row.measured),
        bytes_text(found.reserved),
        f"{found.error:+.1%}",
        f"{row.others / row.measured - 1:+.1%}",
        "yes" if found.fits else "no",
    )


def summary(suite: DevicesSuite) -> list[tuple[str, str, str]]:
    """Median and 90th percentile of absolute errors: as estimated, with an offset a GPU, and xMem's."""
    shift = offsets(suite.rows)
    kinds = {
        "Encore": [found.error for found in suite.rows],
        "Encore, convolutional networks": [found.error for found in suite.rows if found.row.images],
        "Encore, Transformers": [found.error for found in suite.rows if not found.row.images],
        "Encore, with one offset fitted for each GPU": [
            (found.reserved + shift[found.row.gpu]) / found.row.measured - 1 for found in suite.rows
        ],
        "xMem": [found.row.others / found.row.measured - 1 for found in suite.rows],
    }
    return [(name, *(f"{error:.1%}" for error in quantiles(errors))) for name, errors in kinds.items() if errors]  # type: ignore[misc]


def render(suite: DevicesSuite) -> str:
    """The tables for a terminal."""
    rows = [cells(found) for found in suite.rows]
    return "\n\n".join(
        [
            terminal_table(COLUMNS, rows, words=3),
            terminal_table(("estimator", "median error", "90th percentile"), summary(suite), words=1),
            *notes(suite),
        ]
    )


def notes(suite: DevicesSuite) -> list[str]:
    """What a reader must know before quoting a number."""
    shift = ", ".join(f"{gpu} {bytes_text(size)}" for gpu, size in offsets(suite.rows).items())
    lines = [f"models from {', '.join(suite.packages)}", f"offsets fitted for each GPU: {shift}"]
    if suite.left_out:
        lines.append(f"left out, since their package is not installed: {', '.join(suite.left_out)}")
    return lines


def page(suite: DevicesSuite) -> str:
    """`docs/benchmarks-devices.md`."""
    sections = [
        *READING.splitlines(),
        "",
        *markdown_table(("estimator", "median of absolute errors", "90th percentile"), summary(suite)),
        "",
        *(f"- {note}" for note in notes(suite)),
        "",
        *markdown_table(COLUMNS, [cells(found) for found in suite.rows]),
        "",
    ]
    return suite_page(
        "Estimates for GPUs that are not here", "devices", suite.quick, sections, suite.machine, suite.seconds
    )
