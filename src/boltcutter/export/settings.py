"""The settings of an export, and the base class of formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # so that --describe and errors of settings are fast
    from torch import Tensor

    from boltcutter.export.program import Program

Batches = Callable[[], "Iterable[tuple[Tensor, ...]]"]  # inputs of training samples


class ExportError(RuntimeError):
    """A model cannot be exported, or its export differs too much from the original."""

    hide_traceback = True


class Format(ABC):
    """A file format of exported models.

    Attributes:
        file: Name of the file.
        is_runnable: Whether the file holds a program; else it holds only weights.
        packages: Optional packages that writing needs.
    """

    file: ClassVar[str]
    is_runnable: ClassVar[bool] = True
    packages: tuple[str, ...] = ()

    @abstractmethod
    def write(self, program: Program, path: Path, calibration: Batches) -> None:
        """Write the file.

        Args:
            program: The model with its pre- and post-processing, in float32; must not be changed.
            path: File to write.
            calibration: Yields inputs of samples of all classes, for formats that need the ranges of activations.
        """


@dataclass(frozen=True)
class Export:
    """Formats to export a run to, how much they may lose, and where they are uploaded.

    Args:
        formats: Formats by name.
        max_drop: Largest accepted drop, relative to the model in float32: of the accuracy in percentage points; of
            another metric in percent of its value.
        push: Repository of the Hugging Face Hub, as in ``user/name``, to which ``safetensors`` is uploaded, with
            the other ``formats``.
    """

    formats: dict[str, Format] = field(default_factory=dict)
    max_drop: float = 0.5
    push: str | None = None

    def __post_init__(self) -> None:
        if not self.max_drop >= 0:
            raise ValueError(f"export.max_drop={self.max_drop} is negative; try 0.5")
        if not self.formats:
            raise ValueError("export.formats: empty; choose formats, such as export=onnx")
        if self.push is not None and "safetensors" not in self.formats:
            raise ValueError(f"export.push={self.push}: the Hub gets plain weights; add export=safetensors")
