"""Tables: CSV and Parquet files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pandas.api import types
from sklearn.datasets import load_diabetes
from torch import Tensor

from boltcutter.data.module import BatchedTensorDataset, DataModule, Kind, Splits
from boltcutter.data.splits import Indices, check_split, split_indices
from boltcutter_data.files import ordinary

Floats = npt.NDArray[np.float64]
DATE = re.compile(
    r"[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}([ T].*)?|[0-9]{1,2}:[0-9]{2}(:[0-9]{2}.*)?"
)  # or a time of day
DATES = "{name}: column {column} has dates; convert it to numbers or set data.ignore=[{column}]"


class Tabular(DataModule):
    """A CSV or Parquet file, or scikit-learn's diabetes dataset, as feature vectors.

    Numeric columns are standardized to mean 0 and standard deviation 1; missing and infinite values are an error, or
    replaced by the median. Text columns are one-hot encoded; missing and unseen values are all zeros. Medians, means,
    standard deviations and categories come from the train split only, and checkpoints save them, so that prediction
    does not need the table.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file; None: the diabetes dataset.
        target: Column to predict, or several numeric columns.
        kind: ``classification`` or ``regression``; None: classification for text and booleans, else regression.
        ignore: Columns to ignore, such as names and row numbers.
        fill_missing: Whether to replace missing and infinite numbers by the median of their column.
        max_categories: Largest number of values of a text column, each of which becomes a feature.
        shape: Shape of one sample; None: taken from the columns.
        num_classes: Number of classes; of target columns for regression. None: taken from the data.
        split: Fractions of train, val and test, stratified by class.
        group: Column of groups, such as patients, none of which is in two splits or folds; not a feature.
        options: Arguments of ``DataModule``, such as ``batch_size``.

    Source: Efron et al., Least Angle Regression, 2004 (diabetes).
    """

    def __init__(
        self,
        *,
        path: Path | None = None,
        target: str | list[str] | None = None,
        kind: Kind | None = None,
        ignore: Sequence[str] = (),
        fill_missing: bool = False,
        max_categories: int = 100,
        shape: tuple[int] | None = None,
        num_classes: int | None = None,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        group: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if path is not None and not target:
            raise ValueError(f"data.target is not set; set it to a column of {path}, such as data.target=price")
        self.path, self.targets = path, [target] if isinstance(target, str) else list(target or ["target"])
        self.given_kind, self.kind, self.ignore = kind, kind or "regression", list(ignore)
        self.max_categories = max_categories
        self.fill_missing, self.groups = fill_missing, [group] if group else []
        check_split(split)
        self.shape, self.num_classes, self.split = shape, num_classes, split

    def infer_settings(self) -> dict[str, Any]:
        """Return ``shape``, ``num_classes`` and ``kind`` of the loaded table."""
        self.setup("fit")
        return {"shape": list(self.shape or ()), "num_classes": self.num_classes, "kind": self.kind}

    def load(self) -> Splits:
        """Split the rows, and encode them with the statistics of the train split."""
        table = self._table()
        targets = table[self.targets]
        empty = int(targets.isna().any(axis=1).sum())
        if empty:
            raise ValueError(f"{self._name}: {empty} rows have no {', '.join(self.targets)}; remove these rows")
        self.kind = self.given_kind or (
            "regression" if all(map(_is_number, map(targets.get, targets))) else "classification"
        )
        labels = self._labels(targets) if self.kind == "classification" else None
        groups = group_indices(table[self.groups[0]]) if self.groups else None
        settings: Any = {"num_folds": self.num_folds, "fold": self.fold, "groups": groups}
        splits = split_indices(len(table), self.split, self.seed, labels, **settings)
        features = table.drop(columns=[*self.targets, *self.ignore, *self.groups])
        self._check_finite(features, self._name)
        if not self.statistics:
            self.statistics = compute_statistics(features.iloc[splits[0]], self._name, self.max_categories)
            if labels is None:
                values = self._numbers(targets.iloc[splits[0]])  # (N, T)
                self.statistics |= {
                    "target_mean": values.mean(axis=0).tolist(),
                    "target_std": values.std(axis=0).tolist(),
                }
            else:
                self.statistics["classes"] = self.classes
        inputs = encode_features(table, self.statistics, self._name)
        encoded = torch.from_numpy(self._numbers(targets)).float() if labels is None else torch.from_numpy(labels)
        self._check_setting("shape", self.shape, (inputs.size(1),))
        num_classes = len(self.targets) if labels is None else len(self.classes)
        self._check_setting("num_classes", self.num_classes, num_classes)
        self.shape, self.num_classes = (inputs.size(1),), num_classes
        return Splits(*(BatchedTensorDataset(inputs[indices], encoded[indices]) for indices in splits))

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read CSV and Parquet files, encoded as in training; rows are named ``file:row``, counted from 1."""
        if not self.statistics:
            self.setup("predict")
        inputs, names = [], []
        for path in paths:
            table = read_table(path, text=list(self.statistics["categories"]))
            self._check_finite(table.filter(items=list(self.statistics["numbers"])), str(path))
            inputs.append(encode_features(table, self.statistics, str(path)))
            names += [f"{path}:{row}" for row in range(1, len(table) + 1)]
        return torch.cat(inputs), names

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position and the statistics of a checkpoint."""
        super().load_state_dict(state_dict)
        if "classes" in self.statistics:
            self.kind, self.classes = "classification", list(self.statistics["classes"])

    @property
    def _name(self) -> str:
        return f"data.path={self.path}" if self.path else "diabetes"

    def _table(self) -> pd.DataFrame:
        # Unscaled, because scikit-learn scales by statistics that include the test rows.
        try:
            table = read_table(self.path) if self.path else load_diabetes(as_frame=True, scaled=False).frame
        except ValueError as error:
            raise ValueError(f"data.path={error}") from None
        for setting, columns in (("target", self.targets), ("ignore", self.ignore), ("group", self.groups)):
            if missing := [column for column in columns if column not in table]:
                remedy = "; separate columns by commas" if len(table.columns) == 1 else ""
                raise ValueError(
                    f"data.{setting}: {self._name} has no column {', '.join(missing)}; "
                    f"it has {_join(list(table.columns))}{remedy}"
                )
        return table

    def _labels(self, targets: pd.DataFrame) -> Indices:
        """Class index of each row; also sets ``classes``."""
        if len(self.targets) > 1:
            raise ValueError(
                f"data.target={self.targets}: classification needs one column; give one, or set data.kind=regression"
            )
        column = targets.iloc[:, 0]
        values = column if _is_number(column) else column.astype(str)
        self.classes = list(self.statistics.get("classes") or [str(value) for value in np.unique(values.to_numpy())])
        numbers = pd.Index(self.classes).get_indexer(pd.Index(values.astype(str)))
        if (numbers < 0).any():
            raise ValueError(
                f"{self._name}: {self.targets[0]} has a class that is not in the checkpoint; remove those rows"
            )
        if len(self.classes) < 2:
            raise ValueError(f"{self._name}: {self.targets[0]} has only one class; at least two are needed")
        return numbers.astype(np.int64)

    def _numbers(self, targets: pd.DataFrame) -> Floats:
        """Regression targets (N, T)."""
        values = np.stack([_floats(targets[column], self._name) for column in self.targets], axis=1)
        if not np.isfinite(values).all():
            raise ValueError(f"{self._name}: {', '.join(self.targets)} has infinite values; correct these rows")
        return values

    def _check_finite(self, features: pd.DataFrame, name: str) -> None:
        """Check that no number is missing or infinite, unless ``fill_missing`` is set."""
        if self.fill_missing:
            return
        bad = {
            column: count
            for column in map(str, features.columns)
            if _is_number(features[column]) and (count := int((~np.isfinite(_floats(features[column], name))).sum()))
        }
        if bad:
            column, count = next(iter(bad.items()))
            others = f", also {_join(list(bad)[1:])}" if len(bad) > 1 else ""
            raise ValueError(
                f"{name}: column {column} has {count} missing or infinite values{others}; correct these rows, set "
                f"data.ignore=[{column}], or set data.fill_missing=true to use the median"
            )

    def _check_setting(self, setting: str, given: Any, found: Any) -> None:
        if given not in (None, found):
            raise ValueError(f"data.{setting}={given}, but {self._name} has {found}; set it to null to infer it")


def group_indices(column: pd.Series[Any]) -> Indices:
    """Index of the group of each row."""
    numbers, _ = pd.factorize(column)
    if missing := int((numbers < 0).sum()):
        raise ValueError(f"data.group={column.name}: {missing} rows have no group; remove them")
    return numbers.astype(np.int64)


def read_table(path: Path, text: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV or Parquet file with at least one row; of CSV, the columns ``text`` as text."""
    if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise ValueError(f"{path}: expected a file name that ends in .csv, .csv.gz or .parquet")
    ordinary(path, "give the path of a table")
    try:
        kinds: Any = dict.fromkeys(text, str)
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, dtype=kinds)
    except ImportError:  # pandas reads Parquet by pyarrow
        raise ValueError(f"{path}: pyarrow is not installed; pip install 'boltcutter[tabular]'") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a valid table ({' '.join(str(error).split())}); replace it") from None
    if table.empty:
        raise ValueError(f"{path}: the table has no rows; give one with rows")
    return table.rename(columns=str)


