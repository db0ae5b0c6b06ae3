"""What people write by hand: the loop of the guides, and the best one.

Both train the model that Boltcutter trained, from the same weights on the same samples in the same order, with the same
optimizer, schedule and clipping. Run as a process of its own: ``python -m boltcutter.bench.reference '<spec>'``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pydoc import locate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.bench.window import Turns


def guide(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
    """The default loader over single samples, the default optimizer, the loss read at each step."""
    optimizer, scheduler = make_optimizer(model, kept, spec, fused=None)
    order = kept["order"].flatten().tolist()
    batches = DataLoader(TensorDataset(kept["inputs"], kept["targets"]), kept["order"].size(1), sampler=order)
    clock = Clock(spec)
    model.train()
    for inputs, targets in batches:
        clock.begin_step()
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if spec["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
        optimizer.step()
        if scheduler:
            scheduler.step()
        clock.end_step(loss.item())


def best(model: nn.Module, kept: dict[str, Any], spec: dict[str, Any]) -> None:
    """Each batch fetched whole, a fused optimizer, nothing read; a compiled model if ``spec`` says so."""
    optimizer, scheduler = make_optimizer(model, kept, spec, fused=True)
    if spec["compile"]:
        model.compile()
    elif kept["inputs"].ndim == 4:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if dist.is_initialized():
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    clock = Clock(spec)
    model.train()
    parameters = list(model.parameters())
    for chosen in kept["order"]:
        clock.begin_step()
        inputs, targets = kept["inputs"].index_select(0, chosen), kept["targets"].index_select(0, chosen)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if spec["clip"]:
            nn.utils.clip_grad_norm_(parameters, spec["clip"])
        optimizer.step()
        if scheduler:
            scheduler.step()
        clock.end_step(loss.detach())


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of classes (N, C), or of tokens (N, T, V)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())


def make_optimizer(
    model: nn.Module, kept: dict[str, Any], spec: dict[str, Any], *, fused: bool | None
) -> tuple[torch.optim.Optimizer, Any]:
    """As the configuration has it, but fused or as torch makes it."""
    groups = getattr(model, "parameter_groups", None)
    parameters = groups() if groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = call(spec["optimizer"], parameters, fused=fused)
    if not spec["scheduler"]:
        return optimizer, None
    return optimizer, call(spec["scheduler"], optimizer, total_steps=kept["total_steps"])


def call(made: dict[str, Any], *args: Any, **more: Any) -> Any:
    """What a mapping with ``_target_`` stands for."""
    target: Any = locate(made["_target_"])
    return target(*args, **{name: value for name, value in made.items() if not name.startswith("_")} | more)


class Clock:
    """Seeds the first steps as Boltcutter did, and takes turns with other processes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.seeds, self.done = spec["seeds"], 0
        self.turns = Turns(**spec["turns"])

    def begin_step(self) -> None:
        """Before a step."""
        if self.done < len(self.seeds):
            torch.manual_seed(self.seeds[self.done])

    def end_step(self, loss: Tensor | float) -> None:
        """After a step."""
        self.done += 1
        self.turns.end_step(loss)


def main(words: Iterable[str]) -> None:
    """Train as the specification says, which is JSON; under ``torchrun`` with DistributedDataParallel."""
    (text,) = words
    spec = json.loads(text)
    kept = torch.load(spec["keep"], weights_only=True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        kept["order"] = kept["order"].roll(dist.get_rank(), 0)  # other samples for each
    model = call(spec["model"])
    model.load_state_dict(kept["weights"])
    {"guide": guide, "best": best}[spec["loop"]](model, kept, spec)


if __name__ == "__main__":
    main(sys.argv[1:])
