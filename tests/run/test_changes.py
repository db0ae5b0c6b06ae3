import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.run.changes import SettingChanges, rise

SHORT = ["model=linear", "data.num_workers=0", "test=false"]


@pytest.fixture(scope="module")
def begun(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs. Not to be changed."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    done = script("train", *QUICK, *SHORT, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def continued(script: Script, begun: Path, folder: Path, *overrides: str) -> Any:
    """Resume a copy of the run for another epoch."""
    shutil.copytree(begun, folder)
    return script("train", f"resume={folder}", "trainer.max_epochs=3", *overrides)


def test_a_learning_rate_keeps_its_position_in_the_schedule(script: Script, begun: Path, tmp_path: Path) -> None:
    overrides = ["optimizer.lr=0.1", "optimizer.weight_decay=0.5"]
    done = continued(script, begun, tmp_path / "changed", *overrides)
    assert done.returncode == 0, done.stderr
    assert f"resume={tmp_path}/changed: optimizer.lr=0.1 from now on, was 0.002" in done.stdout
    assert continued(script, begun, tmp_path / "same").returncode == 0
    rates = [pd.read_csv(tmp_path / name / "metrics.csv")["lr-AdamW"].dropna() for name in ("changed", "same")]
    third = slice(len(pd.read_csv(begun / "metrics.csv")["lr-AdamW"].dropna()), None)
    assert len(rates[0][third]) > 1
    assert rates[0][third].tolist() == pytest.approx((50 * rates[1][third]).tolist())
    saved = torch.load(tmp_path / "changed" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["weight_decay"] == 0.5
    record = json.loads((tmp_path / "changed" / "record.json").read_text())
    last = record["attempts"][-1]
    assert last["resumed_at"] == int(saved["global_step"] * 2 / 3)
    assert list(last["changed"]) == ["trainer.max_epochs", "optimizer.lr", "optimizer.weight_decay"]
    assert last["changed"]["optimizer.lr"] == {"was": 0.002, "now": 0.1}
    assert "changed" not in record["attempts"][0]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["trainer.max_epochs=2", "optimizer.lr=0.1"], "optimizer.lr=0.1: resume={} is already trained"),
        (["scheduler=constant"], "scheduler._target_=torch.optim.lr_scheduler.ConstantLR: resume={} restores"),
        (["name=other"], "name=other: resume={} continues with its own folder; remove one of the two"),
        (["init_from=x.ckpt"], "init_from=x.ckpt: resume={} continues with its own weights; remove one of the two"),
        (["folder=elsewhere"], "folder=elsewhere: resume={} continues with its own folder; remove one of the two"),
    ],
)
def test_a_change_without_effect_is_refused(
    overrides: list[str], text: str, script: Script, begun: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = continued(script, begun, folder, *overrides)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {text.format(folder)}")
    assert done.stderr.count("\n") == 1
    assert (folder / "record.json").read_text() == (begun / "record.json").read_text()


class Module(L.LightningModule):
    """A user's module, with its own optimizer and schedule."""

    def __init__(self, learning_rate: float = 0.1, schedule: str = "", step_size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        given: Any = self.hparams
        optimizer = torch.optim.SGD(self.parameters(), lr=given.learning_rate)
        if given.schedule == "onecycle":
            return [optimizer], [OneCycleLR(optimizer, given.learning_rate, total_steps=100)]
        return ([optimizer], [StepLR(optimizer, given.step_size)]) if given.schedule == "step" else optimizer


def trained(tmp_path: Path, task: dict[str, Any], patience: int = 3, resume: bool = False) -> L.Trainer:
    """Train one epoch, or resume for a second one."""
    stopping = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "loss", "patience": patience}
    changes = SettingChanges(Settings({"task": task, "callback": {"stop": stopping}}))
    kept = ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
    path = str(tmp_path / "last.ckpt") if resume else None
    if path:
        changes.resume(torch.load(path, weights_only=True), ends=False)
    trainer = L.Trainer(
        max_epochs=1 + resume,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[kept, changes, EarlyStopping("loss", patience=patience)],
    )
    trainer.fit(Module(**task), DataLoader(torch.ones(4, 2)), ckpt_path=path)  # type: ignore[arg-type]
    return trainer


@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("", 1.0), ("step", 1.0 * 0.1**2), ("onecycle", None)],
)
def test_a_module_with_its_own_optimizer(schedule: str, expected: float | None, tmp_path: Path) -> None:
    before = trained(tmp_path, {"learning_rate": 0.1, "schedule": schedule}).optimizers[0].param_groups[0]["lr"]
    trainer = trained(tmp_path, {"learning_rate": 1.0, "schedule": schedule}, patience=7, resume=True)
    group = trainer.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(expected if expected else before * 10, rel=0.3 if not expected else 1e-9)
    if schedule == "onecycle":
        assert group["max_lr"] == 1.0
    assert trainer.early_stopping_callback.patience == 7  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:Checkpoint directory")
