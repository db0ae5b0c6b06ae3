"""The structure of batches: inputs and targets, the tensors in containers, and samples.

A container is a mapping, a list, tuple or other sequence, a named tuple or a dataclass, in any nesting; whatever else a
batch has is a leaf. A ``PackedSequence`` contains one tensor, its data, whose rows are no samples, and a nested tensor
its values or, if it is strided, its samples. All code that looks into a batch does it by the functions of this module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import default_collate

SIZE_ATTRIBUTES = ("num_graphs", "batch_size")  # of the batch classes of libraries such as PyTorch Geometric
CLASS = "_target_"  # in an outline, the key of the class of a named tuple or dataclass
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
    if isinstance(batch, list | tuple) and len(batch) > 1 and not isinstance(batch, PackedSequence):
        place = next((names.index(name) for name in TARGETS if name in names), len(batch) - 1)
        rest = (*batch[:place], *batch[place + 1 :])
        return rest[0] if len(rest) == 1 else rest, batch[place]
    name = next((name for name in TARGETS if name in names), None)
    if name is not None and len(names) > 1:
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


def flatten(value: Any) -> list[Any]:
    """Return what is in a structure and is no container, in its order."""
    return [value] if (parts := children(value)) is None else [leaf for part in parts for leaf in flatten(part)]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a structure, in their order."""
    if isinstance(value, Tensor) and not value.is_nested:
        return [value]
    return [tensor for part in children(value) or () for tensor in tensors(part)]


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the same structure with each tensor changed; the containers are new ones of the same types."""
    if isinstance(value, Tensor) and not value.is_nested:
        return change(value)
    parts = children(value)
    return value if parts is None else _with_parts(value, [map_tensors(part, change) for part in parts])


def with_tensors(value: Any, new: Iterable[Any]) -> Any:
    """Return the same structure with others in place of the tensors, in the order of ``tensors``."""
    following = iter(new)
    return map_tensors(value, lambda _: next(following))


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in a structure, with the expression that selects each: ``["tokens"]`` or ``[0].mask``."""
    if isinstance(value, Tensor) and not value.is_nested:
        return [(name, value)]
    is_indexed = isinstance(value, Mapping) or not _names(value)
    names = _names(value) or range(len(children(value) or ()))
    return [
        found
        for key, part in zip(names, children(value) or (), strict=True)
        for found in named_tensors(part, f"{name}[{key!r}]" if is_indexed else f"{name}.{key}")
    ]


def is_alike(value: Any, structure: Any) -> bool:
    """Whether a value has a structure, in the form of ``outline``, whatever the dtypes of its tensors."""
    found = outline(value)
    if isinstance(found, str) and isinstance(structure, str):
        return found == structure or (isinstance(value, Tensor) and hasattr(torch, structure))
    if type(found) is not type(structure) or len(found) != len(structure):
        return False
    if isinstance(found, dict):
        if found.get(CLASS) != structure.get(CLASS):
            return False
        keys = found.keys() - ({CLASS} if not isinstance(value, Mapping) else ())
        value, structure = children(value), [structure.get(key) for key in found if key in keys]
    return all(is_alike(part, other) for part, other in zip(value, structure, strict=True))


def outline(value: Any) -> Any:
    """Describe a structure in JSON: dtypes of tensors in dictionaries and lists, and names of other classes.

    A named tuple or dataclass is a dictionary with the path of its class as ``_target_``.
    """
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): outline(part) for key, part in value.items()}
    if (names := _names(value)) and not isinstance(value, PackedSequence):
        parts = zip(names, children(value) or (), strict=True)
        path = f"{type(value).__module__}.{type(value).__qualname__}"
        return {CLASS: path, **{str(name): outline(part) for name, part in parts}}
    return [outline(part) for part in value] if type(value) in (list, tuple) else type(value).__name__


