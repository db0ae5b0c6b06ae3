"""What a number is named, and what it is: errors and averages of metrics, and ranks among equal scores."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.epochs import replay
from boltcutter.diagnosis.evidence import Evidence, is_metric
from boltcutter.diagnosis.schedules import HIGHER, LOWER
from boltcutter.diagnosis.source import is_function, own_classes

EXACT = 1e-4  # relative difference of two values
APART = 0.02  # of the value that it should be
FEWEST = 8  # samples, and candidates
TIES = 0.05  # share of the candidates
ERRORS = {
    "rmse": re.compile(r"(^|[/_\-. ])(rmse|root_mean_squared?_error)($|[/_\-. 0-9])", re.IGNORECASE),
    "mae": re.compile(r"(^|[/_\-. ])(mae|mean_absolute_error)($|[/_\-. 0-9])", re.IGNORECASE),
    "mse": re.compile(r"(^|[/_\-. ])(mse|mean_squared_error)($|[/_\-. 0-9])", re.IGNORECASE),
}
NAMED = {"rmse": "a root of a mean squared error", "mae": "a mean absolute error", "mse": "a mean squared error"}
AVERAGES = {
    "macro": re.compile(r"(^|_)(macro|uar)($|_)|balanced_?acc", re.IGNORECASE),
    "micro": re.compile(r"(^|_)micro($|_)", re.IGNORECASE),
}
TOP = re.compile(r"(?<![a-z])(?:top[-_@]?|(?:acc|accuracy|recall|precision|hit|hits|hr|ndcg)@)([0-9]+)", re.IGNORECASE)
OF_STEPS = re.compile(r"step|batch|iter", re.IGNORECASE)
REDUCTIONS = {
    "sum": re.compile(r"sum|total|num|count|correct|seen|hits|errors|tp|fp|fn", re.IGNORECASE),
    "max": re.compile(r"max|best|peak|worst|high|top|upper", re.IGNORECASE),
    "min": re.compile(r"min|best|worst|low", re.IGNORECASE),
}
RANKS = re.compile(r"mrr|rank|hits?($|[@_/0-9])|hr@|recall@|ndcg|r@", re.IGNORECASE)


@check("misnamed-metric", "likely", at="probe")
def other_error(seen: Evidence) -> Lines:
    """A number of validation is named as RMSE, MAE or MSE, and is exactly another one of these."""
    if (probe := seen.probe) is None or "validation_step" not in probe.batches:
        return
    trace = probe.base("validation_step")
    pairs = [*trace.differences, *((c.prediction, c.target) for c in trace.calls)]
    known = [of for a, b in pairs if a is not None and b is not None and (of := _errors(a, b))]
    values = {n: v for n, v in {**trace.logged, **trace.of_batch}.items() if isinstance(v, Tensor | float)}
    values = {n: float(v) for n, v in values.items() if not isinstance(v, Tensor) or v.numel() == 1}
    for name, value in {**replay(seen), **values}.items() if known else ():
        kinds = [kind for kind, pattern in ERRORS.items() if pattern.search(name)]
        is_model = re.search(r"mae[/_\-. ]?loss", name, re.IGNORECASE)  # of a masked autoencoder
        if (
            len(kinds) != 1
            or is_model
            or any(math.isclose(value, of.get(kinds[0], value), rel_tol=APART) for of in known)
        ):
            continue
        found = {k for of in known for k, v in of.items() if v and math.isclose(value, v, rel_tol=EXACT)}
        if len(found) == 1:
            kind = found.pop()
            remedy = "take the root" if (kinds[0], kind) == ("rmse", "mse") else f"name it {kind}, or compute the other"
            yield Line(f"{name} is {NAMED[kind]}, and not {NAMED[kinds[0]]}, by its values; {remedy}", subject=name)


def _errors(a: Tensor, b: Tensor) -> dict[str, float]:
    """Mean errors of predictions; empty of tensors that are none."""
    is_real = (a.is_floating_point() or b.is_floating_point()) and not (a.is_complex() or b.is_complex())
    if a.shape != b.shape or a.numel() < FEWEST or not is_real:
        return {}
    gap = (a - b).detach().double()
    squares = float(gap.square().mean())
    if gap.shape[-1] == 1 and gap.ndim > 1:
        return {"mse": squares}  # the root and the size of a single value are one
    return {"mse": squares, "rmse": math.sqrt(squares), "mae": float(gap.abs().mean())}


@check("misnamed-metric", "likely", at="probe")
def other_average(seen: Evidence) -> Lines:
    """A metric is named as macro, micro or top-k, and averages classes otherwise, or has another k."""
    metrics = {name: part for name, part in seen.module.named_modules() if is_metric(part)}
    for kind in seen.probe.batches if seen.probe is not None else ():
        metrics |= {n: m for n, m in seen.probe.base(kind).logged.items() if is_metric(m)}  # type: ignore[union-attr]
    for name, metric in metrics.items():
        own = re.split(r"[./]", name)[-1]
        average, top = getattr(metric, "average", None), getattr(metric, "top_k", None)
        said = [kind for kind, pattern in AVERAGES.items() if pattern.search(own)]
        if len(said) == 1 and average in AVERAGES and average != said[0]:
            yield Line(
                f"{name}, a {type(metric).__name__}, has average={average!r}, so it is not what its name says; write "
                f"average={said[0]!r}",
                subject=type(metric).__name__,
            )
        k = [int(each) for each in TOP.findall(own)]
        if len(k) == 1 and isinstance(top, int) and top != k[0] and k[0] > 0:
            yield Line(
                f"{name}, a {type(metric).__name__}, has top_k={top}, so it is not what its name says; write "
                f"top_k={k[0]}",
                subject=type(metric).__name__,
            )


@check("misnamed-metric", "likely", at="probe")
def other_unit(seen: Evidence) -> Lines:
    """A number of validation is named as one in a unit into which a method converts, which no other code calls."""
    names = seen.probe.base("validation_step").logged if seen.probe and "validation_step" in seen.probe.batches else {}
    for cls in own_classes(type(seen.module)):
        own = {name: f for name, f in vars(cls).items() if is_function(f)}
        used = {n for name, f in own.items() if not name.startswith("predict") for n in f.__code__.co_names}
        predicts = {n for name, f in own.items() if name.startswith("predict") for n in f.__code__.co_names}
        for method in (m for m in own if m.startswith("to_") and m not in used and m in predicts):
            unit = method.removeprefix("to_")
            found = [n for n in names if re.search(rf"(^|[/_.]){re.escape(unit)}($|[/_.])", n)]
            if found:
                yield Line(
                    f"{found[0]} is named as one in {unit}, but only predictions call {method}(), which converts to "
                    "it; convert predictions and targets before",
                    subject=found[0],
                )


@check("log-reduction", "likely", at="probe")
def logged_otherwise(seen: Evidence) -> Lines:
    """A number of validation is that of the last, best or worst batch, or their sum, and it is not named so."""
    trace = seen.probe.base("validation_step") if seen.probe and "validation_step" in seen.probe.batches else None
    for name, options in trace.options.items() if trace is not None else ():
        reduction = options.get("reduce_fx", "mean")
        kind = getattr(reduction, "__name__", str(reduction)).lower()
        is_higher, is_lower = bool(HIGHER.search(name)), bool(LOWER.search(name))
        if is_metric(trace.logged[name]) or is_higher == is_lower:  # type: ignore[union-attr]
            continue  # it computes its value of all batches itself, or is no score
        if options.get("on_epoch") is False and not OF_STEPS.search(name):
            yield Line(
                f"{name} is logged with on_epoch=False, so what a callback or schedule monitors is that of the last "
                "batch of a validation; leave it out",
                subject=name,
            )
        elif (
            kind in REDUCTIONS
            and not REDUCTIONS[kind].search(name)
            and (kind, is_higher) not in (("min", True), ("max", False))  # the worst batch may be meant
        ):
            yield Line(
                f"{name} is logged with reduce_fx={kind}, so it is the {kind} of the batches of a validation, which "
                "its name does not say; leave it out for their mean",
                subject=name,
            )


@check("shared-log-name", "likely", at="probe")
def same_name(seen: Evidence) -> Lines:
    """Training and validation log numbers of an epoch by the same name, of which callbacks see one or the other."""
    probe = seen.probe
    if probe is None or not {"training_step", "validation_step"} <= probe.batches.keys():
        return
    train, held = (probe.base(kind) for kind in ("training_step", "validation_step"))
    both = sorted(train.options.keys() & held.options.keys())
    monitors = {str(getattr(c, "monitor", None)) for c in seen.trainer.callbacks}  # type: ignore[attr-defined]
    monitors |= {str(config.monitor) for config in seen.trainer.lr_scheduler_configs if config.monitor}
    of_epoch = [n for n in both if train.options[n].get("on_epoch") and held.options[n].get("on_epoch") is not False]
    of_epoch = [n for n in of_epoch if isinstance(held.logged[n], Tensor) or is_metric(held.logged[n])]  # no settings
    monitored = sorted(monitors & {*of_epoch})
    for name in of_epoch[:1]:
        follows = f", and what monitors {monitored[0]} follows that of training" if monitored else ""
        is_score = any(HIGHER.search(each) or LOWER.search(each) for each in of_epoch)
        yield Line(
            f"{some(of_epoch)} is logged both by training and by validation, so that the last one of an epoch is kept"
            f'{follows}; name them apart, as "train/{name}" and "val/{name}"',
            None if monitored or is_score else "note",
        )


class Greater(TorchFunctionMode):
    """Counts the candidates that have exactly the score with which they are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []
        self.count = 0  # of candidates
        self.is_fair = False  # whether equal scores are counted, too

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and look at what it compares."""
        result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        if name in ("gt", "__gt__", "lt", "__lt__", "greater", "less") and len(args) == 2:
            self.compare(*args)
        elif name in ("ge", "__ge__", "le", "__le__", "greater_equal", "less_equal", "eq", "__eq__", "isclose"):
            self.is_fair |= any(isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1 for t in args)
        return result

    def compare(self, one: Any, other: Any) -> None:
        """Look at scores (N, I), and at one of each sample, (N, 1)."""
        if not all(isinstance(t, Tensor) and t.is_floating_point() and t.ndim == 2 for t in (one, other)):
            return
        scores, own = (one, other) if one.shape[1] > other.shape[1] else (other, one)
        if own.shape != (len(scores), 1) or len(scores) < FEWEST or scores.shape[1] < FEWEST:
            return
        equal = (scores == own).sum(1)
        if bool((equal > 0).all()):  # its own score is among them
            self.shares.append(float((equal - 1).double().mean()) / scores.shape[1])
            self.count = scores.shape[1]


@check("optimistic-ties", "likely", at="trial")
def ties_in_favour(seen: Evidence) -> Lines:
    """A rank of validation counts the scores above that of the target, to which over 5% of the others are equal."""
    probe = seen.probe
    if probe is None or "validation_step" not in probe.batches:
        return
    trace = probe.base("validation_step")
    if not any(RANKS.search(name) for name in trace.logged):
        return
    with Greater() as greater:
        probe.run("validation_step", probe.batches["validation_step"], training=False, record=False)
    if greater.shares and not greater.is_fair and max(greater.shares) > TIES:
        yield (
            "a rank of validation counts the candidates with a higher score than the target, but "
            f"{max(greater.shares):.0%} of {greater.count} have exactly its score, and count in its favour; add half "
            "of those that are equal, or keep the scores apart"
        )
