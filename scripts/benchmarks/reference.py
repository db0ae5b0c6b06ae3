"""Reference loops: the loop of PyTorch's guides, the fastest hand-written one, and Lightning as in its guides.

All train the same model as Boltcutter, from the same weights, on the same samples in the same order, with the same
optimizer, schedule and clipping. Runs in a separate process: ``python -m benchmarks.reference '<spec>'``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy, MeanMetric

from benchmarks import keras_fit
from benchmarks.turns import StepTimer


def guide(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
    """Train as in PyTorch's guides: default DataLoader, default optimizer, and ``loss.item()`` at each step."""
    optimizer, scheduler = make_optimizer(model, kept, spec, fused=None)
    order = kept["order"].flatten().tolist()
    batches = DataLoader(TensorDataset(kept["inputs"], kept["targets"]), kept["order"].size(1), sampler=order)
    clock = Clock(spec)
    model.train()
    for inputs, targets in batches:
        clock.begin_step()
        inputs, targets = inputs.to(spec["device"]), targets.to(spec["device"])
        optimizer.zero_grad()
        with precision(spec):
            loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if spec["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
        optimizer.step()
        if scheduler:
            scheduler.step()
        clock.end_step(loss.item())


def best(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
    """Train as fast as possible: data on the device, batched indexing, fused optimizer, no host synchronization.

    The model is compiled if ``spec["compile"]`` is true.
    """
    optimizer, scheduler = make_optimizer(model, kept, spec, fused=True)
    if spec["compile"]:
        model.compile()
    elif kept["inputs"].ndim == 4:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
    if dist.is_initialized():
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    clock = Clock(spec)
    model.train()
    parameters = list(model.parameters())
    all_inputs, all_targets, order = (kept[name].to(spec["device"]) for name in ("inputs", "targets", "order"))
    for chosen in order:
        clock.begin_step()
        inputs, targets = all_inputs.index_select(0, chosen), all_targets.index_select(0, chosen)
        optimizer.zero_grad()
        with precision(spec):
            loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if spec["clip"]:
            nn.utils.clip_grad_norm_(parameters, spec["clip"])
        optimizer.step()
        if scheduler:
            scheduler.step()
        clock.end_step(loss.detach())


def plain_lightning(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
    """Train with Lightning's defaults: default DataLoader, metrics updated and logged at each step, rich progress bar.

    ``spec["without"]`` lists the features that are disabled.
    """
    without, samples = spec["without"], TensorDataset(kept["inputs"], kept["targets"])
    order = kept["order"].flatten().tolist()
    batches: DataLoader[Any] = (
        DataLoader(samples, batch_size=None, sampler=list(kept["order"]))
        if "single samples" in without
        else DataLoader(samples, kept["order"].size(1), sampler=order)
    )
    callbacks: list[Callback] = [Timed(Clock(spec))]
    callbacks += [] if "bar" in without else [RichProgressBar()]
    callbacks += [] if "learning rate" in without else [LearningRateMonitor()]
    folder = Path(spec["keep"]).parent  # removed by the benchmark
    L.Trainer(
        max_epochs=1,
        accelerator=spec["device"],
        precision=spec["precision"],
        gradient_clip_val=spec["clip"],
        callbacks=callbacks,
        logger=CSVLogger(folder),
        enable_progress_bar="bar" not in without,
        default_root_dir=folder,
    ).fit(Plain(model, kept, spec), batches)


def keras(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
    """Train the Keras model of ``model`` with Keras's ``compile`` and ``fit``."""
    optimizer, scheduler = make_optimizer(model, kept, spec, fused=None)
    rates: list[float] = []
    model.zero_grad()
    for _ in kept["order"]:
        rates.append(optimizer.param_groups[0]["lr"])
        if scheduler:
            optimizer.step()  # without gradients, weights do not change
            scheduler.step()
    keras_fit.fit(model, kept, spec, rates, Clock(spec))


class Plain(L.LightningModule):
    """A LightningModule as in Lightning's guides and in common templates.

    Args:
        model: Model that returns logits (N, C).
        kept: Initial weights and samples, as saved by ``TimingWindow``.
        spec: Specification of the training.
    """

    def __init__(self, model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.kept, self.spec = model, kept, spec
        self.train_loss = MeanMetric()
        self.train_accuracy = Accuracy("multiclass", num_classes=int(kept["targets"].max()) + 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss, and log loss and accuracy."""
        inputs, targets = batch
        outputs = self.model(inputs)
        loss = loss_of(outputs, targets)
        if "metrics" not in self.spec["without"]:
            self.train_loss(loss)
            self.train_accuracy(outputs, targets)
        if "log" not in self.spec["without"]:
            self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
            self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Create the optimizer, and the scheduler if there is one."""
        fused = True if "unfused optimizer" in self.spec["without"] else None
        optimizer, scheduler = make_optimizer(self.model, self.kept, self.spec, fused=fused)
        plan = {"optimizer": optimizer}
        return plan | {"lr_scheduler": {"scheduler": scheduler, "interval": "step"}} if scheduler else plan


class Timed(Callback):
    """Calls the clock before and after each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *args: Any) -> None:
        """Before a step."""
        self.clock.begin_step()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        """After a step."""
        self.clock.end_step(outputs["loss"])


def precision(spec: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return the autocast context for ``trainer.precision``."""
    half = {"bf16-mixed": torch.bfloat16}.get(spec["precision"])
    return torch.autocast(spec["device"], half) if half else nullcontext()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy of classes, with logits (N, C), or of tokens, with logits (N, T, V)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())


def make_optimizer(
    model: nn.Module, kept: dict[str, Any], spec: dict[str, Any], *, fused: bool | None
) -> tuple[torch.optim.Optimizer, Any]:
    """Create optimizer and scheduler of the configuration, with ``fused`` as given."""
    groups = getattr(model, "parameter_groups", None)
    parameters = groups() if groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = call(spec["optimizer"], parameters, fused=fused)
    if not spec["scheduler"]:
        return optimizer, None
    return optimizer, call(spec["scheduler"], optimizer, total_steps=kept["total_steps"])


def call(made: dict[str, Any], *args: Any, **more: Any) -> Any:
    """Call the ``_target_`` of a mapping."""
    target: Any = locate(made["_target_"])
    return target(*args, **{name: value for name, value in made.items() if not name.startswith("_")} | more)


class Clock:
    """Seeds the first steps as Boltcutter does, and takes turns with other processes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.seeds, self.done = spec["seeds"], 0
        self.turns = StepTimer(**spec["turns"])

    def begin_step(self) -> None:
        """Before a step."""
        if self.done < len(self.seeds):
            torch.manual_seed(self.seeds[self.done])

    def end_step(self, loss: Tensor | float) -> None:
        """After a step."""
        self.done += 1
        self.turns.end_step(loss)


def main(overrides: Iterable[str]) -> None:
    """Train according to a specification in JSON; under ``torchrun``, with DistributedDataParallel."""
    (text,) = overrides
    spec = json.loads(text)
    kept = torch.load(spec["keep"], weights_only=True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        kept["order"] = kept["order"].roll(dist.get_rank(), 0)  # different samples on each rank
    model = call(spec["model"])
    model.load_state_dict(kept["weights"])
    model.to(spec["device"])
    {"guide": guide, "best": best, "lightning": plain_lightning, "keras": keras}[spec["loop"]](model, kept, spec)


if __name__ == "__main__":
    main(sys.argv[1:])
