"""Items that a validation ranks for users, of which some are known from training: for ``audit``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.epochs import is_same, replay
from boltcutter.diagnosis.evidence import Evidence, tensors_of
from boltcutter.diagnosis.loaders import NUMBERS
from boltcutter.structure import flatten

FEWEST = 20  # items, and users
EXPECTED = 8.0  # common pairs, if they were drawn by chance
MOST = 0.9  # share of users
MOST_NUMBERS = 8  # of a training sample
MOST_LEVELS = 20  # of a rating
LOSSES = re.compile(r"loss|nll|entropy|error|mse|mae", re.IGNORECASE)
Change = Callable[[Tensor], Tensor]


@check("seen-items", "likely", at="data")
def seen_items(seen: Evidence) -> Lines:
    """Scores of validation rank items that users have in training, which are never among those that are looked for."""
    if seen.probe is None or seen.splits is None or "validation_step" not in seen.probe.batches:
        return
    parts = tensors_of(seen.probe.batches["validation_step"])
    users = [t for t in parts if _are_integers(t) and t.ndim == 1 and len(t) >= FEWEST]
    if not users:
        return
    with (scores := Scores(len(users[0]))):
        plain = replay(seen)
    columns = _columns(seen.splits.samples("train")) if plain and scores.widths else None
    for width in sorted(scores.widths) if columns is not None else ():
        found = [*_known(columns, parts, width)]  # type: ignore[arg-type]
        if found and all(_counts(seen, known, plain) for known in found):
            count = float(found[0].sum(1).float().mean())
            yield (
                f"validation ranks {width} items for each user, also the {count:.3g} on average that the user has in "
                "training, which are never among those that are looked for, so they take their places; set their "
                "scores to -inf before the ranking"
            )
            return


def _are_integers(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool


class Neighbours(TorchFunctionMode):
    """Finds the nearest of all samples by their similarities with each other, (N, N), if each is its own nearest."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = WeakTensorKeyDictionary()  # similarities of rows with themselves
        self.found = 0  # samples

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and look at its result."""
        result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in ("matmul", "__matmul__", "mm", "cdist") and first is not None and isinstance(args[1], Tensor):
            is_own = first.ndim == 2 and first.data_ptr() == args[1].data_ptr() and result.shape == (len(first),) * 2
            if is_own and len(first) >= FEWEST:
                self.pairs[result] = name
        elif name in ("neg", "__neg__", "rsub", "__rsub__") and first is not None and first in self.pairs:
            self.pairs[result] = self.pairs[first]
        elif name in ("argmax", "argmin", "topk", "max", "min") and first is not None and first in self.pairs:
            indices = result if isinstance(result, Tensor) else result[1]
            own = torch.arange(len(first), device=first.device)
            if indices.flatten().shape == own.shape and torch.equal(indices.flatten(), own):
                self.found = len(own)
        return result


@check("self-retrieval", "likely", at="trial")
def own_neighbour(seen: Evidence) -> Lines:
    """Validation takes each sample for the nearest one of itself, among similarities of all with all."""
    with Neighbours() as neighbours:
        replay(seen)
    if neighbours.found:
        yield (
            f"validation looks for the nearest of {neighbours.found} samples among all of them, and finds each one "
            "itself, so that what it rates is always right; set the diagonal to -inf, or leave out the first one"
        )


class Scores(TorchFunctionMode):
    """Find the matrices of users and items that a step computes, and change one of them.

    Args:
        count: Users.
        width: Items, of what is changed.
        change: Of the first matrix, which returns another one.
    """

    def __init__(self, count: int, width: int = 0, change: Change | None = None) -> None:
        super().__init__()
        self.count, self.width, self.change = count, width, change
        self.widths = set[int]()

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and look at its result."""
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if result.ndim != 2 or len(result) != self.count or result.shape[1] < FEWEST:
            return result
        given = tensors_of([args, kwargs or {}])
        if not any(t.is_floating_point() for t in given) or any(t.shape == result.shape for t in given):
            return result  # only the first one, of which others are computed
        self.widths.add(result.shape[1])
        return self.change(result) if self.change and result.shape[1] == self.width else result


