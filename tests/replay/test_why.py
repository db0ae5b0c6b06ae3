import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import BAD, forked, overrides, write_project

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.replay import why
from boltcutter.replay.job import Done
from boltcutter.replay.question import Question
from boltcutter.training import train

PROJECT = Project.at(Path(__file__).parents[2])


def digests(folder: Path) -> dict[str, Any]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "ranks", "workers", "cause"),
    [
        ("log-of-zero", 1, 0, "sample"),
        ("outlier-target", 2, 2, "sample"),
        ("weight-lost", 1, 0, "weights"),
        ("out-of-range", 2, 0, "sample"),
        ("unreadable", 1, 2, "sample"),
        ("constant-batch", 1, 0, "none"),
        ("code-of-large", 1, 0, "none"),
        ("rate-jumps", 1, 0, "learning_rate"),
    ],
)
def test_a_cause_is_named_that_removes_the_effect(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    ranks: int,
    workers: int,
    cause: str,
) -> None:
    root = write_project(tmp_path / "project")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(root)
    project, run = Project.find(None), tmp_path / "run"

    def start() -> None:
        project.activate()
        train.train_command(project, overrides(fault, run, ranks, workers))

    forked(start)
    before = digests(run)
    answer = why.why_command(project, [f"run={run}", f"html={tmp_path}/why.html"])
    assert digests(run) == before
    assert answer.cause == cause
    assert answer.exact
    if cause == "sample":
        assert [row["index"] for row in answer.samples] == [BAD]
        assert (
            f"sample {BAD} {'cannot be read' if fault == 'unreadable' else 'is the cause'}" in capsys.readouterr().out
        )
    page = (tmp_path / "why.html").read_text()
    assert all(change.name in page for change in answer.changes)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("boltcutter-replay")]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [([], "run: missing"), (["run={run}"], "no run there"), (["run={run}", "stepp=3"], "stepp=3: not an argument")],
)
def test_what_is_not_asked_rightly_is_said(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        why.why_command(PROJECT, [argument.format(run=tmp_path) for argument in arguments])


def test_a_sample_is_no_culprit_where_another_change_removes_the_effect_as_well() -> None:
    case, row = why.Case.__new__(why.Case), {"index": 4, "row": 0, "rank": 0, "loss": 3.0, "error": ""}
    case.question, case.unusual, case.culprits = Question(7, "spike"), ["loss"], [row]
    sample = why.Change("without sample 4", removes=True)
    for name, removes, cause in (
        ("learning rate × 0.1 from step 1 on", False, "sample"),
        ("learning rate × 0.1 from step 1 on", True, "learning_rate"),
        ("in float64", True, "precision"),
    ):
        answer = why.Answer("runs/a", 7, "spike")
        answer.changes = [sample, why.Change(name, removes=removes)]
        case.conclude(answer, Done([{"bad": []}], []), [row], [row])
        assert answer.cause == cause
    assert answer.lines[0].endswith("without sample 4 loss of the step are as before, but also in float64")


@pytest.mark.parametrize(
    ("earlier", "loss", "norm", "removes"),
    [
        ([4.0, 3.0], 5.0, 2.0, True),
        ([4.0, 3.0], 3e14, 2.0, False),
        ([4.0, 3.0], 30.0, 4048.0, False),
        ([4.0, 3.0], 5.0, float("nan"), True),
        ([], 5.0, 2.0, True),
        ([], 3e14, 2.0, False),
    ],
)
def test_a_change_after_which_the_loss_is_only_finite_removes_nothing(
    earlier: list[float], loss: float, norm: float, removes: bool
) -> None:
    """As of ``exp(exp(loss))``, which is finite without the largest losses of the batch."""
    case = why.Case.__new__(why.Case)
    case.earlier = {"loss": np.asarray(earlier), "gradient_norm": np.asarray(earlier)}
    change = why.Change("without sample 4", loss, norm, after_1=3.5, after_20=3.0, removes=True)
    assert case.stays(change, is_next=False).removes is removes


@pytest.mark.parametrize(("later", "culprits"), [(True, []), (False, [4]), (None, [4])])
def test_a_sample_that_does_no_harm_one_step_later_is_no_culprit(later: bool | None, culprits: list[int]) -> None:
    class Replays(why.Case):
        def row(self, name: str, checkpoint: str | None, last: int = 20, **options: Any) -> why.Change:
            removes = later if options.get("delays") else options["without"] == [(0, 0, 4)]
            return why.Change(name, 3.0, 1.0, 3.0, removes=removes)

    case = Replays.__new__(Replays)
    case.question, case.earlier = Question(7, "nonfinite"), {"loss": np.ones(3), "gradient_norm": np.ones(3)}
    rows = [{"index": row, "row": row, "rank": 0, "batch": 0, "loss": 3.0, "error": ""} for row in range(8)]
    case.try_samples(why.Answer("runs/a", 7, "nonfinite"), rows, [rows[4]], None)
    assert [row["index"] for row in case.culprits] == culprits
    case.shared = []
    said = case.no_sample(rows, [rows[4]], "")
    assert culprits or "without sample 4 loss and gradients are finite, but so they are with the same batch" in said


def test_the_answer_as_text() -> None:
    answer = why.Answer("runs/a", 7, "spike", cause="none", values={"loss": {"value": 3.0, "z": 9.4}})
    answer.exactness = "replayed from the beginning: 7 steps, all equal to the ledger"
    answer.samples = [{"index": 4, "where": "b.png", "loss": 2.0, "row": 0, "rank": 0}]
    answer.layers = [{"layer": "net.0", "gradient": "nan", "z": {"gradient": "inf"}}]
    answer.changes = [why.Change("as it was", 3.0, 1.0, None, float("nan"), False)]
    lines = why.text(answer)
    assert lines[0] == "step 7: loss 3 (z 9)"
    assert "largest loss: sample 4 (b.png): 2" in lines
    assert "layer net.0: gradient nan" in lines
    assert lines[-1].split() == ["as", "it", "was", "3", "1", "–", "nan", "no"]
