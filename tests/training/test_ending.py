import csv
import json
import os
import pickle
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script, environment
from forkserver import ForkServer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau

from boltcutter.callback.checkpoint import BestCheckpoint
from boltcutter.callback.preemption import Preemption
from boltcutter.callback.reseed import Reseed
from boltcutter.callback.skip_no_op_hooks import SkipNoOpHooks
from boltcutter.config.settings import Settings
from boltcutter.data.digits import Digits
from boltcutter.environment import stop_signals as signals
from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification
from boltcutter.training.ending import EndOfTraining
from boltcutter.training.train import flush_loggers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*your dataloader is not resumable",
    "ignore:.*Checkpoint directory",
    "ignore:.*callbacks used to create the checkpoint",
    "ignore:The dirpath has changed",
)
BATCHES = 19  # of an epoch


class SignalIn(L.Callback):
    """Sets the flag as a handler would, in a hook after some step; by default before a batch of validation."""

    def __init__(self, step: int, hook: str = "on_validation_batch_start") -> None:
        def send(trainer: L.Trainer, *args: Any, **options: Any) -> None:
            if trainer.global_step == step:
                signals.handle_signal(signal.SIGTERM)

        setattr(self, hook, send)


class Flush(L.Callback):
    """Writes the metrics before each checkpoint, as ``Recorder`` does."""

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        flush_loggers(trainer)


class CopyAfter(L.Callback):
    """Copies the folder after some step and all that follows it, as a kill in the next epoch or step would leave it."""

    def __init__(self, step: int, folder: Path, copy: Path) -> None:
        self.step, self.folder, self.copy = step, folder, copy

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == self.step and not self.copy.exists():
            shutil.copytree(self.folder, self.copy)

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.on_train_epoch_start(trainer, pl_module)


def fit(
    folder: Path,
    *callbacks: L.Callback,
    resume: bool = False,
    plateau: bool = False,
    final_validation: bool = True,
    **limits: Any,
) -> None:
    """Train in ``folder``, anew or from its last checkpoint."""
    L.seed_everything(0, verbose=False)
    ending = EndOfTraining(Settings({"trainer": limits, "final_validation": final_validation}))
    last = ModelCheckpoint(folder, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    ends = [Flush(), SkipNoOpHooks(), Preemption(str(folder)), Reseed(0), BestCheckpoint(str(folder)), last, ending]
    trainer = L.Trainer(
        accelerator="cpu",
        logger=CSVLogger(folder / "metrics.csv"),
        callbacks=[*callbacks, *ends],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        **limits,
    )
    scheduler = {"scheduler": partial(ReduceLROnPlateau, patience=0, threshold=10.0), "interval": "epoch"}
    task = Classification(Linear((1, 8, 8), 10), optimizer=torch.optim.Adam, **scheduler if plateau else {})
    found = max(folder.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime) if resume else None
    if found:
        ending.resume(torch.load(found, weights_only=True))
    trainer.fit(task, datamodule=Digits(), ckpt_path=found, weights_only=True)


def rows(folder: Path) -> dict[int, dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return {int(row["step"]): {k: v for k, v in row.items() if v} for row in csv.DictReader(file)}


def validated(folder: Path) -> list[int]:
    """Steps after which there was a validation."""
    return [step + 1 for step, row in rows(folder).items() if "val/loss" in row]


def assert_equal(folder: Path, other: Path) -> None:
    """Compare metrics and weights bitwise."""
    assert rows(folder) == rows(other)
    ours, theirs = (last(place)["state_dict"] for place in (folder, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def last(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "last.ckpt", weights_only=True))


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_steps": 25, "max_epochs": 9}, [19, 25]),
        ({"max_steps": 38, "max_epochs": 9}, [19, 38]),
        ({"max_epochs": 1, "val_check_interval": 0.3}, [5, 10, 15, 19]),
        ({"max_epochs": 1, "check_val_every_n_epoch": 2}, [19]),
        ({"max_steps": 25, "max_epochs": 9, "limit_val_batches": 0}, []),
    ],
    ids=str,
)
def test_the_last_weights_are_validated_once_and_can_be_the_best(
    tmp_path: Path, limits: dict[str, Any], steps: list[int]
) -> None:
    fit(tmp_path, **limits)
    assert validated(tmp_path) == steps
    if steps:
        best = torch.load(tmp_path / "best.ckpt", weights_only=True)
        assert best["global_step"] == last(tmp_path)["global_step"] == steps[-1]


@pytest.mark.parametrize(
    "limits", [{"max_steps": 25, "max_epochs": 9}, {"max_epochs": 1, "check_val_every_n_epoch": 2}], ids=str
)
def test_the_final_validation_can_be_turned_off(tmp_path: Path, limits: dict[str, Any]) -> None:
    fit(tmp_path, final_validation=False, **limits)
    assert validated(tmp_path) == ([19] if "max_steps" in limits else [])


class Pickles(L.Callback):
    """Copies the trainer by pickle where plain Lightning can."""

    copies = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pickle.loads(pickle.dumps(trainer))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        copy: L.Trainer = pickle.loads(pickle.dumps(trainer))
        self.copies += copy.global_step


def test_a_trainer_can_be_pickled(tmp_path: Path) -> None:
    pickles = Pickles()
    within = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10)
    fit(tmp_path, pickles, within, plateau=True, max_epochs=1)
    assert pickles.copies == 19


