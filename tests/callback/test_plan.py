"""Settings that the number of batches, epochs or optimizers contradicts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from boltcutter.callback.plan import PlanCheck, planned_length
from boltcutter.diagnosis.checks import Finding

BATCHES, EPOCHS = 40, 3
STEPS = BATCHES * EPOCHS


class Module(L.LightningModule):
    """A weight with a schedule."""

    def __init__(self, schedule: Callable[[Optimizer], Any] | None = None, interval: str = "epoch") -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.schedule, self.interval = schedule, interval

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("val/loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        if self.schedule is None:
            return optimizer
        facts = {"scheduler": self.schedule(optimizer), "interval": self.interval, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": facts}


def fit(
    capsys: pytest.CaptureFixture[str],
    module: L.LightningModule,
    *,
    dataset: Dataset[Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    **options: Any,
) -> list[str]:
    """Train, and return the warnings."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[PlanCheck(), *callbacks], **{"max_epochs": EPOCHS} | quiet | options
    )
    trainer.fit(module, DataLoader(dataset or TensorDataset(torch.ones(BATCHES, 1))))
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


class Stream(IterableDataset[Any]):
    """Three samples, whose number is not known before."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([torch.ones(1)] for _ in range(3))


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestWarnings:
    """One line for each mistake, and none for what is meant."""

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"accumulate_grad_batches": BATCHES}, None),
            ({"accumulate_grad_batches": BATCHES + 1}, f"{BATCHES + 1}"),
            ({"accumulate_grad_batches": 9, "limit_train_batches": 8}, "accumulate_grad_batches=8"),
            ({"accumulate_grad_batches": 4, "dataset": Stream()}, "accumulate_grad_batches=3"),
            ({"accumulate_grad_batches": 3, "dataset": Stream()}, None),
            ({"callbacks": (GradientAccumulationScheduler({0: 1, 2: 99}),)}, "99"),
        ],
    )
    def test_accumulation_longer_than_the_epoch(
        self, options: dict[str, Any], expected: str | None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = fit(capsys, Module(), **options)
        assert len(lines) == (expected is not None)
        assert expected is None or expected in lines[0]

    @pytest.mark.parametrize(
        "schedule",
        [
            partial(CosineAnnealingLR, T_max=STEPS),
            partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=STEPS),
            partial(PolynomialLR, total_iters=STEPS),
            partial(MultiStepLR, milestones=[STEPS // 2, STEPS * 3 // 4]),
            partial(StepLR, step_size=STEPS // 2),
            partial(CosineAnnealingWarmRestarts, T_0=STEPS // 2),
            lambda optimizer: LambdaLR(optimizer, lambda step, total=STEPS: 1 - step / total),
            lambda optimizer: LambdaLR(optimizer, partial(lambda step, total: 1 - step / total, total=STEPS)),
            lambda optimizer: SequentialLR(
                optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, STEPS)], milestones=[9]
            ),
            lambda optimizer: ChainedScheduler([LinearLR(optimizer), CosineAnnealingLR(optimizer, STEPS)]),
        ],
    )
    def test_a_schedule_of_steps_stepped_by_epoch(
        self, schedule: Callable[[Optimizer], Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        (line,) = fit(capsys, Module(schedule))
        assert "interval" in line
        assert not fit(capsys, Module(schedule, "step"))

    @pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler:RuntimeWarning")
    def test_one_cycle(self, capsys: pytest.CaptureFixture[str]) -> None:
        schedule = partial(OneCycleLR, max_lr=0.1, total_steps=STEPS)
        assert len(fit(capsys, Module(schedule))) == 1
        assert not fit(capsys, Module(schedule, "step"))

    @pytest.mark.parametrize(
        "schedule",
        [
            partial(CosineAnnealingLR, T_max=EPOCHS),
            partial(PolynomialLR, total_iters=EPOCHS),
            partial(MultiStepLR, milestones=[1, 2]),
            partial(ExponentialLR, gamma=0.5),
            partial(StepLR, step_size=1, gamma=0.1),
            partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=EPOCHS),
            ReduceLROnPlateau,
        ],
    )
    def test_a_schedule_of_epochs_stepped_after_each_step(
        self, schedule: Callable[[Optimizer], Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        (line,) = fit(capsys, Module(schedule, "step"))
        assert "interval" in line
        assert not fit(capsys, Module(schedule))

    @pytest.mark.parametrize(
        ("schedule", "interval"),
        [
            (partial(LinearLR, total_iters=EPOCHS), "step"),  # a short warmup
            (partial(ConstantLR, total_iters=EPOCHS), "step"),
            (partial(ExponentialLR, gamma=0.99), "step"),
            (partial(CosineAnnealingLR, T_max=2 * EPOCHS), "epoch"),
            (partial(StepLR, step_size=10), "epoch"),  # of a longer training
        ],
    )
    def test_what_may_be_meant(
        self, schedule: Callable[[Optimizer], Any], interval: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert not fit(capsys, Module(schedule, interval))

    def test_what_another_check_has_found_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The diagnosis computes schedules ahead, and has printed its line."""

        class Found(Callback):
            findings = (Finding("schedule-unit", "certain", "is made for steps", 0),)

        assert not fit(capsys, Module(partial(CosineAnnealingLR, T_max=STEPS)), callbacks=(Found(),))

    @pytest.mark.parametrize("interval", ["step", "epoch"])
    @pytest.mark.parametrize("max_epochs", [0, 1])
    def test_a_stream_does_not_tell_the_number_of_steps(
        self, max_epochs: int, interval: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        schedule = partial(CosineAnnealingLR, T_max=STEPS)
        assert not fit(capsys, Module(schedule, interval), dataset=Stream(), max_epochs=max_epochs, max_steps=2)

    @pytest.mark.parametrize(("options", "count"), [({"max_steps": 10}, 1), ({"min_steps": 4}, 1), ({}, 0)])
    def test_steps_of_two_optimizers(
        self, options: dict[str, int], count: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = fit(capsys, Two(), **options)
        assert len(lines) == count
        assert not fit(capsys, Module(), **options)


class Two(Module):
    """Two optimizers, with a step of each in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_an_unknown_length_is_none() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert planned_length(ExponentialLR(optimizer, 0.9)) is None
    assert planned_length(LambdaLR(optimizer, lambda step: 1 / (step + 1))) is None
