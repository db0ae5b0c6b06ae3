"""A Lightning project template: every run is checked, recorded, resumed exactly and reproduced.

The names below are the public API. Each is imported when it is first used, so ``import boltcutter`` imports neither
torch nor Lightning.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from boltcutter import lightning_alias

# ruff: isort: skip_file
if TYPE_CHECKING:
    from boltcutter_api.functions import (
        Loaded as Loaded,
        compare as compare,
        evaluate as evaluate,
        load as load,
        predict as predict,
        train as train,
    )
    from boltcutter.callback.checkpoint import BestCheckpoint as BestCheckpoint, LastCheckpoint as LastCheckpoint
    from boltcutter_parallel.ema import EMA as EMA
    from boltcutter.callback.guard import Guard as Guard
    from boltcutter.callback.preemption import Preemption as Preemption
    from boltcutter_planning.profile import Profile as Profile
    from boltcutter_logging.progress import Progress as Progress
    from boltcutter.callback.reseed import Reseed as Reseed
    from boltcutter_logging.throughput import ThroughputMonitor as ThroughputMonitor
    from boltcutter.config.errors import ConfigError as ConfigError
    from boltcutter_data.augment import Augment as Augment
    from boltcutter.data.digits import Digits as Digits
    from boltcutter.data.module import (
        BatchedTensorDataset as BatchedTensorDataset,
        DataModule as DataModule,
        Splits as Splits,
    )
    from boltcutter.data.splits import split_indices as split_indices
    from boltcutter.data.sampler import Batch as Batch
    from boltcutter_language.tokens import TokenDataModule as TokenDataModule
    from boltcutter.environment.signals import PreemptionError as PreemptionError
    from boltcutter_export.exported import load_exported as load_exported
    from boltcutter_launch.job import Job as Job, Launcher as Launcher, Status as Status
    from boltcutter_launch.local import LocalLauncher as LocalLauncher
    from boltcutter_launch.slurm import SlurmLauncher as SlurmLauncher
    from boltcutter.logger.csv import CSVLogger as CSVLogger
    from boltcutter_logging.wandb import WandbLogger as WandbLogger
    from boltcutter.model.convnet import ConvNet as ConvNet
    from boltcutter_language.gpt import GPT as GPT
    from boltcutter.model.linear import Linear as Linear
    from boltcutter.model.mlp import MLP as MLP
    from boltcutter_data.resnet import ResNet as ResNet
    from boltcutter.project import Project as Project
    from boltcutter_runs.equality import Comparison as Comparison
    from boltcutter.task.base import Task as Task
    from boltcutter.task.classification import Classification as Classification
    from boltcutter_language.task import LanguageModeling as LanguageModeling
    from boltcutter_data.regression import Regression as Regression
    from boltcutter.task.schedule import warmup_cosine as warmup_cosine

    __version__: str

_MODULES = {
    "Batch": "boltcutter.data.sampler",
    "BatchedTensorDataset": "boltcutter.data.module",
    "BestCheckpoint": "boltcutter.callback.checkpoint",
    "Classification": "boltcutter.task.classification",
    "ConfigError": "boltcutter.config.errors",
    "ConvNet": "boltcutter.model.convnet",
    "CSVLogger": "boltcutter.logger.csv",
    "DataModule": "boltcutter.data.module",
    "Digits": "boltcutter.data.digits",
    "Guard": "boltcutter.callback.guard",
    "LastCheckpoint": "boltcutter.callback.checkpoint",
    "Linear": "boltcutter.model.linear",
    "MLP": "boltcutter.model.mlp",
    "Preemption": "boltcutter.callback.preemption",
    "PreemptionError": "boltcutter.environment.signals",
    "Project": "boltcutter.project",
    "Reseed": "boltcutter.callback.reseed",
    "split_indices": "boltcutter.data.splits",
    "Splits": "boltcutter.data.module",
    "Task": "boltcutter.task.base",
    "warmup_cosine": "boltcutter.task.schedule",
}
lightning_alias.install()


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted({*_MODULES, *_names_of_parts()})
        if name == "__version__":
            return _installed_version()
        module = _MODULES.get(name)
        if module is None and not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
            module = _names_of_parts().get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(module), name)
        return value


def _names_of_parts() -> dict[str, str]:
    names: dict[str, str] = import_module(f"{__name__}.extend").public_names()
    return names


def _installed_version() -> str:
    from importlib import metadata  # slow import

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a copy on the path that is not installed, as in an image


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_names_of_parts()})
