"""Which protocols the built-in components satisfy, and that classes of users do not satisfy them by accident."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from boltcutter import protocols as p
from boltcutter.callback.checkpoint import BestCheckpoint, CheckpointSizeError
from boltcutter.callback.keras_file import KerasFile
from boltcutter.callback.preemption import Preemption
from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
from boltcutter.data.digits import Digits
from boltcutter.data.module import DataModule
from boltcutter.data.text import Text
from boltcutter.environment.stop_signals import PreemptionError
from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.model.gpt import GPT
from boltcutter.model.mlp import MLP
from boltcutter.model.resnet import ResNet
from boltcutter.strategy.ddp import DDPStrategy
from boltcutter.strategy.fsdp import FSDPStrategy
from boltcutter.strategy.pipeline import PipelineStrategy
from boltcutter.strategy.process_launcher import WorkerExitError
from boltcutter.strategy.tpu import HostCheckpointIO
from boltcutter.task.base import Task
from boltcutter.task.classification import Classification
from boltcutter.task.language import LanguageModeling

if TYPE_CHECKING:
    from boltcutter.checkpoint.weights import StoresKerasFiles
    from boltcutter.logger.wandb import WandbLogger
    from boltcutter.model.keras_model import KerasModel

    # mypy compares signatures, which isinstance does not.
    def _models(gpt: GPT, mlp: MLP, keras: KerasModel) -> None:
        _shards: list[p.ShardsWeights] = [gpt, mlp]
        _stages: list[p.SplitsIntoStages] = [gpt, mlp]
        _keras: StoresKerasFiles = keras

    def _tasks_and_data(task: Task, language: LanguageModeling, data: DataModule, text: Text) -> None:
        _task: p.NativeTask = task
        _language: p.GeneratesTokens = language
        _data: list[p.NativeData] = [data, text]

    def _loggers(csv: CSVLogger, wandb: WandbLogger) -> None:
        _csv: p.BuffersMetrics = csv
        _wandb: p.ClosesWithExitCode = wandb

    def _strategies(fsdp: FSDPStrategy, pipeline: PipelineStrategy, io: AtomicCheckpointIO) -> None:
        _norms: list[p.ReducesGradientNorms] = [fsdp, pipeline]
        _io: list[p.WaitsForWrites] = [io, HostCheckpointIO(io)]

    def _errors() -> None:
        _exits: list[p.PlannedExit] = [PreemptionError(15, ""), WorkerExitError(1, 1, "")]


PROTOCOLS = {name: cls for name, cls in vars(p).items() if getattr(cls, "_is_runtime_protocol", False)}
SGD = partial(torch.optim.SGD, lr=0.1)
CPU = [torch.device("cpu")]


class ForeignTask(L.LightningModule):
    """A module as users write them, with some of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.optimizer, self.logged_metrics = nn.Linear(1, 1), SGD, ["val/loss"]

    def losses(self) -> None: ...


class ForeignData(L.LightningDataModule):
    """A data module as users write them, with some of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.splits = 4, 2, {"train": [1, 2]}

    def loader(self) -> None: ...

    def read(self) -> None: ...


def mlp() -> MLP:
    return MLP((4,), 2)


def gpt() -> GPT:
    return GPT((8,), 16, hidden_size=8, num_layers=1, num_heads=2)


def loader() -> Any:
    return Digits().train_dataloader()


def text() -> Text:
    return Text(path=str(Path(__file__)))


DATA = "NativeData"
TASK = "NativeTask"
SATISFIED: list[tuple[Callable[[], Any], str]] = [
    (mlp, "ShardsWeights SplitsIntoStages"),
    (gpt, "ShardsWeights SplitsIntoStages"),
    (lambda: ResNet((3, 8, 8), 2), ""),
    (lambda: Classification(mlp(), optimizer=SGD), TASK),
    (lambda: LanguageModeling(gpt(), optimizer=SGD), f"{TASK} GeneratesTokens"),
    (Digits, DATA),
    (text, DATA),
    (loader, ""),
    (lambda: Preemption("folder"), ""),
    (BestCheckpoint, ""),
    (KerasFile, ""),
    (lambda: CSVLogger(Path("metrics.csv")), "BuffersMetrics"),
    (lambda: DDPStrategy(parallel_devices=CPU), ""),
    (lambda: PipelineStrategy(2), "ReducesGradientNorms"),
    (AtomicCheckpointIO, "WaitsForWrites"),
    (lambda: HostCheckpointIO(AtomicCheckpointIO()), "WaitsForWrites"),
    (CheckpointSizeError, ""),
    (lambda: PreemptionError(15, "saved"), "PlannedExit"),
    (lambda: WorkerExitError(143, 143, "reason"), "PlannedExit"),
    (ForeignTask, ""),
    (ForeignData, ""),
    (lambda: nn.Linear(1, 1), ""),
    (lambda: DataLoader(TensorDataset(torch.ones(2))), ""),
    (Callback, ""),
    (lambda: EarlyStopping("val/loss"), ""),
    (lambda: LightningCSVLogger("logs"), ""),
    (lambda: SingleDeviceStrategy("cpu"), ""),
    (TorchCheckpointIO, ""),
    (lambda: ValueError("wrong"), ""),
    (lambda: SystemExit(1), ""),
]


@pytest.mark.parametrize(("make", "expected"), SATISFIED)
def test_a_component_satisfies_exactly_these_protocols(make: Callable[[], Any], expected: str) -> None:
    component = make()
    assert {name for name, protocol in PROTOCOLS.items() if isinstance(component, protocol)} == set(expected.split())


def test_data_parallel_ranks_are_those_of_the_strategy() -> None:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4, "rank": 1})
    assert p.data_parallel(strategy) == (4, 1)
    assert p.data_parallel(SingleDeviceStrategy("cpu")) == (1, 0)
    assert p.data_parallel(None) == (1, 0)


def test_the_model_of_any_module_is_found() -> None:
    task = ForeignTask()
    assert p.find_model(task) is task.model
    assert p.find_model(nn.Linear(1, 1)) is None


def test_importing_protocols_imports_no_framework() -> None:
    code = "import sys, boltcutter.protocols; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_objects_are_gathered_without_a_process_group() -> None:
    assert p.gather_objects("local") == ["local"]
