from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from boltcutter.callback.checkpoint import BestCheckpoint
from boltcutter.checks.monitors import MonitorCheck, choose_monitor
from boltcutter.config.errors import ConfigError


class Module(L.LightningModule):
    """A module that logs the given metrics."""

    def __init__(self, *, val: Sequence[str] = (), train: Sequence[str] = (), plateau: str | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.val, self.train_names, self.plateau = val, train, plateau

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        for name in self.train_names:
            self.log(name, loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        for name in self.val:
            self.log(name, self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.plateau}}


class LogsNothingInSanity(Module):
    def validation_step(self, batch: torch.Tensor) -> None:
        if not self.trainer.sanity_checking:
            super().validation_step(batch)


class NamedByStage(Module):
    """Logs its loss under the name of the stage, as modules of pytorch-forecasting do."""

    names = ("sanity_check_loss", "val_loss")

    def validation_step(self, batch: torch.Tensor) -> None:
        sanity, validation = self.names
        self.log(sanity if self.trainer.sanity_checking else validation, self.layer(batch).square().mean())


class OtherNameInSanity(NamedByStage):
    names = ("check_loss", "val_loss")


def fit(
    folder: Path, module: Module, checkpoint: Path | None = None, sanity: int = 2, **callbacks: Callback
) -> L.Trainer:
    data = DataLoader(torch.ones(8, 2), 2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2 if checkpoint else 1,
        logger=False,
        num_sanity_val_steps=sanity,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[MonitorCheck(callbacks), *callbacks.values()],
    )
    trainer.fit(module, data, data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    return trainer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"val_loss"}, ("val_loss", "min")),
        ({"val_loss", "val_loss_epoch", "accuracy"}, ("val_loss", "min")),
        ({"val_acc"}, ("val_acc", "max")),
        ({"valid/kl_loss", "valid/mse_loss"}, None),
        ({"val/auroc", "val/f1"}, None),
        ({"val_strange"}, None),
        (set(), None),
    ],
)
def test_only_an_unambiguous_metric_is_chosen(names: set[str], expected: tuple[str, str] | None) -> None:
    assert choose_monitor(names) == expected


def test_the_default_is_replaced_by_the_validation_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, stopping = BestCheckpoint(str(tmp_path)), EarlyStopping("val/loss")
    fit(tmp_path, Module(val=["val_loss", "val_acc"]), best=best, early_stopping=stopping)
    assert float(best.best_model_score) == pytest.approx(float(stopping.best_score))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "callback.best.monitor" in line and "val_loss" in line]


@pytest.mark.parametrize("kind", [NamedByStage, OtherNameInSanity])
def test_metrics_of_the_sanity_check_are_no_candidates(tmp_path: Path, kind: type[Module]) -> None:
    best, stopping = BestCheckpoint(str(tmp_path)), EarlyStopping("val/loss")
    fit(tmp_path, kind(), best=best, early_stopping=stopping)
    assert best.monitor == stopping.monitor == "val_loss"
    assert (tmp_path / "best.ckpt").is_file()


def test_a_configured_metric_may_be_missing_in_the_sanity_check(tmp_path: Path) -> None:
    fit(tmp_path, NamedByStage(), best=BestCheckpoint(str(tmp_path), monitor="val_loss"))
    assert (tmp_path / "best.ckpt").is_file()


def test_an_accuracy_is_maximized(tmp_path: Path) -> None:
    best = BestCheckpoint(str(tmp_path))
    fit(tmp_path, Module(val=["val_acc"]), best=best)
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["best"]["mode"] == "max"


@pytest.mark.parametrize("kind", [Module, LogsNothingInSanity])
def test_without_an_unambiguous_metric_only_the_last_checkpoint_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Module]
) -> None:
    last = ModelCheckpoint(tmp_path, "last", every_n_epochs=1, save_on_train_epoch_end=True)
    fit(tmp_path, kind(val=["val/f1", "val/auroc"]), best=BestCheckpoint(str(tmp_path)), last=last)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt"}
    assert "val/auroc, val/f1" in capsys.readouterr().out