def tensor_names(value: Any, prefix: str = "") -> list[str]:
    """Return the names of the tensors in a structure, in their order: ``tokens``, or ``input_0`` in a list."""
    if isinstance(value, Tensor) and not value.is_nested:
        return [prefix or "input"]
    parts = children(value) or ()
    return [
        found
        for name, part in zip(_names(value) or range(len(parts)), parts, strict=True)
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
    return (take_rows(inputs, rows, count_samples(inputs) or 0),)


def take_rows(value: Any, rows: Sequence[int] | Tensor, count: int) -> Any:
    """Return the same structure with other samples.

    Args:
        value: Tensors that have a sample in each row, lists with an element for each sample, tuples with a text for
            each, and whatever else, which stays as it is.
        rows: Indices of the samples.
        count: Number of samples in ``value``.
    """
    if isinstance(value, Tensor):
        if not value.ndim or value.size(0) != count:
            return value
        if value.is_nested:  # which cannot be indexed by a list
            samples = value.unbind()
            return torch.nested.nested_tensor([samples[int(row)] for row in rows], layout=value.layout)
        return value[torch.as_tensor(rows, device=value.device)]
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        chosen = torch.as_tensor(rows)
        taken = padded[chosen.to(padded.device)]
        return pack_padded_sequence(taken, lengths[chosen.cpu()], batch_first=True, enforce_sorted=False)
    if isinstance(value, list) and len(value) == count and not all(_is_column(part, count) for part in value):
        return [value[int(row)] for row in rows]
    if type(value) is tuple and len(value) == count and all(isinstance(part, str | bytes) for part in value):
        return tuple(value[int(row)] for row in rows)  # as default_collate returns texts
    parts = children(value)
    return value if parts is None else _with_parts(value, [take_rows(part, rows, count) for part in parts])


def _is_column(value: Any, count: int) -> bool:
    """Whether a value has an entry for each sample."""
    is_scalar = isinstance(value, Tensor) and not value.ndim
    return isinstance(value, Tensor | list | tuple) and not is_scalar and len(value) == count


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch, which holds its inputs; None if it has no tensor."""
    while not isinstance(batch, Tensor):
        if type(batch) not in (list, tuple):
            return next((found for part in children(batch) or () if (found := first_tensor(part)) is not None), None)
        if not batch:
            return None
        batch = batch[0]
    return batch


def children(batch: Any) -> Sequence[Any] | None:
    """Return the elements of a container; None of any other type, such as a tensor or a text."""
    if isinstance(batch, Tensor) and batch.is_nested:
        return [batch.values()] if batch.layout is torch.jagged else batch.unbind()
    if isinstance(batch, Tensor | str | bytes | int | float) or batch is None:
        return None
    if isinstance(batch, PackedSequence):
        return [batch.data]
    if isinstance(batch, list | tuple):
        return batch
    if isinstance(batch, Mapping):
        return [*batch.values()]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name, None) for field in fields(batch)]
    return [*batch] if isinstance(batch, Sequence) and not isinstance(batch, range | memoryview | bytearray) else None


def _with_parts(value: Any, parts: list[Any]) -> Any:
    """A container of the same type with other elements."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(parts)
    if isinstance(value, PackedSequence):
        return value._replace(data=parts[0])
    if isinstance(value, Tensor):
        if value.layout is not torch.jagged:
            return torch.nested.as_nested_tensor(parts)
        jagged: Any = value
        return torch.nested.nested_tensor_from_jagged(parts[0], jagged.offsets(), jagged.lengths())
    if hasattr(value, "_fields"):
        return kind(*parts)
    if isinstance(value, Mapping):
        new = dict(zip(value.keys(), parts, strict=True))  # a TensorDict iterates over its rows
        if kind is dict or not hasattr(value, "__setitem__"):
            return new if kind is dict else kind(new)
        changed: Any = copy.copy(value)  # of any class, whose constructor may take something else
        for key, part in new.items():
            changed[key] = part
        return changed
    if is_dataclass(value):
        changed = copy.copy(value)
        for field, part in zip(fields(value), parts, strict=True):
            object.__setattr__(changed, field.name, part)  # which a frozen one refuses otherwise
        return changed
    return kind(parts)


def _names(batch: Any) -> list[Any]:
    """Names of the elements of a mapping, dataclass or named tuple."""
    if isinstance(batch, Mapping):
        return [*batch.keys()]
    if isinstance(batch, PackedSequence):
        return ["data"]
    if isinstance(batch, list | tuple):
        return [*getattr(batch, "_fields", ())]
    return [field.name for field in fields(batch)] if is_dataclass(batch) and not isinstance(batch, type) else []


def count_samples(batch: Any) -> int | None:
    """Count the samples in the batch of one rank; None if the count is unknown.

    It is the length of the first tensor, or of the others where that has samples in its second dimension, after time;
    where inputs have a list with an element for each sample, that of the targets; for other batch classes, one of
    ``SIZE_ATTRIBUTES`` or ``len``.
    """
    if after_time := count_after_time(batch):
        return after_time
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1  # a strided nested tensor has no len
    if type(batch) in (list, tuple) and batch and isinstance(batch[0], Tensor):
        return count_samples(batch[0])
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # the number of sequences that have a first time step, which all have
    targets = targets_of(batch)
    is_list = isinstance(targets, list) or (isinstance(targets, Tensor) and bool(targets.ndim))
    if is_list and len({len(t) for t in tensors(batch) if t.ndim}) > 1 and _has_list(inputs_of(batch), len(targets)):
        return len(targets)
    if type(batch) in (list, tuple) and batch and isinstance(batch[0], list | tuple):
        return count_samples(batch[0])
    size = next((count for name in SIZE_ATTRIBUTES if isinstance(count := getattr(batch, name, None), int)), None)
    if size is not None or isinstance(batch, str | bytes):
        return size
    for part in children(batch) or ():
        if isinstance(batch, Mapping) and isinstance(part, list) and not tensors(part):
            return len(part)  # a column of texts or of lists of numbers
        if not isinstance(part, int | float) and (found := count_samples(part)) is not None:
            return found
    if isinstance(batch, list) or (hasattr(batch, "__len__") and not isinstance(batch, tuple | Mapping)):
        return len(batch)
    return None


def count_after_time(batch: Any) -> int:
    """Number of samples where the first tensor has the shape (time, samples, …), and others (samples, …); else 0."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        return 0
    first, *others = batch
    if not all(isinstance(part, Tensor) and part.ndim and not part.is_nested for part in batch) or first.ndim < 2:
        return 0
    sizes = {len(part) for part in others}
    return len(others[0]) if sizes == {first.shape[1]} and len(first) not in sizes else 0


def _has_list(inputs: Any, count: int) -> bool:
    """Whether there is a list with an element for each sample."""
    is_one = isinstance(inputs, list) and len(inputs) == count and bool(tensors(inputs))
    return is_one or any(_has_list(part, count) for part in children(inputs) or ())