def compute_statistics(train: pd.DataFrame, name: str, max_categories: int = 100) -> dict[str, Any]:
    """Compute the statistics that ``encode_features`` needs, as plain types.

    Returns:
        ``columns`` in their order; ``numbers``: median, mean and standard deviation of each numeric column;
        ``categories``: values of each text column.

    Raises:
        ValueError: There is no column, or one has dates or too many texts.
    """
    if train.columns.empty:
        raise ValueError(f"{name}: no feature column is left; remove some from data.ignore or data.target")
    numbers: dict[str, list[float]] = {}
    categories: dict[str, list[str]] = {}
    for column in map(str, train.columns):
        values = train[column]
        if types.is_datetime64_any_dtype(values) or types.is_timedelta64_dtype(values):
            raise ValueError(DATES.format(name=name, column=column))
        if not _is_number(values) and not types.is_bool_dtype(values):
            categories[column] = sorted(values.dropna().astype(str).unique().tolist())
            _check_categories(column, categories[column], name, max_categories)
            continue
        found = _floats(values, name)
        known = found[np.isfinite(found)]
        median = float(np.median(known)) if known.size else 0.0
        filled = np.where(np.isfinite(found), found, median)
        numbers[column] = [median, float(filled.mean()), float(filled.std()) or 1.0]
    return {"columns": list(map(str, train.columns)), "numbers": numbers, "categories": categories}


