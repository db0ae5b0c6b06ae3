"""Inputs that are computed of labels of all samples are found by setting up the data again, and others are not."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Subset, TensorDataset

from boltcutter.data.module import DataModule, Splits
from boltcutter.diagnosis import reruns
from boltcutter.diagnosis.reruns import held_out_labels, table_of


class Table(L.LightningDataModule):
    """Random inputs of 200 samples, of which the first 120 of an order are for training."""

    def setup(self, stage: str) -> None:
        rng = np.random.default_rng(0)
        x, y, shop = rng.normal(size=(200, 40)), rng.integers(0, 2, 200), rng.integers(0, 30, 200)
        x[:, :3] += y[:, None]
        order = rng.permutation(200)
        train, held = order[:120], order[120:]
        x = self.features(x, y, shop, train)
        self.keep(x, y, train, held)

    def keep(self, x: Any, y: Any, train: Any, held: Any) -> None:
        tensors = torch.as_tensor(x), torch.as_tensor(y)
        self.parts = [TensorDataset(*(t[rows] for t in tensors)) for rows in (train, held)]

    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        return x

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 32)  # type: ignore[arg-type]


class Selected(Table):
    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        return x[:, np.argsort(-np.abs(x.T @ (y - y.mean())))[:5]]


class SelectedOnTraining(Table):
    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        return x[:, np.argsort(-np.abs(x[train].T @ (y[train] - y[train].mean())))[:5]]


class Encoded(Table):
    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        mean = np.bincount(shop, y, minlength=30) / np.maximum(np.bincount(shop, minlength=30), 1)
        return np.column_stack([x, mean[shop]])


class EncodedOnTraining(Table):
    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        mean = np.bincount(shop[train], y[train], minlength=30) / np.bincount(shop, minlength=30).clip(1)
        return np.column_stack([x, mean[shop]])


class Parts(Encoded):
    """Both splits are parts of one dataset."""

    def keep(self, x: Any, y: Any, train: Any, held: Any) -> None:
        whole = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        self.parts: Any = [Subset(whole, rows.tolist()) for rows in (train, held)]


class Standardized(Table):
    """Rows of training are chosen by label, and inputs are scaled by them."""

    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        rows = train_test_split(range(200), test_size=80, stratify=y, random_state=0)
        self.rows: Any = rows
        return (x - x[rows[0]].mean(0)) / x[rows[0]].std(0)

    def keep(self, x: Any, y: Any, train: Any, held: Any) -> None:
        first, last = self.rows
        super().keep(x, y, np.array(first), np.array(last))


class Generated(Table):
    """Samples, and edges between them, are drawn by label, and each has the mean of its neighbours."""

    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        rng = np.random.default_rng(1)
        edges = rng.random((200, 200)) < np.where(y[:, None] == y, 0.2, 0.05)
        return np.column_stack([x, (edges @ x) / edges.sum(1, keepdims=True).clip(1)])


class Drawn(Table):
    """More numbers are drawn for samples of one class, so all later ones are others."""

    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        rng = np.random.default_rng(1)
        return np.stack([row + rng.normal(size=2 + label).mean() for row, label in zip(x, y, strict=True)])


class Numbered(Table):
    """Classes are counted, and a column has what is known without labels."""

    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        counts = Counter(y.tolist())
        return np.column_stack([x, np.bincount(shop)[shop], np.full(200, counts[1])])


class Framed(Table):
    """A table of pandas, whose parts are drawn at random."""

    on_all = True

    def setup(self, stage: str) -> None:
        rng = np.random.default_rng(0)
        table = pd.DataFrame({"shop": rng.integers(0, 30, 200), "size": rng.normal(size=200)})
        table["bought"] = rng.integers(0, 2, 200)
        table = self.encode(table, table) if self.on_all else table
        train, held = train_test_split(table, test_size=80, random_state=0)
        parts = [train, held] if self.on_all else [self.encode(each, train) for each in (train, held)]
        columns = ["size", "mean"]
        self.parts = [TensorDataset(*(torch.tensor(p[c].to_numpy()) for c in (columns, "bought"))) for p in parts]

    def encode(self, table: Any, known: Any) -> Any:
        means = known.groupby("shop")["bought"].mean()
        return table.assign(mean=table["shop"].map(means).fillna(0.5))


class FramedOnTraining(Framed):
    on_all = False


class Loaded(DataModule):
    """A data module of the library, which loads its splits once."""

    shape, num_classes = (6,), 2

    def load(self) -> Splits:
        rng = np.random.default_rng(0)
        x, y, shop = rng.normal(size=(200, 5)), rng.integers(0, 2, 200), rng.integers(0, 30, 200)
        x = Encoded().features(x, y, shop, None)
        parts = [TensorDataset(torch.tensor(x[rows]), torch.tensor(y[rows])) for rows in (slice(120), slice(120, None))]
        return Splits(*parts)


class Written(Encoded):
    """Keeps its inputs in a file."""

    folder: Path

    def features(self, x: Any, y: Any, shop: Any, train: Any) -> Any:
        x = super().features(x, y, shop, train)
        np.save(self.folder / "x.npy", x)
        return x


class Random(Encoded):
    """Divides the samples otherwise each time."""

    def keep(self, x: Any, y: Any, train: Any, held: Any) -> None:
        order = np.random.default_rng().permutation(200)
        super().keep(x, y, order[:120], order[120:])


@pytest.mark.parametrize(
    ("kind", "is_found"),
    [
        *((Selected, True), (Encoded, True), (Parts, True), (Framed, True), (FramedOnTraining, False), (Loaded, True)),
        *((Table, False), (SelectedOnTraining, False), (EncodedOnTraining, False), (Standardized, False)),
        *((Generated, False), (Drawn, False), (Numbered, False), (Written, False), (Random, False)),
    ],
)
def test_inputs_of_labels_of_other_samples_are_found(kind: Any, is_found: bool, tmp_path: Path) -> None:
    data = kind()
    data.folder = tmp_path
    data.setup("fit")
    loader = data.train_dataloader()
    kept = table_of(loader)
    for file in tmp_path.iterdir():
        file.unlink()
    seen: Any = SimpleNamespace(trainer=SimpleNamespace(datamodule=data), splits=SimpleNamespace(train=loader))
    assert len([*held_out_labels(seen)]) == is_found
    now = table_of(data.train_dataloader())
    assert kept is not None
    assert now is not None
    assert all(torch.equal(a, b) for a, b in zip(kept.inputs, now.inputs, strict=True))
    assert not [*tmp_path.iterdir()]


class Held(Encoded):
    """Has its table from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.table = {"x": rng.normal(size=(200, 4)), "y": rng.integers(0, 2, 200), "shop": rng.integers(0, 30, 200)}

    def setup(self, stage: str) -> None:
        x = self.features(self.table["x"], self.table["y"], self.table["shop"], None)
        self.keep(x, self.table["y"], slice(120), slice(120, None))


def test_labels_that_the_data_module_has_are_restored() -> None:
    data = Held()
    data.setup("fit")
    before = data.table["y"].copy()
    share, (_, name) = reruns.share_changed(data, data.train_dataloader())
    assert share > 0.2
    assert name == "self.table['y']"
    assert np.array_equal(data.table["y"], before)


class InPlace(L.LightningDataModule):
    """Scales what it holds, and selects inputs by all labels."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=(200, 40)), rng.integers(0, 2, 200)

    def setup(self, stage: str) -> None:
        self.x /= 2
        self.part = TensorDataset(torch.from_numpy(self.x[:120]), torch.from_numpy(self.y[:120]))

    def train_dataloader(self) -> Any:
        return DataLoader(self.part, 32)


def test_what_a_data_module_changes_in_place_is_changed_in_a_copy() -> None:
    data: Any = InPlace()
    data.setup("fit")
    before = data.x.copy()
    reruns.share_changed(data, data.train_dataloader())
    assert np.array_equal(data.x, before)
