"""What a model without learning, or a linear one, reaches on the same data: for ``audit``."""

from __future__ import annotations

import ast
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from boltcutter.diagnosis.calls import CLASSES
from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.graph import REGRESSIONS, Loss
from boltcutter.diagnosis.loaders import Splits

MOST = 4000  # samples of training that baselines are fitted to
FEATURES = 4096  # inputs that are used, the first ones
MOST_CLASSES = 1000
FEWEST = 5  # samples of a class
RIGHT, GAIN = 0.7, 0.3  # shares of samples
ORDERS = frozenset(("permutation", "randperm", "shuffle"))
LIBRARIES = ("torch", "lightning", "builtins", "boltcutter")
NORMAL = 1.96  # standard errors of 95%


@dataclass(frozen=True)
class Baseline:
    """A prediction of each validation sample.

    Args:
        name: What it does.
        errors: Of each sample, shape (N,): 0 or 1 for classes, otherwise squared.
        classes: That it predicts, shape (N,); None if targets are no classes.
    """

    name: str
    errors: Tensor
    classes: Tensor | None = None


def baselines(splits: Splits, held: str = "validation") -> tuple[bool, list[Baseline]]:
    """Whether targets are classes, and what baselines reach on a split."""
    if held not in splits.baselines:
        splits.baselines[held] = _baselines(splits, held)
    found: tuple[bool, list[Baseline]] = splits.baselines[held]
    return found


def _baselines(splits: Splits, held: str) -> tuple[bool, list[Baseline]]:
    train, val = splits.features("train"), splits.features(held)
    if train is None or val is None or len(train[1]) < 20 or not len(val[1]) or train[0].shape[1] != val[0].shape[1]:
        return False, []
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))[:MOST]
    x, y = (part[order] for part in train)
    return fit(x, y, *val)


