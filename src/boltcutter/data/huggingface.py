"""Hugging Face datasets: those of the Hub, and local CSV, JSON, Parquet and WebDataset files and image folders."""

from __future__ import annotations

import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boltcutter.data.arrow import (
    ArrowDataset,
    arrow_column,
    class_indices,
    class_names,
    infer_shape,
    is_image,
    number_chunks,
)
from boltcutter.data.augment import Augment
from boltcutter.data.files import ExpansionError, check_expansion, expansion_limit
from boltcutter.data.image_io import check_image_shape, is_image_file, read_images
from boltcutter.data.module import DataModule, Kind, Splits
from boltcutter.data.splits import Indices, check_split, split_indices

INSTALL = "pip install 'boltcutter[datasets]'"
FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".tar": "webdataset"}
VAL_NAMES = ("validation", "val", "valid", "dev")
DataFiles = str | list[str] | dict[str, str | list[str]]


class HuggingFace(DataModule):
    """A dataset of the Hugging Face Hub, or local files, through the library ``datasets``.

    Files are converted to Arrow once, in ``cache_dir``, and memory-mapped, so that data may be larger than memory.
    Inputs are images, numbers, lists of numbers, or numbers stored as bytes; uint8 stays, other numbers become float32.

    Args:
        path: Name of a dataset on the Hub; ``imagefolder``, ``csv``, ``json``, ``parquet`` or ``webdataset`` with
            ``data_dir`` or ``data_files``; or a local folder or file.
        name: Configuration of the dataset, if it has several.
        revision: Commit, tag or branch on the Hub.
        data_dir: Folder of the files.
        data_files: Files, or a mapping from splits to files. Glob patterns are expanded.
        cache_dir: Folder of the Arrow files; None: Hugging Face's cache folder.
        input: Column of inputs, or several columns of numbers.
        target: Column of class labels; for regression, one or several columns of numbers.
        kind: ``classification`` or ``regression``.
        train: Name of the training split.
        val: Name of the validation split; None: ``validation`` if there is one, else a fraction of ``train``.
        test: Name of the test split; None: ``test`` if there is one, else a fraction of ``train``.
        split: Fractions of train, val and test, stratified by class, for splits that the dataset does not have. A
            test fraction of 0 leaves out the test split.
        group: Column of groups, such as patients, none of which is in two folds, or in two splits that are split off
            ``train``.
        dtype: Dtype of numbers that are stored as bytes.
        shape: Shape of one input; images are resized and cropped to it. None: the shape of the first input.
        num_classes: Number of classes; of target columns for regression. None: taken from the data.
        augment: Random transform of training images.
        options: Arguments of ``DataModule``, such as ``batch_size``.

    Source: Lhoest et al., Datasets: A Community Library for Natural Language Processing, 2021.
    """

    def __init__(
        self,
        *,
        path: str,
        name: str | None = None,
        revision: str | None = None,
        data_dir: str | None = None,
        data_files: DataFiles | None = None,
        cache_dir: Path | None = Path("data/huggingface"),
        input: str | list[str] = "image",
        target: str | list[str] = "label",
        kind: Kind = "classification",
        train: str = "train",
        val: str | None = None,
        test: str | None = None,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        group: str | None = None,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        num_classes: int | None = None,
        augment: Augment | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_split(split)
        try:
            np.dtype(dtype)
        except TypeError:
            raise ValueError(f"data.dtype={dtype} is not a dtype; try uint8 or float32") from None
        self.path, self.name, self.revision, self.cache_dir = path, name, revision, cache_dir
        self.data_dir, self.data_files = data_dir, data_files
        self.inputs = [input] if isinstance(input, str) else list(input)
        self.targets = [target] if isinstance(target, str) else list(target)
        if kind == "classification" and len(self.targets) != 1:
            raise ValueError(
                f"data.target={self.targets}: classification needs one column; give one, or set data.kind=regression"
            )
        self.kind: Kind = kind
        self.names = {"train": train, "val": val, "test": test}
        self.split, self.dtype, self.augment, self.group = split, dtype, augment, group
        self.shape, self.num_classes = shape, num_classes

    def infer_settings(self) -> dict[str, Any]:
        """Return ``shape`` and ``num_classes`` of the data."""
        self.setup("fit")
        return {"shape": list(self.shape or ()), "num_classes": self.num_classes}

    def load(self) -> Splits:
        """Open the dataset, and split off what it has no splits for."""
        found = self._select(self._open(self.path, self.data_files))
        count, existing = len(found["train"]), set(found)
        if self.num_folds and "val" in found:  # folds divide all these samples; nothing is copied
            from datasets import concatenate_datasets

            found["train"] = concatenate_datasets([found["train"], found.pop("val")])
        train, labels = found["train"], None
        if self.kind == "classification":
            self.classes = class_names(train, self.targets[0], self.num_classes)
        targets = {split: self._encode(dataset, split) for split, dataset in found.items()}
        if self.kind == "classification":
            self.num_classes, labels = len(self.classes), targets["train"].numpy()
        elif self.num_classes not in (None, targets["train"].size(1)):
            raise ValueError(
                f"data.num_classes={self.num_classes}, but data.target={','.join(self.targets)} has "
                f"{targets['train'].size(1)} numbers; set it to null"
            )
        self.num_classes = self.num_classes or targets["train"].size(1)
        self.statistics = {"classes": self.classes}
        if self.shape is None:
            self.shape = infer_shape(train, self.inputs, self.dtype)
        elif is_image(train, self.inputs):
            check_image_shape(self.shape)
        indices = split_indices(
            count,
            self.split,
            self.seed,
            labels,
            existing,
            num_folds=self.num_folds,
            fold=self.fold,
            groups=self._groups(train),
            num_val=len(train) - count,
        )
        splits = {}
        for split, chosen in zip(("train", "val", "test"), indices, strict=True):
            source, rows = (split, None) if split in found and split != "train" else ("train", chosen)
            if rows is None or len(rows):
                augment = self.augment if split == "train" else None
                settings: Any = {"dtype": self.dtype, "indices": rows, "augment": augment}
                splits[split] = ArrowDataset(found[source], self.inputs, targets[source], self.shape, **settings)
        return Splits(**splits)

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read images, or files of the other formats; their rows are named ``file:row``, counted from 1."""
        if self.shape is None:
            self.setup("predict")
        shape = self.shape or ()
        if all(path.is_dir() or is_image_file(path) for path in paths):
            if len(shape) != 3:
                raise ValueError(f"input={paths[0]}: data.shape={list(shape)} is not an image shape; give other files")
            return read_images(paths, (shape[0], shape[1], shape[2]))
        inputs, names = [], []
        for path in paths:
            if path.suffix not in FORMATS:
                raise ValueError(f"input={path}: expected images, or a file name that ends in {', '.join(FORMATS)}")
            dataset = self._open(str(path))["train"]
            self._check_columns(dataset, self.inputs, "input")
            rows = torch.zeros(len(dataset))  # there are no targets
            inputs.append(ArrowDataset(dataset, self.inputs, rows, shape, dtype=self.dtype).read_all())
            names += [f"{path}:{row}" for row in range(1, len(dataset) + 1)]
        return torch.cat(inputs), names

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position and the class names of a checkpoint."""
        super().load_state_dict(state_dict | {"classes": state_dict["statistics"].get("classes", [])})

    def _open(self, path: str, data_files: DataFiles | None = None) -> Any:
        """Load all splits as a ``DatasetDict``; the first process converts the files, the others wait for it."""
        try:
            import datasets  # imported here: takes 1.7 s
        except ModuleNotFoundError as error:
            if error.name != "datasets":
                raise
            raise ImportError(f"data=huggingface: the package datasets is not installed; {INSTALL}") from None
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        for file in local_files(path, data_files, self.data_dir):
            try:
                check_expansion(file, limit := expansion_limit(file))
            except ExpansionError:
                raise ValueError(
                    f"data.path={path}: {file} has more than {limit >> 20} MiB when it is expanded; expand it yourself"
                ) from None
            except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
                raise ValueError(f"data.path={path}: {file} is damaged ({error}); replace it") from None
        if (builder := FORMATS.get(Path(path).suffix)) is not None:
            path, data_files = builder, path
        try:
            return datasets.load_dataset(
                path,
                self.name,
                data_dir=self.data_dir,
                data_files=data_files,
                revision=self.revision,
                cache_dir=None if self.cache_dir is None else str(self.cache_dir),
            )
        except Exception as error:  # readers of files raise anything
            reason = " ".join(str(error.__cause__ or error).split())
            files = f" with data_files={data_files}" if data_files else f" with data_dir={self.data_dir}"
            given = files if data_files or self.data_dir else ""
            raise ValueError(
                f"data.path={path}{given} cannot be loaded: {reason}; correct data.path, data.data_dir or "
                "data.data_files"
            ) from None

    def _select(self, splits: Any) -> dict[str, Any]:
        """Choose the dataset of each split, as far as there is one."""
        defaults = {"train": (), "val": VAL_NAMES, "test": ("test",)}
        found: dict[str, Any] = {}
        for split, name in self.names.items():
            if name is not None and name not in splits:
                raise ValueError(f"data.{split}={name}: no such split; the dataset has {', '.join(splits)}")
            chosen = name or next((each for each in defaults[split] if each in splits), None)
            if chosen is not None and (name or split != "test" or self.split[2]):
                found[split] = splits[chosen]
                self._check_columns(splits[chosen], self.inputs, "input")
                self._check_columns(splits[chosen], self.targets, "target")
                if split == "train" and self.group:
                    self._check_columns(splits[chosen], [self.group], "group")
                if not len(splits[chosen]):
                    raise ValueError(f"data.{split}: the split {chosen} of {self.path} has no samples; choose another")
        return found

    def _groups(self, dataset: Any) -> Indices | None:
        """Index of the group of each row."""
        if self.group is None:
            return None
        from boltcutter.data.tabular import group_indices  # with pandas and scikit-learn, which others do not need

        return group_indices(arrow_column(dataset, self.group).to_pandas().rename(self.group))

    def _check_columns(self, dataset: Any, columns: list[str], setting: str) -> None:
        if missing := [column for column in columns if column not in dataset.column_names]:
            there = ", ".join(dataset.column_names)
            raise ValueError(f"data.{setting}={missing[0]}: no such column; the dataset has {there}")

    def _encode(self, dataset: Any, split: str) -> Tensor:
        """Class indices (N,) or regression targets (N, T) of all rows."""
        try:
            if self.kind == "classification":
                return class_indices(dataset, self.targets[0], self.classes)
            columns = [np.concatenate(number_chunks(dataset, name, "float32")) for name in self.targets]
        except ValueError as error:
            raise ValueError(f"{error} (in the {split} split)") from None
        found = torch.from_numpy(np.concatenate(columns, axis=1).astype(np.float32))
        if not found.isfinite().all():
            raise ValueError(f"data.target={','.join(self.targets)}: NaN or Inf in the {split} split; correct it")
        return found


def local_files(path: str, data_files: DataFiles | None, data_dir: str | None) -> Iterator[Path]:
    """The compressed files on this machine that a dataset is read from; none of one on the Hub."""
    named = [data_files] if isinstance(data_files, str) else data_files or []
    nested = named.values() if isinstance(named, dict) else named
    names = [name for each in nested for name in ([each] if isinstance(each, str) else each)]
    for text in (path, *([data_dir] if data_dir else []), *names):
        for place in (Path(text), Path(path, text)):
            inside = place.rglob("*") if place.is_dir() else [place]
            yield from (file for file in inside if file.suffix in (".gz", ".zip") and file.is_file())
