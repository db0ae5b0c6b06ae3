"""Modules as they are published, which log pictures in the way of W&B or of TensorBoard, with each logger."""

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, Script
from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor, nn

from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.logger.wandb import WandbLogger
from boltcutter.report.media_logging import MediaLogger, MediaLogging

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging")


class Module(L.LightningModule):
    """A module that calls its logger at the beginning of each validation, the sanity check included."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 1), calls

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.calls(self)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(list(torch.ones(4, 2)), 2)

    val_dataloader = test_dataloader = train_dataloader


def wandb_style(module: L.LightningModule) -> None:
    import matplotlib.figure
    import wandb

    logger: Any = module.logger
    picture = torch.rand(3, 8, 8)
    figure = matplotlib.figure.Figure(figsize=(1, 1))
    logger.log_image("pictures", [picture, picture.numpy(), Image.new("L", (4, 4))], caption=["a", "b", "c"])
    logger.log_image(key="stepped", images=[picture], step=module.global_step)
    for each in module.loggers:
        each.log_image("each", [picture])  # type: ignore[attr-defined]
    logger.log_table("table", columns=["x", "y"], data=[[1, 0.5], [2, 0.25]])
    logger.log_text("text", columns=["text"], data=[["hello"]])
    logger.log_metrics({"extra": 1.0})
    logger.experiment.log({"one": wandb.Image(np.zeros((8, 8), np.uint8)), "many": [wandb.Image(figure)]})
    logger.experiment.log({"histogram": wandb.Histogram([1, 2]), "number": 1, "global_step": module.global_step})
    logger.experiment.config.update({"a": 1}, allow_val_change=True)
    logger.experiment.summary["a"] = 1
    logger.log_hyperparams({"a": 1})
    if not isinstance(logger, LightningWandbLogger):
        logger.watch(module)
        logger.log_audio("audio", [np.zeros(8)], sample_rate=[8])


def tensorboard_style(module: L.LightningModule) -> None:
    import matplotlib.figure

    writer = module.logger.experiment  # type: ignore[union-attr]
    writer.add_image("picture", torch.rand(3, 8, 8), module.current_epoch)
    writer.add_images("pictures", torch.rand(4, 1, 8, 8), global_step=module.global_step)
    writer.add_figure("figure", matplotlib.figure.Figure(figsize=(1, 1)), module.global_step)
    writer.add_histogram("histogram", torch.rand(9), module.global_step)
    writer.add_text("text", "hello", module.global_step)
    writer.add_scalar("scalar", 0.5, module.global_step)
    writer.add_scalars("scalars", {"a": 0.5, "b": torch.tensor(2.0)}, module.global_step)
    writer.add_audio("audio", torch.zeros(1, 80), module.global_step, sample_rate=80)
    os.path.join(module.logger.log_dir or "", "file")  # type: ignore[union-attr]


def fit(folder: Path, loggers: list[Logger], calls: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=1,
        logger=loggers,
        callbacks=[MediaLogging(folder)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(calls)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    return trainer


def make_loggers(names: str, folder: Path) -> list[Logger]:
    made: dict[str, Any] = {
        "csv": lambda: CSVLogger(folder / "metrics.csv"),
        "tensorboard": lambda: TensorBoardLogger(folder, "tensorboard", version=""),
        "wandb": lambda: WandbLogger(folder=folder, project="media", mode="offline"),
    }
    return [made[name]() for name in names.split()]


@pytest.mark.parametrize("names", ["csv", "tensorboard csv", "wandb csv", "csv tensorboard"])
def test_calls_of_wandb_are_taken_by_each_logger(names: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = fit(tmp_path / "run", make_loggers(names, tmp_path / "run"), wandb_style)
    media = tmp_path / "run" / "media"
    names_of_pictures = {path.parent.name for path in media.rglob("*.png")}
    assert names_of_pictures == {"pictures", "stepped", "each", "one", "many"}
    steps = [sorted(int(path.stem) for path in (media / name).iterdir()) for name in ("each", "stepped", "table")]
    # Sanity check, two validations and the test; by default at the steps of the metrics.
    assert steps == [[0, 1, 3, 4], [0, 2, 4], [0, 1, 3, 4]]
    assert pd.read_csv(media / "table" / "1.csv").to_numpy().tolist() == [[1, 0.5], [2, 0.25]]
    for logger in trainer.loggers:
        logger.finalize("success")
        getattr(logger, "close", lambda code: None)(0)
    if "csv" in names.split()[0]:
        table = pd.read_csv(tmp_path / "run" / "metrics.csv").set_index("step")
        assert table["train/loss"].notna().sum() == 4  # no row is lost or repeated
        assert table.index.tolist() == [0, 1, 2, 3, 4]
        assert table["extra"].dropna().index.tolist() == [0, 1, 3, 4]
    assert ("log_audio is a call of another logger" in capfd.readouterr().err) == (
        names == "csv" or names.startswith("tensorboard")
    )


class Minimal(Logger):
    """A logger with the members that Lightning requires."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @property
    def name(self) -> str:
        return "minimal"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen += metrics


