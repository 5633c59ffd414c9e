"""The rehearsal of a step, before anything of it runs: on a fake twin of the model, without effect on the model.

Dynamo shows that a model becomes several graphs when it ends the first one. Then the whole step is run on fake tensors
and recorded (`recording.py`), all its calls are planned for the budget (`step_plans.py`), and the real step begins with
these plans. Its graphs are captured once more, since they belong to the user's tensors, and each takes over the plans
of the recorded graph that it equals: nothing is searched twice. Where data decides what a step does (`.item()`), or no
twin can be made, the step is learned from real steps (`step.py`).

The twin runs the model's own Python. Modules, arguments and what hooks close over are copies; the states of Python's,
NumPy's and PyTorch's generators are restored; what this thread prints is dropped, and warnings are ignored. Code that
reaches farther (a global list, a file, a logger, a socket) does so once more.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from encore.capture import torch_private
from encore.compiler.recording import NotRehearsableError, Recording
from encore.compiler.step_plans import StepPlans
from encore.compiler.twin import fake_twin

if TYPE_CHECKING:
    from encore.compiler.session import Session

log = logging.getLogger("encore")


def rehearsed_step(session: Session, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepPlans | None:
    """Return the plans of a step that begins with this call; None if it cannot be rehearsed."""
    names = session.captured_so_far + len(session.plain)
    recording = Recording(session.name, session.options, is_estimate=False, first_name=names)
    try:
        with _without_effects():
            twin = fake_twin(call, args, kwargs, recording.memory.mode)
            if not twin.is_separate:
                raise NotRehearsableError("it reaches modules that are not its own")
            recording.run(twin)
        if not recording.calls:
            raise NotRehearsableError("no graph of it receives gradients")
    except Exception as error:  # of any kind: the user's code runs where it has never run
        why = next(iter(str(error).splitlines()), type(error).__name__)
        log.info("a step of %s cannot be rehearsed, and is planned after it has run: %s", session.name, why)
        return None
    for graph in recording.graphs:
        graph.compilation.session = session
    return StepPlans(recording, session.options)


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    """What runs inside prints and warns without effect, and may be compiled while something else is."""
    out, err = _Muted(sys.stdout), _Muted(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch_private.outside_compilation():
            yield


class _Muted:
    """A stream that drops what one thread writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
