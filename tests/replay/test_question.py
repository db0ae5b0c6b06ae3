from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.replay.question import ask, describe
from boltcutter.run.ledger import ROW, header, ledger_path, read_ledgers

RAISED = {"attempts": [{"reason": "IndexError: Target 7 is out of bounds."}]}
LOST = {"attempts": [{"reason": "RankLostError: rank 1 of 2 ended"}]}
FAILED = {"attempts": [{"reason": "NonFiniteGradientError: the gradient of w is not finite"}]}


def write(folder: Path, losses: list[float], norms: list[float] | None = None, stride: int = 1) -> Path:
    rows = np.zeros(len(losses), ROW)
    rows["step"] = np.arange(1, len(losses) + 1) * stride
    rows["loss"], rows["gradient_norm"] = losses, norms if norms else [1.0] * len(losses)
    folder.mkdir(exist_ok=True)
    ledger_path(folder).write_bytes(header("cpu") + rows.tobytes())
    return folder


USUAL = [1.0, 1.1, 0.9, 1.05, 1.0, 1.1, 0.95]


@pytest.mark.parametrize(
    ("losses", "norms", "record", "given", "expected"),
    [
        (USUAL, None, {}, None, (7, "step")),
        (USUAL, None, {}, "3", (3, "step")),
        ([*USUAL, 30.0, 1.0], None, {}, None, (8, "spike")),
        ([*USUAL, 30.0, 1.0], None, {}, "8", (8, "spike")),
        ([*USUAL, 1.0, 30.0], [1.0] * 7 + [90.0, 1.0], {}, "spike", (8, "spike")),
        ([*USUAL, 30.0, np.nan, 1.0], None, {}, None, (9, "nonfinite")),
        ([*USUAL, 30.0], None, FAILED, None, (9, "nonfinite")),
        ([*USUAL, 30.0], None, FAILED, "9", (9, "nonfinite")),
        (USUAL, [np.nan] * 7, {}, None, (7, "step")),
        ([*USUAL, 30.0], None, {}, "last", (8, "spike")),
        ([*USUAL, 30.0], None, RAISED, None, (9, "error")),
        ([*USUAL, 30.0], None, RAISED, "9", (9, "error")),
        ([*USUAL, 30.0], None, RAISED, "spike", (8, "spike")),
        ([*USUAL, np.nan], None, RAISED, None, (8, "nonfinite")),
        ([*USUAL, 30.0], None, LOST, None, (8, "spike")),
    ],
)
def test_the_step_is_found(
    tmp_path: Path, losses: list[float], norms: Any, record: Any, given: str | None, expected: tuple[int, str]
) -> None:
    found = ask(write(tmp_path, losses, norms), record, given)
    assert (found.step, found.kind) == expected


def test_steps_of_several_optimizers_are_counted(tmp_path: Path) -> None:
    folder = write(tmp_path, USUAL, stride=2)
    assert ask(folder, FAILED, None).step == 16
    assert ask(folder, {}, "3").step == 4


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("0", "1 to 7"),
        ("8", "1 to 7"),
        ("spike", "no loss"),
        ("nonfinite", "is finite"),
        ("error", "did not end"),
        ("spik", "spike"),
        ("x", "x"),
    ],
)
def test_what_there_is_not_is_said(tmp_path: Path, given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ask(write(tmp_path, USUAL), {}, given)


def test_a_run_without_steps_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps\.ledger"):
        ask(tmp_path, {}, "3")
    assert ask(tmp_path, FAILED, None).step == 1
    assert ask(tmp_path, RAISED, "error").error == "IndexError: Target 7 is out of bounds."


def test_an_error_was_in_the_step_after_the_last_of_the_rank_that_wrote_most(tmp_path: Path) -> None:
    other = write(tmp_path / "other", USUAL)
    ledger_path(other).rename(ledger_path(tmp_path, 1))
    ledger_path(tmp_path).write_bytes(header("cpu"))  # of a rank that was ended
    record = {"attempts": [{"devices": 2, **RAISED["attempts"][0]}]}
    assert [ask(tmp_path, record, given).step for given in (None, "error")] == [8, 8]


def test_the_loss_of_a_step_is_that_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, USUAL)
    other = write(tmp_path / "other", [3 * loss for loss in USUAL])
    ledger_path(other).rename(ledger_path(tmp_path, 1))
    question = ask(tmp_path, {"attempts": [{"devices": 2}]}, "3")
    assert describe(question, list(read_ledgers(tmp_path)))["loss"]["value"] == pytest.approx(2 * USUAL[2])
