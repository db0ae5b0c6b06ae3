"""What one training executes of the library, which a reader has to hold: functions by package, and their order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Ceilings, not targets: where a package grows beyond its own, look for steps that can be taken away first.
MAX_FILES = 209
MAX_FUNCTIONS = {
    "assembly": 31,
    "callback": 156,
    "checkpoint": 81,
    "checks": 33,
    "config": 119,  # one of them where a file is changed
    "data": 105,
    "diagnosis": 240,
    "environment": 145,
    "evaluation": 45,
    "report": 100,
    "run": 105,
    "task": 76,
    "training": 80,
}
MAX_OTHERS = 171  # of the packages and modules that are not listed, together; one only if files change meanwhile
TRACE = """
import atexit, json, os, runpy, sys, threading
import pandas, sklearn.datasets, torch, torch._dynamo, torch.distributed.fsdp  # whose calls need not be seen
source, folder, found, main = sys.argv[1] + os.sep, sys.argv[2], {}, os.getpid()  # in the order of first calls
def count(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(source):
        found.setdefault((code.co_filename[len(source):], code.co_name, code.co_firstlineno))
def write():
    sys.setprofile(None)
    if os.getpid() == main:
        print("executed", json.dumps(list(found)))
atexit.register(write)
sys.argv = ["scripts/train.py", "trainer.max_epochs=1", "logger=null", "trainer.accelerator=cpu", f"folder={folder}"]
threading.setprofile(count)
sys.setprofile(count)
runpy.run_path("scripts/train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, int]]:
    """File, name and line of each function that a training calls, in the order of their first calls."""
    tmp_path = tmp_path_factory.mktemp("executed")
    command = [sys.executable, "-c", TRACE, str(ROOT / "src" / "boltcutter"), str(tmp_path / "run")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    (tmp_path / "ignored").write_text("*")  # new files of the repository, which are searched for secrets
    env["GIT_CONFIG_COUNT"], env["GIT_CONFIG_KEY_0"] = "1", "core.excludesFile"
    env["GIT_CONFIG_VALUE_0"] = str(tmp_path / "ignored")
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("executed ")]
    return [(file, name, line) for text in lines for file, name, line in json.loads(text[9:])]


def test_the_page_on_a_run_has_the_order_of_its_calls(executed: list[tuple[str, str, int]]) -> None:
    page = (ROOT / "docs" / "step-by-step.md").read_text()
    steps = re.findall(r"\| `([\w/]+\.py): (\w+)` \|$", page, re.M)
    assert len(steps) > 25
    calls = [(file, name) for file, name, _ in executed]
    places = [calls.index(step) for step in steps]  # a ValueError names a function that is not called
    assert [steps[places.index(place)] for place in sorted(places)] == steps
    assert len(page.splitlines()) <= 80


def test_a_training_executes_no_more_than_a_reader_can_hold(executed: list[tuple[str, str, int]]) -> None:
    found = executed
    functions = [(file, name) for file, name, _ in found if not name.startswith("<")]
    packages = [Path(file).parts[0] for file, _ in functions]
    grown = {name: packages.count(name) for name, most in MAX_FUNCTIONS.items() if packages.count(name) > most}
    assert grown == {}, f"more than { ({name: MAX_FUNCTIONS[name] for name in grown}) }"
    others = sorted(pair for pair, name in zip(functions, packages, strict=True) if name not in MAX_FUNCTIONS)
    assert len(others) <= MAX_OTHERS, others
    assert 100 < len({file for file, _, _ in found}) <= MAX_FILES
    launched = {"analysis", "launch", "search", "export", "planning", "prediction", "scaffold", "tries"}
    assert not launched & {Path(file).parts[0] for file, _, _ in found}, (
        "a package of commands is imported by a training"
    )
