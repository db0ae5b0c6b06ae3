"""What a resumed run cannot continue exactly is found by comparison with the checkpoint."""

import csv
import io
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from boltcutter.config.settings import Settings
from boltcutter.training import exactness
from boltcutter.training.exactness import ExactnessCheck

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*many workers", "ignore:.*not resumable", "ignore:.*Checkpoint directory", "ignore:.*isinstance.treespec"
)
BATCHES = 4
BATCHES_SEEN = 0


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


class Held:
    """What a module may hold besides submodules: a schedule, an average of weights and a time."""

    __slots__ = ("average", "now", "state", "step")

    def __init__(self, net: torch.nn.Module) -> None:
        self.average = {name: value.clone() for name, value in net.state_dict().items()}
        self.step, self.now, self.state = 0, 0.0, SimpleNamespace(count=0)

    def update(self, net: torch.nn.Module) -> None:
        self.step += 1
        self.now = time.time()  # is not used before it is set again
        for name, value in net.state_dict().items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * value


class Net(torch.nn.Linear):
    """Counts its calls, and keeps its input."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x
        return super().forward(x)


DRAWN = {"batches": 0}
CACHE: dict[int, int] = {}
LAST: list[int] = []
LOGGED: list[int] = []
ANEW: list[int] = []
ROWS = csv.reader(["1", "2", "3"] * 9)


def count_batch(index: int) -> None:
    global BATCHES_SEEN
    BATCHES_SEEN += 1
    CACHE[index] = DRAWN["batches"]
    DRAWN["batches"] += 1


def count_items(index: int) -> None:
    LAST.append(index + sum(LAST[-2:]))
    LOGGED.append(index)  # which nothing reads
    ANEW.append(len(ANEW))
    next(ROWS)


class Module(L.LightningModule):
    created = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)
        self.held = Held(torch.nn.Linear(1, 600))
        self.outputs: list[float] = []
        self.draws, self.batch = itertools.count(), torch.zeros(())
        self.kind, self.net = kind, Net(1, 1) if kind == "inner" else torch.nn.Linear(1, 1)
        self.seen, self.in_epoch, self.mean, self.fixed = 0, 0, torch.zeros(()), 3
        self.more, self.rows = iter(DataLoader(TensorDataset(torch.zeros(99)))), iter(range(99))
        self.cycle, self.anew, self.file = itertools.cycle([1, 2, 3]), itertools.cycle([1, 2, 3]), io.StringIO("1\n2")
        self.history: dict[str, list[int]] = {"batches": []}

    def on_train_start(self) -> None:
        self.begun = object()
        if self.kind == "loader":
            self.trainer.fit_loop._combined_loader.flattened = [self.train_dataloader()]  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        self.in_epoch = 0
        self.outputs.clear()
        ANEW.clear()
        self.anew = itertools.cycle([1, 2, 3])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.in_epoch += 1
        if self.kind == "cleared":
            self.outputs.append(index)
            self.batch = batch[0]
        if self.kind == "iterators":
            next(self.more), next(self.cycle), next(self.rows), next(self.anew)
            self.file.readline()
        if self.kind == "lists":
            count_items(index)
        if self.kind == "shared":
            type(self).created += 1
            count_batch(index)
        if self.kind == "held":
            self.held.update(torch.nn.Linear(1, 600))
            self.held.state.count += 1
        if self.kind == "drawn":
            self.rng.random()
            next(self.draws)
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
        (
            "held",
            8,
            ["Module.held.average (was", "Module.held.step (was 8, is 0)", "Module.held.state.count (was 8, is 0)"],
        ),
        ("drawn", 8, ["Module.draws (was count(8), is count(0))", "Generator 1 of Module (was state "]),
        (
            "iterators",
            8,
            ["Module.more (was 8 batches yielded, is 0 ", "Module.rows (was 91 left, is 99 left)", "Module.cycle ("],
        ),
        ("iterators", 6, ["Module.more (was 6 batches", "and 1 more"]),
        (
            "shared",
            8,
            [
                "Module.created (was 8, is 0)",
                "test_exactness.DRAWN (was ['batches', 8], is ['batches', 0])",
                "test_exactness.BATCHES_SEEN (was 8, is 0)",
            ],
        ),
        (
            "lists",
            8,
            [
                "test_exactness.LAST (was [0, 1, 3",
                "test_exactness.ROWS (was line 8, is line 0)",
            ],
        ),
        ("inner", 8, ["Module.net.calls (was 8, is 0)"]),
        ("cleared", 8, []),
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
    LAST.clear(), LOGGED.clear(), ANEW.clear()
    sys.modules[__name__].ROWS = csv.reader(["1", "2", "3"] * 9)  # type: ignore[attr-defined]
    for place, name in ((Module, "created"), (sys.modules[__name__], "BATCHES_SEEN"), (DRAWN, "")):
        DRAWN.update(batches=0) if place is DRAWN else setattr(place, name, 0)  # as in a new process
    fit(kind, tmp_path, 12, resume=tmp_path / f"step={steps}.ckpt")
    printed = capsys.readouterr().out
    assert all(printed.count(name) == 1 for name in names), printed
    assert ("not exact" in printed) == bool(names)
    assert bool(recorded.get("inexact")) == bool(names)
    silent = ["fixed", "now", "CACHE", "LOGGED", "ANEW", "file", "batch (", "net.seen", *["anew"] * (steps == 8)]
    assert not any(name in printed for name in silent)


class Cursor(Dataset[Tensor]):
    """Draws by a position of its own, and keeps what it has read."""

    def __init__(self) -> None:
        self.position, self.file, self.transform = 0, None, Drawn()

    def __getitem__(self, index: int) -> Tensor:
        self.file = self.file or open(__file__)  # type: ignore[assignment]  # noqa: SIM115
        self.position += 1
        return torch.tensor(self.position)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_changes_in_workers_is_named(workers: int) -> None:
    """It changes there only, so that it cannot be compared."""
    loader = DataLoader(Subset(Cursor(), range(4)), num_workers=workers)
    trainer: Any = SimpleNamespace(train_dataloader=loader)
    assert exactness._changed_by_workers(trainer) == ["Cursor.position", "Drawn.draws"] * workers


def test_large_tensors_and_functions_are_compared() -> None:
    def texts(value: Any) -> dict[str, str]:
        return dict(exactness._texts(value, "x", set(), set()))

    def counter(start: int) -> Any:
        return lambda: start

    large = torch.zeros(2000, 3)
    changed = large.clone()
    changed[:9] = 1
    assert texts(large).keys() == {"x"}
    assert texts(large) == texts(large.clone()) != texts(changed)
    assert texts(large.bfloat16()) != texts(changed.bfloat16())
    assert texts([counter(3), torch.nn.Linear(1, 1)]).keys() == {"x[0].start", "x[1].weight", "x[1].bias"}
    steps = (2 * number for number in range(9))
    next(steps)
    assert texts(steps)["x.number"] == "0"
    assert texts([L.Trainer, np, open, torch.device("meta")]) == {}
    assert texts([torch.zeros(2, device="meta")]) == {}
