from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.config.values import as_yaml, read_yaml
from boltcutter.project import Project
from boltcutter.replay import golden
from boltcutter.run.folder import save_config, update_record
from boltcutter.run.ledger import ROW, Ledger, header, ledger_path

ROOT = Path(__file__).parents[2]


def rows(count: int, **changed: float) -> Any:
    found = np.zeros(count, ROW)
    found["step"] = np.arange(1, count + 1)
    found["loss"], found["samples"], found["weights"] = 1 / found["step"], found["step"] + 7, found["step"] + 9
    for name, value in changed.items():
        found[name][-1] = value
    return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "project").mkdir()
    return Project.at(tmp_path / "project")


@pytest.fixture
def run(project: Project, tmp_path: Path) -> Callable[..., Path]:
    """The folder of a run, as its arguments compose it."""

    def make(content: Any, command: str = "boltcutter train model=linear seed=3 folder=x", **record: Any) -> Path:
        from boltcutter.config.compose import compose

        folder = tmp_path / "run"
        cfg: Settings = compose(project, ["model=linear", "seed=3", f"folder={folder}"])
        save_config(cfg)
        update_record(folder, command=command, hardware={"threads": 2}, packages={"torch": "2.0"}, **record)
        ledger_path(folder).write_bytes(header("cpu") + content.tobytes())
        return folder

    return make


def test_a_run_is_kept_with_what_trains_it_again(project: Project, run: Callable[..., Path]) -> None:
    content = rows(5)
    path = golden.golden_command(project, [f"run={run(content)}", "name=short", "tolerance.loss=1e-4"])
    assert path == project.root / "tests" / "golden" / "short.ledger"
    assert path.read_bytes() == header("cpu") + content.tobytes()
    assert read_yaml(path.with_suffix(".yaml").read_text()) == {
        "overrides": ["model=linear", "seed=3"],
        "threads": 2,
        "torch": "2.0",
        "tolerance": {"loss": 1e-4},
    }


@pytest.mark.parametrize(
    ("count", "options", "arguments", "reason"),
    [
        (501, {}, [], "it has 501 steps, and a test has at most 500"),
        (0, {}, [], "no steps.ledger with a step"),
        (3, {"command": "train.py model=linear"}, [], "seed=3 → 0"),
        (3, {"attempts": [{"resumed_from": "last.ckpt"}]}, [], "it was resumed"),
        (3, {}, ["tolerance.loss=2"], "tolerance.loss=2: not a relative tolerance"),
        (3, {}, ["tolerance.weights=0.1"], "tolerance.weights=0.1: not an argument"),
        (3, {}, ["name=../x"], "name=../x: not the name"),
    ],
)
def test_what_no_test_can_repeat_is_refused(
    project: Project, run: Callable[..., Path], count: int, options: Any, arguments: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        golden.golden_command(project, [f"run={run(rows(count), **options)}", *arguments])
    assert not (project.root / "tests").exists()


@pytest.mark.parametrize(
    ("changed", "tolerance", "fails"),
    [
        ({}, {}, None),
        ({"loss": 0.2001}, {}, r"step 5 \(epoch 0\): loss"),
        ({"loss": 0.2001, "weights": 3}, {"loss": 1e-3}, None),
        ({"loss": 0.21}, {"loss": 1e-3}, r"step 5 \(epoch 0\): loss"),
        ({"lr": 1e-9}, {"loss": 1e-3, "lr": 1e-6}, r"step 5 \(epoch 0\): lr"),
        ({"samples": 3}, {"loss": 1e-3}, r"step 5 \(epoch 0\): samples"),
        ({"weights": 3}, {}, r"step 5 \(epoch 0\): weights"),
        ({"step": 9}, {}, "it has 5 steps, this training 9"),
    ],
)
def test_a_test_fails_at_the_first_step_that_differs(
    project: Project, monkeypatch: pytest.MonkeyPatch, changed: Any, tolerance: dict[str, float], fails: str | None
) -> None:
    path = project.root / golden.FOLDER / "short.ledger"
    path.parent.mkdir(parents=True)
    path.write_bytes(header("cpu") + rows(5).tobytes())
    write_text(path.with_suffix(".yaml"), as_yaml({"overrides": [], "torch": "1.0", "tolerance": tolerance}))
    monkeypatch.setattr(golden, "_train", lambda *_: Ledger("cpu", rows(5, **changed)))
    name = str(golden.FOLDER / "short.ledger")
    if fails is None:
        golden.check_golden(name, project=project)
        return
    with pytest.raises(AssertionError, match=fails) as raised:
        golden.check_golden(name, project=project)
    assert "written with torch 1.0" in str(raised.value)
    if "loss" in changed:
        golden.check_golden(name, project=project, loss=0.5)


def test_what_is_not_there_is_said(project: Project) -> None:
    with pytest.raises(ConfigError, match="no ledger with its"):
        golden.check_golden("tests/golden/none.ledger", project=project)
    with pytest.raises(ConfigError, match="weights: no column with a tolerance"):
        golden.check_golden("tests/golden/none.ledger", project=project, weights=0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_is_repeated_and_compared(project: Project, tmp_path: Path) -> None:
    facts = {"overrides": ["model=linear", "trainer.max_steps=3", "trainer.accelerator=cpu"], "threads": 1}
    trained = golden._train(project, tmp_path / "first", facts)
    path = project.root / "short.ledger"
    path.write_bytes(header("cpu") + trained.rows.tobytes())
    write_text(path.with_suffix(".yaml"), as_yaml(facts))
    golden.check_golden("short.ledger", project=project)
    write_text(path.with_suffix(".yaml"), as_yaml(facts | {"overrides": [*facts["overrides"], "optimizer.lr=0.1"]}))
    with pytest.raises(AssertionError, match=r"short\.ledger: step 1 \(epoch 0\): lr"):
        golden.check_golden("short.ledger", project=project)
    write_text(path.with_suffix(".yaml"), as_yaml(facts | {"overrides": ["model=liner"]}))
    with pytest.raises(ConfigError, match=r"the training failed: .*liner"):
        golden.check_golden("short.ledger", project=project)


def test_arguments_of_somebody_else_become_no_test(
    project: Project, run: Callable[..., Path], hand_over: Callable[[Path], None]
) -> None:
    """Those that change no step may name any class: ``check_golden`` would call it, as the user's own."""
    planted = "callback.progress._target_=os.mkdir +callback.progress.path=executed checkpoints=/elsewhere"
    folder = run(rows(5), command=f"boltcutter train model=linear seed=3 {planted}")
    hand_over(folder)
    with pytest.raises(ConfigError, match="others own or may write") as error:
        golden.golden_command(project, [f"run={folder}"])
    assert "trust=true" in str(error.value)
    assert not (project.root / golden.FOLDER).exists()
