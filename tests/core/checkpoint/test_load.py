import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, STATE, Script, flip_a_bit
from torch import nn

from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.checkpoint.load import load
from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.checkpoint.weights import incompatibility, load_weights


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("hello"), "not a checkpoint, or truncated (5 bytes)"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a checkpoint, or truncated"),
        (flip_a_bit, "is damaged"),
        (lambda path: torch.save({"state_dict": Evil()}, path), "would execute code"),
        (lambda path: path.write_bytes(pickle.dumps(Evil())), "not a checkpoint"),
        (lambda path: torch.save([1, 2], path), "holds a list, not a checkpoint"),
        (lambda path: torch.save({"weight": torch.ones(1)}, path), "load them with init_from="),
    ],
    ids=["gone", "empty", "text", "truncated", "flipped", "malicious", "pickle", "list", "bare"],
)
def test_a_bad_file_is_reported_in_one_line(saved: Path, spoil: Any, message: str) -> None:
    spoil(saved)
    with pytest.raises(CheckpointError) as error:
        AtomicCheckpointIO().load_checkpoint(saved)
    assert message in str(error.value)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("/tmp/never").exists()


@pytest.fixture
def saved_on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with tensors of a GPU, a foreign object, and weights in the usual places."""
    state = STATE | {"callbacks": {"Best": {"score": torch.tensor(0.5)}}, "hyper_parameters": {"net": nn.Linear(1, 1)}}
    with monkeypatch.context() as patched:
        patched.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        torch.save(state, tmp_path / "gpu.ckpt")
    return tmp_path / "gpu.ckpt"


@pytest.mark.parametrize("options", [{}, {"lazy": True}, {"map_location": None}, {"map_location": None, "lazy": True}])
def test_a_checkpoint_of_a_gpu_is_loaded_to_the_cpu(saved_on_gpu: Path, options: Any) -> None:
    for found in (AtomicCheckpointIO().load_checkpoint(saved_on_gpu, **options), load(saved_on_gpu, **options)):
        assert found["state_dict"]["weight"].device == found["callbacks"]["Best"]["score"].device == torch.device("cpu")
        assert torch.equal(found["state_dict"]["weight"], STATE["state_dict"]["weight"])  # type: ignore[index]


def test_weights_of_a_gpu_are_loaded_into_a_model(saved_on_gpu: Path) -> None:
    model = nn.Linear(3, 2)
    load_weights(model, saved_on_gpu)
    assert torch.equal(model.weight, STATE["state_dict"]["weight"])  # type: ignore[index]
    assert incompatibility(load(saved_on_gpu), model) is None


@pytest.mark.parametrize("device", ["cuda:1", "xpu"])
def test_a_missing_device_is_not_reported_as_a_damaged_file(saved_on_gpu: Path, device: str) -> None:
    with pytest.raises(CheckpointError, match=f"map_location={device} .* use map_location=cpu") as error:
        load(saved_on_gpu, device)
    assert "damaged" not in str(error.value)


OUTSIDE = """
import enum, functools
from pathlib import Path
import pandas as pd
from torch import nn
from lightning.pytorch.callbacks import Callback

class Mode(enum.Enum):
    MIN = "min"

class Foreign(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["hyper_parameters"] = {"net": nn.Linear(1, 1), "loss": functools.partial(nn.MSELoss)}
        checkpoint["hyper_parameters"] |= {"root": Path("data"), "frame": pd.DataFrame({"a": ["b"]}), "mode": Mode.MIN}

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        print("root", checkpoint["hyper_parameters"]["root"])

class Stateful(Foreign):
    def state_dict(self):
        return {"mode": Mode.MIN}

    def load_state_dict(self, state):
        raise AssertionError("has no state that could be loaded")
"""


@pytest.mark.slow
def test_a_run_whose_checkpoints_hold_objects_is_resumed_evaluated_and_compared(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    overrides = [*QUICK, "model=mlp", "scheduler=null"]  # a schedule would depend on the number of epochs
    overrides += [f"+callback.{name}._target_=outside.{name.title()}" for name in ("foreign", "stateful")]
    for folder, epochs in (("uninterrupted", 2), ("cut", 1)):
        done = script("train", *overrides, f"folder={tmp_path}/{folder}", f"trainer.max_epochs={epochs}")
        assert done.returncode == 0, done.stderr
    resumed = script("train", f"resume={tmp_path}/cut", "trainer.max_epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "root data\n" in resumed.stdout
    assert "last.ckpt: callbacks.Stateful.mode " in resumed.stderr
    compared = script("compare", f"run={tmp_path}/uninterrupted", f"with={tmp_path}/cut")
    assert compared.stdout.endswith("bitwise identical\n")
    assert script("evaluate", f"run={tmp_path}/cut").returncode == 0
    monkeypatch.syspath_prepend(tmp_path)
    kept = torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=False)["hyper_parameters"]
    assert isinstance(kept["net"], torch.nn.Linear)  # for load_from_checkpoint