def _columns(samples: list[Any]) -> Tensor | None:
    """The numbers of training samples, shape (N, K); None if they have other parts, or not as many each."""
    rows = []
    for sample in samples:
        leaves = [torch.as_tensor(v) for v in flatten(sample) if isinstance(v, NUMBERS)]
        rows.append([float(v) for t in leaves if t.numel() <= MOST_NUMBERS for v in t.flatten().tolist()])
    count = len(rows[0]) if rows else 0
    if not 2 <= count <= MOST_NUMBERS or any(len(row) != count for row in rows):
        return None
    return torch.tensor(rows, dtype=torch.float64)


def _known(columns: Tensor, parts: list[Tensor], width: int) -> Iterator[Tensor]:
    """Which items users of a batch have in training, (B, I), by any two columns that may be those of users and items.

    Items that are looked for must never be among them, where several would be by chance; nothing if the batch has
    further numbers of each user, as of a relation.
    """
    whole = [j for j in range(columns.shape[1]) if bool((columns[:, j] == columns[:, j].round()).all())]
    levels = [len({*column.tolist()}) for column in columns.T]
    for users in (t for t in parts if _are_integers(t) and t.ndim == 1):
        for a in whole:
            is_user = torch.isin(users.cpu().double(), columns[:, a])
            if levels[a] < FEWEST or float(is_user.float().mean()) < MOST:
                continue
            for b in whole:
                if (
                    b == a
                    or levels[b] < FEWEST
                    or float(columns[:, b].min()) < 0
                    or float(columns[:, b].max()) >= width
                ):
                    continue
                others = [j for j in range(len(levels)) if j not in (a, b)]
                if any(2 < levels[j] <= MOST_LEVELS for j in others):
                    return  # ratings, of which some may not count
                rows = columns
                for j in others:
                    if levels[j] == 2:
                        rows = rows[rows[:, j] == rows[:, j].max()]  # no negatives
                known = _matrix(users, rows[:, a].long(), rows[:, b].long(), width)
                if _are_apart(known, [t for t in parts if t is not users]):
                    yield known


def _matrix(users: Tensor, of_users: Tensor, items: Tensor, width: int) -> Tensor:
    """Which items each user of a batch has, shape (B, I)."""
    names = {int(u): n for n, u in enumerate(sorted({*of_users.tolist()}))}
    table = torch.zeros(len(names) + 1, width, dtype=torch.bool)
    table[torch.tensor([names[int(u)] for u in of_users]), items] = True
    return table[torch.tensor([names.get(int(u), len(names)) for u in users])]


def _are_apart(known: Tensor, parts: list[Tensor]) -> bool:
    """Whether a part of the batch has items, none of which is known, and no further part tells them apart."""
    is_found = False
    if sum(_are_integers(t) and t.ndim == 1 for t in parts) > 1:
        return False
    for t in parts:
        if _are_integers(t) and t.ndim in (1, 2) and len(t) == len(known) and t.shape != known.shape:
            if int(t.min()) < 0 or int(t.max()) >= known.shape[1]:
                return False
            wanted = torch.zeros_like(known).scatter(1, t.cpu().reshape(len(t), -1).long(), value=True)
        elif t.shape == known.shape and bool(((t == 0) | (t == 1)).all()):
            wanted = t.cpu().bool()
        else:
            continue
        expected = float((wanted.sum(1) * known.sum(1)).sum()) / known.shape[1]
        is_apart = not bool((wanted & known).any())
        is_found |= is_apart and expected >= EXPECTED
        if not is_apart and t.ndim == 1:
            return False
    return is_found and float(known.any(1).float().mean()) > MOST


def _counts(seen: Evidence, known: Tensor, plain: dict[str, float]) -> bool:
    """Whether all that depends on the order of the items differs if known items are the first, or the last."""

    def logged(change: Change) -> dict[str, float]:
        with Scores(len(known), known.shape[1], change):
            return replay(seen)

    def placed(x: Tensor, factor: float) -> Tensor:
        far = float(x.abs().max()) + 1
        return torch.where(known.to(x.device), far * factor, x)

    first, farther, last = (logged(lambda x, f=f: placed(x, f)) for f in (10.0, 20.0, -10.0))  # type: ignore[misc]
    others = [logged(torch.neg), logged(lambda x: x.roll(FEWEST // 2, 1))]  # in which one may hit as many by chance
    names = plain.keys() & first.keys() & farther.keys() & last.keys() & others[0].keys() & others[1].keys()
    of_order = [
        n for n in names if not LOSSES.search(n) and is_same(first[n], farther[n])
        and not all(is_same(plain[n], other[n]) for other in others)
    ]  # fmt: skip
    return bool(of_order) and all(not is_same(first[n], last[n]) for n in of_order)
