import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback.checkpoint import BestCheckpoint, CheckpointSizeError, LastCheckpoint
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.checkpoint.find import find_best_by_score

SCORES = [5.0, 2.0, 3.0, 1.0, 4.0]  # one per epoch


class Scored(L.LightningModule):
    """A module that logs predefined scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)  # 0.25 MiB

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("score", SCORES[self.current_epoch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Checkpointed(Scored):
    """Configures its own checkpoint callback."""

    def configure_callbacks(self) -> Callback:
        return ModelCheckpoint(filename="own")


def checkpoints(
    folder: Path, callback: Callback, asynchronous: bool = False, module: type[Scored] = Scored
) -> list[str]:
    """Names of the checkpoints after training with one optimizer step per epoch."""
    data: Any = DataLoader(TensorDataset(torch.ones(1, 256)))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=len(SCORES),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[callback],
        plugins=[AtomicCheckpointIO(asynchronous=asynchronous)],
        default_root_dir=folder,
    )
    trainer.fit(module(), data, data)
    return sorted(path.name for path in folder.glob("*.ckpt"))


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


@pytest.mark.parametrize(
    ("options", "names", "of_all"),
    [
        ({}, ["best.ckpt"], "best.ckpt"),
        ({"save_top_k": 2}, ["best-2.ckpt", "best-4.ckpt"], "best-4.ckpt"),
        ({"save_top_k": 2, "mode": "max"}, ["best-1.ckpt", "best-5.ckpt"], "best-1.ckpt"),
        ({"save_top_k": -1}, [f"best-{step}.ckpt" for step in (1, 2, 3, 4, 5)], "best-4.ckpt"),
        ({"save_top_k": -1, "max_gib": 0.6 / 1024}, ["best-2.ckpt", "best-4.ckpt"], "best-4.ckpt"),
        ({"save_top_k": 3, "max_gib": 0.3 / 1024}, ["best-4.ckpt"], "best-4.ckpt"),
        ({"save_top_k": -1, "max_gib": 1, "mode": "max"}, [f"best-{s}.ckpt" for s in (1, 2, 3, 4, 5)], "best-1.ckpt"),
    ],
    ids=str,
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_checkpoints_are_kept_and_found(
    tmp_path: Path, options: dict[str, Any], names: list[str], of_all: str, asynchronous: bool
) -> None:
    assert checkpoints(tmp_path, BestCheckpoint(str(tmp_path), monitor="score", **options), asynchronous) == names
    assert find_best_by_score(tmp_path) == str(tmp_path / of_all)


@pytest.mark.parametrize("limits", [{"max_steps": 1}, {"max_epochs": 3, "limit_val_batches": 0}])
def test_training_that_ends_before_the_first_validation_warns_once(
    limits: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data: Any = DataLoader(TensorDataset(torch.ones(3, 256)))
    trainer = L.Trainer(
        accelerator="cpu",
        **limits,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[BestCheckpoint(str(tmp_path), monitor="score", save_on_train_epoch_end=True)],
    )
    trainer.fit(Scored(), data, data)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "callback.best.monitor=score" in warning
    assert "trainer.val_check_interval" in warning
    assert not list(tmp_path.iterdir())


def test_weights_larger_than_the_limit_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSizeError, match=r"^callback\.best\.max_gib=0\.0002: .*0\.000245 GiB; try"):
        checkpoints(tmp_path, BestCheckpoint(str(tmp_path), monitor="score", max_gib=0.0002))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_larger_than_the_limit_is_refused_when_first_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSizeError, match=r"^callback\.best\.max_gib=0\.000246: .*; try"):
        checkpoints(tmp_path, BestCheckpoint(str(tmp_path), monitor="score", max_gib=0.000246))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": -2}, r"^callback\.best\.save_top_k=-2 .*; try 3"),
        ({"max_gib": 0.0}, r"^callback\.best\.max_gib=0\.0 .*; try 10"),
        ({"max_gib": 1.0, "monitor": None}, r"^callback\.best\.max_gib=1\.0 .*; set callback\.best\.monitor"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BestCheckpoint(**options)


def test_the_last_checkpoint_is_saved_beside_checkpoints_of_the_module(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    assert checkpoints(tmp_path, last, module=Checkpointed) == ["last.ckpt"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["own.ckpt"]


def test_a_url_that_needs_more_than_an_address_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^checkpoints=reference://x: cannot be reached \(.*\); use s3://"):
        BestCheckpoint("reference://x")


def test_a_folder_needs_no_package_for_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning alone imports all that are installed, which takes a second each."""
    for package in ("adlfs", "gcsfs", "s3fs"):
        (tmp_path / f"{package}.py").write_text("raise AssertionError('imported')")
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert checkpoints(tmp_path / "run", BestCheckpoint(str(tmp_path / "run"), monitor="score")) == ["best.ckpt"]
