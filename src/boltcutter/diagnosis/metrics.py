"""What the user's code passes to metrics while a trial trains and validates: scores, labels, and their order."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, is_metric
from boltcutter.diagnosis.source import own_names
from boltcutter.structure import targets_of

# Metrics that rank scores, or rate probabilities; of labels, they are those of a single threshold.
RANKING = re.compile(
    r"^(roc_auc_score|average_precision_score|roc_curve|precision_recall_curve|det_curve|brier_score_loss"
    r"|((binary|multilabel)_)?(auroc|average_precision|precision_recall_curve|roc|calibration_error)"
    r"|(Binary|Multilabel)(AUROC|AveragePrecision|PrecisionRecallCurve|ROC|CalibrationError))$"
)
# Metrics that are others if predictions and targets are exchanged.
ASYMMETRIC = re.compile(
    r"^(r2_score|explained_variance(_score)?|mean_absolute_percentage_error|precision_score|recall_score|fbeta_score"
    r"|confusion_matrix|balanced_accuracy_score|classification_report|mean_poisson_deviance|mean_gamma_deviance"
    r"|((binary|multiclass|multilabel)_)?(precision|recall|fbeta_score|specificity|confusion_matrix)"
    r"|(Binary|Multiclass|Multilabel)?(Precision|Recall|FBetaScore|Specificity|ConfusionMatrix)"
    r"|R2Score|ExplainedVariance|MeanAbsolutePercentageError)$"
)
LIBRARIES = {"sklearn.metrics": True, "torchmetrics.functional": False, "torchmetrics.functional.classification": False}
FEWEST = 20  # samples of a call
MANY = 50  # of which all have the same score
EXACT = 1e-3
MOST_CALLS = 8  # of each metric, which are kept


class Call(NamedTuple):
    """A call of a metric.

    Args:
        name: Its name.
        prediction: In the place of predictions, shape (N,), float64.
        target: In the place of targets, shape (N,), float64.
    """

    name: str
    prediction: Tensor
    target: Tensor


class MetricCalls:
    """Records what metrics get: functions of scikit-learn and torchmetrics in the user's files, and a module's metrics.

    Args:
        module: Which has the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.varies = False  # whether a linear layer has returned other values for other samples in evaluation
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # where, under which name, what
        self._hooks = [m.register_forward_hook(OutputHook(self)) for m in module.modules() if isinstance(m, nn.Linear)]
        for name, is_target_first in LIBRARIES.items():
            if library := sys.modules.get(name):
                self._replace_functions(library, is_target_first)
        for part in module.modules():
            kind = type(part).__name__
            if is_metric(part) and (RANKING.search(kind) or ASYMMETRIC.search(kind)) and "update" in vars(part):
                self._replace(vars(part), "update", kind, False)

    def close(self) -> None:
        """Restore all."""
        for hook in self._hooks:
            hook.remove()
        for names, name, value in self._replaced:
            names[name] = value
        self._hooks, self._replaced = [], []

    def _replace_functions(self, library: Any, is_target_first: bool) -> None:
        chosen = {n: f for n, f in vars(library).items() if RANKING.search(n) or ASYMMETRIC.search(n)}
        by_identity = {id(f): n for n, f in chosen.items() if callable(f) and not isinstance(f, type)}
        for names in (vars(library), *own_names()):
            for name, value in [*names.items()]:
                if id(value) in by_identity:
                    self._replace(names, name, by_identity[id(value)], is_target_first)

    def _replace(self, names: dict[str, Any], name: str, metric: str, is_target_first: bool) -> None:
        function = names[name]
        self._replaced.append((names, name, function))
        names[name] = self._recorded(function, metric, is_target_first)

    def _recorded(self, function: Callable[..., Any], metric: str, is_target_first: bool) -> Callable[..., Any]:
        @wraps(function)
        def record(*args: Any, **options: Any) -> Any:
            keys = ("y_true", "target") if is_target_first else ("preds", "target")
            found = [*args, *(options[key] for key in (*keys, "y_pred", "y_score", "y_prob") if key in options)][:2]
            values = [_values(value) for value in (found[::-1] if is_target_first else found)]
            kept = self.calls.setdefault(metric, [])
            if len(values) == 2 and len(kept) < MOST_CALLS and all(v is not None for v in values):
                kept.append(Call(metric, *values))  # type: ignore[arg-type]
            return function(*args, **options)

        return record


class OutputHook:
    """Sees whether outputs of a layer vary in evaluation; a copy of the layer, as of an average, has an idle one."""

    def __init__(self, owner: MetricCalls | None = None) -> None:
        self.owner = owner

    def __call__(self, part: nn.Module, given: Any, output: Any) -> None:
        """Compare the samples."""
        if self.owner is not None and not part.training:
            with suppress(Exception):  # of nested tensors, and others that cannot be compared
                self.owner.varies |= len(output) > 1 and bool((output != output[:1]).any())

    def __reduce__(self) -> Any:
        return OutputHook, ()


def _values(value: Any) -> Tensor | None:
    """Numbers of samples, shape (N,), float64; None if they are something else."""
    try:
        t = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        return None
    return t.reshape(-1).double() if t.numel() == (len(t) if t.ndim else 1) else None


