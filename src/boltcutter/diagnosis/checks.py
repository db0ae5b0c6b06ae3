"""A check: its name, how sure it is, when it is asked, and the function that decides.

To add one, decorate a function of the evidence before the callback is built::

    @check("large-batch", "note", at="batch")
    def large_batch(seen: Evidence) -> Lines:
        "The batch has more than 10,000 samples."
        if seen.batch_size > 10_000:
            yield f"{seen.batch_size} samples in a batch; lower the batch size"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from boltcutter.diagnosis.evidence import Evidence

Level = Literal["certain", "likely", "note"]  # cannot be meant; rarely meant; true, but often meant
# start: before the first batch; batch: before a training step; graph: after a forward pass; step: after an optimizer
# step; validation: after a validation step; validated: after a validation; ranks: on rank 0, when all ranks have made
# the same step; summary: after 8, 128, 2048, … steps, and at the end. All but start and summary are asked only at the
# steps that are looked at. Only check --batch and audit ask about a probe, before the first batch, and about their
# eight steps (trial), and only audit about the data.
Moment = Literal[
    "start", "batch", "graph", "step", "validation", "validated", "summary", "ranks", "probe", "trial", "data"
]


@dataclass(frozen=True)
class Line:
    """What a check says, where it is more than a text.

    Args:
        text: What is wrong, where, why it matters, and the remedy.
        level: Instead of the check's own.
        subject: A check speaks once for each subject.
        sample: One sample, or its tensors, that shows it.
    """

    text: str
    level: Level | None = None
    subject: str = ""
    sample: Any = None


Lines = Iterator[str | Line]


@dataclass(frozen=True)
class Check:
    """A check, and the rule by which it decides.

    Args:
        name: By which it is reported, and ignored.
        level: How sure it is.
        at: When it is asked.
        decide: Yields a line for each mistake.
    """

    name: str
    level: Level
    at: Moment
    decide: Callable[[Evidence], Iterable[str | Line]]

    @property
    def rule(self) -> str:
        """When it speaks: the first line of the function's documentation."""
        return (self.decide.__doc__ or "").strip().partition("\n")[0]


# Checks of probes and data, which no training imports: it only lets users ignore them.
ON_DEMAND = frozenset(
    (
        *("advantage-gradient", "adversaries-agree", "argmax-of-labels", "at-chance"),
        *("augmented-validation", "average-copies", "average-statistics", "average-unchanged"),
        *("average-unread", "averaged-metric", "barely-trained", "baseline", "batch-order"),
        *("box-format", "broadcasting", "bytes-wrap", "cached-by-index", "cached-position", "channels-flattened"),
        *("clamped-prediction", "class-dimension", "class-weights", "classes-renumbered"),
        *("clipped-too-early", "condition-dropped", "constant-column", "constant-input"),
        *("constant-target", "constant-term", "cut-gradient", "degrees", "deviation"),
        *("digits-lost", "divergence-weight", "double-softmax", "dropout-in-validation", "duplicates"),
        *("edges-not-shifted",),
        *("exchanged-arguments", "first-target-known", "fitted-before-split", "flat-logits", "future-leak"),
        *("global-seed", "group-overlap", "group-rates", "hard-scores", "held-out-labels"),
        *("in-place", "kl-reduction", "known-edges", "label-leak", "label-range", "label-smoothing"),
        *("last-batch", "later-targets", "little-noise", "loads-nothing", "log-determinant"),
        *("loss-maximized", "margin-target", "mask-inverted", "mask-resized", "masked-extreme"),
        *("masked-matters", "masked-targets", "mean-probability", "metric-not-reset"),
        *("metric-shared", "misaligned", "misaligned-batch", "missing-targets", "misspelled-hook"),
        *("mixed-labels", "mixing", "mostly-unknown", "no-effect", "no-stop-gradient"),
        *("noise-levels", "noisy-target", "nonfinite-data", "not-log", "numbered-apart"),
        *("one-batch", "opponent-stepped", "order-ignored", "ordinal-targets", "other-time", "other-units"),
        *("overlap", "overwritten-loss", "own-messages", "own-scale", "padded-output"),
        *("padding-in-loss", "padding-in-mean", "padding-is-token", "padding-matters"),
        *("pair-target", "partial-validation", "parts-misaligned", "penalty-sign", "policy-sign"),
        *("position", "positive-is-negative", "psnr-peak", "quantile-sign", "random-state", "random-target"),
        *("random-validation", "range", "repeated-index", "reshape-not-transpose", "returns-of-past"),
        *("risk-sets", "rounded-integers", "row-number", "same-order", "same-passes"),
        *("same-layer", "same-sample", "same-views", "sample-cut", "sampler-weights", "scaled-twice"),
        *("schedule-repeated", "seen-items", "self-similarity", "shared-augmentation", "shared-rows"),
        *("shared-state", "shifted-twice", "softmax-of-batch", "softmax-of-labels", "split-scale"),
        *("state-carried", "sum-and-mean", "swapped-arguments", "target-column", "target-gradient"),
        *("target-not-flipped", "target-sum", "teacher-temperature", "thawed", "threshold-of-logits"),
        *("truncated-target", "unread-argument", "unread-samples", "unsaved-state", "unscaled-input"),
        *("unseen-labels", "untied", "unused-input", "unused-part", "unused-value", "updated-in-validation"),
        *("validation-scale", "visible-targets", "weights-of-mean", "weights-of-queries", "window-overlap"),
        *(
            "worker-copies",
            "worker-generator",
        ),
    )
)
CHECKS: dict[str, list[Check]] = {}  # by name; some decide at several moments


def check(
    name: str, level: Level, *, at: Moment
) -> Callable[[Callable[[Evidence], Lines]], Callable[[Evidence], Lines]]:
    """Register a function as a check."""

    def register(decide: Callable[[Evidence], Lines]) -> Callable[[Evidence], Lines]:
        place = (decide.__module__, decide.__qualname__, at)  # the same one if a cell of a notebook is run again
        others = [c for c in CHECKS.get(name, []) if (c.decide.__module__, c.decide.__qualname__, c.at) != place]
        CHECKS[name] = [*others, Check(name, level, at, decide)]
        return decide

    return register


@dataclass(frozen=True)
class Finding:
    """One line of a check.

    Args:
        check: Name of the check.
        level: How sure it is.
        text: What is wrong, where, why it matters, and the remedy.
        step: Optimizer steps that were done.
        evidence: ``numbers`` of what it names, of the losses and of the batch, and a ``sample`` that shows it.
    """

    check: str
    level: Level
    text: str
    step: int = 0
    evidence: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.check} ({self.level}): {self.text}"


class FindingError(RuntimeError):
    """A certain or likely finding, with ``on_finding=error``."""

    hide_traceback = True  # it names the place


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
