"""Sets up the data once more with other labels of validation, to see whether training gets them: for ``audit``."""

from __future__ import annotations

import copy
import io
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from boltcutter.data.module import DataModule
from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.loaders import items
from boltcutter.diagnosis.probe import GENERATORS, generator_state, seeded
from boltcutter.diagnosis.source import is_own_file
from boltcutter.structure import flatten, inputs_of, targets_of

FEWEST = 20  # training samples, and others
MOST = 100_000  # training samples, all of which are read
MAX_BYTES = 1 << 28  # of them
SECONDS = 20.0  # of one setup
VISITS = 3  # of a line, after which its variables are not read again
SAMPLED = 4096  # numbers of an array that are hashed
MOST_RERUNS = 6
# Code with one of these names may write files, which must not get other labels.
WRITES = frozenset(
    (
        *("save", "savez", "savez_compressed", "savetxt", "tofile", "dump", "to_csv", "to_parquet", "to_pickle"),
        *("to_feather", "to_hdf", "to_json", "to_excel", "to_sql", "write", "writelines", "writerow", "writerows"),
        *("write_text", "write_bytes", "save_file", "save_to_disk", "memmap", "execute", "commit", "rename", "unlink"),
        *("rmtree", "move", "copyfile", "symlink_to", "system", "Popen", "check_call", "check_output", "urlretrieve"),
    )
)
TRAIN = re.compile(r"(^|_)train", re.IGNORECASE)


class UnsuitableError(BaseException):
    """A setup takes too long, or may write files; not an error, which the user's code might catch."""


class Labels(NamedTuple):
    """Labels of all samples, in a variable of the user's function.

    Args:
        name: Of the function, and of the variable.
        values: The labels, shape (N,), float64.
        train: Which are those of training, shape (N,).
        rows: Name of the variable that says so, as that of the labels; empty if they are the first ones.
        draws: Lines that had drawn random numbers before.
    """

    name: tuple[str, str]
    values: Tensor
    train: Tensor
    rows: tuple[str, str]
    draws: int


class Variable(NamedTuple):
    """A variable of the user's function.

    Args:
        name: Of the function, and its own.
        values: Its numbers, shape (N,), float64.
        draws: Lines that had drawn random numbers before.
    """

    name: tuple[str, str]
    values: Tensor
    draws: int


class Table(NamedTuple):
    """Training samples.

    Args:
        targets: Shape (R,), float64.
        inputs: A row for each sample, or, of one graph, for each node of training; lists of tensors (R, …).
    """

    targets: Tensor
    inputs: list[Tensor]


