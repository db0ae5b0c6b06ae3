import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import QUICK, STATE, Script, flip_a_bit
from torch import nn

from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.load import find_damage, load_checkpoint, read_metadata, restore
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
    for found in (
        AtomicCheckpointIO().load_checkpoint(saved_on_gpu, **options),
        load_checkpoint(saved_on_gpu, **options),
    ):
        assert found["state_dict"]["weight"].device == found["callbacks"]["Best"]["score"].device == torch.device("cpu")
        assert torch.equal(found["state_dict"]["weight"], STATE["state_dict"]["weight"])  # type: ignore[index]


def test_weights_of_a_gpu_are_loaded_into_a_model(saved_on_gpu: Path) -> None:
    model = nn.Linear(3, 2)
    load_weights(model, saved_on_gpu)
    assert torch.equal(model.weight, STATE["state_dict"]["weight"])  # type: ignore[index]
    assert incompatibility(load_checkpoint(saved_on_gpu), model) is None


@pytest.mark.parametrize("device", ["cuda:1", "xpu"])
def test_a_missing_device_is_not_reported_as_a_damaged_file(saved_on_gpu: Path, device: str) -> None:
    with pytest.raises(CheckpointError, match=rf"map_location={device} \(\w+ .*\w\); use map_location=cpu") as error:
        load_checkpoint(saved_on_gpu, device)
    assert "damaged" not in str(error.value)


def test_a_damaged_file_is_not_reported_as_a_missing_device(saved: Path) -> None:
    torch.save({"state_dict": Evil()}, saved)
    with pytest.raises(CheckpointError, match="would execute code or is damaged"):
        load_checkpoint(saved, "cuda:1")


def test_only_a_lazily_loaded_file_stays_mapped(saved: Path) -> None:
    found = load_checkpoint(saved)
    assert str(saved) not in Path("/proc/self/maps").read_text()
    lazy = load_checkpoint(saved, lazy=True)
    assert str(saved) in Path("/proc/self/maps").read_text()
    for state in (found, lazy):
        assert torch.equal(state["state_dict"]["weight"], STATE["state_dict"]["weight"])  # type: ignore[index]


def test_a_legacy_file_is_refused(saved: Path) -> None:
    torch.save(STATE, saved, _use_new_zipfile_serialization=False)
    readers: list[Callable[[Path], Any]] = [read_metadata, partial(load_checkpoint, lazy=True)]
    for read in readers:
        with pytest.raises(CheckpointError, match=r"not loaded, .* \(it has a legacy format\)$"):
            read(saved)
    for find in (load_checkpoint, find_damage):
        with pytest.raises(CheckpointError, match=r"legacy format of torch before 1\.6.*convert it by python"):
            raise CheckpointError(find(saved))


ERRORS = [(kind(), kind.__name__) for kind in (EOFError, TypeError, ValueError, AttributeError, zipfile.BadZipFile)]


@pytest.mark.parametrize(
    ("error", "why"), [*ERRORS, (KeyError("a"), "'a'"), (RuntimeError("See:\nno  data"), "no data")]
)
def test_errors_of_torch_are_reported_in_one_line(
    saved: Path, error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("boltcutter.checkpoint.unpickle.read_archive", fail)
    with pytest.raises(CheckpointError, match=rf"not loaded, because it would execute code or is damaged \({why}\)$"):
        load_checkpoint(saved)


@pytest.mark.parametrize("error", [zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, zlib.error])
def test_errors_of_reading_are_damage(saved: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(archive: zipfile.ZipFile) -> None:
        raise error("unreadable")

    monkeypatch.setattr("zipfile.ZipFile.testzip", fail)
    assert find_damage(saved) == f"not a checkpoint, or truncated ({saved.stat().st_size} bytes)"


def test_data_and_task_are_restored_from_a_checkpoint_or_an_export(saved: Path) -> None:
    class Data:
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    class Generator(nn.Linear):
        def generate(self) -> None: ...

    data, task, generator = Data(), nn.Linear(3, 2), Generator(3, 2)
    restore(data, str(saved), task)
    assert data.state == {"statistics": {}}
    assert torch.equal(task.weight, STATE["state_dict"]["weight"])  # type: ignore[index]
    torch.save(STATE | {Data.__qualname__: {"statistics": {"mean": 1.0}, "position": 2}}, saved)
    restore(data, str(saved))
    assert data.state == {"statistics": {"mean": 1.0}, "position": 2}
    exported: Any = SimpleNamespace(statistics={"mean": 2.0}, input_structure=["float32"], classes=["cat"])
    for each in (task, generator):
        restore(data, exported, each)
        assert data.state == {"statistics": {"mean": 2.0}, "input_structure": ["float32"], "classes": ["cat"]}
    assert generator.model is exported
    assert not hasattr(task, "model")


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
        print("state", state["mode"] is Mode.MIN)  # no other object in its place
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
    assert "state True\n" in resumed.stdout  # as it is a run of this user
    compared = script("compare", f"run={tmp_path}/uninterrupted", f"with={tmp_path}/cut")
    assert compared.stdout.endswith("bitwise identical\n")
    assert script("evaluate", f"run={tmp_path}/cut").returncode == 0
    monkeypatch.syspath_prepend(tmp_path)
    kept = torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=False)["hyper_parameters"]
    assert isinstance(kept["net"], torch.nn.Linear)  # for load_from_checkpoint
