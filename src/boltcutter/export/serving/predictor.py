"""Predict raw inputs with a run: images, rows of a table, arrays or texts."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities import move_data_to_device

from boltcutter.assembly.assemble import assemble, complete_config
from boltcutter.assembly.precision import apply_precision
from boltcutter.checkpoint.load import restore
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.settings import Settings
from boltcutter.data.image_io import read_image, read_image_shape
from boltcutter.export.exported import ExportedModel
from boltcutter.protocols import GeneratesTokens, NativeData, find_model
from boltcutter.run.best import find_checkpoint
from boltcutter.structure import CLASS, inputs_of, is_alike, make_batch, outline, tensors, with_tensors

Array = npt.NDArray[Any]
Form = Literal["image", "row", "text", "array", "samples"]
IMAGE = Path("the image")  # what messages call it
SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # of PNG and JPEG; other decoders are not exposed
MAX_PIXELS = 1 << 24  # of an image, decoded or resized: a small file may contain far more


class Predictor:
    """The model of a run with its preprocessing.

    Args:
        cfg: Configuration of the run.
        folder: Folder of the run.
        ckpt: ``best``, ``last`` or a path.
        export: Used in place of a checkpoint: a format that the run was exported to, or the path of an export.

    Raises:
        ConfigError: The run has no such checkpoint or export, or its data module cannot read new inputs.
    """

    def __init__(self, cfg: Settings, folder: Path, ckpt: str = "best", export: str | None = None) -> None:
        cfg = complete_config(cfg)
        components = assemble(cfg, with_callbacks=False)
        self.task: Any = components.task
        data: Any = components.data
        self.data = data
        if not isinstance(data, NativeData):
            raise ConfigError(
                f"run={folder}: {type(data or self.task).__name__} cannot read new inputs; derive it from DataModule",
                kind="invalid_override",
            )
        self.export: ExportedModel | None = None
        self.device = components.trainer.strategy.root_device
        if export:
            self.export, self.device = ExportedModel(folder, export), torch.device("cpu")
        restore(self.data, self.export or find_checkpoint(cfg.place, ckpt), self.task)
        if self.export is None:
            generates = isinstance(self.task, GeneratesTokens)
            owner, method = (find_model(self.task), "forward") if generates else (self.task, "predict_step")
            apply_precision(components.trainer.precision_plugin, self.task, owner, method)
        self.task.to(self.device).eval()
        self.name, self.run = str(cfg.name), folder.name
        self.shape = tuple(cfg.data.get("shape") or ())
        self.classes = [str(name) for name in getattr(self.data, "classes", ())]
        self.is_regression = getattr(self.data, "kind", None) == "regression"
        self.collate = getattr(self.data, "collate_fn", None)
        self.structure = getattr(self.data, "input_structure", None) if self.collate is None else None
        try:
            self.form: Form = self._form()
            self.describe()
        except Exception as error:  # statistics are read from a file, which may be of another data module
            used = f"export={export}" if export else f"ckpt={ckpt}"
            raise ConfigError(
                f"{used}: its statistics are not those of {type(self.data).__name__} ({one_line(error, 200)}); "
                f"use one of run={folder}"
            ) from error

    def _form(self) -> Form:
        if isinstance(self.task, GeneratesTokens):
            return "text"
        if "columns" in getattr(self.data, "statistics", ()):
            return "row"
        if self.collate is not None or self.structure is not None:
            return "samples"  # which may have any structure and length
        return "image" if len(self.shape) == 3 and self.shape[0] in (1, 3) else "array"

    def describe(self) -> dict[str, Any]:
        """What the model takes and returns."""
        facts: dict[str, Any] = {"name": self.name, "run": self.run, "input": self.form, "classes": self.classes}
        if self.form == "row":
            statistics = self.data.statistics
            facts["columns"] = {
                column: list(statistics["categories"][column]) if column in statistics["categories"] else "number"
                for column in statistics["columns"]
            }
            facts["fill_missing"] = self.data.fill_missing
        elif self.structure is not None:
            facts["structure"] = self.structure
        elif self.form not in ("text", "samples"):
            facts["shape"] = list(self.shape)
        return facts

    def image(self, contents: bytes) -> Array:
        """Decode an image file as uint8 (1, C, H, W).

        Raises:
            ValueError: It is damaged, or too large.
        """
        if not contents.startswith(SIGNATURES):
            raise ValueError(f"{IMAGE}: not a valid PNG or JPEG image")
        _, height, width = read_image_shape(IMAGE, io.BytesIO(contents))
        scale = max(1, max(self.shape[1:]) / min(height, width))  # a narrow image becomes very long
        if height * width * scale**2 > MAX_PIXELS:
            raise ValueError(f"{IMAGE}: {width} x {height} pixels are too many; make it smaller")
        shape: Any = self.shape
        try:
            found = read_image(IMAGE, shape, io.BytesIO(contents)).numpy()[None]
        except Exception as error:  # Pillow passes on what the decoding of metadata raises
            raise ValueError(str(error) if isinstance(error, ValueError) else f"{IMAGE}: damaged") from None
        return self._preprocess(found) if hasattr(self.data, "preprocess") else found

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> Array:
        """Encode rows of a table (N, F).

        Raises:
            ValueError: A column is missing, or has a value of another type.
        """
        import pandas as pd

        from boltcutter.data.table import to_numbers
        from boltcutter.data.tabular import encode_features

        statistics = self.data.statistics
        known = [{column: row[column] for column in statistics["columns"] if column in row} for row in rows]
        try:
            table = pd.DataFrame(known)  # without further columns, of which each row could have thousands of others
            for column in table:
                if any(isinstance(value, dict | list) for value in table[column]):
                    raise ValueError(f"column {column}: expected numbers or texts")
            inputs = encode_features(table, statistics, "inputs").numpy()
        except OverflowError:
            raise ValueError("inputs: a number is too large") from None
        for column in statistics["numbers"]:
            found = to_numbers(table[column], "inputs")  # also of texts such as "NA" and "inf"
            if np.isinf(found).any():
                raise ValueError(f"column {column} has an infinite value; give a number")
            if np.isnan(found).any() and not self.data.fill_missing:
                raise ValueError(f"column {column} has a missing value; give a number")
        return inputs

    def array(self, values: Any) -> Array | list[Any]:
        """Convert nested lists or an array of samples to (N, …); raw samples, if the data module has ``preprocess``.

        Raises:
            ValueError: It is not numeric, not finite, or of another shape.
        """
        if not self.shape and isinstance(values, list) and isinstance(values[0], dict):
            return self.samples(values)
        try:
            found = np.asarray(values)
        except (ValueError, TypeError):
            raise ValueError("inputs: not a regular array; give samples of equal shape") from None
        if found.dtype.kind not in "uifb" or found.dtype.itemsize > 8:
            raise ValueError("inputs: not numbers")
        if hasattr(self.data, "preprocess"):  # of any shape and type
            return self._preprocess(found)
        self._check_shape(found)
        if self.form == "image" and found.dtype.kind in "ui":
            if found.size and (found.min() < 0 or found.max() > 255):
                raise ValueError("inputs: pixels are not between 0 and 255")
            return found.astype(np.uint8)
        if self.form == "image" and self.export and self.export.runner.card["inputs"][0].get("dtype") == "uint8":
            raise ValueError("inputs: the export takes integers, pixels between 0 and 255")
        found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError("inputs: not all values are finite")
        return found

    def samples(self, values: Any) -> list[Any]:
        """Convert samples in JSON to those that ``collate_fn`` takes, by ``preprocess`` if the data module has it.

        Without either, a sample has the structure that inputs had in training.

        Raises:
            ValueError: They are not numbers in lists and objects, or ``preprocess`` refuses them.
        """
        try:
            if hasattr(self.data, "preprocess"):
                found = self.data.preprocess([*values])
                found = found if isinstance(found, list) else _rows(found, len(values))
            elif self.structure is not None:
                found = [(_as_structure(value, self.structure),) for value in values]  # without a target
            else:
                found = [_to_tensors(value) for value in values]
            batch = make_batch(found, range(len(found)), self.collate)  # so that it fails alone, not joined with others
        except Exception as error:  # of the user's code, for samples of another structure
            remedy = "; make them in a method preprocess of the data module"
            if self.structure is not None:
                remedy = f"; give samples like {self.structure}"
            remedy = "" if hasattr(self.data, "preprocess") else remedy
            reason = one_line(error)[:200]
            raise ValueError(f"inputs: samples cannot be converted and collated ({reason}){remedy}") from None
        if self.structure is not None and not is_alike(given := inputs_of(batch), self.structure):
            raise ValueError(
                f"inputs: preprocess returns samples like {outline(given)}, and in training they are like "
                f"{self.structure}; return the same"
            )
        if not all(bool(part.isfinite().all()) for part in tensors(batch)):
            raise ValueError("inputs: not all values are finite")
        return found

    def _check_shape(self, found: Array) -> None:
        if self.shape and found.shape[1:] != self.shape:
            raise ValueError(f"inputs: shape {list(found.shape)}, expected [N, {', '.join(map(str, self.shape))}]")

    def _preprocess(self, raw: Array) -> Array:
        """Preprocess raw samples as the data module does for training; the shape of the model's inputs is the result's.

        Raises:
            ValueError: ``preprocess`` refuses them, or its result is not finite or of another shape.
        """
        try:
            found: Array = self.data.preprocess(raw).numpy()
        except Exception as error:  # of the user's code, for samples of another shape
            raise ValueError(f"inputs: preprocess refuses shape {list(raw.shape)}: {one_line(error)}") from None
        self._check_shape(found)
        if not np.isfinite(found).all():
            raise ValueError("inputs: not all values are finite")
        return found

    @torch.inference_mode()
    def predict(self, inputs: Array | list[Any]) -> Array:
        """Return probabilities (N, C), or values (N, T), of inputs (N, …), or of a list of samples."""
        given = inputs if isinstance(inputs, list) else torch.from_numpy(inputs)
        batch = make_batch(given, range(len(inputs)), self.collate)
        if self.export:
            (outputs,) = self.export.predict_batches([batch])
        else:
            outputs = self.task.predict_step(move_data_to_device(batch, self.device), 0)
        if len(outputs) != len(inputs):
            raise ValueError(f"{len(outputs)} predictions for {len(inputs)} samples")
        return np.asarray(outputs.float().cpu().numpy())

    def format(self, outputs: Array) -> list[dict[str, Any]]:
        """Convert outputs to what is sent to clients."""
        if self.is_regression:
            return [{"values": [float(value) for value in row]} for row in outputs]
        labels = self.classes or [str(number) for number in range(outputs.shape[1])]
        return [
            {
                "class": labels[int(row.argmax())],
                "probability": float(row.max()),
                "probabilities": dict(zip(labels, map(float, row), strict=True)),
            }
            for row in outputs
        ]

    def generate(self, prompt: str, tokens: int, *, temperature: float, top_k: int | None, seed: int) -> Iterator[str]:
        """Yield the continuation of a text in pieces.

        Raises:
            ValueError: The prompt has no token.
        """
        encoded = list(self.data.tokenizer.encode(prompt.encode()))
        if not encoded:
            raise ValueError("prompt: is empty")
        found, shown = list[int](), ""
        settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed}
        for token in self.task.generate(torch.tensor(encoded), tokens, **settings):
            found.append(token)
            text = str(self.data.tokenizer.decode(found))
            if text.startswith(shown) and not text.endswith("\ufffd"):  # a character may consist of several tokens
                yield text[len(shown) :]
                shown = text
        if (rest := str(self.data.tokenizer.decode(found))) != shown:
            yield rest[len(shown) :]


def _to_tensors(value: Any) -> Any:
    """Numbers and nested lists of numbers as tensors, also in objects."""
    if isinstance(value, dict):
        return {str(key): _to_tensors(inner) for key, inner in value.items()}
    return torch.tensor(value)


def _as_structure(value: Any, structure: Any, name: str = "a sample") -> Any:
    """Numbers and nested lists of numbers as tensors in a structure, of the form of ``structure.outline``.

    Raises:
        ValueError: The value has another structure.
    """
    if isinstance(structure, dict):
        kind: Any = _imported_class(structure.get(CLASS)) if "." in str(structure.get(CLASS)) else dict
        inner = {key: part for key, part in structure.items() if kind is dict or key != CLASS}
        if not isinstance(value, dict) or value.keys() != inner.keys():
            raise ValueError(f"{name} is not an object with {', '.join(inner)}")
        return kind(**{key: _as_structure(value[key], part, f"{name}[{key}]") for key, part in inner.items()})
    if isinstance(structure, list):
        if not isinstance(value, list) or len(value) != len(structure):
            raise ValueError(f"{name} is not a list of {len(structure)} inputs")
        parts = zip(value, structure, strict=True)
        return tuple(_as_structure(inner, part, f"{name}[{at}]") for at, (inner, part) in enumerate(parts))
    dtype = getattr(torch, str(structure), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is a {structure} in training; make it in a method preprocess of the data module")
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    try:
        found = torch.tensor(value, dtype=None if is_whole else dtype)
        if is_whole and found.is_floating_point():
            found = torch.tensor(value, dtype=torch.float64)  # whose whole numbers are exact up to 2 ** 53
    except Exception as error:  # of texts, objects, and lists of different lengths
        raise ValueError(f"{name} is no array of numbers: {one_line(error, 100)}") from None
    made = found.to(dtype)
    if is_whole and not torch.equal(made.double(), found.double()):
        raise ValueError(f"{name} has numbers that {structure}, its type in training, does not have")
    return made


def _imported_class(path: Any) -> Any:
    """A named tuple or dataclass of a module that the run has imported, which nothing else is imported for.

    Raises:
        ValueError: There is none, such as where a function defines it.
    """
    place = str(path).split(".")
    end = next((end for end in range(len(place) - 1, 0, -1) if ".".join(place[:end]) in sys.modules), 0)
    found: Any = sys.modules.get(".".join(place[:end]))
    for name in place[end:]:
        found = getattr(found, name, None)
    if not isinstance(found, type) or not (is_dataclass(found) or hasattr(found, "_fields")):
        raise ValueError(f"a sample is a {path} in training; make it in a method preprocess of the data module")
    return found


def _rows(stacked: Any, count: int) -> list[Any]:
    """The samples of a tensor, or of a structure of tensors with the samples in their first dimension."""
    parts = tensors(stacked)
    return [with_tensors(stacked, [part[row] for part in parts]) for row in range(count)]
