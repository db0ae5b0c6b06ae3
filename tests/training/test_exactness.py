"""What a resumed run cannot continue exactly is found by comparison with the checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from boltcutter.config.settings import Settings
from boltcutter.training import exactness
from boltcutter.training.exactness import ExactnessCheck

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*many workers", "ignore:.*not resumable", "ignore:.*Checkpoint directory", "ignore:.*isinstance.treespec"
)
BATCHES = 4


class Drawn(Sampler[list[int]]):
    """A batch sampler that depends on how often it was drawn."""

    def __init__(self) -> None:
        self.draws = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        self.draws += 1
        return iter([[(self.draws + index) % 8] for index in range(BATCHES)])


class Level(L.Callback):
    def __init__(self) -> None:
        self.level = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.level += 1


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, torch.nn.Linear(1, 1)
        self.seen, self.in_epoch, self.mean, self.fixed = 0, 0, torch.zeros(()), 3
        self.history: dict[str, list[int]] = {"batches": []}

    def on_train_start(self) -> None:
        self.begun = object()
        if self.kind == "loader":
            self.trainer.fit_loop._combined_loader.flattened = [self.train_dataloader()]  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        self.in_epoch = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.in_epoch += 1
        if self.kind in ("attributes", "saved"):
            self.seen += 1
            self.mean = self.mean + batch[0].mean()
            self.history["batches"].append(index)
        return self.net(batch[0]).mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.kind == "saved":
            checkpoint["own"] = [self.seen, self.mean, self.history]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.kind == "saved":
            self.seen, self.mean, self.history = checkpoint["own"]

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.arange(8.0)[:, None])
        return DataLoader(data, batch_sampler=Drawn()) if self.kind == "sampler" else DataLoader(data, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(kind: str, folder: Path, steps: int, resume: Path | None = None) -> None:
    within = ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1, enable_version_counter=False)
    check = ExactnessCheck(Settings({"folder": str(folder)}))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=5,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[check, within, *([Level()] if kind == "callback" else [])],
    )
    trainer.fit(Module(kind), ckpt_path=resume, weights_only=True)
    if steps % BATCHES == 0:
        trainer.save_checkpoint(folder / f"step={steps}.ckpt")


@pytest.mark.parametrize(
    ("kind", "steps", "names"),
    [
        ("attributes", 8, ["Module.seen (was 8, is 0)", "Module.history", "Module.mean"]),
        ("saved", 8, []),
        ("plain", 8, []),
        ("sampler", 8, ["Drawn.draws (was 2, is 1)"]),
        ("callback", 8, ["Level.level (was 2, is 0)"]),
        ("plain", 6, ["Module.in_epoch (was 2, is 0)"]),  # within an epoch, at whose start a hook sets it
        ("loader", 6, ["loaders are replaced in on_train_start"]),
        ("loader", 8, []),
    ],
)
def test_what_was_not_restored_is_reported_once(
    kind: str,
    steps: int,
    names: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(exactness, "update_record", lambda folder, **facts: recorded.update(facts))
    fit(kind, tmp_path, steps)
    assert "not exact" not in capsys.readouterr().out
    fit(kind, tmp_path, 12, resume=tmp_path / f"step={steps}.ckpt")
    printed = capsys.readouterr().out
    assert all(printed.count(name) == 1 for name in names), printed
    assert ("not exact" in printed) == bool(names)
    assert bool(recorded.get("inexact")) == bool(names)
    assert "fixed" not in printed