def test_an_argument_of_a_scheduler(tmp_path: Path) -> None:
    trained(tmp_path, {"schedule": "step", "step_size": 1})
    trainer = trained(tmp_path, {"schedule": "step", "step_size": 9}, resume=True)
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.step_size == 9
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)  # of the first epoch; not lowered again


@pytest.mark.slow
def test_the_rate_has_its_place_in_a_longer_schedule(script: Script, tmp_path: Path) -> None:
    def rates(name: str) -> Any:
        return pd.read_csv(tmp_path / name / "metrics.csv").set_index("step")["lr-AdamW"].dropna()

    for name, epochs in (("long", 2), ("short", 1)):
        overrides = [*SHORT, f"trainer.max_epochs={epochs}", "trainer.log_every_n_steps=1"]
        done = script("train", *QUICK, *overrides, f"folder={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
    assert rates("short").iloc[-1] < 1e-4
    done = script("train", f"resume={tmp_path}/short", "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the learning rate rises from") == 1
    assert rates("short")[19:].tolist() == rates("long")[19:].tolist()
    assert rates("long")[19] == pytest.approx(0.00109, rel=0.01)  # the first step after the resume


def schedules(optimizer: Any, total: int) -> dict[str, Any]:
    """A scheduler of each kind for a number of steps; those that are not used change nothing."""
    warm = lambda: LinearLR(optimizer, 0.1, total_iters=total // 4)  # noqa: E731
    return {
        "lambda": lambda: LambdaLR(optimizer, lambda step: 1 - step / total),
        "cosine": lambda: CosineAnnealingLR(optimizer, total),
        "onecycle": lambda: OneCycleLR(optimizer, 0.3, total_steps=total),
        "sequential": lambda: SequentialLR(optimizer, [warm(), CosineAnnealingLR(optimizer, total)], [total // 4]),
        "chained": lambda: ChainedScheduler([warm(), PolynomialLR(optimizer, total)]),
    }


class Scheduled(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(2, 1), kind
        self.rates: list[float] = []
        self.momenta: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        (group,) = self.trainer.optimizers[0].param_groups
        self.rates.append(float(group["lr"]))
        self.momenta.append(group["momentum"])
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1) if self.kind == "lambda" else 0.1)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = schedules(optimizer, total)[self.kind]()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:Checkpoint directory")
@pytest.mark.parametrize("kind", ["lambda", "cosine", "onecycle", "sequential", "chained"])
@pytest.mark.parametrize(
    ("before", "after"), [({"max_epochs": 1}, {"max_epochs": 3}), ({"max_steps": 8}, {"max_steps": 16})]
)
def test_every_scheduler_continues_in_the_new_schedule(
    kind: str, before: dict[str, int], after: dict[str, int], tmp_path: Path
) -> None:
    def fit(limit: dict[str, int], resume: bool = False) -> Scheduled:
        changes = SettingChanges(Settings({}))
        if resume:
            changes.resume(torch.load(tmp_path / "last.ckpt", weights_only=True), ends=False)
        kept = ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
        trainer = L.Trainer(
            **limit,  # type: ignore[arg-type]
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[kept, changes],
        )
        module = Scheduled(kind)
        trainer.fit(module, DataLoader(torch.ones(8, 2)), ckpt_path=tmp_path / "last.ckpt" if resume else None)
        return module

    whole = fit(after)
    begun = fit(before)
    ended = fit(after, resume=True)
    assert ended.rates == pytest.approx(whole.rates[len(begun.rates) :])
    assert ended.momenta == pytest.approx(whole.momenta[len(begun.rates) :])


def test_a_rate_that_rises_after_its_schedule_had_ended_is_one_line() -> None:
    line = rise([{"lr": 0.0}, {"lr": 1e-9}], [{"lr": 0.1}, {"lr": 0.02}])
    assert line
    assert "from 1e-09 to 0.1" in line
    assert "init_from=" in line
    assert rise([{"lr": 0.1}], [{"lr": 0.15}]) is None
    assert rise([{"lr": 0.1}], [{"momentum": 0.9}]) is None


def test_a_schedule_of_a_trillion_steps_is_not_repeated() -> None:
    """A checkpoint of somebody else may claim any number."""
    optimizer = sgd(lr=0.1)
    trainer = fake_trainer(optimizer, LambdaLR(optimizer, lambda step: 1.0))
    changes = SettingChanges(Settings({}))
    changes.resume({"settings": {}, "length": [2], "lr_schedulers": [{"last_epoch": 10**12}]}, ends=False)
    with pytest.raises(ValueError, match=r"schedule of 1e\+12 steps, at most 1e\+07"):
        changes.on_fit_start(trainer, Module())


def test_equal_settings_are_not_changes() -> None:
    cfg = Settings({"optimizer": {"_target_": "torch.optim.SGD", "lr": float("nan")}, "seed": 1})
    changes = SettingChanges(cfg)
    assert (
        changes.resume({"settings": {"optimizer": {"_target_": "torch.optim.SGD", "lr": float("nan")}}}, ends=True)
        == []
    )
    assert changes.resume({}, ends=True) == []  # of an earlier version
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=\.nan: .*resume=None"):
        changes.resume({"settings": {"optimizer": {"_target_": "torch.optim.SGD", "lr": 1.0}}}, ends=True)


def fake_trainer(optimizer: torch.optim.Optimizer, scheduler: Any = None, callbacks: Any = ()) -> Any:
    """What ``SettingChanges`` uses of a trainer."""
    return SimpleNamespace(
        optimizers=[optimizer],
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)] if scheduler else [],
        callbacks=[*callbacks],
        max_epochs=3,
        max_steps=-1,
        limit_train_batches=1.0,
        accumulate_grad_batches=1,
    )


def restore_and_change(trainer: Any, before: dict[str, Any], now: dict[str, Any], **restored: float) -> None:
    """Restore values of the parameter group, as from a checkpoint with other settings."""
    changes, unused = SettingChanges(Settings(now)), L.LightningModule()
    changes.resume({"settings": before, "lr_schedulers": [{"last_epoch": 3}]}, ends=False)
    changes.on_fit_start(trainer, unused)
    trainer.optimizers[0].param_groups[0].update(restored)
    changes.on_train_start(trainer, unused)


def sgd(**settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], **settings)