def _check_categories(column: str, found: list[str], name: str, max_categories: int) -> None:
    """Refuse a column whose values would all become features: dates, names, or free text."""
    if len(found) > 2 and all(map(DATE.fullmatch, found)):
        raise ValueError(DATES.format(name=name, column=column))
    if len(found) > max_categories:
        raise ValueError(
            f"{name}: column {column} has {len(found)} different texts, such as {found[0][:40]!r}, each of which would "
            f"be a feature; set data.ignore=[{column}], or data.max_categories={len(found)}"
        )


def encode_features(table: pd.DataFrame, statistics: dict[str, Any], name: str) -> Tensor:
    """Encode the features of each row.

    Returns:
        Shape (N, F), float32.
    """
    if missing := [column for column in statistics["columns"] if column not in table]:
        raise ValueError(
            f"{name}: no column {', '.join(missing)}, which training had; it has {_join(list(table.columns))}"
        )
    features = []
    for column in statistics["columns"]:
        if column in statistics["categories"]:
            values = table[column].astype(str).where(table[column].notna(), None).to_numpy(object)
            features.append(values[:, None] == np.array([statistics["categories"][column]], object))  # (N, categories)
        else:
            median, mean, std = statistics["numbers"][column]
            found = _floats(table[column], name)
            features.append(((np.where(np.isfinite(found), found, median) - mean) / std)[:, None])
    return torch.from_numpy(np.concatenate(features, axis=1).astype(np.float32))


def _is_number(values: Any) -> bool:
    return types.is_numeric_dtype(values) and not types.is_bool_dtype(values)


def _floats(values: pd.Series[Any], name: str) -> Floats:
    try:
        return pd.to_numeric(values).to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: column {values.name} must be numeric: {error}; correct it") from None


def _join(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
