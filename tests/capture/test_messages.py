"""Messages with constants, and assertions on tensors, do not end a graph and do what they do in eager."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import encore
from support.compare_with_eager import session_of
from support.cut_models import Checking

log = logging.getLogger("a model's own")


class Speaking(nn.Module):
    """Two layers with something said in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        self.speak(x)
        return self.second(x).sum()

    def speak(self, x: Tensor) -> None:
        raise NotImplementedError


class Prints(Speaking):
    def speak(self, x: Tensor) -> None:
        print("between the layers", x.shape, end="; ")
        print(f"type {x.dtype}", 1.5, sep=": ")


class Warns(Speaking):
    def speak(self, x: Tensor) -> None:
        warnings.warn("deprecated", DeprecationWarning)  # noqa: B028
        warnings.warn("careful")  # noqa: B028


class Logs(Speaking):
    def speak(self, x: Tensor) -> None:
        log.info("of %d rows", x.shape[0])
        log.debug("not written")
        log.warning("twice")


class InOrder(Speaking):
    def speak(self, x: Tensor) -> None:
        print("one")
        print("two", x.detach().mean().isnan())
        print("three")


class Suppressed(Speaking):
    def speak(self, x: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("never seen", stacklevel=1)
        try:
            print("inside try")
        finally:
            pass


@pytest.mark.parametrize(("kind", "graphs"), [(Prints, 1), (Warns, 1), (Logs, 1), (InOrder, None), (Suppressed, None)])
def test_messages_are_those_of_eager(
    kind: Callable[[], Speaking],
    graphs: int | None,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, x = kind(), torch.randn(3, 8)
    model = encore.compile(copy.deepcopy(plain), lowering="eager")
    caplog.set_level(logging.INFO, log.name)
    written = []
    for one in (plain, model):
        caplog.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(3):
                one(x).backward()
        records = [(it.levelname, it.getMessage(), it.pathname, it.lineno, it.funcName) for it in caplog.records]
        written.append(
            (
                capsys.readouterr().out,
                [record for record in records if record[2] == __file__],
                [(str(it.message), it.category, it.filename, it.lineno) for it in warned if it.filename == __file__],
            )
        )
    assert written[0] == written[1]
    assert any(written[0]) or kind is Suppressed
    assert graphs is None or len(session_of(model).graphs) == graphs


def test_a_warning_is_written_once_for_its_line_and_raised_where_it_is_an_error() -> None:
    model, x = encore.compile(Warns(), lowering="eager"), torch.randn(3, 8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("once")
        for _ in range(3):
            model(x).backward()
    assert [str(one.message) for one in warned] == ["deprecated", "careful"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        with pytest.raises(DeprecationWarning, match="deprecated"):
            model(x)


def test_an_assertion_on_a_tensor_is_in_the_graph_and_raises_what_eager_raises(lowering: str) -> None:
    model = encore.compile(Checking(), lowering=lowering)
    for _ in range(2):
        model(torch.ones(3, 8)).backward()
        with pytest.raises(AssertionError, match=r"^out of range$"):
            model(torch.full((3, 8), 20.0))
        with pytest.raises(AssertionError):
            model(torch.full((3, 8), -torch.inf))
    assert len(session_of(model).graphs) == 1
