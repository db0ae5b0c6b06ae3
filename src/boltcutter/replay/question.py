"""Which step of a run is asked for: a number, the first that is not finite, a spike, or the last."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boltcutter.config.errors import ConfigError, hint
from boltcutter.replay.job import ledgers_of
from boltcutter.replay.scores import HIGH, step_scores
from boltcutter.run.ledger import Ledger

KINDS = ("spike", "nonfinite", "error", "last")
NOT_FINITE = "NonFiniteGradientError"  # of callback.guard, as the record has it
ERROR = re.compile(r"(?:\w+\.)*(\w+(?:Error|Exception)): ")  # of Python, as the record has it
# Errors that no step has by itself.
OTHER_ERRORS = (
    NOT_FINITE,
    "ConfigError",
    "OutOfMemoryError",
    "RankLostError",
    "RanksDifferError",
    "MetricNotLoggedError",
)


@dataclass(frozen=True)
class Question:
    """The step that is asked for.

    Args:
        step: Its number, from 1.
        kind: ``nonfinite``, ``error``, ``spike`` or ``step``.
        is_done: Whether the optimizer made it; not if training stopped before.
        error: With which training ended there, as the record has it.
    """

    step: int
    kind: str
    is_done: bool = True
    error: str = ""


def ask(folder: Path, record: Mapping[str, Any], given: str | None) -> Question:
    """Find the step.

    Args:
        folder: Of the run.
        record: Its ``record.json``.
        given: A number, ``nonfinite``, ``error``, ``spike`` or ``last``; None: the first of these that there is.

    Raises:
        ConfigError: There is no such step.
    """
    ledgers = ledgers_of(folder, record)
    if given in (None, "error") and (error := error_of(record)) and (given or not _bad_rows(ledgers)):
        step = max((_next_step([ledger]) for ledger in ledgers), default=1)  # ranks that were ended wrote less
        return Question(step, "error", is_done=False, error=error)
    if not ledgers or not min(ledger.last for ledger in ledgers):
        if given in (None, "nonfinite"):
            return _first_step(folder, record)
        raise ConfigError(
            f"run={folder}: it has no steps.ledger with a step, so its steps are not known; train with callback.ledger"
        )
    if given is not None and given.isascii() and given.isdecimal():
        return numbered(ledgers, int(given), record)
    if given is not None and given not in KINDS:
        raise ConfigError(f"step={given}: expected a number, {', '.join(KINDS)}{hint(given, KINDS)}")
    if given in (None, "nonfinite") and (found := _not_finite(ledgers, record)):
        return found
    if given == "nonfinite":
        raise ConfigError(f"step=nonfinite: each loss and gradient of {folder} is finite; try step=spike")
    if given == "error":
        raise ConfigError(f"step=error: {folder} did not end with an error of a step; try step=last")
    if given in (None, "spike") and (found := _spike(ledgers)):
        return found
    if given == "spike":
        raise ConfigError(f"step=spike: no loss or gradient of {folder} is {HIGH:.0f} deviations above those before it")
    return numbered(ledgers, ledgers[0].last, record)


def stopped_at(record: Mapping[str, Any]) -> bool:
    """Whether the last attempt was stopped by gradients that are not finite."""
    reason = str((record.get("attempts") or [{}])[-1].get("reason"))
    return reason.startswith(NOT_FINITE)


def error_of(record: Mapping[str, Any]) -> str:
    """The error with which the last attempt ended, if a step may have raised it; empty if not."""
    reason = str((record.get("attempts") or [{}])[-1].get("reason"))
    found = ERROR.match(reason)
    return reason if found and found[1] not in OTHER_ERRORS else ""


def _first_step(folder: Path, record: Mapping[str, Any]) -> Question:
    if stopped_at(record):
        return Question(1, "nonfinite", is_done=False)
    raise ConfigError(f"run={folder}: it has no steps.ledger with a step, so its steps are not known")


def numbered(ledgers: list[Ledger], step: int, record: Mapping[str, Any]) -> Question:
    """The step of a number; of what kind it is.

    Raises:
        ConfigError: The run has no such step.
    """
    last = min(ledger.last for ledger in ledgers)
    if step == _next_step(ledgers) and stopped_at(record):
        return Question(step, "nonfinite", is_done=False)
    if (error := error_of(record)) and step == max(_next_step([ledger]) for ledger in ledgers):
        return Question(step, "error", is_done=False, error=error)
    steps = ledgers[0].rows["step"].astype(np.int64)
    begin = 1 if steps[0] <= _stride(ledgers[0]) else int(steps[0])
    if not begin <= step <= last or not len(at := np.flatnonzero(steps >= step)):
        raise ConfigError(f"step={step}: the run has steps {begin} to {last}; give one of them")
    found = int(steps[at[0]])
    bad = _bad_rows(ledgers)
    kind = "nonfinite" if found in bad else "spike" if _scores(ledgers)[int(at[0])] >= HIGH else "step"
    return Question(found, kind)


def _next_step(ledgers: list[Ledger]) -> int:
    """The step after the last, which was begun."""
    return min(ledger.last for ledger in ledgers) + _stride(ledgers[0])


def _stride(ledger: Ledger) -> int:
    """Optimizer steps of each batch, which are several where there are several optimizers."""
    steps = ledger.rows["step"].astype(np.int64)
    return int(np.diff(steps, prepend=0)[-1]) if len(steps) else 1


def _bad_rows(ledgers: list[Ledger]) -> list[int]:
    found = set[int]()
    for ledger in ledgers:
        rows = ledger.rows
        for name in ("loss", "gradient_norm"):
            values = rows[name]
            if np.isnan(values).all():  # not known
                continue
            found |= set(rows["step"][~np.isfinite(values)].tolist())
    return sorted(found)


def _not_finite(ledgers: list[Ledger], record: Mapping[str, Any]) -> Question | None:
    if bad := _bad_rows(ledgers):
        return Question(int(bad[0]), "nonfinite")
    if stopped_at(record):
        return Question(_next_step(ledgers), "nonfinite", is_done=False)
    return None


def _scores(ledgers: list[Ledger]) -> Any:
    """The largest score of each step, of its loss and of its gradient, over all ranks."""
    length = min(len(ledger.rows) for ledger in ledgers)
    each = [step_scores(ledger.rows[name][:length]) for ledger in ledgers for name in ("loss", "gradient_norm")]
    known = [
        scores
        for scores, (ledger, name) in zip(
            each, [(x, n) for x in ledgers for n in ("loss", "gradient_norm")], strict=True
        )
        if not np.isnan(ledger.rows[name]).all()
    ]
    return np.max(known, axis=0) if known else np.zeros(length)


def _spike(ledgers: list[Ledger]) -> Question | None:
    """The step of the largest loss against those before, or the one before it where this began."""
    length = min(len(ledger.rows) for ledger in ledgers)
    losses = np.max([step_scores(ledger.rows["loss"][:length]) for ledger in ledgers], axis=0)
    scores = _scores(ledgers)
    if not length or scores.max() < HIGH:
        return None
    at = int(losses.argmax()) if losses.max() >= HIGH else int(scores.argmax())
    while at and scores[at - 1] >= HIGH:  # the update of the step before may have caused it
        at -= 1
    return Question(int(ledgers[0].rows["step"][at]), "spike")


def describe(question: Question, ledgers: list[Ledger]) -> dict[str, Any]:
    """Loss, gradient and learning rate of the step as means over the ranks, and their scores against those before."""
    found: dict[str, Any] = {}
    for name in ("loss", "gradient_norm", "lr"):
        if ledgers and len(at := np.flatnonzero(ledgers[0].rows["step"] == question.step)):
            each = [ledger.rows[name][: int(at[0]) + 1] for ledger in ledgers if ledger.last >= question.step]
            upto = np.mean(each, axis=0)
            found[name] = {"value": float(upto[-1]), "z": float(step_scores(upto)[-1])}
    return found
