"""Tables: CSV and Parquet files."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from sklearn.datasets import load_diabetes
from torch import Tensor

from boltcutter.data.files import MAX_EXPANSION
from boltcutter.data.module import BatchedTensorDataset, DataModule, Kind, Splits
from boltcutter.data.splits import Indices, check_split, split_indices
from boltcutter.data.table import SEPARATORS, Floats, Type, decide_types, read_table, to_numbers, to_texts

MAX_ROUNDING = 0.01  # of targets that become 32 bits, in standard deviations
WHOLE = re.compile(r"[-+]?[0-9]+(\.0*)?")
FLAG = (0.0, 1.0)
MAX_LABELS = 50  # different whole numbers that can be classes


class Tabular(DataModule):
    """A CSV or Parquet file, or scikit-learn's diabetes dataset, as feature vectors.

    Columns of numerals are numbers, also ``true`` and ``false`` without empty cells; all others are texts, as are
    numerals with leading zeros. Numbers are standardized to mean 0 and standard deviation 1; missing and infinite ones,
    such as ``NA`` among numbers, are an error, or replaced by the median. Texts are one-hot encoded; missing and unseen
    values are all zeros. Types are those of the whole table; categories, medians, means and standard deviations come
    from the train split only. Checkpoints save them, so that prediction reads a file as training did, and does not need
    the table. ``check`` and the report list the type of each column.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file; None: the diabetes dataset.
        target: Column to predict, or several numeric columns.
        kind: ``classification`` or ``regression``; None: what the task expects, if the target can be both, as 0 and 1
            and few whole numbers can; without a task, classification for texts, booleans and 0 and 1, else regression.
        ignore: Columns to ignore, such as names and row numbers.
        columns: Types of columns that are decided otherwise: ``{zip: text, month: number}``.
        decimal: Decimal separator of numbers in CSV files.
        separator: Separator of CSV files; None: comma, semicolon, tab or ``|``, by the first line.
        encoding: Encoding of CSV files, such as ``latin-1``; None: UTF-8, or by the byte order mark.
        fill_missing: Whether to replace missing and infinite numbers by the median of their column.
        max_categories: Largest number of values of a text column, each of which becomes a feature.
        max_expansion: Largest size of the content of a ``.csv.gz`` or ``.parquet`` file, in sizes of the file; up to
            128 MiB are always read.
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
        columns: Mapping[str, Type] | None = None,
        decimal: Literal[".", ","] = ".",
        separator: str | None = None,
        encoding: str | None = None,
        fill_missing: bool = False,
        max_categories: int = 100,
        max_expansion: float = MAX_EXPANSION,
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
        if repeated := [column for column in self.targets if self.targets.count(column) > 1]:
            raise ValueError(f"data.target={self.targets}: {repeated[0]} is there more than once; remove one of them")
        kind = kind or ("classification" if self._names else None)  # whose classes have names
        self.given_kind, self.kind, self.ignore = kind, kind or "regression", list(ignore)
        self.columns, self.decimal, self.separator, self.encoding = dict(columns or {}), decimal, separator, encoding
        self.max_categories, self.max_expansion = max_categories, max_expansion
        self.read_as: list[str] = []  # a line for each column of the table
        self.possible_kinds: set[str] = set()  # what the target can be, if kind is not given
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
        features = table.drop(columns=[*self.targets, *self.ignore, *self.groups])
        kinds = self._decide(features, table[self.targets])
        labels = self._labels(table[self.targets]) if self.kind == "classification" else None
        if labels is not None and self._names is not None:
            self._check_names(self._names)  # before rows of other targets than classes are stratified
        targets = self._numbers(table[self.targets]) if labels is None else labels
        groups = group_indices(table[self.groups[0]]) if self.groups else None
        settings: Any = {"num_folds": self.num_folds, "fold": self.fold, "groups": groups}
        splits = split_indices(len(table), self.split, self.seed, labels, **settings)
        self._check_finite(features, [name for name, kind in kinds.items() if kind == "number"], self._name)
        is_trained = bool(self.statistics)
        if not is_trained:
            train = features.iloc[splits[0]]
            self.statistics = compute_statistics(train, self._name, self.max_categories, kinds, self.decimal)
            if labels is None:
                values = targets[splits[0]]  # (N, T)
                self.statistics |= {
                    "target_mean": values.mean(axis=0).tolist(),
                    "target_std": values.std(axis=0).tolist(),
                }
            else:
                self.statistics["classes"] = self.classes
        inputs = encode_features(table, self.statistics, self._name, self.decimal)
        if is_trained:
            self._note_unseen(table, self._name)
        encoded = torch.from_numpy(targets).float() if labels is None else torch.from_numpy(labels)
        self._check_setting("shape", self.shape, (inputs.size(1),))
        num_classes = len(self.targets) if labels is None else len(self.classes)
        self._check_setting("num_classes", self.num_classes, num_classes)
        self.shape, self.num_classes = (inputs.size(1),), num_classes
        return Splits(*(BatchedTensorDataset(inputs[indices], encoded[indices]) for indices in splits))

    def _decide(self, features: pd.DataFrame, targets: pd.DataFrame) -> dict[str, Type]:
        """Types of the features, as in training if a checkpoint has been loaded; also sets ``kind``."""
        if unknown := [column for column in self.columns if column not in {*features, *targets}]:
            raise ValueError(
                f"data.columns: {self._name} has no feature or target column {unknown[0]}; "
                f"it has {_join([*features, *targets])}"
            )
        of_targets, lines = decide_types(targets, self.columns, self._name, self.decimal)
        is_text = any(kind == "text" for kind in of_targets.values())
        is_class = is_text or any(_is_binary(targets[name]) for name in of_targets)
        self.kind = self.given_kind or ("classification" if is_class else "regression")
        self.possible_kinds = {self.kind} if is_text else {self.kind, "regression"}
        if not is_text and len(self.targets) == 1:
            values = to_numbers(targets.iloc[:, 0], self._name, self.decimal)
            self.possible_kinds |= {"classification"} if _are_labels(values) else set()
        if self.statistics:
            return {
                name: "number" if name in self.statistics["numbers"] else "text" for name in self.statistics["columns"]
            }
        kinds, self.read_as = decide_types(features, self.columns, self._name, self.decimal)
        self.read_as += [f"{line}; target of {self.kind}" for line in lines]
        return kinds

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read CSV and Parquet files, encoded as in training; rows are named ``file:row``, counted from 1.

        A line on the standard error says which texts training did not have.
        """
        if not self.statistics:
            self.setup("predict")
        inputs, names = [], []
        for path in paths:
            table = self._read_table(path)
            self._check_finite(table, [name for name in self.statistics["numbers"] if name in table], str(path))
            inputs.append(encode_features(table, self.statistics, str(path), self.decimal))
            self._note_unseen(table, str(path))
            names += [f"{path}:{row}" for row in range(1, len(table) + 1)]
        return torch.cat(inputs), names

    def _note_unseen(self, table: pd.DataFrame, name: str) -> None:
        """Say on the standard error which values of categories, and of flags (0 and 1), training did not have."""
        for column, known in self.statistics["categories"].items():
            texts = to_texts(table[column]).dropna()
            _note_values(texts[~texts.isin(known)].tolist(), f"{name}: column {column}", "they are no category")
        for column in self.statistics.get("flags", ()):  # which checkpoints of earlier versions do not have
            values = to_numbers(table[column], name, self.decimal)
            others = [f"{value:g}" for value in values[np.isfinite(values) & ~np.isin(values, FLAG)]]
            _note_values(others, f"{name}: column {column}", "it had 0 and 1")

    def _read_table(self, path: Path) -> pd.DataFrame:
        return read_table(path, encoding=self.encoding, separator=self.separator, max_expansion=self.max_expansion)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position and the statistics of a checkpoint."""
        if classes := state_dict["statistics"].get("classes", []):
            self.kind = "classification"
        super().load_state_dict(state_dict | {"classes": classes})

    @property
    def _name(self) -> str:
        return f"data.path={self.path}" if self.path else "diabetes"

    def _table(self) -> pd.DataFrame:
        # Unscaled, because scikit-learn scales by statistics that include the test rows.
        try:
            table = self._read_table(self.path) if self.path else load_diabetes(as_frame=True, scaled=False).frame
        except ValueError as error:
            raise ValueError(f"data.path={error}") from None
        for setting, columns in (("target", self.targets), ("ignore", self.ignore), ("group", self.groups)):
            if missing := [column for column in columns if column not in table]:
                is_cut = len(table.columns) == 1 or set(SEPARATORS) & set("".join(table.columns))
                remedy = "; set data.separator" if is_cut else ""
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
        values = to_texts(column)
        known = pd.Series(self.statistics.get("classes") or values.dropna().unique(), dtype=object)
        name = str(column.name)
        kind = decide_types(pd.DataFrame({name: known}), self.columns, self._name, self.decimal)[0][name]
        if kind == "number" and not set(known) <= {"False", "True"}:
            found = to_numbers(column, self._name, self.decimal)
            self._check_infinite(found)
            texts, values = values, _numerals(found)
            self._warn_of_equal(texts, values)
        self._check_known(values.isna().to_numpy())
        self.classes = list(self.statistics.get("classes") or sorted(values.unique(), key=_order))
        numbers = pd.Index(self.classes).get_indexer(pd.Index(values))
        if (numbers < 0).any():
            raise ValueError(
                f"{self._name}: {self.targets[0]} has a class that is not in the checkpoint; remove those rows"
            )
        if len(self.classes) < 2:
            raise ValueError(f"{self._name}: {self.targets[0]} has only one class; at least two are needed")
        return numbers.astype(np.int64)

    def _warn_of_equal(self, texts: pd.Series[Any], classes: pd.Series[Any]) -> None:
        """Warn of texts that are one class, as they are the same number, but for those such as ``1`` and ``1.0``."""
        found = pd.DataFrame({"text": texts, "class": classes}).dropna().drop_duplicates()
        for _, same in found.groupby("class")["text"]:
            if len(same) > 1 and not all(WHOLE.fullmatch(text) for text in same):
                rank_zero_warn(
                    f"{self._name}: {self.targets[0]} has {' and '.join(map(repr, same[:2]))}, which are the same "
                    f"number, so one class; set data.columns='{{{self.targets[0]}: text}}' if they are different"
                )
                return

    def _numbers(self, targets: pd.DataFrame) -> Floats:
        """Regression targets (N, T)."""
        columns = [to_numbers(targets[column], self._name, self.decimal) for column in self.targets]
        values = np.stack(columns, axis=1)
        self._check_known(np.isnan(values).any(axis=1))
        self._check_infinite(values)
        for column, found in zip(self.targets, values.T, strict=True):
            with np.errstate(over="ignore"):
                rounding = np.abs(found.astype(np.float32) - found).max()
                if found.min() < found.max() and not rounding <= MAX_ROUNDING * found.std():
                    raise ValueError(
                        f"{self._name}: {column} has values from {found.min():g} to {found.max():g}, whose differences "
                        "are lost in 32 bits; subtract their mean, or write them in another unit"
                    )
        return values

    def _check_known(self, is_missing: npt.NDArray[np.bool_] | np.bool_) -> None:
        if count := int(is_missing.sum()):
            raise ValueError(f"{self._name}: {count} rows have no {', '.join(self.targets)}; remove these rows")

    def _check_infinite(self, targets: Floats) -> None:
        if np.isinf(targets).any():
            raise ValueError(f"{self._name}: {', '.join(self.targets)} has infinite values; correct these rows")

    def _check_finite(self, table: pd.DataFrame, columns: Sequence[str], name: str) -> None:
        """Check that no number is missing or infinite, unless ``fill_missing`` is set."""
        if self.fill_missing:
            return
        values = {column: to_numbers(table[column], name, self.decimal) for column in columns if column in table}
        bad = {
            column: int((~np.isfinite(found)).sum()) for column, found in values.items() if not np.isfinite(found).all()
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


@rank_zero_only
def _note_values(values: list[str], where: str, what: str) -> None:
    if values:
        example = f"such as {values[0][:40]!r}; {what}"
        print(f"note: {where} has {len(values)} values that training did not have, {example}", file=sys.stderr)


def group_indices(column: pd.Series[Any]) -> Indices:
    """Index of the group of each row."""
    numbers, _ = pd.factorize(column)
    if missing := int((numbers < 0).sum()):
        raise ValueError(f"data.group={column.name}: {missing} rows have no group; remove them")
    return numbers.astype(np.int64)


def compute_statistics(
    train: pd.DataFrame,
    name: str,
    max_categories: int = 100,
    kinds: Mapping[str, Type] | None = None,
    decimal: str = ".",
) -> dict[str, Any]:
    """Compute the statistics that ``encode_features`` needs, as plain types.

    Args:
        train: The features of the train split.
        name: Name of the table, for messages.
        max_categories: Largest number of texts of a column.
        kinds: Types of the columns; None: decided by these rows.
        decimal: Decimal separator of numbers that are texts.

    Returns:
        ``columns`` in their order; ``numbers``: median, mean and standard deviation of each numeric column;
        ``categories``: values of each text column; ``flags``: numeric columns of 0 and 1 only.

    Raises:
        ValueError: There is no column, or one has dates or too many texts.
    """
    if train.columns.empty:
        raise ValueError(f"{name}: no feature column is left; remove some from data.ignore or data.target")
    kinds = kinds or decide_types(train, {}, name, decimal)[0]
    numbers: dict[str, list[float]] = {}
    categories: dict[str, list[str]] = {}
    flags: list[str] = []
    for column in map(str, train.columns):
        if kinds[column] == "text":
            categories[column] = sorted(to_texts(train[column]).dropna().unique().tolist())
            _check_categories(column, categories[column], name, max_categories)
            continue
        found = to_numbers(train[column], name, decimal)
        known = found[np.isfinite(found)]
        median = float(np.median(known)) if known.size else 0.0
        filled = np.where(np.isfinite(found), found, median)
        with np.errstate(over="ignore"):
            mean, std = float(filled.mean()), float(filled.std())
        if not math.isfinite(std) or (not std and filled.min() < filled.max()):
            raise ValueError(
                f"{name}: column {column} has numbers from {filled.min():g} to {filled.max():g}, whose standard "
                f"deviation is no number of 64 bits; correct them, or set data.ignore=[{column}]"
            )
        numbers[column] = [median, mean, std or 1.0]
        flags += [column] if np.array_equal(np.unique(known), FLAG) else []
    return {"columns": list(map(str, train.columns)), "numbers": numbers, "categories": categories, "flags": flags}


def _check_categories(column: str, found: list[str], name: str, max_categories: int) -> None:
    """Refuse a column whose values would all become features, such as names or free text."""
    if len(found) > max_categories:
        raise ValueError(
            f"{name}: column {column} has {len(found)} different texts, such as {found[0][:40]!r}, each of which would "
            f"be a feature; set data.ignore=[{column}], or data.max_categories={len(found)}"
        )


def encode_features(table: pd.DataFrame, statistics: dict[str, Any], name: str, decimal: str = ".") -> Tensor:
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
            values = to_texts(table[column]).to_numpy(object)
            features.append(values[:, None] == np.array([statistics["categories"][column]], object))  # (N, categories)
        else:
            median, mean, std = statistics["numbers"][column]
            found = to_numbers(table[column], name, decimal)
            features.append(((np.where(np.isfinite(found), found, median) - mean) / std)[:, None])
    return torch.from_numpy(np.concatenate(features, axis=1).astype(np.float32))


def _are_labels(values: Floats) -> bool:
    """Whether numbers can be classes: few different whole numbers, of each of which there are several."""
    distinct = np.unique(values[~np.isnan(values)])
    return bool(np.all(distinct == np.round(distinct))) and len(distinct) <= min(MAX_LABELS, len(values) // 5)


def _is_binary(values: pd.Series[Any]) -> bool:
    """Whether a column has the values 0 and 1, or true and false, and no others."""
    return set(to_texts(values).dropna()) in ({"0", "1"}, {"0.0", "1.0"}, {"False", "True"})


def _numerals(values: Floats) -> pd.Series[Any]:
    """The names of classes that are numbers, without ``.0`` if all are whole; None for a missing one."""
    known = values[~np.isnan(values)]
    is_whole = bool(np.all(known == np.round(known)))
    return pd.Series(
        [None if np.isnan(value) else str(int(value) if is_whole else value) for value in values.tolist()], dtype=object
    )


def _order(text: str) -> tuple[float, str]:
    """Sort numerals by their value, and before other texts."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def _join(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
