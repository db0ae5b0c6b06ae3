# The public names. Type checkers read them here, and ``__init__.py`` the module of each.
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
from boltcutter.environment.stop_signals import PreemptionError as PreemptionError
from boltcutter.logger.csv_logger import CSVLogger as CSVLogger
from boltcutter.model.convnet import ConvNet as ConvNet
from boltcutter.model.linear import Linear as Linear
from boltcutter.model.mlp import MLP as MLP
from boltcutter.project import Project as Project
from boltcutter.task.base import Task as Task
from boltcutter.task.classification import Classification as Classification
from boltcutter.task.schedule import warmup_cosine as warmup_cosine
from boltcutter.api.functions import Loaded as Loaded
from boltcutter.api.functions import evaluate as evaluate
from boltcutter.api.functions import load as load
from boltcutter.api.functions import predict as predict
from boltcutter.api.functions import train as train
from boltcutter.data.augment import Augment as Augment
from boltcutter.task.regression import Regression as Regression
from boltcutter.model.resnet import ResNet as ResNet
from boltcutter.export.exported import load_exported as load_exported
from boltcutter.model.gpt import GPT as GPT
from boltcutter.task.language import LanguageModeling as LanguageModeling
from boltcutter.data.tokens import TokenDataModule as TokenDataModule
from boltcutter.launch.job import Job as Job
from boltcutter.launch.job import Launcher as Launcher
from boltcutter.launch.job import Status as Status
from boltcutter.launch.local import LocalLauncher as LocalLauncher
from boltcutter.launch.slurm import SlurmLauncher as SlurmLauncher
from boltcutter.callback.progress import Progress as Progress
from boltcutter.callback.throughput import ThroughputMonitor as ThroughputMonitor
from boltcutter.logger.wandb import WandbLogger as WandbLogger
from boltcutter.callback.ema import EMA as EMA
from boltcutter.replay.golden import check_golden as check_golden

__version__: str
