"""Checks of what training, or an input, gets of samples and targets that it must not know: for ``audit``."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.loaders import NUMBERS, Splits, digest, first_leaf, items
from boltcutter.diagnosis.probe import seeded
from boltcutter.diagnosis.source import own_classes, tree_of
from boltcutter.diagnosis.splits import WIDE
from boltcutter.diagnosis.statements import called_name
from boltcutter.structure import flatten

FEWEST_WINDOWS = 8  # and values of a column
FEWEST_VALUES = 4  # of a window
MOST_HELD = 100  # windows that are looked for
MOST_SHIFTS = 64  # values
DIGITS = 1000  # steps of a normalized difference, within which rounding may move it
FEWEST_ROWS = 200  # of a series
MOST_COLUMNS = 500
REACH = 8  # samples before and after one
EXACT = 1e-8  # variance of what a linear function leaves
IN_TIME, PARTS_OF_TIME, LONGEST_WINDOW = 96, 4, 30  # rows, how often, and of a rolling mean
CHANGED = 1e-3  # of the deviation of changes
SPLITTERS = frozenset(("train_test_split", "random_split", "Subset"))
FITS = frozenset(("fit", "fit_transform"))
UNSUPERVISED = re.compile(r"KMeans|PCA|Mixture|DBSCAN|Scaler|UMAP|NMF|kmeans|pca|scaler")
RESAMPLES = frozenset(("fit_resample",))


@check("window-overlap", "likely", at="data")
def window_overlap(seen: Evidence) -> Lines:
    """Over 30% of the windows of another split begin within a window of training, and end within another one."""
    splits = seen.splits
    for name in ("validation", "test") if splits else ():
        train, held = (_windows(splits, each) for each in ("train", name))  # type: ignore[arg-type]
        if len(train) < WIDE or len(held) < FEWEST_WINDOWS:
            continue
        share, gap = max(_share_inside(train, held, is_first) for is_first in (True, False))
        if share > 0.3:
            yield Line(
                f"{share:.0%} of the {name} samples are windows between two of training, which overlap them but for "
                f"{'one value' if gap == 1 else f'{gap} values'}; split by time before windows are made, not windows "
                "at random",
                subject=name,
                sample=held[0],
            )


def _share_inside(train: list[Tensor], held: list[Tensor], is_first: bool) -> tuple[float, int]:
    """Share of windows that lie between two of training, and by how much they are shifted; time is a dimension."""
    if not is_first and train[0].ndim < 2:
        return 0.0, 0
    train, held = ([w if is_first else w.transpose(0, 1) for w in windows] for windows in (train, held))
    held = held[:: max(1, len(held) // MOST_HELD)]
    length = len(train[0])
    best = 0.0, 0
    for part in (slice(None), slice(None, length // 2), slice(-(length // 2), None)):
        one, other = ([w[part] for w in windows if len(w) == length] for windows in (train, held))
        size = len(one[0]) if one else 0
        # Shifted by one, all other values are compared, but for level and scale; by more, one half as it is.
        kinds = [(size - 1, _key, range(1, 2)), (size // 2, _exact, range(2, MOST_SHIFTS))]
        for width, key, reach in kinds if part == slice(None) and _recur(one, other) else kinds[:1]:
            starts, ends = {key(w[:width]) for w in one} - {None}, {key(w[-width:]) for w in one} - {None}
            shifts: Counter[int] = Counter()
            for w in other:
                places = range(reach.start, min(reach.stop, size - width + 1))
                begins = next((s for s in places if key(w[s : s + width]) in starts), 0)
                if not begins or key(w[begins : begins + width]) == key(w[:width]):
                    continue  # each part of an exponential or periodic one is like another
                shifts[begins] += any(key(w[size - width - s : size - s]) in ends for s in places)
            if other and (share := sum(shifts.values()) / len(other)) > best[0]:
                best = share, shifts.most_common(1)[0][0]
    return best


def _windows(splits: Splits, name: str) -> list[Tensor]:
    """Inputs of a split that may be windows of a series, shape (T,), (T, F) or (F, T)."""
    found = [first_leaf(sample) for sample in splits.samples(name)]
    kept = [w for w in found if w is not None and w.ndim in (1, 2) and max(w.shape) >= 4 and w.is_floating_point()]
    kept = [w for w in kept if w.ndim == 1 or w.shape[0] != w.shape[1]]  # no pictures
    kept = [w for w in kept if bool(w.isfinite().all())]
    return [w for w in kept if len(torch.unique(w)) >= FEWEST_VALUES]  # not a class in 0 and 1


def _recur(train: list[Tensor], held: list[Tensor]) -> bool:
    """Whether windows have, behind their first value, those with which windows of training begin."""
    if not train or not held:
        return False
    firsts = torch.stack([w[0].flatten()[0] for w in train])
    later = torch.stack([w.flatten(1)[2:, 0] if w.ndim > 1 else w[2:] for w in held])
    return float(torch.isin(later, firsts).any(1).float().mean()) > 0.3


def _exact(window: Tensor) -> bytes | None:
    """Hash of a part of a window; None if it has few values."""
    return digest(window) if len(torch.unique(window)) >= FEWEST_VALUES else None


def _key(window: Tensor) -> bytes | None:
    """Hash of a part of a window, but for its level and scale; None if it has few values."""
    if len(window) <= FEWEST_VALUES:
        return digest(window) if len(torch.unique(window)) >= FEWEST_VALUES - 1 else None
    steps = window.double().diff(dim=0)
    steps = (DIGITS * steps / (steps.norm() + 1e-30)).round()
    return digest(steps.to(torch.int32)) if len(torch.unique(steps)) >= FEWEST_VALUES else None


@check("later-targets", "likely", at="data")
def later_targets(seen: Evidence) -> Lines:
    """A column is an exact linear function of targets in a row, its sample's own one among others."""
    table = seen.splits.table("train") if seen.splits else None
    if table is None or seen.splits is None or len(table[1]) < FEWEST_ROWS or not table[1].is_floating_point():
        return
    if len(cast(Sized, seen.splits.dataset("train"))) != len(table[1]):
        return  # samples that are read are not neighbours
    x, y = table[0][:4096, -WIDE:], table[1][:4096].double()
    inner = slice(REACH, len(y) - REACH)
    around = torch.stack([y.roll(-lag)[inner] for lag in range(-REACH, REACH + 1)], 1)  # column REACH is its own
    around, x = around - around.mean(0), x[inner] - x[inner].mean(0)
    if bool((around.std(0) < 1e-9).any()) or not bool(x.isfinite().all() & around.isfinite().all()):
        return
    weights = torch.linalg.lstsq(around, x, driver="gelsd").solution  # (lags, columns)
    left = (x - around @ weights).var(0) / (x.var(0) + 1e-30)
    used = weights.abs() > 0.01 * weights.abs().amax(0)
    is_exact = (left < EXACT) & (x.var(0) > 1e-12)
    from_own = is_exact & used[REACH] & (used.sum(0) > 1)
    only_later = is_exact & used[REACH + 1 :].any(0) & ~used[: REACH + 1].any(0)  # as of what fills a gap
    past = around[:, :REACH]
    rest = y[inner] - y[inner].mean()
    is_known = float((rest - past @ torch.linalg.lstsq(past, rest[:, None], driver="gelsd").solution[:, 0]).var())
    if bool(from_own.any()) and not bool(only_later.any()) and is_known > 1e-6 * float(rest.var()):
        column = int(from_own.nonzero()[0]) + table[0].shape[1] - x.shape[1]
        yield (
            f"column {column} of the inputs is computed of the target of its own sample and of its neighbours, "
            "exactly, as by a moving average around it; use earlier values only"
        )