def test_a_learning_rate_without_schedule_is_replaced() -> None:
    optimizer = sgd(lr=1.0, momentum=0.5)
    rates = {"task": {"lr": 0.1}}, {"task": {"lr": 1.0}}
    restore_and_change(fake_trainer(optimizer), *rates, lr=0.1, momentum=0.9)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (1.0, 0.9)


def test_all_rates_of_a_schedule_are_scaled() -> None:
    optimizer = sgd(lr=1.0)
    scheduler = StepLR(optimizer, 1)
    optimizer.param_groups[0] |= {"max_lr": 2.0, "min_lr": 0.2}
    rates = {"task": {"base_lr": 0.1}}, {"task": {"base_lr": 1.0}}
    restored = {"lr": 0.05, "initial_lr": 0.1, "max_lr": 0.2, "min_lr": 0.02}
    restore_and_change(fake_trainer(optimizer, scheduler), *rates, **restored)
    found = {name: optimizer.param_groups[0][name] for name in restored}
    assert found == pytest.approx({"lr": 0.5, "initial_lr": 1.0, "max_lr": 2.0, "min_lr": 0.2})
    assert (scheduler.base_lrs, scheduler.get_last_lr()) == ([1.0], [0.5])
    assert scheduler.last_epoch == 0  # the checkpoint does not say that training got longer


