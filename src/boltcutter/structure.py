"""The structure of batches: inputs and targets, the tensors in mappings, sequences and dataclasses, and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

SIZE_ATTRIBUTES = ("num_graphs", "batch_size")  # of the batch classes of libraries such as PyTorch Geometric
TARGETS = ("targets", "target", "labels", "label", "y")  # names of the targets in a batch whose elements have names


class BatchError(ValueError):
    """A batch has no targets, or its inputs cannot be told from them."""

    hide_traceback = True


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch.

    The last element of a list or tuple is the targets, as is one with a name of ``TARGETS`` in a mapping, dataclass or
    named tuple. What is left are the inputs: a single element as it is, several as a tuple, or as a dictionary if they
    have names in a mapping or dataclass.

    Raises:
        BatchError: There are no inputs or no targets.
    """
    if type(batch) in (list, tuple) and len(batch) == 2:
        return batch[0], batch[1]
    names = _names(batch)
    if isinstance(batch, list | tuple) and len(batch) > 1:
        place = next((names.index(name) for name in TARGETS if name in names), len(batch) - 1)
        rest = (*batch[:place], *batch[place + 1 :])
        return rest[0] if len(rest) == 1 else rest, batch[place]
    if (name := next((name for name in TARGETS if name in names), None)) and len(names) > 1:
        values = {key: batch[key] if isinstance(batch, Mapping) else getattr(batch, key) for key in names}
        targets = values.pop(name)
        return next(iter(values.values())) if len(values) == 1 else values, targets
    listed = f" with {', '.join(map(str, names[:10]))}" if names else ""
    raise BatchError(
        f"data: a batch is a {type(batch).__name__}{listed}; return (inputs, targets), or name the targets "
        f"{' or '.join(TARGETS[:3:2])}"
    )


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch that may have targets: those of ``split_batch``, or else all of it."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return batch[0]
    try:
        return split_batch(batch)[0]
    except BatchError:
        return batch


def targets_of(batch: Any) -> Any:
    """Return the targets of a batch; None if it has none."""
    try:
        return split_batch(batch)[1]
    except BatchError:
        return None


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a mapping, sequence or dataclass, in their order."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return found


def with_tensors(value: Any, new: Iterable[Tensor]) -> Any:
    """Return the same structure with other tensors, in the order of ``tensors``."""
    following = iter(new)
    return apply_to_collection(value, Tensor, lambda _: next(following))


def tensor_names(value: Any, prefix: str = "") -> list[str]:
    """Return the names of the tensors in a structure, in their order: ``tokens``, or ``input_0`` in a list."""
    if isinstance(value, Tensor):
        return [prefix or "input"]
    names = _names(value) or range(len(value) if isinstance(value, list | tuple) else 0)
    return [
        found
        for name, part in zip(names, children(value), strict=True)
        for found in tensor_names(part, f"{prefix or ('input' if isinstance(name, int) else '')}_{name}".lstrip("_"))
    ]


def make_batch(inputs: Any, rows: Sequence[int], collate: Callable[[list[Any]], Any] | None = None) -> Any:
    """Make a batch for prediction, whose inputs ``inputs_of`` returns.

    Args:
        inputs: A list of samples, with or without targets, which are collated; or a tensor, mapping, tuple or dataclass
            with the samples in the first dimension of each tensor.
        rows: Indices of the samples.
        collate: Collates a list of samples; None means ``default_collate``.
    """
    if isinstance(inputs, list):
        return (collate or default_collate)([inputs[row] for row in rows])
    return (apply_to_collection(inputs, Tensor, lambda tensor: tensor[rows]),)


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch, which holds its inputs; None if it has no tensor."""
    while not isinstance(batch, Tensor):
        if type(batch) not in (list, tuple):
            return next((found for part in children(batch) if (found := first_tensor(part)) is not None), None)
        if not batch:
            return None
        batch = batch[0]
    return batch


def children(batch: Any) -> Sequence[Any]:
    """Return the elements of a mapping, sequence or dataclass; empty for any other type."""
    if isinstance(batch, Mapping):
        return [*batch.values()]
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return ()


def _names(batch: Any) -> list[Any]:
    """Names of the elements of a mapping, dataclass or named tuple."""
    if isinstance(batch, Mapping):
        return [*batch]
    if isinstance(batch, tuple):
        return [*getattr(batch, "_fields", ())]
    return [field.name for field in fields(batch)] if is_dataclass(batch) and not isinstance(batch, type) else []


def count_samples(batch: Any) -> int | None:
    """Count the samples in the batch of one rank; None if the count is unknown.

    It is the length of the first tensor; where inputs are a list, that of the targets; for other batch classes, one of
    ``SIZE_ATTRIBUTES`` or ``len``.
    """
    while type(batch) in (list, tuple) and batch and isinstance(batch[0], Tensor | list | tuple):
        if len(batch) == 2 and isinstance(batch[0], list):
            targets = batch[1]
            if isinstance(targets, Tensor) and targets.ndim and len({len(t) for t in tensors(batch) if t.ndim}) > 1:
                return len(targets)  # a list with a tensor for each sample, or of tensors that are no samples
            is_paired = isinstance(targets, list) and len(targets) == len(batch[0])
            if is_paired and len({len(t) for t in tensors(batch) if t.ndim}) > 1:
                return len(targets)  # a list of pictures, and one of their boxes
        batch = batch[0]
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # the number of sequences that have a first time step, which all have
    size = next((count for name in SIZE_ATTRIBUTES if isinstance(count := getattr(batch, name, None), int)), None)
    if size is not None or isinstance(batch, str | bytes):
        return size
    for part in children(batch):
        if not isinstance(part, int | float) and (found := count_samples(part)) is not None:
            return found
    if isinstance(batch, list) or (hasattr(batch, "__len__") and not isinstance(batch, tuple | Mapping)):
        return len(batch)
    return None
