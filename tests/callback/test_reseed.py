import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import lightning as L
import numpy as np
import pytest
import torch
from conftest import Script
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.callback.reseed import Reseed
from boltcutter.data.streams import Purpose, stream

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "have no `val_dataloader`", "is smaller than the logging interval")
]


class WithDropout(L.LightningModule):
    """Records the random numbers of each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.drawn: list[tuple[Any, ...]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mask = tuple(nn.functional.dropout(torch.ones(8)).tolist())
        self.drawn.append((mask, random.random(), np.random.random()))
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.rand(7), random.random(), np.random.random()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, seed: int, *, validate: bool = False, before: int = 0, epochs: int = 2) -> WithDropout:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(12, 4)), 4)
    task = WithDropout()
    torch.rand(before)
    options: dict[str, Any] = {"limit_val_batches": 1.0 if validate else 0}
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Reseed(seed)],
        **options,
    ).fit(task, loader, loader)
    return task


def test_random_numbers_do_not_depend_on_earlier_steps(tmp_path: Path) -> None:
    first, second = fit(tmp_path, 3), fit(tmp_path, 3, before=100)
    assert first.drawn == second.drawn
    assert len(set(first.drawn)) == 6  # 2 epochs × 3 batches


def test_validation_does_not_change_the_weights(tmp_path: Path) -> None:
    without, with_it = (fit(tmp_path, 3, validate=on).state_dict() for on in (False, True))
    assert all(torch.equal(without[name], with_it[name]) for name in without)


def test_seeds_differ(tmp_path: Path) -> None:
    assert not set(fit(tmp_path, 0).drawn) & set(fit(tmp_path, 1).drawn)


def test_each_rank_and_batch_draws_different_numbers() -> None:
    def draw(epoch: int, batch: int, rank: int) -> float:
        at = SimpleNamespace(current_epoch=epoch, global_rank=rank)
        Reseed(0).on_train_batch_start(cast(L.Trainer, at), L.LightningModule(), None, batch)
        return torch.rand(1).item()

    drawn = {draw(epoch, batch, rank) for epoch in range(3) for batch in range(3) for rank in range(3)}
    assert len(drawn) == 27


RANKS = """
import sys, lightning as L, torch
from boltcutter.callback.reseed import Reseed

class Task(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight, self.drawn = torch.nn.Parameter(torch.ones(1)), {}
    def training_step(self, batch, batch_idx):
        mask = torch.nn.functional.dropout(torch.ones(64))
        drawn = self.drawn[self.current_epoch, batch_idx] = self.all_gather(torch.cat([mask, torch.rand(1)]))
        assert not torch.equal(drawn[0, :-1], drawn[1, :-1]), "the masks of two ranks are equal"
        assert drawn[0, -1] != drawn[1, -1]
        return self.weight.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(ckpt_path=None):
    L.seed_everything(0)
    torch.rand(0 if ckpt_path is None else 5)
    saves = L.pytorch.callbacks.ModelCheckpoint(sys.argv[1], every_n_train_steps=3, save_top_k=-1, filename="{step}")
    task = Task()
    L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Reseed(0), saves],
    ).fit(task, torch.utils.data.DataLoader(torch.zeros(8, 1), 1), ckpt_path=ckpt_path)
    return task.drawn

whole, resumed = fit(), fit(sys.argv[1] + "/step=3.ckpt")
assert len(whole) == 8 and sorted(resumed) == sorted(whole)[3:], resumed
assert all(torch.equal(drawn, whole[at]) for at, drawn in resumed.items())
assert len({tuple(each) for drawn in whole.values() for each in drawn[:, :-1].tolist()}) == 16
print("differ")
"""


def test_two_real_ranks_drop_and_draw_differently_and_alike_after_a_resume(two_ranks: Script, tmp_path: Path) -> None:
    done = two_ranks(RANKS, str(tmp_path))
    assert done.stdout.count("differ") == 2


def test_the_generator_of_the_accelerator_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    at = SimpleNamespace(current_epoch=0, global_rank=0)
    on_cuda = SimpleNamespace(device=torch.device("cuda", 0))
    Reseed(0).on_train_batch_start(cast(L.Trainer, at), cast(L.LightningModule, on_cuda), None, 0)
    assert seeds == [stream(Purpose.STEP, 0) >> 1]


def test_a_hook_of_the_transfer_that_is_set_during_training_draws_its_own_numbers(tmp_path: Path) -> None:
    class Sets(WithDropout):
        at_transfer: ClassVar[list[float]] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.on_after_batch_transfer = self.augment  # type: ignore[method-assign]

        def augment(self, batch: Any, dataloader_idx: int) -> Any:
            self.at_transfer.append(random.random())
            return batch

    task = Sets()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, callbacks=[Reseed(3)], **options)
    trainer.fit(task, DataLoader(TensorDataset(torch.randn(12, 4)), 4))
    expected = [random.Random(stream(Purpose.TRANSFER, 3, position=batch)).random() for batch in (1, 2)]
    assert task.at_transfer == expected
