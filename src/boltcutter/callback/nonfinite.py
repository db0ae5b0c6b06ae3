"""The origin of non-finite gradients: the inputs, a weight, the first module, the loss, or the backward pass."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from boltcutter.data.sampler import find_sampler
from boltcutter.protocols import ReducesGradientNorms, gather_objects
from boltcutter.structure import named_tensors, tensors


class Origin(NamedTuple):
    """Where a value was not finite first."""

    text: str
    in_data: bool = False


def find_origin(trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> Origin | None:
    """Find where non-finite gradients come from, on all ranks together; the batch is computed once more.

    Returns:
        The origin on the first rank that has one; None if the values were finite this time.
    """
    found = _in_batch(trainer, batch, batch_idx)
    names = [name for name, p in module.named_parameters() if not p.is_meta and _is_bad(p.detach())]
    if found is None and names:
        found = Origin(f"the weight {names[0]} is not finite")
    sharded = isinstance(trainer.strategy, ReducesGradientNorms) or any(
        hasattr(parameter, "full_tensor") for parameter in module.parameters()
    )
    if found is None and module.automatic_optimization and not sharded:  # ranks with shards would wait for one another
        found = _in_step(trainer, module, batch, batch_idx)
    each: list[tuple[int, Origin]] = [(rank, origin) for rank, origin in enumerate(gather_objects(found)) if origin]
    if not each:
        return None
    rank, origin = min(each, key=lambda pair: not pair[1].in_data)
    return Origin(f"rank {rank}: {origin.text}", origin.in_data) if trainer.world_size > 1 else origin


def _in_batch(trainer: L.Trainer, batch: Any, batch_idx: int) -> Origin | None:
    for path, tensor in named_tensors(batch):
        if not _is_bad(tensor):
            continue
        where = (~tensor.isfinite()).nonzero()[0].tolist()
        value = tensor[tuple(where)].item()
        text = f"the data are not finite: batch{path}"
        if where:
            text += f" has {value} in {_sample(trainer, batch_idx, where[0], len(tensor))}"
            text += _position(trainer, tensor, where[1:])
        return Origin(text + _in_dataset(trainer, path), in_data=True)
    return None


def _sample(trainer: L.Trainer, batch_idx: int, row: int, count: int) -> str:
    """A sample by its index in the data, or, where a loader has none, by its place in the batch."""
    sampler = find_sampler(trainer.train_dataloader)
    indices = sampler.indices_of(batch_idx) if sampler else None
    if indices is not None and len(indices) == count:
        return f"sample {indices[row]} of the training data"
    return f"sample {row} of the {count} of the batch"


def _position(trainer: L.Trainer, tensor: Tensor, where: list[int]) -> str:
    data = trainer.datamodule  # type: ignore[attr-defined]
    columns = getattr(data, "statistics", {}).get("columns")
    if columns and tensor.ndim == 2 and len(columns) == tensor.size(1):
        return f", column {columns[where[0]]}"
    return f", position {where}" if where else ""


def _in_dataset(trainer: L.Trainer, path: str) -> str:
    """The samples with such values in a dataset of tensors, whose index the position in a batch does not tell."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    parts = getattr(dataset, "tensors", ()) or [getattr(dataset, name, None) for name in ("inputs", "targets")]
    tensor = {f"[{number}]": part for number, part in enumerate(parts)}.get(path)
    if not isinstance(tensor, Tensor) or not _is_bad(tensor):
        return ""
    bad = sorted({*(~tensor.isfinite()).nonzero()[:, 0].tolist()})
    some = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
    return f" ({len(bad)} of {len(tensor)} training samples: {some})"


def _in_step(trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> Origin | None:
    """Repeat the step with a hook in each module, then the backward pass with torch's anomaly detection."""
    first: list[str] = []

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not first and any(map(_is_bad, tensors(output))):
            what = "input" if any(map(_is_bad, tensors(inputs))) else "output"
            first.append(f"the {what} of {name} ({type(module).__name__}) is the first that is not finite")

    handles = [
        part.register_forward_hook(partial(check, name))
        for name, part in module.named_modules()
        if name and not isinstance(part, Metric | torch.jit.ScriptModule)
    ]
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    step: Callable[[], Any] = partial(module.training_step, batch, *([batch_idx] if takes_index else []))
    loss: Any = None
    try:
        with warnings.catch_warnings(), torch.enable_grad(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            with torch.compiler.set_stance("force_eager"), trainer.precision_plugin.forward_context():
                output = step()
            loss = output["loss"] if isinstance(output, dict) else output
            if not first and not _is_bad(loss):
                # Not loss.backward(), which would reduce the gradients over ranks.
                torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad], allow_unused=True)
    except Exception as error:  # of any kind: this is only the explanation of another error
        if found := re.search(r"Function '(\w+?)(Backward[0-9]*)?' returned nan", str(error)):
            return Origin(f"the loss is finite, but the backward pass of {found[1]} is not")
    finally:
        for handle in handles:
            handle.remove()
    if first:
        return Origin(first[0])
    return Origin(f"the loss is {loss.item()}, but each module's output is finite") if _is_bad(loss) else None


def _is_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all())
