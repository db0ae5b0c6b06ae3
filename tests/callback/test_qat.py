from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from conftest import QUICK, Script, saved_weights

from boltcutter.callback import qat
from boltcutter.export.formats import Int8
from boltcutter.export.program import TaskProgram
from boltcutter.export.runner import load_torch, sha256
from boltcutter.model.mlp import MLP
from boltcutter.task.classification import Classification

MODEL = ["model=mlp", "model.hidden_sizes=[16]", "callback=[default,qat]", *QUICK[:2], "test=false"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(script: Script, tmp_path: Path) -> None:
    plain = [*MODEL, "scheduler=null"]
    for folder, overrides in {
        "whole": [*plain, "trainer.max_epochs=2", f"folder={tmp_path}/whole"],
        "parts": [*plain, "trainer.max_epochs=1", f"folder={tmp_path}/parts"],
        "again": [f"resume={tmp_path}/parts", "trainer.max_epochs=2"],
        "without": [*plain, "callback=default", "trainer.max_epochs=2", f"folder={tmp_path}/without"],
    }.items():
        done = script("train", *overrides)
        assert done.returncode == 0, f"{folder}: {done.stderr}"
        assert not done.stderr
    expected, found, without = (saved_weights(tmp_path / name) for name in ("whole", "parts", "without"))
    assert expected.keys() == found.keys() == without.keys()  # those of the plain model
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not all(torch.equal(expected[name], without[name]) for name in expected)


@pytest.mark.slow
def test_the_export_of_a_trained_model_loses_little(script: Script, tmp_path: Path) -> None:
    done = script("train", *MODEL, "model.hidden_sizes=[64]", "trainer.max_epochs=30", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    done = script("export", f"run={tmp_path}/run", "export=int8-dynamic", "export.max_drop=0.5", timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_export_rounds_as_the_trained_model(tmp_path: Path) -> None:
    torch.manual_seed(0)  # with some seeds, a value lies between two integers and may be rounded either way
    task = Classification(MLP((64,), 5, hidden_sizes=[64, 64]), optimizer=partial(torch.optim.Adam, lr=0.1)).eval()
    inputs = torch.rand(32, 64)
    program = TaskProgram(task, (inputs, torch.zeros(32)), {})
    Int8(dynamic=True).write(program, tmp_path / "model.pt2", lambda: iter(()))
    (found,) = load_torch(tmp_path / "model.pt2", None, sha256(tmp_path / "model.pt2"))(inputs.numpy())
    plain = program(inputs)[0].detach().numpy()
    qat.QAT().setup(L.Trainer(logger=False, enable_checkpointing=False), task, "fit")
    rounded = program(inputs)[0].detach().numpy()
    assert abs(rounded - plain).max() > 1e-5
    assert abs(found - rounded).max() < 1e-6


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qat, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"callback.qat: torchao is not installed; pip install 'boltcutter\[export"):
        qat.QAT()
