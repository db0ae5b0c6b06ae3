from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from sklearn.feature_selection import SelectKBest
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder, StandardScaler

from boltcutter.diagnosis.leaks import fitted_before_split


class OnAll(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x, y = self.read()
        selection = SelectKBest(k=3).fit(x, y)
        x = selection.transform(x)
        order = range(9)
        self.train, self.val = (x[order], y[order]), (x[9:], y[9:])


class OnAllAtOnce(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x, y = self.read()
        chosen = SelectKBest(k=3).fit_transform(x, y)
        self.parts = train_test_split(chosen, y)


class Copied(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x, y = self.read()
        x, y = self.sampler.fit_resample(x, y)
        parts = self.indices()
        self.sets = [(x[i], y[i]) for i in parts]


class OnTraining(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x, y = self.read()
        x, x_val, y, y_val = train_test_split(x, y)
        selection = SelectKBest(k=3).fit(x, y)
        self.sets = selection.transform(x)[:9], selection.transform(x_val), y, y_val


class OnRowsOfTraining(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x, y = self.read()
        first, last = self.indices()
        selection = SelectKBest(k=3).fit(x[first], y[first])
        x = selection.transform(x)
        self.sets = x[first], x[last]


class WithoutLabels(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        x, y = self.read()
        y = LabelEncoder().fit_transform(y)
        x = StandardScaler().fit_transform(x)
        self.sets = x[:9], y[:9], x[9:], y[9:]


class OfColumns(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        table, columns = self.read()
        table = self.encoder.fit_transform(table, columns)
        self.sets = table[:9], table[9:]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (OnAll, "SelectKBest(k=3).fit(x, y)` (OnAll.setup, line"),
        (OnAllAtOnce, "fit_transform(x, y)` (OnAllAtOnce.setup, line"),
        (Copied, "fit_resample(x, y)` (Copied.setup, line"),
        (OnTraining, ""),
        (OnRowsOfTraining, ""),
        (WithoutLabels, ""),
        (OfColumns, ""),
    ],
)
def test_what_is_fitted_to_all_labels_is_found(data: Any, said: str) -> None:
    seen: Any = SimpleNamespace(trainer=SimpleNamespace(datamodule=data()))
    found = [line.text for line in fitted_before_split(seen) if data.__name__ in line.text]  # type: ignore[union-attr]
    assert len(found) == bool(said)
    assert all(said in text for text in found)