class Ordered(Minimal):
    """Other arguments, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def log_metrics(  # type: ignore[override]
        self, prefix: str = "", *, step: int | None = None, metrics: Any = None
    ) -> None:
        self.seen.append((prefix, metrics, step))


def test_a_logger_is_called_as_lightning_calls_it(tmp_path: Path) -> None:
    logger: Any = Ordered()
    MediaLogging(tmp_path).setup(L.Trainer(logger=[logger], accelerator="cpu"), L.LightningModule(), "fit")
    logger.log_metrics(metrics={"x": 1.0}, step=3)
    logger.log_metrics({"x": 2.0}, 4, prefix="of a module/")
    assert logger.seen == [("", {"x": 1.0}, 3), ("of a module/", {"x": 2.0}, 4)]


def test_another_rank_has_the_experiment_that_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger: Any = LightningCSVLogger(tmp_path)
    MediaLogging(tmp_path).setup(L.Trainer(logger=[logger], accelerator="cpu"), L.LightningModule(), "fit")
    assert isinstance(logger.experiment, DummyExperiment)
    logger.experiment.add_image("picture", np.zeros((1, 2, 2)), 0)
    logger.experiment.config.update({"of": "W&B"})
    assert not [*tmp_path.iterdir()]


def test_an_extended_logger_is_pickled_as_what_it_was(tmp_path: Path) -> None:
    for logger in (LightningCSVLogger(tmp_path, "plain"), TensorBoardLogger(tmp_path, "board")):
        kind, trainer = type(logger), L.Trainer(accelerator="cpu", logger=logger)
        MediaLogging(tmp_path).setup(trainer, L.LightningModule(), "fit")
        assert isinstance(logger, MediaLogger)
        logger.log_metrics({"x": 1.0}, 0)  # which creates the experiment
        for copied in (pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger)):
            assert type(copied) is kind
            assert (copied.name, copied.save_dir) == (logger.name, logger.save_dir)


def test_a_logger_without_an_experiment_takes_the_calls_of_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = Minimal()

    def calls(module: L.LightningModule) -> None:
        logger.log_image("own", [torch.rand(3, 8, 8)])  # type: ignore[attr-defined]
        logger.log_table("table", columns=["x"], data=[[1]])  # type: ignore[attr-defined]
        logger.log_audio("audio", [np.zeros(8)])  # type: ignore[attr-defined]
        logger.experiment.add_image("picture", torch.rand(3, 8, 8))  # type: ignore[attr-defined]
        logger.experiment.log({"number": 1.0})  # type: ignore[attr-defined]

    fit(tmp_path / "run", [logger], calls)
    assert {path.parent.name for path in (tmp_path / "run" / "media").rglob("*.png")} == {"own", "picture"}
    assert "number" in logger.seen
    assert capfd.readouterr().err.count("warning: Minimal: log_audio is a call of another logger; ignored") == 1


@pytest.mark.parametrize("names", ["csv", "tensorboard csv", "wandb csv"])
def test_calls_of_tensorboard_are_taken_by_each_logger(names: str, tmp_path: Path) -> None:
    trainer = fit(tmp_path / "run", make_loggers(names, tmp_path / "run"), tensorboard_style)
    media = tmp_path / "run" / "media"
    assert {"picture", "pictures", "figure"} <= {path.parent.name for path in media.rglob("*.png")}
    assert sorted(path.stem for path in (media / "pictures").iterdir()) == ["0", "2", "4"]
    for logger in trainer.loggers:
        logger.finalize("success")
        getattr(logger, "close", lambda code: None)(0)


def test_trackers_get_the_pictures_too(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = fit(tmp_path, make_loggers("tensorboard wandb csv", tmp_path), wandb_style)
    for logger in trainer.loggers:
        logger.finalize("success")
        getattr(logger, "close", lambda code: None)(0)
    fit(tmp_path / "other", make_loggers("wandb", tmp_path / "other"), tensorboard_style).loggers[0].close(0)  # type: ignore[attr-defined]
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert set(events.Tags()["images"]) == {"pictures", "stepped", "each", "one", "many"}
    assert [event.step for event in events.Images("each")] == [0, 1, 3, 4]
    for folder, found in ((tmp_path, "each"), (tmp_path / "other", "picture")):
        assert list((folder / "wandb").rglob(f"*/media/images/{found}*.png"))


def test_a_tracker_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no Pillow")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_image", fail)
    fit(tmp_path, make_loggers("tensorboard", tmp_path), lambda m: m.logger.log_image("x", [torch.zeros(4, 4)]))
    assert capsys.readouterr().err.count("no Pillow") == 1
    assert len(list((tmp_path / "media" / "x").iterdir())) == 4


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("boltcutter.report.media.write_atomically", fail)
    fit(tmp_path, make_loggers("csv", tmp_path), lambda m: m.logger.log_image("x", [torch.zeros(4, 4)]))
    assert capsys.readouterr().err.count("no space left") == 1


TASK = """
import torch
from boltcutter import Classification

