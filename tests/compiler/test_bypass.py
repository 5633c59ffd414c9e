"""Steps that would pass a plan by in silence: they are planned, or there is one warning that says so."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_same, run_step, session_of
from support.lightning_loop import import_lightning
from support.rounding import assert_close


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@contextmanager
def one_warning(text: str) -> Iterator[None]:
    """Exactly one warning of Encore is given inside, with this text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(entry.message) for entry in caught if "encore" in str(entry.message)]
    assert len(found) == 1, found
    assert text in found[0]


def compiled(model: nn.Module | None = None, **options: Any) -> Net:
    return encore.compile(model or Net(), lowering="eager", **options)  # type: ignore[return-value]


# -- methods and outer functions -------------------------------------------------------------------------------------


def test_another_method_is_trained() -> None:
    model, x = compiled(), torch.randn(3, 4)
    with one_warning("parameters of Net received gradients, but no plan of it has run"):
        for _ in range(3):
            model.loss(x).backward()
    model(x).sum().backward()
    assert session_of(model).forwards_run == 1


@pytest.mark.parametrize("hooked", [False, True], ids=["", "with a hook"])
def test_a_module_inside_torch_compile(hooked: bool) -> None:
    model, x = compiled(), torch.randn(3, 4)
    if hooked:  # Dynamo traces the compiled call, not only `forward`
        model.register_forward_hook(lambda _, args, out: out * 2)
    outer = torch.compile(lambda x: model(x) * 2, backend="eager")
    with one_warning("compiled function"):
        for _ in range(2):
            outer(x).sum().backward()


def test_a_module_inside_another_that_is_compiled() -> None:
    model, x = Net(), torch.randn(3, 4)
    compiled(model.layers)  # type: ignore[arg-type]
    compiled(model)
    with one_warning("parameters of Sequential received gradients"):
        for _ in range(2):
            model(x).sum().backward()


def test_a_function_inside_torch_compile() -> None:
    inner = encore.compile(lambda x: x.exp().sin(), lowering="eager")
    outer = torch.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    with one_warning("is traced as a part of another compiled function"):
        for rows in (3, 4):
            x = torch.randn(rows, requires_grad=True)
            outer(x).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.autograd.grad((x.exp().sin() * 2).sum(), x)[0])


def test_parameters_are_left_as_they_were() -> None:
    model = Net()
    mine = next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    compiled(model)
    compiled(model)
    model(torch.randn(3, 4)).sum().backward()
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]  # type: ignore[attr-defined]
    assert list(hooks[0]) == [mine.id]
    assert hooks[1:] == [None] * 3


def test_without_gradients_nothing_is_warned_of() -> None:
    model, x = compiled(), torch.randn(3, 4)
    with torch.no_grad():
        model.loss(x)
        model(x)
    model.loss(x.requires_grad_())


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ran", [False, True], ids=["before the first step", "after it"])
def test_a_deep_copy_is_compiled_with_the_same_options(ran: bool) -> None:
    model, x = compiled(budget="1MiB"), torch.randn(3, 4)
    if ran:
        run_step(model, (x,))
    twin, plain = copy.deepcopy(model), Net()
    plain.load_state_dict(model.state_dict())
    before = session_of(model).forwards_run
    assert_same(run_step(twin, (x,)), run_step(plain, (x,)), "eager")
    assert session_of(twin).options == session_of(model).options
    assert session_of(twin) is not session_of(model)
    assert (session_of(twin).forwards_run, session_of(model).forwards_run) == (1, before)
    assert encore.report(twin).budget == 2**20


def test_a_deep_copy_of_a_model_with_a_compiled_part() -> None:
    model = Net()
    compiled(model.layers)  # type: ignore[arg-type]
    twin = copy.deepcopy(model)
    twin(torch.randn(3, 4)).sum().backward()
    assert session_of(twin.layers).forwards_run == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def save_whole(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [lambda model: pickle.loads(pickle.dumps(model)), save_whole])
