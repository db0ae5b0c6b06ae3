import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import Script
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback import progress
from boltcutter.callback.progress import Progress, speed_fields
from boltcutter.callback.throughput import ThroughputMonitor

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "have no `val_dataloader`", "is smaller than the logging interval")
]


class Clock:
    """A clock that advances only when set."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr(progress, "time", ticking)
    return ticking


class Timed(L.LightningModule):
    """A module with a loss of 3 whose steps take a given time."""

    def __init__(self, clock: Clock, train: float, validate: float = 0.0, fail_at: int = -1) -> None:
        super().__init__()
        self.clock, self.train_seconds, self.val_seconds, self.fail_at = clock, train, validate, fail_at
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.now += self.train_seconds
        if self.global_step == self.fail_at:
            raise RuntimeError("broken")
        return self.weight.sum() + 3

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.now += self.val_seconds
        self.log("val/loss", torch.tensor(0.25))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    folder: Path,
    task: Timed,
    bar: Progress,
    checkpoint: Path | None = None,
    *,
    stop: Callback | None = None,
    **options: Any,
) -> L.Trainer:
    loader = DataLoader(TensorDataset(torch.zeros(100, 1)), 10)
    options = {"max_epochs": 2} | options
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[bar, *([stop] if stop else [])],
        **options,
    )
    trainer.fit(task, loader, loader, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    return trainer


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


OpenTerminal = Callable[..., tuple[Progress, io.StringIO]]


@pytest.fixture
def with_terminal(monkeypatch: pytest.MonkeyPatch) -> OpenTerminal:
    """Make a progress bar on a terminal whose lines have ``width`` columns."""

    def make(width: int = 119) -> tuple[Progress, io.StringIO]:
        for name, value in {"COLUMNS": str(width + 1), "TERM": "xterm", "NO_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)
        file = Terminal()
        monkeypatch.setattr(sys, "__stdout__", file)
        return Progress(), file

    return make


def drawings(file: io.StringIO) -> list[str]:
    return [line.strip() for line in file.getvalue().split("\r\x1b[2K")[1:]]


@pytest.fixture
def without_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Progress]:
    """Make a progress bar whose output is not a terminal."""

    def make(line_interval: float = progress.LINE_INTERVAL) -> Progress:
        monkeypatch.setattr(progress, "LINE_INTERVAL", line_interval)
        monkeypatch.setattr(sys, "__stdout__", io.StringIO())
        return Progress()

    return make


def test_the_bar_shows_loss_metric_speed_and_remaining_time(
    tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal
) -> None:
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=1.0), bar)
    seen = drawings(file)
    assert re.fullmatch(r"epoch 1/2  [━╸─]+    5 %  loss 3\.0000  step 1/20  0:19 left", seen[0])
    half = next(line for line in seen if "step 15/20" in line)
    assert re.fullmatch(r"epoch 2/2  [━╸─]+   75 %  loss 3\.0000  val/loss 0\.2500  step 15/20  0:05 left", half)
    assert re.fullmatch(r"epoch 2/2  ━+  100 %  loss 3\.0000  val/loss 0\.2500  step 20/20  in 0:20", seen[-1])


@pytest.mark.parametrize("width", [79, 119])
def test_a_drawing_fits_the_terminal(tmp_path: Path, ticking: Clock, width: int, with_terminal: OpenTerminal) -> None:
    bar, file = with_terminal(width)
    fit(tmp_path, Timed(ticking, train=1.0), bar)
    assert {len(line) for line in drawings(file)} == {width}


def test_the_refresh_rate_is_limited(tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal) -> None:
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=0.01, validate=0.02), bar, max_epochs=20, num_sanity_val_steps=0)
    seconds = ticking.now - 1000
    assert seconds == pytest.approx(20 * 0.3)
    often = 5 * seconds + 20 + 20 + 1  # validations, the end of an epoch and that of training are drawn in any case
    assert 40 < len(drawings(file)) <= often


def test_a_validation_is_shown(tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal) -> None:
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=1.0, validate=1000.0), bar, val_check_interval=5)
    assert any("validating" in line for line in drawings(file))


def test_the_loss_shown_is_the_mean_of_accumulated_batches(
    tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal
) -> None:
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=1.0), bar, accumulate_grad_batches=3)
    seen = drawings(file)
    assert all("loss 3.0000" in line for line in seen)
    assert "100 %" in seen[-1]
    assert "step 8/8" in seen[-1]  # 10 batches are 4 steps, the last of them with one batch


def test_a_resumed_run_starts_where_it_stopped(tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal) -> None:
    first = fit(tmp_path, Timed(ticking, train=1.0), with_terminal()[0])
    first.save_checkpoint(tmp_path / "a.ckpt")
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=1.0), bar, tmp_path / "a.ckpt", max_epochs=4)
    seen = drawings(file)
    assert re.search(r"^epoch 3/4 .* 52 % .* step 21/40  0:19 left$", seen[0])
    assert re.search(r"^epoch 4/4 .*100 % .* step 40/40  in 0:20$", seen[-1])


def test_training_that_ends_early_shows_where(tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal) -> None:
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=1.0), bar, max_epochs=10, stop=EarlyStopping("val/loss", patience=1))
    assert re.search(r"^epoch 2/10 .* 20 % .* step 20/100  in 0:20$", drawings(file)[-1])


def test_training_without_an_end_counts_steps(tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal) -> None:
    bar, file = with_terminal()
    fit(tmp_path, Timed(ticking, train=1.0), bar, max_epochs=-1, stop=EarlyStopping("val/loss", patience=1))
    assert drawings(file)[-1] == "epoch 2  loss 3.0000  val/loss 0.2500  step 20  in 0:20"


class TwoOptimizers(Timed):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, train=1.0)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for optimizer in self.optimizers():
            optimizer.step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD(self.parameters(), lr=0.0) for _ in range(2)]


def test_steps_of_several_optimizers_count_once(tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal) -> None:
    bar, file = with_terminal()
    fit(tmp_path, TwoOptimizers(ticking), bar)
    seen = drawings(file)
    assert re.search(r"step 1/20  0:19 left$", seen[0])
    assert re.search(r"100 % .* step 20/20  in 0:20$", seen[-1])


def test_the_terminal_is_restored_when_training_fails(
    tmp_path: Path, ticking: Clock, with_terminal: OpenTerminal
) -> None:
    bar, file = with_terminal()
    out = sys.stdout
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, Timed(ticking, train=1.0, fail_at=7), bar)
    assert "step 7/20" in file.getvalue()
    assert file.getvalue().endswith("\n")
    assert sys.stdout is out


def test_without_a_terminal_each_epoch_prints_a_line(
    tmp_path: Path, ticking: Clock, capsys: pytest.CaptureFixture[str], without_terminal: Callable[..., Progress]
) -> None:
    class Printing(Timed):
        def on_train_end(self) -> None:
            self.print("of the module")

    fit(tmp_path, Printing(ticking, train=1.0, validate=2.0), without_terminal())
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/2  loss 3.0000  val/loss 0.2500  0:30 left",
        "epoch 2/2  loss 3.0000  val/loss 0.2500  in 1:00",
        "of the module",
    ]


def test_lines_are_limited_and_include_the_last_epoch(
    tmp_path: Path, ticking: Clock, capsys: pytest.CaptureFixture[str], without_terminal: Callable[..., Progress]
) -> None:
    fit(tmp_path, Timed(ticking, train=0.1), without_terminal(3.5), max_epochs=10)
    assert re.findall(r"epoch (\d+)/10", capsys.readouterr().out) == ["1", "5", "9", "10"]
    fit(tmp_path, Timed(ticking, train=0.1), without_terminal(99), max_epochs=10, max_steps=35)
    assert re.findall(r"epoch (\d+)/10", capsys.readouterr().out) == ["1", "4"]


def test_a_disabled_rank_shows_nothing(
    tmp_path: Path,
    ticking: Clock,
    capsys: pytest.CaptureFixture[str],
    with_terminal: OpenTerminal,
    without_terminal: Callable[..., Progress],
) -> None:
    bar, file = with_terminal()
    bar.disable()
    fit(tmp_path, Timed(ticking, train=1.0), bar)
    other = without_terminal()
    other.disable()
    fit(tmp_path, Timed(ticking, train=1.0), other)
    assert not file.getvalue()
    assert not capsys.readouterr().out


REAL = """
import sys, lightning as L, torch
from boltcutter.callback import progress

