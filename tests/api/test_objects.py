"""Runs of objects that were built in Python."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import ROOT, Script, assert_same_history, saved_weights
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import boltcutter
from boltcutter.api import objects

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*srun", "ignore:.*does not have many workers", "ignore:.*have no `val_"
)


class Lit(L.LightningModule):
    """A plain module with dropout, whose losses depend on the generator of each step."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.stop_at = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)), stop_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, "test")

    def loss(self, batch: list[Tensor], split: str) -> Tensor:
        found = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(f"{split}/loss", found)
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loader(*, shuffle: bool = False) -> DataLoader[Any]:
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 2).long()), 8, shuffle=shuffle)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(shuffle=True)

    val_dataloader = test_dataloader = staticmethod(loader)


QUIET = ("logger=null", "callback.progress=null")


def train(*overrides: str, task: Any = None, data: Any = None, trainer: Any = None) -> Path:
    given = {"task": task or Lit(), "data": data or Data(), "trainer": trainer}
    return boltcutter.train(*QUIET, *overrides, **given, project=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("has_trainer", [False, True])
def test_a_signal_saves_a_run_that_is_resumed_exactly(has_trainer: bool, tmp_path: Path) -> None:
    def train_three_epochs(*overrides: str, task: Any = None) -> Path:
        if not has_trainer:
            return train("trainer.max_epochs=3", *overrides, task=task)
        trainer = L.Trainer(max_epochs=3, accelerator="cpu", log_every_n_steps=1, callbacks=[Timer()])
        return train(*overrides, task=task, trainer=trainer)

    whole = train_three_epochs(f"folder={tmp_path}/whole")
    with pytest.raises(boltcutter.PreemptionError):
        train_three_epochs(f"folder={tmp_path}/parts", task=Lit(stop_at=7))
    parts = train_three_epochs(f"resume={tmp_path}/parts")
    one, other = saved_weights(whole), saved_weights(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert_same_history(whole, parts)
    record = json.loads((parts / "record.json").read_text())
    assert [attempt["reason"] == "completed" for attempt in record["attempts"]] == [False, True]
    assert record["config"]["task"]["built_in_python"].endswith("test_objects.Lit")
    assert record["config"]["data"]["built_in_python"].endswith("test_objects.Data")
    assert record["name"] == "lit"
    assert record["test"].keys() == {"test/loss"}
    assert "built_in_python" in (parts / "report.html").read_text()


@pytest.mark.slow
def test_a_run_is_continued_for_longer_and_loaded(tmp_path: Path, script: Script) -> None:
    run = train(f"folder={tmp_path}/run", "trainer.max_epochs=1")
    train(f"resume={run}", "trainer.max_epochs=2")
    task, data = boltcutter.load(run, task=Lit(), data=Data(), ckpt="last", project=ROOT)
    assert all(torch.equal(task.state_dict()[name], value) for name, value in saved_weights(run).items())
    assert isinstance(data, Data)
    for command, *more in (("evaluate", f"run={run}"), ("predict", f"run={run}"), ("train", f"resume={run}")):
        done = script(command, *more)
        assert done.returncode == 2
        assert "Data was built in Python, not from a configuration; call boltcutter.load(" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_task_of_the_library_trains_a_network(tmp_path: Path) -> None:
    task = boltcutter.Classification(boltcutter.Linear((1, 8, 8), 10), optimizer=torch.optim.AdamW)
    run = train(f"folder={tmp_path}/run", "trainer.max_epochs=1", task=task, data=boltcutter.Digits())
    assert (run / "evaluation" / "test" / "confusion.csv").is_file()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"task": nn.Linear(2, 2)}, "task: expected a LightningModule, got torch.nn.modules.linear.Linear"),
        ({"task": Lit}, "task: expected a LightningModule"),
        ({"data": 3}, "data: expected a LightningDataModule, got int"),
        ({"data": [loader()]}, "data: expected a LightningDataModule, got list"),
        ({"trainer": 3}, r"trainer: expected an L.Trainer, got int"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(boltcutter.ConfigError, match=expected) as error:
        train(f"folder={tmp_path}/run", **given)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_compiled_module_is_trained_as_lightning_does() -> None:
    module = Lit()
    with objects.registered(torch.compile(module, backend="eager"), None, None, ()):
        assert objects.task(objects._name(module)) is module
    assert module._compiler_ctx is not None


class OwnIO(TorchCheckpointIO):
    """Somebody else's way to write checkpoints."""


def test_a_trainer_keeps_what_it_was_given(tmp_path: Path) -> None:
    saves, elsewhere, own = ModelCheckpoint(save_top_k=-1), CSVLogger(tmp_path / "logs"), OwnIO()
    given = L.Trainer(accelerator="cpu", callbacks=[saves], logger=elsewhere, plugins=[own], default_root_dir=tmp_path)
    default = L.Trainer(accelerator="cpu", default_root_dir=tmp_path)
    for each, kept in ((given, True), (default, False)):
        with objects.registered(Lit(), Data(), each, ()):
            found = objects.trainer("lightning.pytorch.trainer.trainer.Trainer", OwnIO(), callbacks=[], logger=[])
        assert (found.strategy.checkpoint_io is own, found.loggers == [elsewhere]) == (kept, kept)
        assert found.checkpoint_callbacks == ([saves] if kept else [])
        assert isinstance(found.strategy.checkpoint_io, OwnIO)


def test_another_class_or_a_used_trainer_is_refused(tmp_path: Path) -> None:
    class Other(Lit):
        pass

    used = L.Trainer(max_epochs=1, accelerator="cpu")
    with pytest.raises(boltcutter.ConfigError, match=r"trainer.max_epochs: set it in the trainer"):
        train("trainer.max_epochs=2", trainer=used)
    run = train(f"folder={tmp_path}/run", trainer=used)
    for given, expected in (({"trainer": used}, "it has trained a run already"), ({"task": Other()}, "pass the same")):
        with pytest.raises(boltcutter.ConfigError, match=expected):
            train(f"resume={run}", **given)  # type: ignore[arg-type]
    assert boltcutter.load(run, task=Lit(), data=Data(), project=ROOT).task.net