@check("hard-scores", "likely", at="trial")
def hard_scores(seen: Evidence) -> Lines:
    """A metric that ranks scores, such as AUROC, gets 0 and 1 only, for 20 samples or more."""
    calls = seen.metric_calls
    for name, found in calls.calls.items() if calls else ():
        scores = torch.cat([call.prediction for call in found]) if found and RANKING.search(name) else torch.zeros(0)
        is_hard = len(scores) >= FEWEST and bool(((scores == 0) | (scores == 1)).all())
        if is_hard and (len(torch.unique(scores)) == 2 or (len(scores) >= MANY and calls.varies)):  # type: ignore[union-attr]
            yield Line(
                f"{name} gets only 0 and 1 for {len(scores)} samples, so it rates a single threshold; pass scores or "
                "probabilities, not labels",
                subject=name,
            )


@check("psnr-peak", "likely", at="probe")
def wrong_peak(seen: Evidence) -> Lines:
    """A logged PSNR is that of a peak of 255, of pictures up to 1.5, or that of 1, of pictures above 100."""
    probe, kind = seen.probe, "validation_step"
    if probe is None or kind not in probe.batches:
        return
    trace = probe.base(kind)
    pairs = [*trace.differences, *((c.prediction, c.target) for c in trace.calls if c.kind == "mse_loss")]
    pairs = [(a.double(), b.double()) for a, b in pairs if a.shape == b.shape and a.ndim > 2 and a.numel() > MANY]
    for name, value in trace.logged.items():
        if not re.search("psnr|peak_?signal", name, re.IGNORECASE):
            continue
        each = [[p for p in _peaks_of(value, a, b) if _is_wrong_peak(p, a, b)] for a, b in pairs]
        if is_metric(value) and not all(each):
            continue  # of which one is what it gets
        peaks = {p for found in each for p in found}
        is_one = bool(peaks) and all(abs(peak - 1) < EXACT for peak in peaks)
        if is_one and all(_has_both_signs(t) for pair in pairs for t in pair):
            yield (
                f"{name} is the PSNR of values from 0 to 1, but pictures have values of -1 to 1, so it is 6 dB too "
                "low; pass data_range=2.0"
            )
            return
        if peaks:
            peak = peaks.pop()
            yield (
                f"{name} is the PSNR of values with a peak of {peak:.0f}, but pictures have values of up to "
                f"{max(float(b.abs().max()) for _, b in pairs):.3g}, so it is {20 * abs(math.log10(255)):.0f} dB too "
                f"{'high' if peak > 1 else 'low'}; pass the range of the values that are compared"
            )
            return


def _peaks_of(value: Any, one: Tensor, other: Tensor) -> list[float]:
    """What the peak must be if a number is the PSNR of two pictures: of all values, or the mean of the samples."""
    if not isinstance(value, Tensor | float) or (isinstance(value, Tensor) and value.numel() != 1):
        peak = getattr(value, "data_range", None)  # of a metric
        return [float(peak)] if isinstance(peak, Tensor | float | int) and peak is not None else []
    errors = (one - other).square()
    logs = [errors.mean().log10(), errors.flatten(1).mean(1).clamp_min(1e-12).log10().mean()]
    found = [10 ** ((float(value) + 10 * float(log)) / 20) for log in logs if math.isfinite(log)]
    return [peak for known in (1.0, 255.0) for peak in found if abs(peak / known - 1) < EXACT]


def _is_wrong_peak(peak: float, one: Tensor, other: Tensor) -> bool:
    least, most = (min(float(t.abs().max()) for t in (one, other)), max(float(t.abs().max()) for t in (one, other)))
    is_signed = _has_both_signs(one) and _has_both_signs(other)
    return (abs(peak - 255) < 1 and most <= 1.5) or (abs(peak - 1) < EXACT and (least > 100 or is_signed))


def _has_both_signs(t: Tensor) -> bool:
    """Whether pictures have values from -1 to 1, as they are scaled for a network."""
    is_dark = float((t < -0.9).double().mean()) > 0.02  # as pictures, and no waves
    return is_dark and float(t.max()) > 0.3 and float(t.abs().max()) <= 1.001


@check("exchanged-arguments", "likely", at="trial")
def exchanged_arguments(seen: Evidence) -> Lines:
    """A metric for which it matters gets the labels of validation as predictions, and others as targets."""
    calls, splits = seen.metric_calls, seen.splits
    samples = splits.samples("validation") if splits and calls and calls.calls else []
    parts = [_values(targets_of(sample)) if targets_of(sample) is not None else None for sample in samples]
    are_single = all(p is not None and p.numel() == 1 for p in parts)
    labels = torch.cat(parts) if parts and are_single else torch.zeros(0)  # type: ignore[arg-type]
    for name, found in calls.calls.items() if calls else ():
        for call in found if ASYMMETRIC.search(name) else ():
            count = len(call.prediction)
            known = labels[:count]
            is_other = len(call.target) == count and not torch.equal(call.target, call.prediction)
            if count >= FEWEST and is_other and len(torch.unique(known)) > 1 and torch.equal(call.prediction, known):
                yield Line(
                    f"{name} gets the labels of validation in the place of predictions; exchange its arguments",
                    subject=name,
                )
                break
