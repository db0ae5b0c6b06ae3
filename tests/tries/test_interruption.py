"""Tries that are killed at any time, and continued by the same command."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from boltcutter.project import Project

REAL = sys.executable
MAIN = "import sys; sys.executable = sys.argv.pop(1); from boltcutter.cli.commands import main; main()"
ARGUMENTS = ["try", "optimizer.lr=0.05", "tags=[fail:1]", "metric=val/accuracy", "effect=0.01", "budget=8", "--json"]


def start(project: Project, program: str, runs: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [REAL, "-c", MAIN, program, *ARGUMENTS, f"runs={runs}"],
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    text = process.communicate(timeout=300)[0]
    return dict(json.loads(text)["result"])


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    keys = ("verdict", "pairs", "difference", "low", "high", "seeds", "runs", "askings", "is_stopped")
    return {key: found[key] for key in keys}


def kills(project: Project, tmp_path: Path, times: int, number: int) -> None:
    """Kill the command so often, at random times, and compare its verdict with that of one that was not killed."""
    program = sys.executable
    expected = result(start(project, program, tmp_path / "whole"))
    draw, runs = random.Random(times), tmp_path / "killed"
    for _ in range(times):
        process, before = start(project, program, runs), len(list(runs.glob("tries/*/*/record.json")))
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(list(runs.glob("tries/*/*/record.json"))) > before:
                break
            time.sleep(0.01)
        time.sleep(draw.random() * 0.2)
        process.send_signal(number)
        process.communicate(timeout=60)
    found = result(start(project, program, runs))
    assert comparable(found) == comparable(expected)
    started = Counter(line for file in runs.glob("tries/*/started.txt") for line in file.read_text().split())
    assert len(started) == expected["runs"]
    assert max(started.values()) <= 2  # a run that was killed with the command is resumed
    assert len((runs / "tries.jsonl").read_text().splitlines()) >= 1


@pytest.mark.slow
def test_twenty_kills_do_not_change_the_verdict(project: Project, tmp_path: Path) -> None:
    kills(project, tmp_path, 20, signal.SIGKILL)


@pytest.mark.slow
def test_keyboard_interrupts_do_not_change_the_verdict(project: Project, tmp_path: Path) -> None:
    kills(project, tmp_path, 3, signal.SIGINT)