def fit(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> tuple[bool, list[Baseline]]:
    """Fit baselines to samples, and predict others: majority or mean, previous value of a series, and linear.

    Args:
        x: Inputs, shape (N, F), float64.
        y: Targets, shape (N,); integers are classes.
        held_x: Inputs of other samples, shape (M, F).
        held_y: Their targets, shape (M,).

    Returns:
        Whether targets are classes, and the baselines.
    """
    x, held_x = (part[:, :FEATURES].nan_to_num(0, 0, 0) for part in (x, held_x))
    mean, std = x.mean(0), x.std(0)
    x, held_x = ((part - mean) / torch.where(std > 0, std, 1) for part in (x, held_x))
    if not y.is_floating_point():
        kinds, indices = torch.unique(y, return_inverse=True)
        if not 1 < len(kinds) <= min(MOST_CLASSES, len(y) // 2):
            return True, []
        frequent = kinds[indices.bincount().argmax()]
        chosen = kinds[_ridge(x, F.one_hot(indices, len(kinds)).double(), held_x).argmax(1)]
        return True, [
            Baseline(f"always class {int(frequent)}", (held_y != frequent).double(), frequent.expand_as(held_y)),
            Baseline("a linear model of the raw inputs", (chosen != held_y).double(), chosen),
        ]
    y, held_y = y.double(), held_y.double()
    found = [Baseline("the mean of training", (held_y - y.mean()).square())]
    if held_x.shape[1] > 1:
        last = held_x[:, -1] * std[-1] + mean[-1]
        found.append(Baseline("the last input", (held_y - last).square()))
    linear = _ridge(x, y[:, None], held_x)[:, 0]
    return False, [*found, Baseline("a linear model of the raw inputs", (held_y - linear).square())]


def _ridge(x: Tensor, y: Tensor, held: Tensor) -> Tensor:
    """Predictions of a linear model with a small penalty; in the dual form, if there are fewer samples than inputs."""
    mean, penalty = y.mean(0), 1e-2 * len(x)
    weights: Tensor
    if len(x) < x.shape[1]:
        gram = x @ x.T + penalty * torch.eye(len(x), dtype=x.dtype)
        weights = x.T @ torch.linalg.solve(gram, y - mean)
        return held @ weights + mean
    gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (y - mean))
    return held @ weights + mean


def errors_of(calls: list[Loss], *, classes: bool) -> Tensor | None:
    """Errors of the model's own predictions, shape (N,), of the first loss function that tells them."""
    found = []
    for call in calls:
        p, t = call.prediction, call.target
        if classes and call.kind in CLASSES and p.ndim == 2 and t.ndim == 1 and not t.is_floating_point():
            found.append((p.argmax(1) != t).double())
        elif not classes and call.kind in REGRESSIONS and p.shape == t.shape and p.numel() == len(p):
            found.append((p.double() - t.double()).square().flatten())
    return torch.cat(found).cpu() if found else None


@check("baseline", "note", at="data")
def baseline(seen: Evidence) -> Lines:
    """What baselines reach in validation, and the model, if it is trained."""
    if seen.splits is None:
        return
    classes, found = baselines(seen.splits)
    if not found:
        return
    count = len(found[0].errors)
    text = ", ".join(f"{b.name} {_score(b.errors, classes)}" for b in found)
    budget = f"{count} validation samples; fitted to at most {MOST} of training"
    own = errors_of(seen.predictions, classes=classes)
    best = min(found, key=lambda b: float(b.errors.mean()))
    if own is None or not len(own):
        yield f"{'accuracy' if classes else 'RMSE'} that needs no network: {text} ({budget})"
        return
    gain, error = _difference(best.errors, own)
    if classes:
        gain, error, unit = 100 * gain, 100 * error, " points of accuracy"
    else:
        unit = " of the squared error"
    verb = "beats" if gain > 0 else "is behind" if gain < 0 else "differs from"
    sure = "" if abs(gain) > error else ", which may be chance"
    is_behind = gain < -error
    if is_behind and not seen.is_converged:
        sure = ", but its validation was still improving: train longer"
    yield Line(
        f"your model {verb} {best.name} by {abs(gain):.3g} ± {error:.2g}{unit}{sure} ({_score(own, classes)}; {text}; "
        f"{budget})",
        level="likely" if is_behind and seen.is_converged else None,
    )


@check("classes-renumbered", "likely", at="data")
def classes_renumbered(seen: Evidence) -> Lines:
    """A linear model of training takes most samples of each validation class for those of another one, one to one."""
    if seen.splits is None:
        return
    classes, found = baselines(seen.splits)
    table = seen.splits.features("validation")
    predicted = found[-1].classes if classes and found else None
    if predicted is None or table is None:
        return
    targets = table[1]
    answers = {
        int(k): predicted[targets == k].mode().values
        for k in torch.unique(targets)
        if int((targets == k).sum()) >= FEWEST
    }
    hits = [predicted[targets == k] == answer for k, answer in answers.items()]
    share, before = (float(torch.cat(hits).double().mean()) if hits else 0.0), 1 - float(found[-1].errors.mean())
    moved = {k: int(answer) for k, answer in answers.items() if int(answer) != k}
    are_one_to_one = len({int(answer) for answer in answers.values()}) == len(answers)
    if are_one_to_one and len(moved) >= 2 and share > RIGHT and share > before + GAIN and _fits_training(seen.splits):
        named = some([f"{k} → {answer}" for k, answer in moved.items()])
        yield (
            f"classes of validation have other numbers than those of training: a linear model finds {named}, and "
            f"is right for {share:.0%} of the samples with these numbers, without for {before:.0%}; encode the labels "
            "of all splits together"
        )


def _fits_training(splits: Splits) -> bool:
    """Whether the linear model has learned the classes of training; else it may exchange some of them."""
    _, found = baselines(splits, "train")
    return bool(found) and float(found[-1].errors.mean()) < 1 - RIGHT


def _score(errors: Tensor, classes: bool) -> str:
    return f"{1 - float(errors.mean()):.1%}" if classes else f"{math.sqrt(float(errors.mean())):.4g}"


def _difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """How much larger the first errors are, and half of its 95% interval; of pairs, where the samples are the same."""
    if len(one) == len(other):
        gap = one - other
        return float(gap.mean()), NORMAL * float(gap.std()) / math.sqrt(len(gap))
    spread = math.sqrt(float(one.var()) / len(one) + float(other.var()) / len(other))
    return float(one.mean() - other.mean()), NORMAL * spread


@check("at-chance", "note", at="data")
def at_chance(seen: Evidence) -> Lines:
    """Neither a linear model nor nearest neighbours tell the classes of one half of training from the other half."""
    table = seen.splits.table("train") if seen.splits else None
    if table is None or table[1].is_floating_point() or len(table[1]) < 200:
        return
    order = torch.randperm(len(table[1]), generator=torch.Generator().manual_seed(0))[:2000]
    x, y = (part[order] for part in table)
    kinds, y = torch.unique(y, return_inverse=True)
    if not 1 < len(kinds) <= len(y) // 20:
        return
    half = len(y) // 2
    _, found = fit(x[:half], y[:half], x[half:], y[half:])
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    near = torch.cdist(x[half:, :FEATURES], x[:half, :FEATURES]).topk(5, largest=False).indices
    votes = F.one_hot(y[:half][near], len(kinds)).sum(1).argmax(1)
    accuracies = [1 - float(b.errors.mean()) for b in found] + [float((votes == y[half:]).double().mean())]
    chance = float(y[half:].bincount().max()) / (len(y) - half)
    if max(accuracies) < chance + 2 * math.sqrt(chance * (1 - chance) / (len(y) - half)):
        apart = shuffles_apart(seen)
        yield Line(
            f"neither a linear model nor nearest neighbours find the labels of training samples ({max(accuracies):.0%} "
            f"right, {chance:.0%} by always answering the most frequent one): "
            + (
                f"{apart} shuffles twice; are labels and samples shuffled alike, by one permutation?"
                if apart
                else "are labels and samples in the same order?"
            ),
            "likely" if apart else None,
        )


def shuffles_apart(seen: Evidence) -> str:
    """Name of a function of the user, beside module or data, that draws two orders; empty if there is none."""
    train = seen.splits.dataset("train") if seen.splits else None
    parts = (seen.module, getattr(seen.trainer, "datamodule", None), train, getattr(train, "dataset", None))
    for name in dict.fromkeys(type(part).__module__ for part in parts):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if name.startswith(LIBRARIES) or "-packages" in file or not file.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(Path(file).read_bytes())):
            if isinstance(node, ast.FunctionDef) and _orders(node) > 1:
                return f"{node.name}()"
    return ""


def _orders(function: ast.FunctionDef) -> int:
    """How many arrays a function puts each into an order of its own: ``a = a[permutation(n)]``, or ``shuffle(a)``."""
    ordered = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and _draws(node.value.slice):
            ordered.add(ast.unparse(node.value.value))
        elif isinstance(node, ast.Expr) and _draws(node.value) and node.value.args:  # type: ignore[attr-defined]
            ordered.add(ast.unparse(node.value.args[0]))  # type: ignore[attr-defined]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("seed"):
            return 0  # both may be drawn alike
    return len(ordered)


def _draws(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ORDERS
