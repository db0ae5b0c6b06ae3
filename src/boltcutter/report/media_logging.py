"""Every logger takes pictures and tables, in the way of W&B and of TensorBoard, and writes them to the run folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from boltcutter.internals import batches_with_step
from boltcutter.protocols import BuffersMetrics
from boltcutter.report import media
from boltcutter.report.pixels import arrange, to_pixels

LOGGER_CALLS = re.compile(r"log_\w+|(un)?watch")  # of some loggers, and ignored by others
MEDIA_CALLS = ("add_image", "add_images", "add_figure", "log")  # of experiments
WRITER_KINDS = "scalar scalars text histogram audio video graph hparams embedding pr_curve mesh"
OWN = ("_media", "_warned_of", "_extended", "_nested")  # attributes of an extended logger
OTHER_CALLS = (*(f"add_{kind}" for kind in WRITER_KINDS.split()), "config", "summary", "watch")


class MediaLogging(Callback):
    """Gives each logger of the trainer the methods of ``MediaLogger``."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Extend the loggers, in each process."""
        for logger in trainer.loggers:
            kind: Any = type(logger)
            if not isinstance(logger, MediaLogger) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                vars(logger).update(zip(OWN, ((self.folder, trainer), set(), None, False), strict=True))
                logger.__class__ = type(kind.__name__, (MediaLogger, kind), {"__module__": kind.__module__})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Delete what a killed attempt logged after the step from which the run is resumed."""
        if trainer.is_global_zero:
            media.discard_after(self.folder, trainer.global_step)


def _create(kind: Any) -> Any:
    return kind.__new__(kind)


class MediaLogger(Logger):
    """Takes pictures and tables in the way of W&B and of TensorBoard, and also writes them to the run folder.

    It becomes a base class of each logger. Calls that only other loggers have are ignored, so that a module does not
    depend on the logger that is selected.
    """

    _media: tuple[Path, L.Trainer]
    _warned_of: set[str]
    _extended: Any  # the experiment that has the calls of others
    _nested: bool  # whether a call of this class is active, which either writes a picture or passes it on

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the logger that was extended: the class that extends it has no place from which it could be loaded."""
        kind: Any = type(self).__bases__[1]
        logger = kind.__new__(kind)
        vars(logger).update({name: value for name, value in vars(self).items() if name not in OWN})
        found: Any = logger.__reduce_ex__(protocol)
        # pickle refuses the function that creates an object of the object's own class
        return (_create, (kind,), *found[2:]) if isinstance(found, tuple) and found[1] == (kind,) else found

    def __getattr__(self, name: str) -> Any:
        if not LOGGER_CALLS.fullmatch(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(self.ignore, name)

    @property
    def experiment(self) -> Any:
        """The experiment of the logger, which also takes the calls of TensorBoard's and W&B's."""
        found = getattr(super(), "experiment", None)  # which no logger needs to have
        calls = ExperimentCalls(self)
        if found is None or isinstance(found, _DummyExperiment):
            return calls
        if found is not self._extended:
            self._extended = found
            # Not setattr: W&B's run refuses new attributes.
            for name in OTHER_CALLS:
                if not hasattr(found, name):
                    object.__setattr__(found, name, getattr(calls, name))
            for name in MEDIA_CALLS:
                own, write = getattr(found, name, None), getattr(calls, name)
                object.__setattr__(found, name, partial(self._record_media, own, write) if own else write)
        return found

    def log_metrics(self, metrics: Any, step: int | None = None, **options: Any) -> None:
        """Log numbers, of the current step by default; as Lightning does, the logger is called by keyword."""
        if not self._repeats:
            super().log_metrics(metrics=metrics, step=self._media_step(step), **options)  # type: ignore[safe-super]

    @rank_zero_only
    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log pictures.

        Args:
            key: Name, which may have several parts, such as ``val/samples``.
            images: A picture or several: tensors, arrays, PIL images, figures of matplotlib, or paths.
            step: The step; by default the current one.
            kwargs: Passed to W&B, such as a list of ``caption``.
        """
        if self._repeats:
            return
        images = list(images) if isinstance(images, list | tuple) else [images]
        at = self._media_step(step)
        self._write_media(media.write_images, key, images, at)
        if self._nested:
            return
        if own := getattr(super(), "log_image", None):
            self._pass_on(own, key, [one for image in images for one in _for_wandb(image)], step, **kwargs)
        elif not isinstance(found := self.experiment, ExperimentCalls) and hasattr(type(found), "add_image"):
            pixels = arrange([one for image in images for one in to_pixels(image)])
            self._pass_on(type(found).add_image, found, key, pixels, at)  # of TensorBoard

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table, from columns and rows or from a data frame."""
        if self._repeats:
            return
        self._write_media(media.write_table, key, columns, data, dataframe, self._media_step(step))
        if not self._nested and (own := getattr(super(), "log_table", None)):
            self._pass_on(own, key, columns, data, dataframe, step)

    log_text = log_table

    @rank_zero_only
    def warn_once(self, text: str) -> None:
        """Print a warning, unless it was printed before."""
        if text not in self._warned_of:
            print(f"warning: {type(self).__name__}: {text}", file=sys.stderr)
        self._warned_of.add(text)

    def ignore(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Ignore a call of another logger, with a warning; metrics.csv, which is always written, has it where alone."""
        if not isinstance(self, BuffersMetrics) or len(self._media[1].loggers) == 1:
            self.warn_once(f"{name} is a call of another logger; ignored")

    @property
    def _repeats(self) -> bool:
        """Whether this is the sanity check of a resumed run, in which an uninterrupted run logs nothing."""
        trainer = self._media[1]
        return bool(trainer.sanity_checking) and trainer.global_step > 0

    def _media_step(self, step: int | None) -> int:
        """The given step, or the current one, with which Lightning logs metrics."""
        return batches_with_step(self._media[1]) if step is None else int(step)

    def _write_media(self, write: Callable[..., None], *args: Any) -> None:
        try:
            write(self._media[0], *args)
        except OSError as error:  # a full disk must not stop training
            self.warn_once(f"pictures and tables are not written ({error})")

    def _pass_on(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a tracker; if it fails, for example because Pillow is missing, training continues."""
        self._nested = True
        try:
            call(*args, **kwargs)
        except Exception as error:
            self.warn_once(f"{type(error).__name__}: {' '.join(str(error).split())}; it is only in {self._media[0]}")
        finally:
            self._nested = False

    def _record_media(self, own: Callable[..., Any], write: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a tracker's experiment, and write its pictures to the run folder too."""
        if not self._nested:
            self._nested = True
            try:
                with suppress(ValueError, TypeError):  # the tracker decides what it takes
                    write(*args, **kwargs)
            finally:
                self._nested = False
        return own(*args, **kwargs)


class ExperimentCalls(_DummyExperiment):
    """Calls of TensorBoard's ``SummaryWriter`` and of W&B's ``Run``; other calls and attributes have no effect."""

    def __init__(self, logger: Any, path: str = "experiment") -> None:
        self.logger, self.path = logger, path

    def add_image(
        self, tag: str, img_tensor: Any = None, global_step: int | None = None, *_: Any, figure: Any = None, **__: Any
    ) -> None:
        """Log a picture, a batch of pictures, or a figure of matplotlib."""
        self.logger.log_image(tag, img_tensor if figure is None else figure, global_step)

    add_images = add_figure = add_image

    def add_text(self, tag: str, text_string: Any, global_step: int | None = None, *_: Any, **__: Any) -> None:
        """Log a text as a table with one cell."""
        self.logger.log_table(tag, ["text"], [[text_string]], step=global_step)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *_: Any, **__: Any) -> None:
        """Log a number."""
        if not self.logger._nested:
            self.logger.log_metrics({tag: scalar_value}, global_step)

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: int | None = None) -> None:
        """Log several numbers."""
        for tag, value in tag_scalar_dict.items():
            self.add_scalar(f"{main_tag}/{tag}", value, global_step)

    def log(self, data: Mapping[str, Any], step: int | None = None, *_: Any, **__: Any) -> None:
        """Log numbers, pictures and tables."""
        steps = {key: value for key, value in data.items() if key.endswith("global_step")}
        step = next(iter(steps.values()), step)
        for key, value in data.items():
            first = value[0] if isinstance(value, list | tuple) and value else value
            library, kind = type(first).__module__.partition(".")[0], type(first).__name__
            if (library, kind) == ("wandb", "Image") or library in ("PIL", "matplotlib"):
                self.add_image(key, value, step)
            elif (library, kind) == ("wandb", "Table"):
                self.logger.log_table(key, first.columns, first.data, step=step)
            elif key not in steps and (isinstance(first, int | float) or getattr(first, "ndim", None) == 0):
                self.add_scalar(key, first, step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ExperimentCalls(self.logger, f"{self.path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore a call that is unknown here."""
        self.logger.ignore(self.path)

    def __getitem__(self, key: Any) -> ExperimentCalls:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing."""


def _for_wandb(image: Any) -> list[Any]:
    """Arrays (H, W, C) in place of tensors and arrays, of which W&B takes some only with torchvision."""
    if hasattr(image, "detach") or isinstance(image, np.ndarray):
        return [np.moveaxis(pixels, 0, -1) for pixels in to_pixels(image)]
    return [image]
