from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback.checkpoint import BestCheckpoint, CheckpointSizeError, LastCheckpoint
from boltcutter.checkpoint import AtomicCheckpointIO
from boltcutter.selection import find_best

SCORES = [5.0, 2.0, 3.0, 1.0, 4.0]  # of an epoch each


class Scored(L.LightningModule):
    """Some weights, and the scores it is told to have."""

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
    """Brings a checkpoint callback of its own."""

    def configure_callbacks(self) -> Callback:
        return ModelCheckpoint(filename="own")


def kept(folder: Path, callback: Callback, asynchronous: bool = False, module: type[Scored] = Scored) -> list[str]:
    """Names of what is left of a training, one optimizer step an epoch."""
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
def test_the_best_are_kept_and_the_best_of_them_is_found(
    tmp_path: Path, options: dict[str, Any], names: list[str], of_all: str, asynchronous: bool
) -> None:
    assert kept(tmp_path, BestCheckpoint(str(tmp_path), monitor="score", **options), asynchronous) == names
    assert find_best(tmp_path) == str(tmp_path / of_all)


def test_a_training_that_ends_before_the_first_validation_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data: Any = DataLoader(TensorDataset(torch.ones(3, 256)))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[BestCheckpoint(str(tmp_path), monitor="score")],
    )
    trainer.fit(Scored(), data, data)
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(
        "warning: callback.best.monitor=score: there was no validation yet, so no checkpoint is kept"
    )
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_weights_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointSizeError, match=r"^callback\.best\.max_gib=0\.0002: one checkpoint takes 0\.000245 GiB or more; try"
    ):
        kept(tmp_path, BestCheckpoint(str(tmp_path), monitor="score", max_gib=0.0002))
    assert not list(tmp_path.iterdir())


def test_no_room_for_all_of_a_checkpoint_is_told_at_the_first(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSizeError, match=r"^callback\.best\.max_gib=0\.000246: one checkpoint takes"):
        kept(tmp_path, BestCheckpoint(str(tmp_path), monitor="score", max_gib=0.000246))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": -2}, r"^callback\.best\.save_top_k=-2 is not a number of checkpoints; try 3"),
        ({"max_gib": 0.0}, r"^callback\.best\.max_gib=0\.0 is no room; try 10"),
        ({"max_gib": 1.0, "monitor": None}, r"^callback\.best\.max_gib=1\.0: nothing tells the worst; set"),
    ],
)
def test_values_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BestCheckpoint(**options)


def test_the_last_checkpoint_stays_beside_those_of_the_module_itself(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    assert kept(tmp_path, last, module=Checkpointed) == ["last.ckpt"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["own.ckpt"]