def test_a_pickle_is_a_plain_module_and_says_so(through: Callable[[nn.Module], Any]) -> None:
    model, x = compiled(), torch.randn(3, 4)
    with one_warning("a pickle of Net has the plain module, without its plans; call encore.compile again"):
        loaded = through(model)
        through(model)
    assert loaded._compiled_call_impl is None
    assert_same(run_step(loaded, (x,)), run_step(model, (x,)), "eager")


@encore.compile(lowering="eager")
def scaled(x: Tensor) -> Tensor:
    return x * 2


def test_a_function_is_copied_and_pickled_as_itself() -> None:
    assert copy.deepcopy(scaled) is scaled
    assert pickle.loads(pickle.dumps(scaled)) is scaled


# -- reports ---------------------------------------------------------------------------------------------------------


def test_the_report_of_a_function_that_ran_plain_says_why() -> None:
    def looped(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    planned = encore.compile(looped)
    with one_warning("ran as plain eager PyTorch"):
        planned(torch.randn(3, requires_grad=True))
    with pytest.raises(encore.NeverRunError, match="no plan to report: it ran as plain eager PyTorch"):
        encore.report(planned)


def test_the_report_of_a_function_without_gradients_says_so() -> None:
    planned = encore.compile(lambda x: x.detach() * 2)
    planned(torch.randn(3, requires_grad=True))
    with pytest.raises(encore.NeverRunError, match="ran, but no call led to a gradient"):
        encore.report(planned)


# -- Lightning -------------------------------------------------------------------------------------------------------


ROWS, BATCH = 40, 16
"""The last batch of an epoch is smaller than the others."""


def lightning_module(lightning: Any, *, manual: bool = False) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """Its `training_step` never calls `forward`."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.batch_size = BATCH
            self.automatic_optimization = not manual

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.net.loss(batch[0])
            self.log("loss", loss)
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def train_dataloader(self) -> Any:
            rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=self.batch_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return Module()


def fit(lightning: Any, module: Any, **options: Any) -> Any:
    trainer = lightning.Trainer(
        **{"max_epochs": 2, **options},
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*(LeafSpec|isinstance.treespec|pytree).*")
        trainer.fit(module)
    return trainer


@pytest.mark.slow
def test_lightning_trains_by_plans() -> None:
    lightning = import_lightning()
    plain, planned = lightning_module(lightning), lightning_module(lightning)
    encore.compile(planned, lowering="eager", budget="100%")
    theirs, ours = fit(lightning, plain), fit(lightning, planned)
    assert session_of(planned).forwards_run == 6
    assert_same(dict(planned.state_dict()), dict(plain.state_dict()), "eager")
    assert torch.equal(ours.callback_metrics["loss"], theirs.callback_metrics["loss"])
    assert encore.report(planned).graphs
    twin = copy.deepcopy(planned)
    fit(lightning, twin)
    assert session_of(twin).forwards_run == 6
    assert session_of(planned).forwards_run == 6


@pytest.mark.slow
def test_lightning_with_manual_optimization_warns() -> None:
    lightning = import_lightning()
    module = compiled(lightning_module(lightning, manual=True))
    with pytest.warns(UserWarning, match="parameters of Module received gradients"):
        fit(lightning, module)


@pytest.mark.slow
def test_lightning_finds_a_batch_that_fits() -> None:
    lightning = import_lightning()
    probe = lightning_module(lightning)
    encore.compile(probe, lowering="eager", budget="min")
    fit(lightning, probe, max_epochs=1)
    budget = session_of(probe).graphs[0].plan.timeline
    module = lightning_module(lightning)
    module.batch_size = 1
    encore.compile(module, lowering="eager", budget=budget.resident + budget.step_peak)
    finder = lightning.callbacks.BatchSizeFinder(mode="power", steps_per_trial=1, init_val=4)
    fit(lightning, module, callbacks=[finder])
    assert finder.optimal_batch_size == BATCH
