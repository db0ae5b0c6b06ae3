"""A module of Lightning, as users write it, that is interrupted and resumed logs and trains the same."""

import csv
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import run_forked
from forkserver import ForkServer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from boltcutter.callback.preemption import Preemption
from boltcutter.callback.reseed import Reseed
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.data.hooks import shard_loaders
from boltcutter.environment import stop_signals as signals
from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.protocols import gather_objects
from boltcutter.training.ending import EndOfTraining
from boltcutter.training.resume import explain_restoring
from boltcutter.training.resume_state import ResumeState
from boltcutter.training.train import flush_loggers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*your dataloader is not resumable",
    "ignore:.*Checkpoint directory",
    "ignore:The dirpath has changed",
    "ignore:.*callbacks used to create the checkpoint",
    "ignore:SWA is currently only supported every epoch",
    "ignore:.*lr_scheduler.step",
    "ignore:.*LeafSpec",
    "ignore:ReduceLROnPlateau conditioned",
)
BATCHES = 6  # of an epoch


def scores(prefix: str) -> MetricCollection:
    """Two metrics that share their state."""
    return MetricCollection(
        [MulticlassAccuracy(3, average="micro"), MulticlassF1Score(3, average="micro")], prefix=prefix
    )


class Module(L.LightningModule):
    """Logs in the ways that Lightning offers."""

    def __init__(self, *, plateau: bool = False) -> None:
        super().__init__()
        self.plateau = plateau
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.logged, self.computed = MeanMetric(), MeanMetric()
        self.train_scores, self.val_scores = scores("train/"), scores("val/")
        self.register_buffer("scale", torch.ones(()))
        self.options: dict[str, Any] = {}

    def on_train_epoch_start(self) -> None:
        self.scale = torch.rand(())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        outputs = self.net(batch[0])
        loss: Tensor = nn.functional.cross_entropy(outputs, batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True, **self.options)
        self.log("train/largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.logged(loss)
        self.log("train/metric", self.logged, on_step=False, on_epoch=True)
        self.computed.update(loss)
        self.train_scores.update(outputs, batch[1])
        if index == 1:
            self.log("train/once", loss)
        return loss * self.scale if index == 0 else loss

    def on_train_epoch_end(self) -> None:
        self.log("train/computed", self.computed.compute())
        self.log_dict(self.train_scores.compute())
        self.computed.reset()
        self.train_scores.reset()
        with torch.no_grad():
            self.net[3].weight += torch.randn(3, 8) / 100

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        outputs = self.net(batch[0])
        self.log("val/loss", nn.functional.cross_entropy(outputs, batch[1]))
        self.val_scores.update(outputs, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_scores.compute())
        self.val_scores.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.01)
        if not self.plateau:
            return optimizer
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        plateau = {"scheduler": scheduler, "monitor": "val/loss", "interval": "step", "frequency": 3, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])  # type: ignore[index]

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)  # type: ignore[index]


class Interrupt(L.Callback):
    """Sets the flag of a signal before a batch of training, or of the validation after it."""

    def __init__(self, batch: int, *, in_validation: bool) -> None:
        self.batch, self.in_validation = batch, in_validation

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if not self.in_validation and trainer.fit_loop.total_batch_idx == self.batch:
            signals.handle_signal(signal.SIGTERM)

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int, loader: int = 0
    ) -> None:
        if self.in_validation and index == 1 and trainer.fit_loop.total_batch_idx == self.batch - 1:
            signals.handle_signal(signal.SIGTERM)


class Search(L.Callback):
    """Saves and restores before training, as a search for a batch size or a learning rate does."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callback_metrics["trial"] = torch.tensor(1.0)
        trainer.save_checkpoint(path := f"{trainer.default_root_dir}/search.ckpt")
        trainer.callback_metrics.clear()
        trainer._checkpoint_connector.restore(path)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert "trial" not in trainer.callback_metrics
        assert "val/loss" in trainer.callback_metrics


class Flush(L.Callback):
    """Writes the metrics before each checkpoint, and copies both after that of an epoch, as a kill leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        flush_loggers(trainer)
        if trainer.is_global_zero:
            (self.folder / f"{trainer.global_step}.csv").write_bytes((self.folder / "metrics.csv").read_bytes())