@dataclass
class Setup:
    """One more setup of a data module, whose variables are read line by line.

    Args:
        change: Called before each line with the variables of the function: its name, their names and values.
        drawn: Of each line that draws random numbers, what it has changed: names of variables, and hashes.
        states: Of random generators at the end of each function.
    """

    change: Callable[[Setup, str, dict[str, Any]], None]
    drawn: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    visits: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    before: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)  # by frame: generators, variables
    end: float = 0.0

    def run(self, data: Any) -> Any:
        """Set up a copy of a data module, and return it."""
        trainer = data.trainer  # which is not copied, as its own arrays may be changed in place
        copied, before = copy.deepcopy(data, {id(trainer): trainer}), sys.gettrace()
        if isinstance(copied, DataModule):
            copied.splits = None  # which would not be loaded again
        self.end = monotonic() + SECONDS
        with seeded(0), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            sys.settrace(self.follow)
            try:
                copied.setup("fit")
            finally:
                sys.settrace(before)
        return copied

    def follow(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Read the variables of the user's functions, and none of libraries."""
        if not is_own_file(frame.f_code.co_filename):
            return None
        if WRITES & {*frame.f_code.co_names}:
            raise UnsuitableError
        return self.read

    def read(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Before a line, and at the end of a function."""
        if monotonic() > self.end:
            raise UnsuitableError
        place = id(frame.f_code), event, frame.f_lineno  # a line with a loop may be that which returns, too
        self.visits[place] += 1
        if event not in ("line", "return") or self.visits[place] > VISITS:
            return self.read
        function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        found = dict(variables(frame))
        if event == "return":
            results = argument if isinstance(argument, tuple) else (argument,)
            found |= {f"return {i}": value for i, value in enumerate(results)}
        states = [generator_state(v) for v in found.values() if isinstance(v, GENERATORS)]
        states += [torch.get_rng_state(), np.random.get_state(), random.getstate()]
        state = tuple(hash(s.numpy().tobytes()) if isinstance(s, Tensor) else hash(str(s)) for s in states)
        hashes = {name: fingerprint(value) for name, value in found.items()}
        earlier_state, earlier = self.before.get(id(frame), (state, hashes))
        if state != earlier_state and earlier_state is not None:
            self.drawn.append((function, {n: h for n, h in hashes.items() if h != earlier.get(n)}))
        self.change(self, function, found)
        hashes = {name: fingerprint(value) for name, value in found.items()}  # with what was changed
        self.before[id(frame)] = state, hashes
        if event == "return":
            self.states.append(state)
            del self.before[id(frame)]
        return self.read


def fingerprint(value: Any) -> Any:
    """A hash of some of the numbers of an array or a tensor; None of anything else."""
    with suppress(TypeError, ValueError, RuntimeError):
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            flat = value.reshape(-1)
            return value.shape, hash(flat[:: len(flat) // SAMPLED + 1].tobytes())
    return None


def variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Names and values of a function, of its object, and in dictionaries and tables."""
    found = dict(frame.f_locals)
    for name, value in getattr(found.get("self"), "__dict__", {}).items():
        found.setdefault(f"self.{name}", value)
    for name, value in found.items():
        yield name, value
        parts = value if isinstance(value, dict) and len(value) < 100 else {}
        if is_frame(value) and len(value.columns) < 100:
            parts = {column: value[column] for column in value.columns} | {"index": value.index.to_numpy()}
        for key, part in parts.items():
            yield f"{name}[{key!r}]", part


def is_frame(value: Any) -> bool:
    """Whether a value is a table of pandas."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


def numbers(value: Any) -> Tensor | None:
    """The numbers of an array, a tensor, a list or a column, shape (N,), float64; None if it is something else."""
    if hasattr(value, "iloc") and not is_frame(value):
        value = value.to_numpy()
    if isinstance(value, list | range) and (not value or type(value[0]) not in (int, float)):
        return None
    if not isinstance(value, Tensor | np.ndarray | list | range) or len(getattr(value, "shape", (1,))) != 1:
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        return None
    with suppress(TypeError, ValueError, RuntimeError):
        value = value.detach().clone() if isinstance(value, Tensor) else np.array(value)
        return torch.as_tensor(value, device="cpu").double()
    return None


def table_of(loader: Any) -> Table | None:
    """Targets and inputs of the samples of a loader, in their order; None if there are others."""
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not 0 < len(dataset) <= MOST:
        return None
    with seeded(0):
        (first,) = items(dataset, range(1))
        size = sum(torch.as_tensor(t).nbytes for t in flatten(first) if isinstance(t, Tensor | np.ndarray))
        if size * len(dataset) > MAX_BYTES:
            return None
        if len(dataset) == 1 and isinstance(first, Mapping):
            return graph_of(first)
        samples = [*items(dataset, range(len(dataset)))]
    targets = [targets_of(sample) for sample in samples]
    kinds: Any = Tensor | np.ndarray | np.number | int | float
    if any(not isinstance(t, kinds) or torch.as_tensor(t).numel() != 1 for t in targets):
        return None
    found = [flatten(inputs_of(sample)) for sample in samples]
    inputs = [[torch.as_tensor(t) for t in parts if isinstance(t, Tensor | np.ndarray)] for parts in found]
    shapes = {tuple(t.shape for t in parts) for parts in inputs}
    if len(shapes) != 1 or not inputs[0]:
        return None
    columns = [torch.stack(parts) for parts in zip(*inputs, strict=True)]
    return Table(torch.tensor([float(t) for t in targets], dtype=torch.float64), columns)


def graph_of(sample: Mapping[Any, Any]) -> Table | None:
    """Targets and features of the nodes of training, which a mask in the sample names."""
    tensors = {str(k): t for k, t in sample.items() if isinstance(t, Tensor) and t.ndim}
    mask = next((t for k, t in tensors.items() if TRAIN.search(k) and t.dtype == torch.bool and t.ndim == 1), None)
    targets = targets_of(dict(tensors))
    if mask is None or not isinstance(targets, Tensor) or targets.shape != mask.shape:
        return None
    inputs = [t[mask] for t in tensors.values() if t is not targets and t.ndim == 2 and len(t) == len(mask)]
    return Table(targets[mask].double(), inputs)


def find_labels(dataset: Any, table: Table, found: list[Variable]) -> Labels | None:
    """The first variable that has the targets of training, at places that another one names, and further ones."""
    count = len(table.targets)
    rows = [(("", ""), torch.arange(count))]
    rows += [(("", ""), torch.as_tensor(dataset.indices))] if isinstance(dataset, Subset) else []
    for name, t, _ in found:
        if len(t) == count == len(torch.unique(t)) and bool((t == t.round()).all() & (t >= 0).all()):
            rows.append((name, t.long()))
        if bool(((t == 0) | (t == 1)).all()) and count in (int(t.sum()), int((1 - t).sum())):
            rows += [(name, chosen.nonzero().flatten()) for chosen in (t == 1, t == 0) if int(chosen.sum()) == count]
    for name, values, draws in found:
        for place, chosen in rows:
            if len(values) < count + FEWEST or int(chosen.max()) >= len(values):
                continue
            if torch.equal(values[chosen], table.targets):
                train = torch.zeros(len(values), dtype=torch.bool)
                train[chosen] = True
                return Labels(name, values, train, place, draws) if len(torch.unique(values[~train])) > 1 else None
    return None


class Exchange:
    """Exchanges labels that are not those of training, once.

    Args:
        labels: Where they are.
        draws: Lines that must have drawn random numbers since they are there.
    """

    def __init__(self, labels: Labels, draws: int) -> None:
        self.labels, self.draws = labels, labels.draws + draws
        self.rows: list[Tensor] = []  # values of the variable that says which are those of training
        self.undo: list[tuple[Any, Any, Any]] = []  # what has the labels, under which name or at which places, before
        self.others = (~labels.train).nonzero().flatten()
        generator = torch.Generator().manual_seed(0)
        self.order = self.others[torch.randperm(len(self.others), generator=generator)]

    def __call__(self, setup: Setup, function: str, found: dict[str, Any]) -> None:
        """Do it if the labels are there."""
        if function == self.labels.rows[0] and (rows := numbers(found.get(self.labels.rows[1]))) is not None:
            self.rows.append(rows)
        value: Any = found.get(self.labels.name[1]) if function == self.labels.name[0] else None
        now = numbers(value) if not self.undo and len(setup.drawn) >= self.draws else None
        if now is None or not torch.equal(now, self.labels.values):
            return
        before: Any = value.clone() if isinstance(value, Tensor) else copy.copy(value)
        others, order = (t if isinstance(value, Tensor) else t.numpy() for t in (self.others, self.order))
        frame: Any = found.get(self.labels.name[1].rpartition("[")[0])
        self.undo.append((frame, value.name, before) if is_frame(frame) else (value, slice(None), before))
        if isinstance(value, list):
            for row, other in zip(others.tolist(), order.tolist(), strict=True):
                value[row] = before[other]
            return
        new = before.to_numpy().copy() if hasattr(value, "iloc") else value
        old = before.to_numpy() if hasattr(value, "iloc") else before
        new[others] = old[order]
        if is_frame(frame):
            frame[value.name] = new  # a column of it is a copy
        elif hasattr(value, "iloc"):
            value.iloc[:] = new

    def restore(self) -> None:
        """Undo it, as the variable may be a part of the original data."""
        for owner, place, before in self.undo:
            if hasattr(owner, "iloc") and not is_frame(owner):
                owner.iloc[place] = before
            else:
                owner[place] = before


@check("held-out-labels", "likely", at="data")
def held_out_labels(seen: Evidence) -> Lines:
    """Inputs of training change if labels of other samples, as of validation, are exchanged while data are set up."""
    data = getattr(seen.trainer, "datamodule", None)
    if data is None or seen.splits is None or seen.splits.train is None:
        return
    with suppress(UnsuitableError):
        share, (function, name) = share_changed(data, seen.splits.train)
        if share > 0:
            yield (
                f"the inputs of {share:.0%} of the training samples change if labels of other samples, in {name} of "
                f"{function}, are exchanged among them, so they are computed of the labels of all samples, such as of "
                "validation; use labels of training only"
            )


def share_changed(data: Any, train: Any) -> tuple[float, tuple[str, str]]:
    """The share of training samples whose inputs change with labels of others, and where these labels are."""
    found: list[Variable] = []
    known: set[tuple[str, str, Any]] = set()

    def keep(setup: Setup, function: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            t = numbers(value)
            if t is not None and FEWEST <= len(t) <= 10 * MOST:
                key = (function, name, fingerprint(t))
                if key not in known:
                    known.add(key)
                    found.append(Variable((function, name), t, len(setup.drawn)))

    unknown = 0.0, ("", "")
    before = table_of(train)
    if before is None or len(before.targets) < FEWEST or not before.inputs:
        return unknown
    first = Setup(keep)
    loader = first.run(data).train_dataloader()
    same = table_of(loader)
    if same is None or not _are_equal(before, same) or (labels := find_labels(loader.dataset, same, found)) is None:
        return unknown  # what is drawn at random would change, too
    rows = [v.values for v in found if v.name == labels.rows]
    for draws in range(min(len(first.drawn) - labels.draws, MOST_RERUNS) + 1):
        change = Exchange(labels, draws)
        second = Setup(change)
        try:
            other = table_of(second.run(data).train_dataloader())
        finally:
            change.restore()
        # Stratified splits change all.
        is_same_split = all(any(torch.equal(a, b) for b in rows) for a in change.rows)
        if not change.undo or not is_same_split or other is None or not torch.equal(other.targets, before.targets):
            return unknown
        share = _share(before, other)
        # What is drawn at random by a line, and has changed, was generated of labels: later ones are tried.
        if share == 0 or (first.drawn == second.drawn and first.states == second.states):
            return share, labels.name
    return unknown


def _share(one: Table, other: Table) -> float:
    """The share of samples whose inputs differ."""
    changed = torch.zeros(len(one.targets), dtype=torch.bool)
    for a, b in zip(one.inputs, other.inputs, strict=False):
        differ = torch.ones_like(a, dtype=torch.bool) if a.shape != b.shape else ~torch.isclose(a, b, equal_nan=True)
        changed |= differ.flatten(1).any(1) if differ.ndim > 1 else differ
    return float(changed.double().mean())


def _are_equal(one: Table, other: Table) -> bool:
    pairs = zip([one.targets, *one.inputs], [other.targets, *other.inputs], strict=False)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
