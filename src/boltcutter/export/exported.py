"""Use an export in place of a checkpoint."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boltcutter.config.errors import ConfigError, as_config_error, one_line, prefix_errors
from boltcutter.config.instantiate import build
from boltcutter.data.files import ordinary
from boltcutter.environment import announcement, user_key
from boltcutter.export.card import PREPROCESSING
from boltcutter.export.program import Inputs, select_inputs
from boltcutter.export.runner import CARD, Runner, read_card, read_once
from boltcutter.export.tabular import TableEncoder, describes_table
from boltcutter.project import Project
from boltcutter.run import trust

# The key of a path in an ONNX file, after its length as a varint, which may have more bytes than it needs.
EXTERNAL = re.compile(rb"[\x08\x00]location")


class ExportedModel(nn.Module):
    """An export as a module.

    Args:
        run: Folder of the run.
        export: Name of a format that the run was exported to, or the path of an export or of its file.

    Attributes:
        context_length: Maximum number of tokens of a language model.
        supports_cache: Whether the export has the key-value cache of its model.
        statistics: Those of the data module at the time of the export.
        input_structure: Likewise; None of a single tensor.
        classes: Names of classes; none if the data module has none.

    Raises:
        ConfigError: There is no such export, it has changed, or the package that runs it is missing.
    """

    def __init__(self, run: Path, export: str) -> None:
        super().__init__()
        folder, self.setting = find_export(run, export), f"export={export}"
        card = verified_card(folder, self.setting)
        try:
            self.runner = Runner(folder, torch.get_num_threads(), card)
            self.statistics, self.input_structure = trust.read_json(folder / PREPROCESSING), card.get("structure")
            self.classes = [str(name) for name in card.get("classes") or ()]
            self.encoder = TableEncoder(self.statistics) if describes_table(self.statistics) else None
            given = self.runner.card["inputs"][0]
            size = given["shape"][1] if len(given["shape"]) > 1 else None
        except ImportError as error:
            raise ConfigError(
                f"export={export}: {error.name} is not installed; pip install 'boltcutter[export]'",
                kind="not_installed",
            ) from None
        except (ValueError, OSError) as error:
            raise ConfigError(f"export={export}: {one_line(error)}") from error
        except Exception as error:  # each engine raises its own, and the card may be somebody else's
            raise ConfigError(f"export={export}: cannot be loaded ({one_line(error, 200)}); export it again") from error
        self.length = size if isinstance(size, int) else None
        longest = given.get("max_length")
        self.context_length = longest if isinstance(longest, int) and longest > 0 else self.length or 1
        self.supports_cache = bool(self.runner.card.get("cache"))

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        """Return the logits (N, T, V) of tokens (N, T) that follow those in the cache, which is extended in place."""
        if self.supports_cache:
            return self._compute(tokens, cache=cache)[0]
        length = tokens.size(1)
        padded = F.pad(tokens, (0, (self.length or max(2, length)) - length))  # which earlier positions do not see
        return self._compute(padded)[0][:, :length]

    def predict_batches(self, batches: Any) -> Iterator[Any]:
        """Yield the outputs for batches of a loader, as ``predict_step`` would return them."""
        for batch in batches:
            with self._one_line_errors():
                tensors = self._compute(*self._inputs(batch))
                names = [facts["name"] for facts in self.runner.card["outputs"]]
                found = dict(zip(names, tensors, strict=True))
            announcement.count_progress()
            yield tensors[0] if names == ["output"] or self.runner.card["takes"] == "task" else found

    def _inputs(self, batch: Any) -> Inputs:
        """The inputs of the export in a batch, as its card describes them: numbers in JSON may have another type."""
        inputs = select_inputs(batch, self.runner.card)
        if self.encoder:
            return (self.encoder.invert(inputs[0]),)
        types = (getattr(torch, str(facts.get("dtype")), None) for facts in self.runner.card["inputs"])
        return tuple(
            tensor.to(dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else tensor
            for tensor, dtype in zip(inputs, types, strict=True)
        )

    def _compute(self, *inputs: Tensor, **options: Any) -> list[Tensor]:
        """Return the outputs, one or more."""
        with self._one_line_errors():
            arrays = self.runner(*(tensor.cpu().numpy() for tensor in inputs), **options)
            return [torch.from_numpy(arrays[0]), *map(torch.from_numpy, arrays[1:])]

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Convert the errors of computing: each engine raises its own, and the card may be somebody else's."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            reason = one_line(error, 200) or type(error).__name__
            raise ConfigError(f"{self.setting}: cannot be computed ({reason}); export it again") from error


def verified_card(folder: Path, setting: str) -> dict[str, Any]:
    """Read the card of an export, whose program may be loaded.

    PyTorch unpickles files of ``torch.export``, and ONNX Runtime 1.23 reads weights from any file that one names.

    Raises:
        ConfigError: It is such a file of somebody else, and ``trust=true`` is not set.
    """
    with as_config_error():
        card = read_card(folder)
    name = card["program"] or ""  # none of weights alone
    if trust.is_granted() or user_key.is_signed(card.get("files"), card.get("signature")):
        return card
    if name.endswith(".pt2"):
        raise ConfigError(
            f"{setting}: to load {name} may execute code, and you have not signed it; use an export to "
            "onnx, or set trust=true if you trust its source"
        )
    with prefix_errors(setting, ValueError):  # not by another opening, as the file may change in between
        content = read_once(folder / name, card["files"][name]["sha256"]) if name.endswith(".onnx") else b""
    if EXTERNAL.search(content):
        raise ConfigError(
            f"{setting}: {name} takes weights from other files, and you have not signed it; set trust=true "
            "if you trust its source"
        )
    return card


def load_exported(folder: str | Path) -> nn.Module:
    """Load the model of an export to ``safetensors``, as on the Hugging Face Hub, without executing what it contains.

    Args:
        folder: Folder with ``config.json`` and ``model.safetensors``.

    Returns:
        The model with its weights, in evaluation mode, on the CPU.

    Raises:
        ConfigError: A file is missing, or ``config.json`` names a class that is neither the project's nor well known.
    """
    from safetensors.torch import load_model

    place = Path(folder)
    try:
        node = dict(trust.read_json(place / "config.json")["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place}/config.json: cannot be read ({error}); give the folder of an export") from error
    trust.check_record(node, f"folder={place}", place, Project.find())
    file = "config.json"
    try:
        model: nn.Module = build(node, "model")
        file = "model.safetensors"
        load_model(model, ordinary(place / file))
    except Exception as error:  # safetensors, and each constructor, raises its own
        raise ConfigError(f"{place}/{file}: cannot be loaded ({one_line(error, 200)}); export it again") from error
    return model.eval()


def find_export(run: Path, export: str) -> Path:
    """Find the folder of an export."""
    path = Path(export)
    for folder in (run / "export" / export, path, path.parent):
        if (folder / CARD).is_file() and (folder != path.parent or path.is_file()):
            return folder
    known = sorted(card.parent.name for card in (run / "export").glob(f"*/{CARD}"))
    raise ConfigError(
        f"export={export}: not an export of the run (there are: {', '.join(known) or 'none yet'}); "
        f"create it with boltcutter export {shlex.quote(f'run={run}')}"
    )
