"""The audit command: any Lightning script without a configuration, a configuration, and a run with its weights."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, Script, run_command

from boltcutter.config.errors import ConfigError
from boltcutter.diagnosis import Finding
from boltcutter.planning import audit
from boltcutter.planning.audit import is_converged, make
from boltcutter.project import Project

SCRIPT = """
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from helper import SIZE


class Net(L.LightningModule):
    def __init__(self, size=SIZE):
        super().__init__()
        self.net = nn.Linear(size, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).softmax(-1), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self.net(batch[0]).softmax(-1), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def needs(argument):
    return Net()


def loaders():
    x = torch.randn(200, SIZE, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    return DataLoader(data, 16), DataLoader(torch.utils.data.Subset(data, range(40)), 16)


net, text = Net(), "a text"
if __name__ == "__main__":
    raise AssertionError
"""
Audit = Callable[..., dict[str, Finding]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    (tmp_path / "audited_script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("SIZE = 40\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    before = {*tmp_path.rglob("*")}

    def audited(*arguments: str) -> dict[str, Finding]:
        found = audit.audit_command(Project.at(tmp_path), [*arguments])["findings"]
        assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == before
        return {finding.check: finding for finding in found}

    return audited


@pytest.mark.filterwarnings("ignore")  # of Lightning, about few workers
def test_a_script_is_audited_without_a_configuration(call: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    found = call("audited_script.py:Net", "audited_script.py:loaders", "trainer.max_epochs=3")
    assert found["double-softmax"].level == "certain"
    assert found["overlap"].level == "likely"
    assert found["baseline"].level == "note"
    out, err = capsys.readouterr()
    assert "warning: double-softmax (certain): " in err
    assert "note: baseline (note): " in err
    assert out.startswith("2 findings, ")


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ("nowhere.py:Net", "nowhere.py:Net: no such file"),
        ("audited_script.py:Nett", "audited_script.py:Nett: "),
        ("audited_script.py:text", "audited_script.py:text is a str"),
        (
            "audited_script.py:Net audited_script.py:text",
            "audited_script.py:Net is a Net, ",
        ),
        ("audited_script.py:needs", "audited_script.py:needs: "),
        ("audited_script.py:Net audited_script.py:loaders max_epochs=3", "max_epochs=3: "),
        ("audited_script.py:Net audited_script.py:loaders trainer.max_epoch=3", "trainer.max_epoch=3: "),
        ("audited_script.py:Net audited_script.py:loaders trainer.num_nodes=two", "trainer.num_nodes=two "),
        ("audited_script.py:Net audited_script.py:loaders trainer.num_nodes=0", "trainer.num_nodes=0: "),
        ("audited_script.py:Net audited_script.py:loaders trainer.accelerator=gpus", "trainer.accelerator=gpus: "),
        (
            "audited_script.py:Net audited_script.py:loaders trainer.devices=2 trainer.strategy=dpp",
            "trainer.strategy=dpp: ",
        ),
        ("ckpt=best", "ckpt=best: run is not set"),
    ],
)
def test_mistakes_are_one_line(arguments: str, setting: str, call: Audit) -> None:
    with pytest.raises(ConfigError) as error:
        call(*arguments.split())
    assert str(error.value).startswith(setting)
    assert "\n" not in str(error.value)


def test_objects_classes_and_functions_are_made(call: Audit, tmp_path: Path) -> None:
    made: Any = [make(f"audited_script.py:{name}") for name in ("net", "Net", "loaders")]
    assert [type(each).__name__ for each in made] == ["Net", "Net", "tuple"]


STREAM = """

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        for row in torch.randn(2000, SIZE, generator=random):
            yield row, (row[0] > 0).long()


class Hanging(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank:
            import time

            time.sleep(600)
        return super().training_step(batch, batch_idx)


class Drifting(Net):
    def on_train_start(self):
        self.net.bias.data += self.global_rank


def stream():
    return DataLoader(Stream(), 16)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "data", "expected"),
    [("Net", "stream", ["ranks-same-data"]), ("Net", "loaders", []), ("Drifting", "loaders", ["ranks-differ"])],
)
def test_two_ranks_are_compared(module: str, data: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "audited_script.py").write_text(SCRIPT + STREAM)
    (tmp_path / "helper.py").write_text("SIZE = 40\n")
    objects = [f"{tmp_path}/audited_script.py:{name}" for name in (module, data)]
    command = [sys.executable, "-m", "boltcutter", "audit", *objects, "trainer.devices=2", "--json"]
    done = run_command(command)
    found = [each["check"] for each in json.loads(done.stdout)["result"]["findings"]]
    assert [name for name in found if name.startswith("ranks")] == expected, done.stderr


@pytest.mark.slow
def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "audited_script.py").write_text(SCRIPT + STREAM)
    (tmp_path / "helper.py").write_text("SIZE = 40\n")
    monkeypatch.setattr(audit, "RANKS_SECONDS", 40.0)
    objects = [f"{tmp_path}/audited_script.py:{name}" for name in ("Hanging", "loaders")]
    (found,) = audit.compare_ranks(Project.at(tmp_path), [*objects, "trainer.devices=2"])
    assert (found.check, found.level) == ("ranks", "note")
    assert "over 40 s" in found.text
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not [text for text in commands if objects[0].encode() in text]


@pytest.mark.slow
def test_two_ranks_of_a_configuration_are_compared() -> None:
    done = run_command([sys.executable, "-m", "boltcutter", "audit", *QUICK, "model=mlp", "trainer.devices=2"])
    assert done.returncode == 0
    assert "ranks" not in done.stderr


def test_ranks_that_cannot_be_compared_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = audit.compare_ranks(Project.at(Path.cwd()), ["model=nothing"])
    assert (found.check, found.level) == ("ranks", "note")
    assert "model=nothing" in found.text


@pytest.mark.slow
def test_the_example_of_the_first_page() -> None:
    done = run_command([sys.executable, "-m", "boltcutter", "audit", "docs/demo.py:Demo", "docs/demo.py:tokens"])
    assert (done.returncode, done.stdout) == (0, "1 finding, 0 notes\n")
    assert "future-leak (certain)" in done.stderr


@pytest.mark.slow
def test_the_model_of_a_run_is_compared_with_baselines(script: Script, tmp_path: Path) -> None:
    assert script("train", *QUICK, "model=mlp", "trainer.max_epochs=8", f"folder={tmp_path}/run").returncode == 0
    done = run_command([sys.executable, "-m", "boltcutter", "audit", f"run={tmp_path}/run"])
    assert done.returncode == 0, done.stderr
    assert "baseline (" in done.stderr
    assert "your model" in done.stderr
    assert "points of accuracy" in done.stderr


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"best_after": 20}, False),  # its last validation was its best
        ({"best_after": None}, False),
        ({"best_by": None}, False),
        ({"attempts": [{"reason": "interrupted"}]}, False),
        ({"attempts": []}, False),
    ],
)
def test_a_run_whose_best_validation_is_before_its_end_has_converged(changed: dict[str, Any], expected: bool) -> None:
    record = {
        "attempts": [{"reason": "completed"}],
        "best_by": {"monitor": "val/loss"},
        "best_after": 10,
        "measured_after": {"val/loss": 20},
    }
    assert is_converged(record | changed) == expected
