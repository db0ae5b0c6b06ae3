import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import run_command

from boltcutter.cli import commands
from boltcutter.cli.answer import answer, described
from boltcutter.environment.startup import restored_signals
from boltcutter.environment.stop_signals import PreemptionError
from boltcutter.extend import NegativeResult


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with --json in this process."""
    capfd.readouterr()
    try:
        commands.main([*arguments, "--json"])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    (line,) = capfd.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    assert found["exit_status"] == status
    assert found["ok"] == (status == 0)
    return found


def test_every_command_answers_with_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    for name, command in commands.commands().items():
        found = call(capfd, name, "--help")
        assert (found["command"], found["ok"], found["errors"]) == (name, True, [])
        assert found["output"][0].startswith(command.summary)


def test_mistakes_have_a_code_and_a_fix(capfd: pytest.CaptureFixture[str]) -> None:
    found = call(capfd, "check", "trainer.devces=2", "seed=a")
    assert found["exit_status"] == 2
    assert [(e["code"], e["setting"], e["value"], e["fix"]) for e in found["errors"]] == [
        ("wrong_type", "seed", "a", None),
        ("unknown_key", "trainer.devces", "2", "trainer.devices=2"),
    ]
    assert found["errors"][1]["replaces"] == ["trainer.devces=2"]
    (error,) = call(capfd, "export", "export=onx", "run=x")["errors"]
    assert error["replaces"] == ["export=onx"]  # but not the command
    (error,) = call(capfd, "trian")["errors"]
    assert (error["code"], error["fix"]) == ("unknown_command", "train")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ("predict run={run} inptu=x.csv", "input=x.csv"),
        ("predict run={run} tempreature=1", "temperature=1"),
        ("evaluate rnu={run}", "run={run}"),  # not only that run is not set
        ("evaluate run={run} splt=val --print", "split=val"),
        ("export run={run} exprot=onnx", "export=onnx"),
        ("serve run={run} prot=1", "port=1"),  # not report=1
        ("serve run={run} drian=3", "drain=3"),
        ("compare run={run} wiht={run}", "with={run}"),
        ("search bugdet=30m", "budget=30m"),
        ("search serach=optuna", "search=optuna"),
        ("launch lanch=local", "launch=local"),
        ("launch status rnu={run}", "run={run}"),
        ("doctor memroy=3GiB", "memory=3GiB"),
        ("find-batch-size limt_gib=3", "limit_gib=3"),
        ("check rnu={run}", "run={run}"),
        ("train resmue={run}", "resume={run}"),
        ("train sed=3", "seed=3"),  # a key of the configuration
        ("runs --live prot=3", "port=3"),
        ("runs remvoe seed=1", "remove"),
        ("compare --mertic test/loss seed=0 seed=1", "--metric"),  # not that seed is given twice
    ],
)
def test_a_misspelt_argument_of_a_command(
    arguments: str, fix: str, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = arguments.format(run=trained).split()
    with restored_signals(), patch.dict(os.environ):
        (error,) = call(capfd, *words)["errors"]
    near = fix.partition("=")[0]
    assert (error["fix"], error["remedy"].partition(" (")[0]) == (fix.format(run=trained), f"did you mean {near}?")
    assert [error["code"], *error["replaces"]][1:] == [w for w in words if w.startswith(f"{error['setting']}")]


def test_secrets_are_not_in_the_answer(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "0123456789abcdef")
    found = call(capfd, "check", "optimizer.lr=${oc.env:MY_SERVICE_TOKEN}")
    (error,) = found["errors"]
    assert (error["setting"], error["value"]) == ("optimizer.lr", "${oc.env:MY_SERVICE_TOKEN}")
    assert "***" in error["message"]
    assert "0123456789abcdef" not in json.dumps(found)


def test_another_mistake_is_not_hidden_by_keys_of_the_configuration(capfd: pytest.CaptureFixture[str]) -> None:
    for word in ("name=x", "+rnu=3", "trainer.devices=1"):
        (error,) = call(capfd, "evaluate", word)["errors"]
        assert (error["code"], error["setting"]) == ("missing_value", "run")


def test_a_correction_takes_the_place_of_the_argument_that_was_given(capfd: pytest.CaptureFixture[str]) -> None:
    """Not of a line in a file, also for the words of another template."""
    given = ("callbacks.model_checkpoint.monitor=val/acc", "callbacks.model_checkpoint.save_top_k=x")
    errors = call(capfd, "check", given[0])["errors"] + call(capfd, "check", given[1])["errors"]
    assert [(error["fix"], error["replaces"], error["file"]) for error in errors] == [
        ("callback.best.monitor=val/accuracy", [given[0]], None),
        (None, [given[1]], None),
    ]
    (error,) = call(capfd, "check", "callbacks=none")["errors"]
    assert (error["fix"], error["replaces"]) == ("callback=null", ["callbacks=none"])


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (SystemExit(3), 3, None),
        (PreemptionError(15, "nothing saved"), 143, "interrupted"),
        (ZeroDivisionError("no"), 1, "internal_error"),
    ],
)
def test_the_object_is_printed_however_a_command_ends(
    raised: BaseException, status: int, code: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> None:
        print("before", arguments)
        raise raised

    with pytest.raises(type(raised)):
        answer("train", ["a=1", "--json"], fail)
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (found["exit_status"], found["output"]) == (status, ["before ['a=1']"])
    assert [error["code"] for error in found["errors"]] == ([code] if code else [])
    assert "before" in err


def test_a_negative_result_is_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    def end(arguments: list[str]) -> None:
        raise NegativeResult({"loss": float("nan"), "sizes": (1, 2)})

    with pytest.raises(NegativeResult):
        answer("compare", [], end)
    found = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert (found["ok"], found["exit_status"], found["result"]) == (False, 1, {"loss": None, "sizes": [1, 2]})


def test_the_result_of_training_is_its_folder_and_its_metrics(tmp_path: Path) -> None:
    facts = {"stopped_by": "trainer.max_time", "metrics": {"val/loss": 0.5}}
    attempts = [{"reason": "killed"}, {"reason": "completed"}]
    (tmp_path / "record.json").write_text(json.dumps({**facts, "attempts": attempts, "git": {}}))
    assert described(tmp_path) == {"folder": str(tmp_path), "status": "completed", **facts}


def test_output_of_other_processes_is_not_in_the_answer() -> None:
    code = "import os; from boltcutter.cli.answer import answer; answer('x', [], lambda _: os.system('echo other'))"
    done = run_command([sys.executable, "-c", code])
    assert json.loads(done.stdout)["result"] == 0
    assert "other" in done.stderr