def test_groups_that_are_no_part_of_a_schedule_leave_its_rates() -> None:
    optimizer = sgd(lr=1.0)
    scheduler = StepLR(optimizer, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})  # as a callback does
    rates = {"task": {"lr": 0.1}}, {"task": {"lr": 1.0}}
    restore_and_change(fake_trainer(optimizer, scheduler), *rates, lr=0.05, initial_lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert scheduler.base_lrs == [1.0]


@pytest.mark.parametrize(("section", "expected"), [("optimizer", 0.5), ("model", 0.1)])
def test_only_settings_of_optimizers_change_them(section: str, expected: float) -> None:
    optimizer = sgd(lr=1.0, weight_decay=0.5)
    settings = [{section: {"weight_decay": value}} for value in (0.1, 0.5)]
    restore_and_change(fake_trainer(optimizer), *settings, lr=0.3, weight_decay=0.1)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.3, expected)  # the rate may be that of a callback


def test_a_callback_that_was_removed_gets_no_settings() -> None:
    settings = [{"callback": {"stop": {"_target_": "lightning.pytorch.callbacks.EarlyStopping"}, "none": None}}, {}]
    for before, now in (settings, settings[::-1]):
        restore_and_change(fake_trainer(sgd(lr=1.0)), before, {"callback": {}, **now})


def test_only_the_callback_whose_setting_changed_gets_it() -> None:
    stops = [EarlyStopping("loss", patience=3), EarlyStopping("loss", patience=4)]
    other: Any = SimpleNamespace(patience=3)
    target = "lightning.pytorch.callbacks.EarlyStopping"
    settings = [{"callback": {"stop": {"_target_": target, "patience": value}}} for value in (3, 7)]
    restore_and_change(fake_trainer(sgd(lr=1.0), callbacks=[*stops, other]), *settings)
    assert [callback.patience for callback in (*stops, other)] == [7, 4, 3]


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize(
    ("before", "now", "key"),
    [(None, {}, ""), ({"_target_": "torch.optim.SGD"}, {"_target_": "torch.optim.Adam"}, "._target_")],
)
def test_another_optimizer_or_scheduler_is_refused(section: str, before: Any, now: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}{key}=.*: resume=None restores the state of .*init_from="):
        SettingChanges(Settings({section: now})).resume({"settings": {section: before}}, ends=False)


def test_settings_of_the_model_are_compared() -> None:
    changes = SettingChanges(Settings({"model": {"dropout": 0.5}, "seed": 1}))
    lines = changes.resume({"settings": {"model": {"dropout": 0.1}}}, ends=False)
    assert lines == ["model.dropout=0.5 from now on, was 0.1"]


def test_another_length_of_the_training_is_a_change() -> None:
    changes = SettingChanges(Settings({}))
    saved = {"settings": {}, "length": [3, -1, 1.0, 2]}
    assert changes.resume(saved, ends=False, planned=[5, -1, 1.0, 2]) == ["trainer.max_epochs=5 from now on, was 3"]
    assert changes.changed_length == {"trainer.max_epochs": (3, 5)}
    assert changes.changed == {}  # nothing to apply
    assert changes.resume(saved, ends=True, planned=[3, -1, 1.0, 2]) == []