def _is_known(y: Tensor) -> bool:
    """Whether targets in a row (T,) are an exact linear function of those before, as of a wave without noise."""
    rest = y[REACH:] - y.mean()
    past = torch.stack([y[REACH - lag : len(y) - lag] - y.mean() for lag in range(1, REACH + 1)], 1)
    left = rest - past @ torch.linalg.lstsq(past, rest[:, None], driver="gelsd").solution[:, 0]
    return len(y) > 4 * REACH and float(left.var()) < 1e-6 * float(rest.var())


@check("later-targets", "likely", at="data")
def own_in_mean(seen: Evidence) -> Lines:
    """In rows in the order of time, a column is exactly a rolling or weighted mean with the target of its own row."""
    dataset: Any = seen.splits.dataset("train") if seen.splits else None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) < 2 * IN_TIME:
        return
    found = Counter[int]()
    for start in (len(dataset) * i // PARTS_OF_TIME for i in range(PARTS_OF_TIME)):
        with seeded(0):
            rows = [flatten(each) for each in items(dataset, range(start, min(start + IN_TIME, len(dataset))))]
        if not all(len(row) == 2 and all(isinstance(v, NUMBERS) for v in row) for row in rows):
            return
        inputs, targets = ([torch.as_tensor(row[i]) for row in rows] for i in (0, 1))
        if any(t.shape != inputs[0].shape or t.ndim != 1 or len(t) > MOST_COLUMNS for t in inputs):
            return
        if any(t.numel() != 1 or t.is_complex() for t in targets):
            return
        x, y = torch.stack(inputs).double(), torch.stack([t.double().reshape(()) for t in targets])
        if not _is_known(y):  # else a column may have it by the past alone
            found.update(j for j in range(x.shape[1]) if _has_own(x[:, j], y))
    if columns := [str(j) for j, times in sorted(found.items()) if times > PARTS_OF_TIME / 2]:
        yield (
            f"column {some(columns)} of the inputs is a mean over rows, as of a rolling window, that has the target of "
            "its own row, so it tells what is to be predicted; shift(1) before the mean"
        )


def _has_own(x: Tensor, y: Tensor) -> bool:
    """Whether values (T,) are a rolling or an exponentially weighted mean up to the present, perhaps in other units."""
    now, before, own = x[LONGEST_WINDOW:], x[LONGEST_WINDOW - 1 : -1], y[LONGEST_WINDOW:]
    change, ones = now - before, torch.ones_like(own)
    if not (x.isfinite().all() and y.isfinite().all() and change.std() > 1e-6 * (x.abs().max() + 1) and y.std() > 0):
        return False
    for k in range(2, LONGEST_WINDOW + 1):
        step = own - y[LONGEST_WINDOW - k : len(y) - k]
        factor = float((step * change).sum() / step.square().sum().clamp_min(1e-12))
        if factor > 0 and float((change - factor * step).abs().max()) < CHANGED * float(change.std()):
            return True
    table = torch.stack([before, own, ones], 1)
    factors = torch.linalg.lstsq(table, now[:, None]).solution[:, 0]
    is_exact = float((table @ factors - now).abs().max()) < CHANGED * float(change.std())
    return is_exact and 0.05 < float(factors[0]) < 0.99 and float(factors[1]) > 0


@check("held-out-labels", "likely", at="data")
def target_means(seen: Evidence) -> Lines:
    """A column tells the mean target of the samples that have the same value in it, those of all splits together."""
    tables = [seen.splits.table(name) for name in seen.splits.loaders] if seen.splits else []
    known = [table for table in tables if table is not None]
    if len(known) < 2 or len({table[0].shape[1] for table in known}) > 1:
        return
    x, y = (torch.cat([table[i].double() for table in known]) for i in range(2))
    columns, spread = x[:, :MOST_COLUMNS].isfinite().all(0).nonzero().flatten().tolist(), float(y.var())
    for column in columns if len(x) >= FEWEST_ROWS and spread > 0 else ():
        values, places, counts = torch.unique(x[:, column], return_inverse=True, return_counts=True)
        if len(values) < FEWEST_WINDOWS or len(values) > 0.7 * len(x):
            continue
        means = torch.zeros_like(values).index_add_(0, places, y) / counts
        several = counts > 1
        is_mixed = float((y - means[places])[several[places]].var()) > 0.01 * spread
        if int(several.sum()) < FEWEST_WINDOWS or not is_mixed:
            continue
        line = torch.stack([means[several], torch.ones_like(means[several])], 1)
        left = values[several] - line @ torch.linalg.lstsq(line, values[several, None]).solution[:, 0]
        if float(left.var()) < EXACT * float(values[several].var()):
            yield (
                f"column {column} of the inputs is the mean target of all samples with the same value, those of "
                "validation and the sample's own among them; compute it from other samples of training only"
            )
            return


@check("fitted-before-split", "likely", at="data")
def fitted_before_split(seen: Evidence) -> Lines:
    """The code of the data fits a selection or encoding to labels of all samples, and splits them afterwards."""
    for name, tree, first in _functions_of_data(seen):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            kind = called_name(call)
            if kind not in FITS | RESAMPLES or len(call.args) + len(call.keywords) < 2:
                continue
            if UNSUPERVISED.search(ast.unparse(call.func)):
                continue  # their second argument is no label
            arguments = [*call.args, *(k.value for k in call.keywords if k.arg in ("X", "y"))]
            names = [a.id for a in arguments if isinstance(a, ast.Name)]
            if len(names) < 2 or any(_is_split(tree, n, before=call.lineno) for n in names[:2]):
                continue
            if _is_split_later(tree, call, names[0], or_result=True) and _is_split_later(tree, call, names[1]):
                line = first + call.lineno - 1
                what = "copies samples" if kind in RESAMPLES else "is fitted to the labels of all samples"
                yield Line(
                    f"`{' '.join(ast.unparse(call).split())[:60]}` ({name}, line {line}) {what} before they are split, "
                    "so that training knows labels of validation and test; split first, and fit on training only",
                    subject=f"{name}:{line}",
                )


def _functions_of_data(seen: Evidence) -> Iterator[tuple[str, ast.AST, int]]:
    """Methods of the data module, functions beside it, and the file's other statements: name, code and first line.

    Without a data module, functions and statements beside the module that is trained.
    """
    data = getattr(seen.trainer, "datamodule", None)
    for cls in own_classes(type(seen.module if data is None else data)):
        if cls.__module__.startswith("boltcutter."):
            continue
        file = sys.modules.get(cls.__module__, types)
        yield f"{cls.__module__}, outside of functions", _statements(file), 1
        for value in (*(vars(cls).values() if data is not None else ()), *vars(file).values()):
            function = getattr(value, "__func__", value)
            is_own = isinstance(function, types.FunctionType) and function.__module__ == cls.__module__
            if is_own and (tree := tree_of(function)) is not None:
                yield function.__qualname__, tree, function.__code__.co_firstlineno


def _statements(file: types.ModuleType) -> ast.Module:
    """The statements of a file that are in no function or class; none if it is of an installed package."""
    try:
        body = ast.parse(inspect.getsource(file)).body if "-packages" not in str(file.__file__) else []
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):  # typed in, or generated
        body = []
    kept = [each for each in body if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return ast.Module(kept, [])


def _is_split_later(tree: ast.AST, call: ast.Call, name: str, *, or_result: bool = False) -> bool:
    """Whether samples of a name, or of what is made of it, are split behind a call; ``or_result``: by the call, too."""
    made = {name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.lineno >= call.lineno:
            used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            if used & made and (or_result or call not in ast.walk(node.value)):
                made |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return any(_is_split(tree, each, after=call.lineno) for each in made)


def _is_split(tree: ast.AST, name: str, *, before: int = sys.maxsize, after: int = 0) -> bool:
    """Whether samples of a name are split within some lines: by a function, or by two indices."""
    indices = set()
    for node in ast.walk(tree):
        if not after < getattr(node, "lineno", 0) < before:
            continue
        if isinstance(node, ast.Call) and called_name(node) in SPLITTERS:
            given = {n.id for a in node.args for n in ast.walk(a) if isinstance(n, ast.Name)}
            sized = {
                n.id for a in node.args for call in ast.walk(a)
                if isinstance(call, ast.Call) and called_name(call) == "len"
                for n in ast.walk(call) if isinstance(n, ast.Name)
            }  # fmt: skip  # of which numbers of samples are split
            if name in given - sized:
                return True
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Name | ast.Slice):
            continue
        if getattr(node.value, "id", "") == name:
            indices |= {ast.unparse(node.slice), *(["other"] if _is_in_comprehension(tree, node) else [])}
    return len(indices) > 1


def _is_in_comprehension(tree: ast.AST, node: ast.AST) -> bool:
    loops = (n for n in ast.walk(tree) if isinstance(n, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.For))
    return any(node in ast.walk(loop) for loop in loops)