class SetsHook(L.Callback):
    """Sets a hook of the module in the second epoch."""

    calls = 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.on_train_epoch_end = self.add  # type: ignore[method-assign]

    def add(self) -> None:
        self.calls += 1


def test_a_hook_that_is_set_during_training_is_kept_beside_a_plateau(tmp_path: Path) -> None:
    hook = SetsHook()
    fit(tmp_path, hook, plateau=True, max_epochs=3)
    assert hook.calls == 2


def test_an_epoch_that_max_steps_cut_short_is_finished_without_it(tmp_path: Path) -> None:
    fit(tmp_path / "whole", max_epochs=2)
    fit(tmp_path / "cut", max_epochs=2, max_steps=25)
    assert "train/loss_epoch" in rows(tmp_path / "cut")[24]
    fit(tmp_path / "cut", max_epochs=2, resume=True)
    ours, theirs = (last(tmp_path / name)["state_dict"] for name in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert validated(tmp_path / "cut") == [19, 25, 38]
    whole, cut = rows(tmp_path / "whole"), rows(tmp_path / "cut")
    cut[24] = {name: cut[24][name] for name in whole[24]}  # has the metrics of the earlier end as well
    assert cut == whole


@pytest.mark.parametrize(
    "limits",
    [{"max_epochs": 2}, {"max_epochs": 9, "max_steps": 25}, {"max_epochs": -1, "max_steps": 38}],
    ids=str,
)
def test_the_end_of_an_epoch_is_not_repeated(tmp_path: Path, limits: dict[str, Any]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(whole, CopyAfter(BATCHES, whole, cut), **limits)
    assert last(cut)["global_step"] == BATCHES
    fit(cut, resume=True, **limits)
    assert_equal(cut, whole)


@pytest.mark.parametrize("step", [7, BATCHES])
def test_what_follows_a_step_that_is_saved_is_not_left_out(tmp_path: Path, step: int) -> None:
    def often(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder, "last-often", every_n_train_steps=step, enable_version_counter=False)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(whole, often(whole), CopyAfter(step, whole, cut), max_epochs=2)
    (cut / "last.ckpt").unlink(missing_ok=True)
    assert torch.load(cut / "last-often.ckpt", weights_only=True)["global_step"] == step
    fit(cut, often(cut), resume=True, max_epochs=2)
    assert_equal(cut, whole)


def test_a_plateau_is_saved_at_the_end_of_its_epoch(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(whole, CopyAfter(BATCHES, whole, cut), plateau=True, max_epochs=3)
    assert last(whole)["lr_schedulers"][0]["_last_lr"] == [pytest.approx(1e-6)]  # reduced by each epoch
    fit(cut, resume=True, plateau=True, max_epochs=3)
    assert last(cut)["lr_schedulers"] == last(whole)["lr_schedulers"]
    assert_equal(cut, whole)


def test_a_plateau_is_found_in_the_epoch_of_an_interruption(tmp_path: Path) -> None:
    fit(tmp_path / "whole", plateau=True, max_epochs=3)
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", SignalIn(7, "on_train_batch_end"), plateau=True, max_epochs=3)
    fit(tmp_path / "cut", resume=True, plateau=True, max_epochs=3)
    assert_equal(tmp_path / "cut", tmp_path / "whole")


def test_a_signal_in_the_last_validation_repeats_it(tmp_path: Path) -> None:
    limits = {"max_epochs": 9, "max_steps": 25}
    fit(tmp_path / "whole", **limits)
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", SignalIn(25), **limits)
    assert validated(tmp_path / "cut") == [19]
    fit(tmp_path / "cut", resume=True, **limits)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert last(tmp_path / "cut")["global_step"] == 25


def test_a_training_that_is_to_stop_after_more_steps_stops_there_if_resumed(tmp_path: Path) -> None:
    limits = {"max_epochs": 5, "min_steps": 50}

    def patience() -> EarlyStopping:
        return EarlyStopping("val/loss", patience=1, min_delta=10.0)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(whole, patience(), CopyAfter(2 * BATCHES, whole, cut), **limits)
    assert last(whole)["global_step"] == 50
    fit(cut, patience(), resume=True, **limits)
    assert_equal(cut, whole)


@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_a_training_that_stopped_early_is_continued_only_with_other_limits(tmp_path: Path, interval: float) -> None:
    limits = {"max_epochs": 5, "val_check_interval": interval}
    patience = {"monitor": "val/loss", "patience": 1, "min_delta": 10.0}
    fit(tmp_path, EarlyStopping(**patience), **limits)  # type: ignore[arg-type]
    before, steps = rows(tmp_path), last(tmp_path)["global_step"]
    assert steps == (2 * BATCHES if interval == 1.0 else 18)
    fit(tmp_path, EarlyStopping(**patience), resume=True, **limits)  # type: ignore[arg-type]
    assert (rows(tmp_path), last(tmp_path)["global_step"]) == (before, steps)
    fit(tmp_path / "whole", max_epochs=3, val_check_interval=interval)
    fit(tmp_path, resume=True, max_epochs=3, val_check_interval=interval)
    assert last(tmp_path)["global_step"] == 3 * BATCHES
    ours, theirs = last(tmp_path)["state_dict"], last(tmp_path / "whole")["state_dict"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_time_limit_is_over_all_attempts_and_is_recorded(script: Script, tmp_path: Path) -> None:
    folder, record = tmp_path / "run", {}
    limits = ["trainer.max_epochs=100000", "trainer.max_time=1s", f"folder={folder}"]
    for index, arguments in enumerate(([*QUICK, "model=linear", *limits], [f"resume={folder}"])):
        done = script("train", *(a for a in arguments if a != "test=false"))
        assert done.returncode == 0, done.stderr
        before, record = record, json.loads((folder / "record.json").read_text())
        assert record["stopped_by"] == "trainer.max_time"
        assert record["attempts"][index]["reason"] == "completed"
        assert record["test"]
        assert record["best_after"]
        assert "stopped by     trainer.max_time=00:00:00:01" in done.stdout
        assert f"resume={folder} trainer.max_time=<more>" in done.stdout
        assert "warning: scheduler: planned over" in done.stdout
    assert "trainer.max_time=00:00:00:01 is used up; to continue, set trainer.max_time=<more>" in done.stdout
    assert record["measured_after"] == before["measured_after"]


def test_a_time_limit_of_which_an_earlier_attempt_has_used_a_part_is_not_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path, SignalIn(2 * BATCHES), max_epochs=5000, max_time={"hours": 1})
    (saved,) = tmp_path.glob("last-*.ckpt")
    state = torch.load(saved, weights_only=True)
    used = state["callbacks"]["Timer"]["time_elapsed"]
    assert 0 < used["train"] < 3600
    state["callbacks"]["Timer"]["time_elapsed"] = used | {"train": 3599.9}
    torch.save(state, saved)
    fit(tmp_path, resume=True, max_epochs=5000, max_time={"hours": 1})
    assert last(tmp_path)["stopped_by"] == "trainer.max_time"
    assert last(tmp_path)["global_step"] < 5000 * BATCHES


def test_a_run_that_stopped_early_and_was_killed_in_its_test_is_finished(
    forks: ForkServer, script: Script, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stop = ["callback=[default,early_stopping]", "callback.early_stopping.patience=1"]
    stop += ["+callback.early_stopping.min_delta=10", "trainer.max_epochs=5", "scheduler=constant"]
    argv = ["tests/faulty.py", "SIGKILL", "test", "scripts/train.py", *QUICK, "model=linear", *stop]
    with (
        open(os.devnull, "wb") as nothing,
        forks.start([*argv, f"folder={folder}"], environment(), nothing.fileno(), 2) as process,
    ):
        assert process.wait(60) == -signal.SIGKILL
    before = (folder / "metrics.csv").read_text()
    done = script("train", f"resume={folder}")
    assert done.returncode == 0, done.stderr
    assert f"resume={folder}: training had stopped early at step 38" in done.stdout
    assert "trainer.max_epochs=<more>" in done.stdout
    record = json.loads((folder / "record.json").read_text())
    assert [attempt["reason"] for attempt in record["attempts"]] == ["killed", "completed"]
    assert record["measured_after"]["val/loss"] == 38
    assert record["test"]
    assert [row.split(",")[0] for row in before.splitlines()] == [
        row.split(",")[0] for row in (folder / "metrics.csv").read_text().splitlines() if row.split(",")[0] != "38"
    ]
    done = script("train", f"resume={folder}", "trainer.max_epochs=6", "test=false")
    assert done.returncode == 0, done.stderr
    assert "it continues with trainer.max_epochs=6" in done.stdout
    assert ", after 57 steps" in done.stdout  # and stopped early once more