progress.INTERVAL = progress.LINE_INTERVAL = 0

class Task(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def training_step(self, batch, batch_idx):
        if sys.argv[1] == "fail" and self.global_step == 5:
            raise RuntimeError("broken")
        if self.global_step == 3:
            print("printed")
        return self.weight.sum()
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.weight.sum(), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

ranks = {"devices": 2, "strategy": "ddp"} if sys.argv[1] == "ranks" else {"devices": 1}
loader = torch.utils.data.DataLoader(torch.zeros(16, 1), 2)
L.Trainer(
    accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_model_summary=False,
    callbacks=[progress.Progress()], **ranks,
).fit(Task(), loader, loader)
print("after")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("end", marks=pytest.mark.slow), "fail"])
def test_a_real_terminal_is_restored(tmp_path: Path, how: str) -> None:
    (tmp_path / "real.py").write_text(REAL)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-W", "ignore", str(tmp_path / "real.py"), how]
    env = os.environ | {"COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env, cwd=tmp_path)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(30) == (how == "fail")
    os.close(ours)
    text = seen.decode()
    lines = [line.rpartition("\x1b[2K")[2].strip("\r") for line in text.split("\n")]
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    assert plain[0] == "printed"
    assert "\x1b[?" not in text
    if how == "end":
        assert re.match(r"epoch 2/2 +━+ +100 % .*in 0:0\d$", plain[1])
        assert plain[2:] == ["after", ""]
    else:
        assert re.match(r"epoch 1/2 .* 31 % ", plain[1])
        assert plain[2:] == [""]


def test_only_rank_zero_prints(two_ranks: Script) -> None:
    done = two_ranks(REAL, "ranks")
    assert re.findall(r"epoch \d/\d", done.stdout) == ["epoch 1/2", "epoch 2/2"]  # lines of two ranks may run together
    assert done.stdout.count("after") == 2


def test_throughput_mfu_waiting_and_memory_are_shown(tmp_path: Path, with_terminal: OpenTerminal) -> None:
    assert [field.text for field in speed_fields({"samples_per_second": 1234.5})] == ["1,234 samples/s"]
    rates = {"samples_per_second": 1234.5, "tokens_per_second": 123450, "mfu": 0.416, "data_wait": 0.3}
    assert [field.text for field in speed_fields(rates | {"memory_gib": 1.25})] == [
        "123,450 tokens/s",
        "MFU 42%",
        "waiting for data 30%",
        "memory 1.2 GiB",
    ]
    assert not any("waiting" in field.text for field in speed_fields(rates | {"data_wait": 0.01}))
    bar, file = with_terminal()
    fit(tmp_path, Timed(Clock(), train=1.0), bar, stop=ThroughputMonitor(), log_every_n_steps=5)
    assert "samples/s" in drawings(file)[-1]
