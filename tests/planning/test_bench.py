import json
import sys

import pytest
from conftest import run_command

from boltcutter.config.errors import ConfigError
from boltcutter.planning.bench import LARGE, SMALL, format_result, read_arguments

MEASURED = {"ms_per_step": 12.3, "by_hand_ms_per_step": 12.0, "ratio": 1.025, "turns": 9}
FOUND = {
    "machine": "CPU",
    "seconds": 200.0,
    "models": {
        "convnet": {**MEASURED, "mfu": 0.36, "input_wait": 0.02, "overlap": 0.9},
        "gpt": {**MEASURED, "mfu": None, "input_wait": 0.0, "overlap": None},
        "resnet50": {"error": "did not end in time"},
    },
    "checks": [
        {"check": "ddp", "result": "works", "detail": ""},
        {"check": "compile", "result": "fails", "detail": "no compiler"},
    ],
}


@pytest.mark.parametrize(
    ("argument", "part"), [("seconds=0", "seconds=0"), ("work=vgg", "work=vgg"), ("model=mlp", "model")]
)
def test_mistakes_name_the_argument(argument: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_arguments([argument])


def test_arguments() -> None:
    assert read_arguments([]) == (240.0, ["convnet", "resnet50", "gpt"])
    assert read_arguments(["seconds=60", "work=gpt"]) == (60.0, ["gpt"])
    assert SMALL.keys() == LARGE.keys()


def test_the_table_has_what_was_measured_and_what_was_not() -> None:
    rows = [line for line in format_result(FOUND).splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "| convnet | 12.3 | 1.02 (9 turns) | 36% | 2% | 90% |" in rows
    assert "| gpt | 12.3 | 1.02 (9 turns) |  | 0% |  |" in rows
    assert "did not end in time" in format_result(FOUND)
    assert "1 checks work, 1 fail" in format_result(FOUND)
    assert "compile: fails: no compiler" in format_result(FOUND)


@pytest.mark.slow
def test_the_command_measures_a_model_on_this_machine() -> None:
    command = [sys.executable, "-m", "boltcutter", "bench", "work=convnet", "seconds=60", "--json"]
    done = run_command(command, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found = found.get("result", found)
    row = found["models"]["convnet"]
    assert 0.3 < row["ratio"] < 5
    assert row["turns"] > 1
    assert row["mfu"] is None
    assert 0 <= row["input_wait"] < 1
    assert {check["result"] for check in found["checks"]} <= {"works", "not tried", "fails"}
    assert found["seconds"] < 100