def fit(
    folder: Path,
    module: L.LightningModule,
    *callbacks: L.Callback,
    resume: Path | None = None,
    loader: Any = None,
    **settings: Any,
) -> L.LightningModule:
    """Train, anew or from a checkpoint."""
    folder.mkdir(exist_ok=True)
    limits: dict[str, Any] = {"max_epochs": 3, **settings}
    kept = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True, enable_version_counter=False)
    ending = EndOfTraining(Settings({"trainer": limits}))
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder / "metrics.csv"),
        callbacks=[*callbacks, Preemption(str(folder)), Reseed(0), ResumeState(), Flush(folder), kept, ending],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **limits,
    )
    shard_loaders(trainer, 0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 4, generator=generator)
    data = TensorDataset(inputs, (inputs.abs().argmax(1) % 3))
    trainer.fit(module, loader or DataLoader(data, 8), DataLoader(data, 24), ckpt_path=resume, weights_only=True)
    return module


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return {row["step"]: {k: v for k, v in row.items() if v} for row in csv.DictReader(file)}


def module(**options: Any) -> Module:
    torch.manual_seed(0)
    return Module(**options)


def assert_equal(ours: L.LightningModule, theirs: L.LightningModule) -> None:
    states = ours.state_dict(), theirs.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


class Batches:
    """A loader without a length, whose order depends on all earlier epochs, and which saves its own position."""

    def __init__(self) -> None:
        self.generator, self.order, self.next = torch.Generator().manual_seed(1), torch.arange(0), 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        if self.next == len(self.order):
            self.order, self.next = torch.randperm(BATCHES, generator=self.generator), 0
        while self.next < BATCHES:
            seed = int(self.order[self.next])
            self.next += 1
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            yield [inputs, inputs.abs().argmax(1) % 3]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": self.order, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.next = state["order"], state["next"]
        self.generator.set_state(state["generator"])


class SizedBatches(Batches):
    """The same with a length, so that Lightning fetches no batch in advance."""

    def __len__(self) -> int:
        return BATCHES


@pytest.mark.parametrize("loader", [Batches, SizedBatches])
@pytest.mark.parametrize("batch", [BATCHES + 3, 2 * BATCHES - 1, 2 * BATCHES])
def test_a_loader_that_saves_its_position_continues_with_the_next_batch(
    tmp_path: Path, batch: int, loader: type[Batches]
) -> None:
    whole = fit(tmp_path / "whole", module(), loader=loader())
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", module(), Interrupt(batch, in_validation=False), loader=loader())
    resumed = fit(tmp_path / "cut", module(), resume=tmp_path / "cut" / "last-preempted.ckpt", loader=loader())
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert_equal(resumed, whole)


