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
from lightning.pytorch.callbacks import Timer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import boltcutter

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


def train(*overrides: str, task: Any = None, data: Any = None, **settings: Any) -> Path:
    return boltcutter.train(*QUIET, *overrides, task=task or Lit(), data=data or Data(), project=ROOT, **settings)


def make_trainer(kind: str, epochs: int) -> dict[str, Any]:
    if kind == "keywords":
        return {"max_epochs": epochs}
    if kind == "objects":
        return {"trainer": {"max_epochs": epochs, "callbacks": [Timer()]}, "enable_model_summary": False}
    return {"trainer": L.Trainer(max_epochs=epochs, accelerator="cpu", log_every_n_steps=1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keywords", "objects", "trainer"])
def test_a_signal_saves_a_run_that_is_resumed_exactly(kind: str, tmp_path: Path) -> None:
    whole = train(folder=tmp_path / "whole", **make_trainer(kind, 3))
    with pytest.raises(boltcutter.PreemptionError):
        train(task=Lit(stop_at=7), folder=tmp_path / "parts", **make_trainer(kind, 3))
    parts = train(resume=tmp_path / "parts", **make_trainer(kind, 3))
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
    run = train(folder=tmp_path / "run", max_epochs=1)
    train(resume=run, max_epochs=2)
    task, data = boltcutter.load(run, task=Lit(), data=Data(), ckpt="last", project=ROOT)
    assert all(torch.equal(task.state_dict()[name], value) for name, value in saved_weights(run).items())
    assert isinstance(data, Data)
    for command, *more in (("evaluate", f"run={run}"), ("predict", f"run={run}"), ("train", f"resume={run}")):
        done = script(command, *more)
        assert done.returncode == 2
        assert "Data was built in Python, not from a configuration; call boltcutter.load(" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("form", ["loader", "tuple", "dict"])
def test_dataloaders_are_a_data_module(form: str, tmp_path: Path) -> None:
    forms = {"loader": loader(), "tuple": (loader(), loader()), "dict": {"train": loader(), "test": loader()}}
    run = train("callback.best=null", data=forms[form], folder=tmp_path / "run", max_epochs=1)
    assert bool(json.loads((run / "record.json").read_text())["test"]) == (form == "dict")


def test_a_task_of_the_library_trains_a_network(tmp_path: Path) -> None:
    task = boltcutter.Classification(boltcutter.Linear((1, 8, 8), 10), optimizer=torch.optim.AdamW)
    run = train(task=task, data=boltcutter.Digits(), folder=tmp_path / "run", max_epochs=1)
    assert (run / "evaluation" / "test" / "confusion.csv").is_file()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"task": nn.Linear(2, 2)}, "task: expected a LightningModule, got torch.nn.modules.linear.Linear"),
        ({"task": Lit}, "task: expected a LightningModule"),
        ({"data": 3}, "data: expected a LightningDataModule or dataloaders, got int"),
        ({"data": "digits"}, "data: expected a LightningDataModule or dataloaders, got str"),
        ({"data": {"training": []}}, "data: training: no such split; use train"),
        ({"trainer": 3}, r"trainer: expected an L.Trainer or a dict of its arguments, got int"),
        ({"max_epoch": 3}, "max_epoch: no such key; did you mean trainer.max_epochs"),
        ({"max_epochs": "many"}, "trainer.max_epochs=many: expected"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(boltcutter.ConfigError, match=expected) as error:
        train(folder=tmp_path / "run", **given)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_another_class_or_a_used_trainer_is_refused(tmp_path: Path) -> None:
    class Other(Lit):
        pass

    used = L.Trainer(max_epochs=1, accelerator="cpu")
    run = train(folder=tmp_path / "run", trainer=used)
    for given, expected in (({"trainer": used}, "it has trained a run already"), ({"task": Other()}, "pass the same")):
        with pytest.raises(boltcutter.ConfigError, match=expected):
            train(resume=run, **given)
