import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pandas as pd
import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from boltcutter.callback.checkpoint import LastCheckpoint
from boltcutter.training.best import CheckpointRecorder, why_no_best

LAST = """
last:
  _target_: boltcutter.callback.checkpoint.LastCheckpoint
  dirpath: ${checkpoints}
  filename: last
  every_n_epochs: 1
  save_on_train_epoch_end: true
  enable_version_counter: false
"""
OWN = """
{name}:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  dirpath: ${{folder}}/own
  filename: "{name}-{{step}}"
  monitor: {monitor}
  mode: {mode}
"""
# A learning rate so large that the last epoch is not the best.
SHORT = [*QUICK, "model=linear", "data.num_workers=0", "trainer.max_epochs=6", "optimizer.lr=0.3", "seed=3"]


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())  # type: ignore[no-any-return]


def callbacks(path: Path, *own: tuple[str, str, str], more: str = "") -> str:
    """Write an option of the group with the last checkpoint and plain ones: name, metric and mode."""
    path.write_text(LAST + "".join(OWN.format(name=name, monitor=m, mode=mode) for name, m, mode in own) + more)
    return f"callback={path}"


@pytest.fixture(scope="module")
def plain(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a plain ModelCheckpoint. Not to be changed."""
    place = tmp_path_factory.mktemp("plain")
    chosen = callbacks(place / "own.yaml", ("top", "val/accuracy", "max"))
    done = script("train", *SHORT, chosen, f"folder={place}/run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return place / "run"


def accuracies(folder: Path) -> dict[int, float]:
    """Validation accuracy by number of steps."""
    values = pd.read_csv(folder / "metrics.csv").set_index("step")["val/accuracy"].dropna()
    return {int(step) + 1: value for step, value in values.items()}


def test_what_somebody_has_set_in_place_of_saving_is_called_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, saved = list[L.Trainer](), list[str]()
    monkeypatch.setattr(CheckpointRecorder, "_record", lambda self, trainer: recorded.append(trainer))
    trainer, module = L.Trainer(accelerator="cpu", logger=False), L.LightningModule()
    own = saved.append
    trainer.save_checkpoint = own  # type: ignore[assignment,method-assign]
    recorder = CheckpointRecorder(cast(Any, None), {})
    for _ in range(2):
        recorder.setup(trainer, module, "fit")
        trainer.save_checkpoint("folder/a.ckpt")
    recorder.teardown(trainer, module, "fit")
    assert vars(trainer)["save_checkpoint"] is own
    assert (saved, recorded) == (["folder/a.ckpt"] * 2, [trainer] * 2)


def test_the_best_checkpoint_of_a_plain_callback_is_tested(plain: Path) -> None:
    by_step = accuracies(plain)
    best = max(by_step, key=lambda step: by_step[step])
    assert best != max(by_step), "the last epoch must not be the best"
    known = record(plain)
    assert known["best"] == f"own/top-step={best}.ckpt"
    assert known["best_after"] == best
    assert known["best_by"]["monitor"] == "val/accuracy"
    assert known["best_by"]["score"] == pytest.approx(by_step[best])


def test_commands_on_the_finished_run_use_it(script: Script, plain: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(plain, moved)
    done = script("evaluate", f"run={moved}", f"output={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == pytest.approx(record(plain)["test"])
    (kept,) = (moved / "own").iterdir()
    torch.save({}, kept)
    (plain / "own" / kept.name).rename(tmp_path / "hidden")  # the copy must not use the original either
    try:
        done = script("evaluate", f"run={moved}", f"output={tmp_path}/again")
    finally:
        (tmp_path / "hidden").rename(plain / "own" / kept.name)
    assert done.returncode != 0  # an empty file of torch is not damaged, but no checkpoint
    kept.write_bytes(b"cut")
    done = script("evaluate", f"run={moved}", f"output={tmp_path}/again")
    assert done.returncode == 0, done.stderr
    assert f"warning: ckpt=best: {kept}: not a checkpoint, or truncated" in done.stderr
    assert json.loads((tmp_path / "again" / "metrics.json").read_text()) != pytest.approx(record(plain)["test"])


def test_it_counts_after_resume(script: Script, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / plain.name
    chosen = callbacks(tmp_path / "own.yaml", ("top", "val/accuracy", "max"))
    done = script("train", *SHORT, chosen, f"folder={folder}", "trainer.max_epochs=4")
    assert done.returncode == 0, done.stderr
    older = record(folder) | {"saved": True}  # as earlier versions have recorded it
    (folder / "record.json").write_text(json.dumps(older))
    done = script("train", f"resume={folder}", "trainer.max_epochs=6", "optimizer.lr=1e-9")  # nothing gets better
    assert done.returncode == 0, done.stderr
    assert "checkpoints" in record(folder)["saved"]
    by_step = accuracies(folder)
    best = max(by_step, key=lambda step: by_step[step])
    assert record(folder)["best"] == f"own/top-step={best}.ckpt"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", "one"),
        (
            "stop: {_target_: lightning.pytorch.callbacks.EarlyStopping, mode: max, "
            "monitor: val/accuracy, patience: 99}\n",
            "two",
        ),
    ],
)
def test_the_monitored_one_of_several_is_tested(more: str, expected: str, script: Script, tmp_path: Path) -> None:
    own = [("one", "val/loss", "min"), ("two", "val/accuracy", "max")]
    chosen = callbacks(tmp_path / "own.yaml", *own, more=more)
    folder = tmp_path / "run"
    done = script("train", *SHORT, chosen, f"folder={folder}", "task.monitor=train/loss")
    assert done.returncode == 0, done.stderr
    assert Path(record(folder)["best"]).name.startswith(expected)
    lines = [line for line in done.stdout.splitlines() if line.startswith("best checkpoint: ")]
    assert len(lines) == 1
    assert "val/loss" in lines[0]
    assert "val/accuracy" in lines[0]


FAILS = """
from lightning.pytorch.callbacks import Callback


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 3:
            raise SystemExit(3)
"""


def test_a_run_that_ended_early_has_recorded_it(script: Script, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    chosen = callbacks(tmp_path / "own.yaml", ("top", "val/accuracy", "max"), more="fails: {_target_: fails.Fails}\n")
    folder = tmp_path / "run"
    done = script("train", *SHORT, chosen, f"folder={folder}", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    by_step = accuracies(folder)
    best = max(by_step, key=lambda step: by_step[step])
    assert record(folder)["best"] == f"own/top-step={best}.ckpt"


SAVED = """
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint


class Mine(ModelCheckpoint):
    pass


class Own(Checkpoint):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/of-{trainer.current_epoch}.ckpt")
"""
MINE = """
mine:
  _target_: saved.Mine
  dirpath: ${folder}/a
  monitor: val/loss
  mode: max
  save_last: true
  filename: "last-{epoch}"
"""
OWN_ONLY = """
own: {_target_: saved.Own, folder: "${folder}/b"}
"""


@pytest.mark.parametrize(
    ("written", "best", "last"),
    [(MINE, "a/last-epoch=0.ckpt", "a/last.ckpt"), (OWN_ONLY, None, "b/of-3.ckpt")],
    ids=["subclass", "own"],
)
def test_callbacks_of_the_user_alone_are_enough(
    written: str, best: str | None, last: str, script: Script, tmp_path: Path
) -> None:
    """Without the default callbacks: the best is tested, and a resumed run continues with the last."""
    (tmp_path / "saved.py").write_text(SAVED)
    (tmp_path / "own.yaml").write_text(written)
    folder, env = tmp_path / "run", {"PYTHONPATH": str(tmp_path)}
    options = [*QUICK, "model=linear", "data.num_workers=0"]
    done = script(
        "train", *options, f"callback={tmp_path}/own.yaml", f"folder={folder}", "trainer.max_epochs=4", env=env
    )
    assert done.returncode == 0, done.stderr
    known = record(folder)
    assert known["best"] == (best or last)
    assert bool(known["best_by"]) == bool(best)
    done = script("train", f"resume={folder}", "trainer.max_epochs=5", env=env)
    assert done.returncode == 0, done.stderr
    assert record(folder)["attempts"][-1]["resumed_from"] == str(folder / last)


LATE = " was never due; lower its every_n_epochs, or train longer"


def checkpoint_callback(**options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"monitor": "val/loss", **options})


@pytest.mark.parametrize(
    ("callbacks", "before", "after"),
    [
        ([checkpoint_callback()], None, "c0" + LATE),
        ([checkpoint_callback(save_top_k=0), LastCheckpoint()], "callback.c0.save_top_k=0; set it to 1", None),
        ([LastCheckpoint(), checkpoint_callback(monitor=None)], "callback.c1.monitor=null; set it", None),
        ([checkpoint_callback(save_top_k=0, save_last=True)], "callback.c0.save_top_k=0; set it to 1", None),
        ([checkpoint_callback(save_top_k=0), checkpoint_callback(save_top_k=-1)], None, "c1" + LATE),
        ([checkpoint_callback(every_n_epochs=9)], None, "c0" + LATE),
        ([checkpoint_callback(monitor="epoch", mode="max"), LastCheckpoint()], None, None),  # of which it is the last
        ([LastCheckpoint()], "none has a monitor; add callback.best", None),
        ([], None, None),  # nothing is saved, which is said elsewhere
    ],
)
def test_it_is_said_why_no_checkpoint_is_the_best(
    callbacks: list[Callback], before: str | None, after: str | None
) -> None:
    trainer: Any = SimpleNamespace(callbacks=callbacks, fast_dev_run=False, callback_metrics={"val/loss": 1.0})
    configured = {f"c{number}": callback for number, callback in enumerate(callbacks)}
    for ended, expected in ((False, before), (True, after)):
        note = why_no_best(trainer, configured, ended=ended) or ""
        assert note.endswith(expected or "")
        assert bool(note) == bool(expected)
    for callback in callbacks:
        vars(callback)["best_model_path"] = "some.ckpt"
    assert why_no_best(trainer, configured, ended=True) is None
