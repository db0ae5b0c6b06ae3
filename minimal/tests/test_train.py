import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import wandb
from conftest import TORCHRUN, Train, end, reached, start, weights
from lightning.pytorch.callbacks import Callback

EPOCH = 19  # steps
# Of what rounding changes between one process and two, Adam would make much where a gradient is next to nothing.
SGD = ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1", "model.dropout=0"]
TWO = ["trainer=ddp", "trainer.devices=2", *SGD]


class SignalAt(Callback):
    """Sends this process a signal at a step, and another one on its heels."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)


def record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "record.json").read_text()))


def logged(folder: Path) -> list[list[str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.reader(file))


def apart(one: Path, other: Path) -> float:
    """The largest difference between the last weights of two runs."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_a_run_leaves_what_it_takes_to_trace_it(whole: Path) -> None:
    known = record(whole)
    assert known["command"]
    assert known["seed"] == 0
    assert known["packages"]["lightning"] == L.__version__
    assert (whole / "code.patch").is_file() == known["changed"]
    assert [attempt["reason"] for attempt in known["attempts"]] == ["completed"]
    assert known["test"]["test/accuracy"] > 0.9
    assert "max_epochs: 3" in (whole / "config.yaml").read_text()
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert [row[0] for row in logged(whole) if row[1] == "val/loss"] == [str(EPOCH * n - 1) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        pytest.param(25, [], id="in mid-epoch"),
        pytest.param(EPOCH, [], id="at the end of an epoch"),
        pytest.param(24, ["trainer.val_check_interval=5"], id="at a validation in mid-epoch"),
        pytest.param(7, ["trainer.accumulate_grad_batches=2"], id="with batches added up"),
    ],
)
def test_a_signal_and_a_resume_leave_no_trace(
    step: int, words: list[str], train: Train, whole: Path, tmp_path: Path
) -> None:
    untouched, folder = whole, tmp_path / "run"
    if words:
        untouched = tmp_path / "untouched"
        train(f"folder={untouched}", *words)
    with pytest.raises(SystemExit) as left:
        train(f"folder={folder}", f"+callback.signal={{_target_: test_train.SignalAt, step: {step}}}", *words)
    assert left.value.code == 128 + signal.SIGTERM
    train(f"resume={folder}", "~callback.signal")
    assert [attempt["reason"] for attempt in record(folder)["attempts"]] == ["Preempted: 143", "completed"]
    assert apart(folder, untouched) == 0
    assert logged(folder) == logged(untouched)
    assert record(folder)["test"] == record(untouched)["test"]


def test_a_kill_and_a_resume_in_another_process_leave_no_trace(train: Train, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(f"folder={folder}", "data.workers=1")
    reached(process, folder, "checkpoints/last.ckpt")
    os.killpg(process.pid, signal.SIGKILL)
    end(process)
    train(f"resume={folder}", "data.workers=0")
    assert [attempt["reason"] for attempt in record(folder)["attempts"]] == ["killed", "completed"]
    assert apart(folder, whole) == 0
    assert logged(folder) == logged(whole)


def test_two_ranks_make_one_run_that_counts_each_sample_once(train: Train, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    train(f"folder={alone}", *SGD)
    status, said = end(start(f"runs={tmp_path}/two", *TWO))
    assert status == 0, said
    (folder,) = (tmp_path / "two" / "digits-convnet").iterdir()
    assert record(folder)["attempts"][0]["ranks"] == 2
    assert apart(folder, alone) < 1e-4
    # The test split's 270 samples are no multiple of 64: with padding the numbers would be others.
    assert record(folder)["test"] == pytest.approx(record(alone)["test"], rel=1e-4)
    assert [row[:2] for row in logged(folder)] == [row[:2] for row in logged(alone)]


def test_a_signal_to_one_rank_of_torchrun_ends_all_and_one_process_goes_on(train: Train, tmp_path: Path) -> None:
    process = start(f"runs={tmp_path}", *TWO, "trainer.max_epochs=1000", command=TORCHRUN)
    reached(process, tmp_path, "digits-convnet/*/checkpoints/last.ckpt")
    _, second = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[:2]
    os.kill(int(second), signal.SIGTERM)
    status, said = end(process)
    assert status, said
    (folder,) = (tmp_path / "digits-convnet").iterdir()
    assert [attempt["reason"] for attempt in record(folder)["attempts"]] == ["Preempted: 143"]
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    train(f"resume={folder}", "trainer=default", f"trainer.max_epochs={saved['epoch'] + 1}")
    step = EPOCH * (saved["epoch"] + 1)
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == step
    assert record(folder)["attempts"][-1]["ranks"] == 1


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        train(f"folder={tmp_path}/run", "optimizer.lr=1e30", "trainer.gradient_clip_val=null")
    assert left.value.code == 1
    assert "is not finite at epoch 0, batch 1; the weights are those of step 1" in capsys.readouterr().err
    assert record(tmp_path / "run")["attempts"][0]["reason"].startswith("NonFinite: the gradient of")
    assert not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_weights_and_biases_offline(train: Train, tmp_path: Path) -> None:
    train(f"folder={tmp_path}/run", "logger=wandb", "trainer.max_epochs=1", "test=false")
    wandb.finish()  # as the end of the process does
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*-run/*.wandb")
    assert b"val/accuracy" in file.read_bytes()
