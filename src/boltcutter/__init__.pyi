# The public names. Type checkers read them here, and ``__init__.py`` the modules of those of the core; parts name
# theirs in ``Part.names``.
# ruff: isort: skip_file
from boltcutter.callback.checkpoint import BestCheckpoint as BestCheckpoint
from boltcutter.callback.checkpoint import LastCheckpoint as LastCheckpoint
from boltcutter.callback.guard import Guard as Guard
from boltcutter.callback.preemption import Preemption as Preemption
from boltcutter.callback.reseed import Reseed as Reseed
from boltcutter.config.errors import ConfigError as ConfigError
from boltcutter.data.digits import Digits as Digits
from boltcutter.data.module import BatchedTensorDataset as BatchedTensorDataset
from boltcutter.data.module import DataModule as DataModule
from boltcutter.data.module import Splits as Splits
from boltcutter.data.sampler import Batch as Batch
from boltcutter.data.splits import split_indices as split_indices
from boltcutter.environment.signals import PreemptionError as PreemptionError
from boltcutter.logger.csv import CSVLogger as CSVLogger
from boltcutter.model.convnet import ConvNet as ConvNet
from boltcutter.model.linear import Linear as Linear
from boltcutter.model.mlp import MLP as MLP
from boltcutter.project import Project as Project
from boltcutter.task.base import Task as Task
from boltcutter.task.classification import Classification as Classification
from boltcutter.task.schedule import warmup_cosine as warmup_cosine
from boltcutter_api.functions import Loaded as Loaded
from boltcutter_api.functions import evaluate as evaluate
from boltcutter_api.functions import load as load
from boltcutter_api.functions import predict as predict
from boltcutter_api.functions import train as train
from boltcutter_data.augment import Augment as Augment
from boltcutter_data.regression import Regression as Regression
from boltcutter_data.resnet import ResNet as ResNet
from boltcutter_export.exported import load_exported as load_exported
from boltcutter_language.gpt import GPT as GPT
from boltcutter_language.task import LanguageModeling as LanguageModeling
from boltcutter_language.tokens import TokenDataModule as TokenDataModule
from boltcutter_launch.job import Job as Job
from boltcutter_launch.job import Launcher as Launcher
from boltcutter_launch.job import Status as Status
from boltcutter_launch.local import LocalLauncher as LocalLauncher
from boltcutter_launch.slurm import SlurmLauncher as SlurmLauncher
from boltcutter_logging.progress import Progress as Progress
from boltcutter_logging.throughput import ThroughputMonitor as ThroughputMonitor
from boltcutter_logging.wandb import WandbLogger as WandbLogger
from boltcutter_parallel.ema import EMA as EMA

__version__: str
