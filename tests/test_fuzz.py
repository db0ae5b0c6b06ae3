"""Random changes of files that somebody else may have made: a minute for each reader."""

import json
import sys
from pathlib import Path

import pytest
from conftest import run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECONDS = 60


@pytest.mark.parametrize(
    "reader",
    [
        *("record", "search", "journal", "checkpoint", "metadata", "card", "shards", "bundle"),
        "requests",
    ],
)
def test_changed_files_end_in_one_line_and_execute_nothing(reader: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tests/fuzz_readers.py", reader, str(tmp_path), str(SECONDS)]
    done = run_command(command, timeout=250, env={"PYTHONPATH": "tests", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    count, faults = json.loads(done.stdout.splitlines()[-1])
    assert faults == []
    assert count >= 50
