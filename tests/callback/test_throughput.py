from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import RecordingLogger, Script
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback import throughput
from boltcutter.callback.throughput import ThroughputMonitor
from boltcutter.strategy.data_parallel import DataParallelStrategy

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "have no `val_dataloader`", "is smaller than the logging interval")
]


class Clock:
    """A clock that advances only when set."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


class Timed(L.LightningModule):
    """A batch takes one second, the first of an epoch three; validation one hour."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.now += 1 if batch_idx else 3
        return self.weight.sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.now += 3600

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, clock: Clock, **options: Any) -> tuple[dict[int, float], dict[int, float]]:
    loader = DataLoader(TensorDataset(torch.zeros(60, 1)), 10)
    log = RecordingLogger()
    options = {"max_epochs": 2, "log_every_n_steps": 2} | options
    L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=log,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ThroughputMonitor()],
        **options,
    ).fit(Timed(clock), loader, loader)
    return log.values("throughput/samples_per_second"), log.values("throughput/samples_per_second_epoch")


def test_samples_per_second_are_logged_for_steps_and_epochs(tmp_path: Path, clock: Clock) -> None:
    steps, epochs = fit(tmp_path, clock)
    assert steps == {1: 20 / 4, 3: 10, 5: 10, 7: 20 / 4, 9: 10, 11: 10}
    assert list(epochs.values()) == [60 / 8, 60 / 8]


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_an_epoch_resumed_in_the_middle_is_timed_from_there(tmp_path: Path, clock: Clock) -> None:
    data: Any = DataLoader(TensorDataset(torch.zeros(24, 1)), batch_size=4)
    off = ("checkpointing", "progress_bar", "model_summary")
    plain: dict[str, Any] = {"accelerator": "cpu", "log_every_n_steps": 1} | {f"enable_{what}": False for what in off}
    for steps, begin in ((2, None), (4, tmp_path / "middle.ckpt")):
        clock.now, logger = 1e6, RecordingLogger()
        trainer = L.Trainer(
            max_steps=steps, logger=logger, callbacks=[ThroughputMonitor()], default_root_dir=tmp_path, **plain
        )
        trainer.fit(Timed(clock), data, ckpt_path=begin)
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
    assert logger.values("throughput/samples_per_second") == {2: 4.0, 3: 4.0}


def test_validation_time_is_excluded(tmp_path: Path, clock: Clock) -> None:
    steps, epochs = fit(tmp_path, clock, max_epochs=1, val_check_interval=3)
    assert clock.now > 3600
    assert steps == {1: 5, 3: 10, 5: 10}
    assert list(epochs.values()) == [60 / 8]


def test_accumulated_batches_count_once_for_each_optimizer_step(tmp_path: Path, clock: Clock) -> None:
    steps, epochs = fit(tmp_path, clock, max_epochs=1, accumulate_grad_batches=2, log_every_n_steps=1)
    assert steps == {0: 20 / 4, 1: 10, 2: 10}
    assert list(epochs.values()) == [60 / 8]
    steps, _ = fit(tmp_path, clock, max_epochs=1, accumulate_grad_batches=3, log_every_n_steps=2)
    assert steps == {1: 60 / 8}


def test_intervals_that_no_logging_step_ends_count_for_the_epoch(tmp_path: Path, clock: Clock) -> None:
    for every in (0, 4, 100):
        steps, epochs = fit(tmp_path, clock, max_epochs=1, log_every_n_steps=every)
        assert steps == ({3: pytest.approx(40 / 6)} if every == 4 else {})
        assert list(epochs.values()) == [60 / 8]


class Slow:
    """A loader that takes half a second per batch and measures it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.wait_seconds = clock, 0.0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[list[Tensor]]:
        for _ in range(40):
            self.clock.now += 0.5
            self.wait_seconds += 0.5
            yield [torch.zeros(4, 7)]


class Language(Timed):
    kind = "language_modeling"

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.model = nn.Linear(7, 5)


def slow(folder: Path, clock: Clock, devices: int = 1, **settings: Any) -> RecordingLogger:
    log = RecordingLogger()
    silent = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=DataParallelStrategy() if devices > 1 else "auto",
        logger=log, default_root_dir=folder, callbacks=[ThroughputMonitor(**settings)],
        max_epochs=1, log_every_n_steps=5, **silent,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.fit(Language(clock), Slow(clock))
    return log


def test_waiting_for_data_warns_once_with_a_remedy(tmp_path: Path, clock: Clock) -> None:
    with pytest.warns(UserWarning, match=r"data.num_workers=0: .*33% .* set data.num_workers=2, or") as caught:
        log = slow(tmp_path, clock)
    assert sum("waits for data" in str(warning.message) for warning in caught) == 1
    assert list(log.values("throughput/data_wait").values())[1:] == [pytest.approx(1 / 3)] * 7


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "MAX_DATA_WAIT", 1.0)  # warnings are errors


@pytest.mark.usefixtures("patient")
def test_tokens_utilization_and_memory_are_logged(tmp_path: Path, clock: Clock) -> None:
    log = slow(tmp_path, clock, peak_tflops=1e-9)  # 1000 FLOPS
    assert log.values("throughput/samples_per_second")[9] == pytest.approx(4 / 1.5)
    assert log.values("throughput/tokens_per_second")[9] == pytest.approx(7 * 4 / 1.5)
    assert log.values("throughput/mfu")[9] == pytest.approx(4 / 1.5 * 3 * 2 * 7 * 5 / 1000)
    assert 0.05 < log.values("throughput/memory_gib")[9] < 100
    shared = slow(tmp_path, clock, devices=2, peak_tflops=1e-9)  # in one process
    assert shared.values("throughput/mfu")[9] == pytest.approx(log.values("throughput/mfu")[9] / 2)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("change", ["split", "compiled"])
def test_utilization_is_that_of_the_model_before_the_strategy_changed_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def start(task: Language) -> None:
        if change == "split":  # a pipeline keeps one stage
            task.model = nn.Identity()  # type: ignore[assignment]
        else:
            task.model.compile(backend="eager")

    monkeypatch.setattr(Language, "on_fit_start", start)
    log = slow(tmp_path, clock, peak_tflops=1e-9)
    assert log.values("throughput/mfu")[9] == pytest.approx(4 / 1.5 * 3 * 2 * 7 * 5 / 1000)


@pytest.mark.usefixtures("patient")
def test_without_a_known_peak_there_is_no_utilization(tmp_path: Path, clock: Clock) -> None:
    assert not slow(tmp_path, clock).values("throughput/mfu")


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"callback.throughput.peak_tflops=0.0 .*; try null"):
        ThroughputMonitor(peak_tflops=0.0)


RANKS = """
import lightning as L, time, torch
from boltcutter.callback.throughput import ThroughputMonitor
from boltcutter.strategy.data_parallel import DataParallelStrategy

class Task(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return self.weight.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[ThroughputMonitor()], log_every_n_steps=4,
)
trainer.fit(Task(), torch.utils.data.DataLoader(torch.zeros(160, 1), 10))
for name in ("throughput/samples_per_second", "throughput/samples_per_second_epoch"):
    found = trainer.callback_metrics[name]
    assert 100 < found <= 200, found  # 2 ranks × 10 samples in each 0.1 s at best
print("counted")
"""


def test_two_real_ranks_are_counted(two_ranks: Script) -> None:
    done = two_ranks(RANKS)
    assert done.stdout.count("counted") == 2