class Pictures(Classification):
    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        w = next(self.parameters()).detach()
        self.logger.log_image("val/weights", [w[None], w[None] * 2], caption=["one", "two"])
        self.logger.experiment.add_scalar("norm", w.norm(), self.global_step)

    def on_test_epoch_end(self):
        super().on_test_epoch_end()
        self.logger.log_image("test/weights", next(self.parameters())[None])
"""


@pytest.mark.slow
def test_a_run_on_two_ranks_is_resumed_exactly_and_evaluated(script: Script, tmp_path: Path) -> None:
    """One rank writes; a resumed run replaces what a killed attempt had logged later."""
    (tmp_path / "pictures.py").write_text(TASK)
    builtin = (ROOT / "configs" / "task" / "classification.yaml").read_text()
    (tmp_path / "pictures.yaml").write_text(
        builtin.replace("boltcutter.task.classification.Classification", "pictures.Pictures")
    )
    env = {"PYTHONPATH": str(tmp_path)}
    common = ["model=linear", "logger=null", f"task={tmp_path}/pictures.yaml", "trainer.accelerator=cpu"]
    common += ["trainer.devices=2", "scheduler=constant", "trainer.max_epochs=3", "report=false"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = [script("train", *common, f"folder={whole}", ranks=2, env=env)]
    done += [script("train", *common, f"folder={parts}", "trainer.max_epochs=2", ranks=2, env=env)]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    late = parts / "media" / "val" / "weights" / "999.png"
    late.write_bytes(b"")
    done += [script("train", f"resume={parts}", "trainer.max_epochs=3", "report=true", ranks=2, env=env)]
    done += [script("evaluate", f"run={whole}", "split=val", env=env)]
    assert [each.returncode for each in done] == [0] * 4, [each.stderr for each in done]
    one, other = ({p.name: p.read_bytes() for p in (run / "media" / "val/weights").iterdir()} for run in (whole, parts))
    assert one == other
    assert len(one) == 4  # sanity check and three epochs
    tables = [pd.read_csv(run / "metrics.csv")["norm"] for run in (whole, parts)]
    pd.testing.assert_series_equal(*tables)
    assert json.loads((whole / "record.json").read_text())["attempts"][0]["reason"] == "completed"
    assert list((whole / "evaluation").glob("*/media/**/0.png"))
    assert "val/weights" in (parts / "report.html").read_text()