def test_a_metric_of_training_is_none_of_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Module(val=["a", "b"], train=("train_loss", "b")), sanity=0, best=BestCheckpoint(str(tmp_path)))
    assert "(validation metrics: a, b)" in capsys.readouterr().out


def test_a_resumed_run_uses_the_same_monitor(tmp_path: Path) -> None:
    module = Module(val=["val_loss"])
    fit(tmp_path, module, best=BestCheckpoint(str(tmp_path)), early_stopping=EarlyStopping("val/loss"))
    kept = (tmp_path / "best.ckpt").rename(tmp_path.with_suffix(".ckpt"))
    best, stopping = BestCheckpoint(str(tmp_path)), EarlyStopping("val/loss")
    saved = torch.load(kept, weights_only=True)
    MonitorCheck({"best": best, "early_stopping": stopping}).load_state_dict(saved["callbacks"]["MonitorCheck"])
    fit(tmp_path, module, kept, best=best, early_stopping=stopping)  # warnings are errors
    assert best.monitor == stopping.monitor == "val_loss"


@pytest.mark.parametrize(
    ("module", "callback", "setting"),
    [
        (Module(val=["val_loss"]), BestCheckpoint(monitor="val_los"), "callback.one.monitor=val_los"),
        (Module(val=["val_loss"]), EarlyStopping("val/acc"), "callback.one.monitor=val/acc"),
        (
            Module(val=["val_acc"]),
            EarlyStopping("val/loss"),
            "callback.one.monitor=val/loss",
        ),  # its mode is min, but accuracy is maximized
        (
            Module(val=["val_loss"], train=["train_loss"]),
            BestCheckpoint(monitor="train_los"),
            "callback.one.monitor=train_los",
        ),
        (Module(val=["val_loss"], plateau="valid_loss"), BestCheckpoint(monitor="val_loss"), "scheduler=valid_loss"),
    ],
)
def test_a_metric_that_is_not_logged_stops_training_at_the_first_batch(
    tmp_path: Path, module: Module, callback: Callback, setting: str
) -> None:
    if isinstance(callback, BestCheckpoint):
        callback.dirpath = str(tmp_path)
    with pytest.raises(ConfigError, match=setting) as error:
        fit(tmp_path, module, one=callback)
    assert "val_" in str(error.value)
    assert module.trainer.global_step <= 1


def test_a_validation_metric_can_be_logged_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    class Late(Module):
        def on_train_epoch_end(self) -> None:
            self.log("val_late", 1.0)

    best, stopping = BestCheckpoint(str(tmp_path), monitor="val_late"), EarlyStopping("val_late")
    fit(tmp_path, Late(val=["val_loss"], plateau="val_late"), best=best, stopping=stopping)
    assert float(best.best_model_score or 0) == float(stopping.best_score) == 1


def test_a_training_metric_is_known_before_the_epoch_ends(tmp_path: Path) -> None:
    best = BestCheckpoint(str(tmp_path), monitor="train_loss", save_on_train_epoch_end=True)
    fit(tmp_path, Module(val=["val_loss"], train=["train_loss"]), best=best)
    assert best.best_model_score is not None


def test_what_lightning_accepts_is_no_mistake(tmp_path: Path) -> None:
    class ScoresAtTheEnd(Module):  # a name that does not say validation, and no sanity check
        def on_validation_epoch_end(self) -> None:
            self.log("auroc", 1.0 * self.current_epoch)

    class Own(Callback):
        monitor = "cpu"

    by_step = ModelCheckpoint(tmp_path / "step", monitor="step", mode="max")
    score = ModelCheckpoint(tmp_path / "score", monitor="auroc", save_on_train_epoch_end=False, every_n_train_steps=1)
    stopping = EarlyStopping("missing", strict=False, patience=9)
    fit(tmp_path, ScoresAtTheEnd(), sanity=0, by_step=by_step, score=score, own=Own(), stopping=stopping)
    assert score.best_model_score == 0
    assert by_step.best_model_path
