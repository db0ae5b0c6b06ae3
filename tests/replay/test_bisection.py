import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import QUICK, Script
from planted_pairs import EQUAL, PAIRS, PairProject, overrides

from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.extend import NegativeResult
from boltcutter.project import Project
from boltcutter.replay.bisection import Answer, Bisection, bisect_command, text
from boltcutter.replay.factors import Factor
from boltcutter.replay.job import Done, Job, ReplayError
from boltcutter.replay.traces import Place

PROJECT = Project.at(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairProject:
    return PairProject(tmp_path_factory.mktemp("pairs"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "a sample, 2 ranks, 2 workers",
        "uncommitted change",
        "version of a library",
        "lr of a resumed run",
        "environment variable",
        "rate before both were resumed with another",
        "number of ranks",
    ],
)
def test_the_first_difference_and_its_cause_are_named(
    pairs: PairProject, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pair = PAIRS[name]
    first, second = pairs.make(name, pair)
    before = {path: path.stat().st_mtime_ns for run in (first, second) for path in run.rglob("*")}
    monkeypatch.chdir(pairs.root)
    with pytest.raises(NegativeResult) as raised:
        bisect_command(Project.find(pairs.root), overrides(first, second, pair, pairs))
    answer = raised.value.result
    if pair.kind:
        assert answer.places[0].kind == pair.kind
        assert pair.name in answer.places[0].name
    assert pair.step is None or answer.step == pair.step
    assert [pair.cause in cause for cause in answer.causes] == [True]
    assert "equal to its ledger" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for run in (first, second) for path in run.rglob("*")} == before
    assert not list(tmp_path.iterdir())  # neither copies of the code nor replays
    assert len(pairs.git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["2 ranks, 2 workers", "a module renamed"])
def test_equal_runs_do_not_differ(pairs: PairProject, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pairs.make(name, EQUAL[name])
    monkeypatch.chdir(pairs.root)
    answer = bisect_command(Project.find(pairs.root), [f"run={first}", f"with={second}"])
    assert answer.equal
    assert answer.step is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "run: missing"),
        (["run={run}", "with={run}"], "no run there"),
        (["run={run}", "step=3"], "step=3: not an argument"),
        (["run={run}", "python_a=/no/python"], "--python-a=/no/python: no such file"),
        (["run={run}", "timeout=-1"], "timeout=-1: not a positive number"),
    ],
)
def test_what_is_not_asked_rightly_is_said(tmp_path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        bisect_command(PROJECT, [argument.format(run=tmp_path) for argument in arguments])


def test_the_answer_as_text() -> None:
    answer = Answer(("a", "b"), step=3, epoch=0, columns=["loss"], causes=["setting task.lr=1 → 2"])
    answer.places = [Place("module", "net.0", "the output of module net.0 (Linear) differs", rank=1)]
    answer.factors = [
        Factor("setting", ["setting   task.lr=1 → 2"], removes=True),
        Factor("code", ["code      commit a → b"], removes=False, left="the same"),
        Factor("setting", ["setting   tags=a → b"], matters=False),
    ]
    assert text(answer) == [
        "first difference: step 3 (epoch 0) of rank 1: the output of module net.0 (Linear) differs",
        "cause: setting task.lr=1 → 2",
        "setting   task.lr=1 → 2",
        "code      commit a → b: with it of B, the difference is the same",
        "setting   tags=a → b, without effect on a step",
    ]


def test_a_text_of_somebody_else_refers_to_no_value_of_this_user(tmp_path: Path) -> None:
    """``data.path=s3://theirs/${note}`` is harmless in their run, where the note is a plain text, but not in ours."""
    ours = Settings({"note": "${oc.env:HOME}", "data": {"path": "here"}})
    case = Bisection.__new__(Bisection)
    case.project, case.cfgs = PROJECT, (ours, ours)
    for own, path, is_refused in (
        ([True, False], "s3://theirs/${note}", True),
        ([True, False], "s3://theirs/plain", False),
        ([True, True], "s3://mine/${note}", False),
    ):
        case.own, job = own, Job("run", "", 1, values={"data.path": path})
        with pytest.raises(ReplayError, match="environment") if is_refused else nullcontext():
            case.check_mixed(0, job)


def test_a_replay_that_fails_before_the_step_is_no_equal_one(tmp_path: Path) -> None:
    done = Done([{"ended": 4}], [], "TypeError: of the replay")
    found = Bisection.__new__(Bisection)
    found.cfgs = (Settings({}), Settings({}))
    found.folders, found.devices, found.own = (tmp_path, tmp_path), [1, 1], [True, True]
    found.before, found.shared, found.records = [({}, []), ({}, [])], [], ({}, {})
    found.given = (None, None)  # type: ignore[assignment]
    found.workers = SimpleNamespace(find=lambda *args: SimpleNamespace(run=lambda job: done))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"A \(.*\) cannot be replayed: TypeError: of the replay"):
        found.replay(0, None, 5, [5])
    assert found.replay(0, None, 4, [4]) is done  # as the run itself


def test_what_needs_a_state_that_the_checkpoint_has_not_is_tried_from_the_beginning() -> None:
    def attempt(factor: Factor, second: Any, checkpoint: str | None, step: int) -> None:
        factor.removes = checkpoint is None and len(factor.lines) == 2  # only both together

    found = Bisection.__new__(Bisection)
    found.found = Answer(("a", "b"), step=14)
    found.found.factors = [Factor("setting", [f"setting   {key}=1 → 2"], [key]) for key in ("data.a", "data.b")]
    found.attempt = attempt  # type: ignore[method-assign]
    found.find_causes(Done([], []), None)
    assert found.found.causes == ["setting data.a=1 → 2 and 1 more"]
    begins = list[Any]()
    found.attempt = lambda factor, second, begin, step: begins.append(begin)  # type: ignore[method-assign]
    found.find_causes(Done([], []), "a.ckpt")
    assert begins == ["a.ckpt", "a.ckpt", None, None, None]


@pytest.mark.slow
def test_runs_on_built_in_data(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rate in (("one", 0.002), ("two", 0.01)):
        done = script("train", *QUICK, "model=linear", f"optimizer.lr={rate}", f"folder={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    with pytest.raises(NegativeResult) as raised:
        bisect_command(PROJECT, [f"run={tmp_path / 'one'}", f"with={tmp_path / 'two'}"])
    assert raised.value.result.step == 1
    assert raised.value.result.causes == ["setting optimizer.lr=0.002 → 0.01"]
