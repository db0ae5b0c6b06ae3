"""The check command loads the data, applies the model, and with --batch trains eight steps, validates and tests."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.planning import check
from boltcutter.project import Project

ROOT = Path(__file__).parents[3]
MODULE = '''
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Flat(nn.Module):
    """Correct in shape, or with an error."""

    def __init__(self, features: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(features, outputs))

    def forward(self, x):
        return self.net(x / 255)


class Suspicious(Flat):
    """Valid, but rarely meant."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x):
        outputs = super().forward(x - x.float().mean(0) if self.fault == "mixed" else x.reshape(len(x), -1))
        if self.fault == "random":
            return outputs + torch.rand_like(outputs)
        return outputs.softmax(-1) if self.fault == "softmax" else outputs


class Wrong(L.LightningModule):
    def __init__(self, fault: str = "", lr: float = 0.1) -> None:
        super().__init__()
        self.fault, self.lr, self.net = fault, lr, nn.Linear(4, 1)

    def forward(self, x, y=None):
        return self.net(x.long() if self.fault == "dtype" else x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.logger.experiment.add_image("x", x, self.global_step)
        if self.fault == "signature":
            return self.forward(x, y, 1).mean()
        if self.fault == "targets":
            return F.mse_loss(self(x), y)
        return F.mse_loss(self(x)[:, 0], y)

    def validation_step(self, batch, batch_idx):
        if self.fault == "validation":
            batch["inputs"]
        self.log("val/loss", self(batch[0]).mean())

    def test_step(self, batch, batch_idx):
        if self.fault == "test":
            self.netw(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    def __init__(self, fault: str = "", num_workers: int = 0) -> None:
        super().__init__()
        self.fault, self.num_workers = fault, num_workers

    def setup(self, stage):
        if self.fault == "setup":
            {}["price"]
        self.dataset = Rows(self.fault)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, num_workers=self.num_workers)

    val_dataloader = test_dataloader = train_dataloader


class Rows(torch.utils.data.Dataset):
    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.fault == "sample":
            return {}["price"]
        return torch.rand(4, generator=torch.Generator().manual_seed(index)), torch.tensor(1.0)
'''
OWN = ["task=wrong.yaml", "data=wrong_data.yaml"]
Check = Callable[..., str]


@pytest.fixture
def mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run the command in a folder with the module; returns its mistakes, or what it printed."""
    (tmp_path / "wrong_parts.py").write_text(MODULE)
    for name, target in {"wrong": "Wrong", "wrong_data": "Data", "flat": "Flat", "suspicious": "Suspicious"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"_target_: wrong_parts.{target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.rglob("*")}

    def call(*arguments: str) -> str:
        try:
            with warnings.catch_warnings():
                check.check_command(Project.at(ROOT), [*arguments])
        except ConfigError as error:
            return str(error)
        assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == before
        out, err = capsys.readouterr()
        return out + "".join(line for line in err.splitlines() if line.startswith("warning: "))

    return call


@pytest.mark.parametrize(
    ("overrides", "setting", "shape"),
    [
        ("data=images data.folder=nowhere data.num_classes=3", "data.folder=nowhere: ", ""),
        ("init_from=nowhere.ckpt", "init_from=nowhere.ckpt: no such file; ", ""),
        ("trainer.devices=0.5", "trainer.devices=0.5 is not a number of devices; try ", ""),
        ("data=text data.path=nowhere.txt model=gpt task=language", "data.path=nowhere.txt: ", ""),
        ("data=tokens data.path=nowhere data.vocab_size=256 model=gpt task=language", "data.path=nowhere: ", ""),
        ("model=flat.yaml model.features=65", "model: ", "(16, 64) float32"),
        ("model=flat.yaml model.outputs=2", "task: ", "(16, 2) float32"),
        ("model=mlp model.num_classes=3", "task", "(16, 3) float32"),
        ("data=wrong_data.yaml data.fault=setup task=wrong.yaml", "data: Data.setup (wrong_parts.py:", ""),
    ],
)
def test_data_and_shapes(overrides: str, setting: str, shape: str, mistake: Check) -> None:
    found = mistake(*overrides.split())
    assert found.startswith(setting)
    assert shape in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mixed", "warning: mixing (likely): "),
        ("softmax", "warning: double-softmax (certain): "),
        ("random", ""),
        ("", ""),
    ],
)
def test_what_is_rarely_meant_is_a_warning(fault: str, message: str, mistake: Check) -> None:
    found = mistake("--batch", "model=suspicious.yaml", f"model.fault='{fault}'")
    assert found.startswith("ok\n")
    assert message in found if message else found == "ok\n"


def test_a_batch_of_one_sample_is_not_divided(mistake: Check) -> None:
    assert mistake("model=suspicious.yaml", "data.batch_size=1") == "ok\n"


@pytest.mark.parametrize(
    ("overrides", "setting", "part"),
    [
        ("task.fault=signature", "task: Wrong.training_step (wrong_parts.py:", "4 were given"),
        ("task.fault=dtype", "task: Wrong.forward (wrong_parts.py:", "(8, 4) int64"),
        ("task.fault=targets", "task: Wrong.training_step (wrong_parts.py:", "input (8, 1) float32, target (8,) float"),
        ("task.fault=validation", "task: Wrong.validation_step (", "batch: [(8, 4) float32, (8,) float32]"),
        ("task.fault=test", "task: Wrong.test_step (", "no attribute 'netw'"),
        ("task.lr=-1", "task: Wrong.configure_optimizers (", "learning rate: -1"),
        ("data.fault=sample", "data: Rows.__getitem__ (", "KeyError: 'price'"),
        ("data.fault=sample data.num_workers=1", "data: ", "KeyError: 'price'"),
        ("callback.best.monitor=val/los", "callback.best.monitor=val/los", "not logged"),
    ],
)
def test_batch(overrides: str, setting: str, part: str, mistake: Check) -> None:
    found = mistake("--batch", *OWN, *overrides.split())
    assert found.startswith(setting)
    assert part in found
    assert "\n" not in found


def test_correct_configurations(mistake: Check) -> None:
    assert mistake(*OWN) == mistake("--batch", *OWN) == "ok\n"
    assert mistake("--batch", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2") == "ok\n"
    assert mistake("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=3", "data.batch_size=66") == "ok\n"
    assert mistake("--batch", "model=flat.yaml", "callback=[default,early_stopping]") == "ok\n"


def test_a_mistake_in_the_samples_is_one_line(tmp_path: Path) -> None:
    np.full(4000, 65_000, np.uint16).tofile(tmp_path / "tokens.bin")
    given = ["data=tokens", f"data.path={tmp_path}/tokens.bin", "data.shape=[32]", "data.vocab_size=60000"]
    with pytest.raises(ConfigError, match=r"token 65000, but data\.vocab_size=60000"):
        check.check_command(
            Project.at(ROOT), [*given, "data.batch_size=2", "task=language", "model=gpt", "logger=null"]
        )
