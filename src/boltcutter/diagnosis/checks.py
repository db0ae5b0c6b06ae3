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