def test_a_loader_that_saves_its_position_continues_after_an_epoch(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", module(), loader=SizedBatches())
    checkpoint = tmp_path / "whole" / f"step={BATCHES}.ckpt"
    assert_equal(fit(tmp_path / "again", module(), resume=checkpoint, loader=SizedBatches()), whole)


def test_weights_in_double_precision_are_not_rounded(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", module(), precision="64-true")
    checkpoint = tmp_path / "whole" / f"step={BATCHES}.ckpt"
    resumed = fit(tmp_path / "again", module(), resume=checkpoint, precision="64-true")
    assert next(whole.parameters()).dtype is torch.float64
    assert_equal(resumed, whole)


class SameBuffers(L.Callback):
    """Fails if ranks validate with different statistics."""

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int, loader: int = 0
    ) -> None:
        mean: Tensor = module.net[1].running_mean  # type: ignore[index, union-attr, assignment]
        of_ranks = gather_objects(mean.tolist())
        assert trainer.sanity_checking or any(of_ranks[0])
        assert of_ranks == of_ranks[:1] * 2


def test_ranks_validate_with_the_statistics_that_checkpoints_have(forks: ForkServer, tmp_path: Path) -> None:
    """In a process of its own: a build of torch with CUDA does not fork after threads of autograd were used."""
    code = tmp_path / "ranks.py"
    code.write_text(
        "import sys\nfrom pathlib import Path\nfrom test_resume_state import SameBuffers, fit, module\n"
        "fit(Path(sys.argv[1]), module(), SameBuffers(), strategy='ddp_fork', devices=2, max_epochs=1)\n"
    )
    path = os.pathsep.join((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
    done = run_forked(forks, [str(code), str(tmp_path)], env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("in_validation", [False, True])
@pytest.mark.parametrize("batch", [BATCHES + 3, 2 * BATCHES])
def test_an_interrupted_epoch_has_the_same_metrics(tmp_path: Path, batch: int, in_validation: bool) -> None:
    whole = fit(tmp_path / "whole", module(), val_check_interval=3)
    logged = {"train/loss_epoch", "train/largest", "train/metric", "train/computed", "train/MulticlassF1Score"}
    assert logged | {"train/once", "val/MulticlassF1Score"} <= rows(tmp_path / "whole")["11"].keys()
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", module(), Interrupt(batch, in_validation=in_validation), val_check_interval=3)
    resumed = fit(tmp_path / "cut", module(), resume=tmp_path / "cut" / "last-preempted.ckpt", val_check_interval=3)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert_equal(resumed, whole)


def test_a_run_that_is_killed_after_the_checkpoint_of_an_epoch_has_its_metrics(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", module())
    cut = tmp_path / "cut"
    cut.mkdir()
    shutil.copy(tmp_path / "whole" / f"{BATCHES}.csv", cut / "metrics.csv")
    resumed = fit(cut, module(), Search(), resume=tmp_path / "whole" / f"step={BATCHES}.ckpt")
    assert rows(cut) == rows(tmp_path / "whole")
    assert_equal(resumed, whole)


def test_a_resumed_run_continues_means_though_the_module_logs_with_other_options(tmp_path: Path) -> None:
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path, module(), Interrupt(3, in_validation=False))
    changed = module()
    changed.options = {"prog_bar": True}
    fit(tmp_path, changed, resume=tmp_path / "last-preempted.ckpt", max_epochs=1)
    assert "train/loss_epoch" in rows(tmp_path)["5"]


def test_a_plateau_between_validations_has_its_metric(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", module(plateau=True))
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", module(plateau=True), Interrupt(BATCHES + 1, in_validation=False))
    resumed = fit(tmp_path / "cut", module(plateau=True), resume=tmp_path / "cut" / "last-preempted.ckpt")
    assert_equal(resumed, whole)


@pytest.mark.parametrize("batch", [2 * BATCHES, 2 * BATCHES + 2])
def test_what_was_unfrozen_is_trained_on(tmp_path: Path, batch: int) -> None:
    whole = fit(tmp_path / "whole", module(), Unfreeze())
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", module(), Unfreeze(), Interrupt(batch, in_validation=False))
    resumed = fit(tmp_path / "cut", module(), Unfreeze(), resume=tmp_path / "cut" / "last-preempted.ckpt")
    assert_equal(resumed, whole)


@pytest.mark.parametrize("batch", [BATCHES + 2, 3 * BATCHES + 2])
def test_stochastic_weight_averaging_is_continued_within_an_epoch(tmp_path: Path, batch: int) -> None:
    average = partial(StochasticWeightAveraging, 0.02, swa_epoch_start=1, annealing_epochs=2)
    whole = fit(tmp_path / "whole", module(), average())
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", module(), average(), Interrupt(batch, in_validation=False))
    resumed = fit(tmp_path / "cut", module(), average(), resume=tmp_path / "cut" / "last-preempted.ckpt")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert_equal(resumed, whole)


@pytest.mark.parametrize(
    "change",
    [
        {"resume_state": 1},
        {"resume_state": [1]},
        {"trained": []},
        {"trained": {"net.0.weight": "x"}},
        {"monitored": {"a": 1}},
        {"monitored": {"a": torch.zeros(3)}},
        {"states": {"logged": 3}},
        {"logged": {"a.b": {}}},
        {"logged": {1: {"tensors": {}, "options": {}}}},
        {"logged": {"training_step.x": {"tensors": {"value": torch.zeros(9)}, "options": {"reduce_fx": "os.system"}}}},
        {"states": {"computed": {"mean_value": torch.zeros(3)}}},
        {"states": {"computed": {"mean_value": torch.zeros((), dtype=torch.int64)}}},
        {"states": {"computed": {"weight": []}}},
        {"states": {"logged": {"mean_value": torch.zeros(2, 2)}}},
        {"states": {"train_scores.MulticlassAccuracy": {"tp": torch.zeros(2, 3)}}},
        {"states": {"computed": {"weight": torch.zeros(()).to_sparse()}}},
    ],
)
def test_a_damaged_state_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path, module(), Interrupt(3, in_validation=False))
    file = tmp_path / "last-preempted.ckpt"
    checkpoint = torch.load(file)
    checkpoint["resume_state"] = change.get("resume_state", [checkpoint["resume_state"][0] | change])
    torch.save(checkpoint, file)
    with pytest.raises(ConfigError, match=r"^a: not restored \(.*\); use another checkpoint"), explain_restoring("a"):
        fit(tmp_path, module(), resume=file, max_epochs=1)


class Grown(MeanMetric):
    """Has a state that grows with its first update."""

    def update(self, value: Tensor) -> None:  # type: ignore[override]
        self.mean_value, self.weight = self.mean_value + torch.ones(2) * value.detach(), self.weight + 1

    def compute(self) -> Tensor:
        return (self.mean_value / self.weight).sum()


def test_a_state_that_has_grown_is_continued(tmp_path: Path) -> None:
    def grown() -> Module:
        made = module()
        made.computed = Grown()
        return made

    fit(tmp_path / "whole", grown())
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path / "cut", grown(), Interrupt(3, in_validation=False))
    fit(tmp_path / "cut", grown(), resume=tmp_path / "cut" / "last-preempted.ckpt")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


class Wrong(L.Callback):
    """Passes a metric what it does not take, in an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            module.train_scores.update(torch.zeros(2, 9), torch.zeros(3))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(("epoch", "metric"), [(0, MeanMetric), (1, Grown)])
def test_an_error_of_the_module_in_its_metrics_has_a_traceback(
    tmp_path: Path, epoch: int, metric: type[MeanMetric]
) -> None:
    made = [module(), module()]
    for one in made:
        one.computed = metric()
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path, made[0], Interrupt(3, in_validation=False))
    with pytest.raises((ValueError, RuntimeError)) as error, explain_restoring("a"):
        fit(tmp_path, made[1], Wrong(epoch), resume=tmp_path / "last-preempted.ckpt")
    assert not isinstance(error.value, ConfigError)


@pytest.mark.parametrize(("key", "value"), [("amsgrad", True), ("betas", (0.9,))])
def test_settings_that_the_optimizer_cannot_use_are_one_line(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(signals.PreemptionError):
        fit(tmp_path, module(), Interrupt(3, in_validation=False))
    file = tmp_path / "last-preempted.ckpt"
    checkpoint = torch.load(file)
    checkpoint["optimizer_states"][0]["param_groups"][0][key] = value
    torch.save(checkpoint, file)
    with pytest.raises(ConfigError, match=r"^a: not restored \(.*\); use another checkpoint"), explain_restoring("a"):
        fit(tmp_path, module(), resume=file, max_epochs=1)
