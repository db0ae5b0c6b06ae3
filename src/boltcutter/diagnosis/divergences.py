"""Probes of what compares two distributions over classes: their temperatures, and what a divergence is divided by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.probe import Probe, is_close
from boltcutter.diagnosis.temperatures import Temperatures

FACTOR = 2.0
FEWEST = 3  # classes
COMPENSATED = 0.5  # of the number of classes


@check("teacher-temperature", "likely", at="probe")
def teacher_temperature(seen: Evidence) -> Lines:
    """Of the logits of a student and a teacher that a loss compares, one are divided by a temperature above 1."""
    probe = seen.probe
    trace = probe.base("training_step") if probe is not None and "training_step" in probe.batches else None
    for student, teacher in trace.compared if trace else ():
        one, other = student.temperature, teacher.temperature
        if not ((one > 1 and other == 1) or (other > 1 and one == 1)) or is_close(student.logits, teacher.logits):
            continue
        outputs = [t for name, t in trace.tensors if name.startswith("the output of ")]  # type: ignore[union-attr]
        if all(any(is_close(t, side.logits) for t in outputs) for side in (student, teacher)):
            who = ("the student", "its teacher") if one > 1 else ("a teacher", "the student")
            yield (
                f"the softmax of {who[0]} is that of logits divided by {max(one, other):g}, but {who[1]}'s, with "
                "which the loss compares it, is not; divide both by the same temperature"
            )
            return


class _Reductions(TorchFunctionMode):
    """Multiply the first divergence that is a mean over classes, too, by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.temperatures = factor, Temperatures()
        self.each: Any = None  # the first divergence of each class, not reduced
        self.classes, self.temperature = 0, 1.0
        self.value: float | None = None

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        result = function(*args, **kwargs)
        self.temperatures.follow(name, args, kwargs, result)
        if name == "kl_div" and self.value is None:
            prediction, target = [*args, *kwargs.values()][:2]
            self._divergence(prediction, target, bool(kwargs.get("log_target")), result)
        elif name == "mean" and len(args) == 1 and not kwargs and args[0] is self.each:
            self.value = float(result.detach())
        else:
            return result
        is_mean = self.value is not None and isinstance(result, Tensor) and result.ndim == 0
        return result * self.factor if is_mean else result

    def _divergence(self, prediction: Any, target: Any, is_log: bool, result: Any) -> None:
        if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or prediction.shape != target.shape:
            return
        if prediction.ndim < 2 or not prediction.requires_grad:
            return
        p = target.detach().exp() if is_log else target.detach()
        over = [d for d in (-1, 1) if torch.allclose(p.sum(d), torch.ones_like(p.sum(d)), atol=1e-3)]
        if not over or (classes := p.shape[over[0]]) < FEWEST:
            return
        self.classes, self.temperature = classes, self.temperatures.temperature(prediction)
        if result.ndim:
            self.each = result
        else:
            whole = F.kl_div(prediction.detach(), target.detach(), reduction="none", log_target=is_log).mean()
            self.value = float(result.detach()) if is_close(result.detach(), whole) else None


@check("kl-reduction", "likely", at="probe")
def kl_reduction(seen: Evidence) -> Lines:
    """Beside other terms of the loss, kl_div is a mean over samples and classes, and no factor makes up for these."""
    probe = seen.probe
    if probe is None or "training_step" not in probe.batches or not probe.module.automatic_optimization:
        return
    if not any(call.kind == "kl_div" for call in probe.base("training_step").calls):
        return
    (mean, loss), (_, other) = (_with_factor(probe, factor) for factor in (1.0, FACTOR))
    if loss is None or other is None or not mean.value or not math.isfinite(mean.value):
        return
    part = (other - loss) / (FACTOR - 1)
    factor = abs(part / mean.value) / mean.temperature**2
    if part == 0 or factor >= COMPENSATED * mean.classes:
        return
    is_whole = math.isclose(part, loss, rel_tol=1e-3)
    yield Line(
        f"kl_div divides its sum by the number of samples and by the {mean.classes} classes, as reduction='mean' does, "
        "so it is smaller than the divergence beside the other terms of the loss; use reduction='batchmean'",
        "note" if is_whole else None,
    )


def _with_factor(probe: Probe, factor: float) -> tuple[_Reductions, float | None]:
    """The loss of the batch, with a divergence times a factor."""
    mode, kind = _Reductions(factor), "training_step"
    with mode:
        output = probe.run(kind, probe.batches[kind], training=True, record=False).output
    loss = output.get("loss") if isinstance(output, dict) else output
    return mode, float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else None
