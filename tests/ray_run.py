"""A run that is launched on Ray, for tests."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import QUICK, Script, patience, saved_weights

# No dropout or BatchNorm, so that the epochs are short.
OVERRIDES = [*QUICK, "model=mlp", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


class Run:
    """A run that is launched on Ray, and ended with the test."""

    def __init__(self, folder: Path, script: Script) -> None:
        self.folder, self.script = folder, script

    def launch(self, *overrides: str, **options: Any) -> str:
        given = [*OVERRIDES, "launch.timeout=240", *overrides, f"folder={self.folder}"]  # Ray may start late
        done = self.script("launch", "launch=ray", *given, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "ray.log").read_text()

    @property
    def record(self) -> Any:
        return json.loads((self.folder / "record.json").read_text())

    @property
    def reasons(self) -> list[str]:
        return [attempt["reason"].partition(",")[0] for attempt in self.record["attempts"]]

    @property
    def driver(self) -> int:
        """The process ID of the driver; 0 if it is a job of a cluster."""
        first = str(self.record["launch"]["id"]).split()[0]
        return int(first) if first.isdigit() else 0

    def ranks(self, attempt: int) -> dict[int, psutil.Process]:
        """The training processes of an attempt, by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                if f"resume={self.folder}" in process.cmdline():
                    env = process.environ()
                    if int(env["TORCHELASTIC_RESTART_COUNT"]) == attempt:
                        found[int(env["RANK"])] = process
            except (psutil.Error, KeyError):
                continue
        return found

    def wait(self, what: Callable[[], Any], seconds: float = 120) -> Any:
        """Return the first true value of ``what``, or fail with the log."""
        end = time.monotonic() + patience(seconds)
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.1)
        pytest.fail(f"not within {seconds} s:\n{self.log}")

    def is_training(self, attempt: int) -> bool:
        """Whether that attempt has trained for an epoch."""
        starts = self.log.split("all ranks restart, ")
        return len(starts) == attempt + 1 and "\nepoch " in starts[-1] and len(self.ranks(attempt)) == 2

    def wait_until_training(self, attempt: int) -> dict[int, psutil.Process]:
        self.wait(lambda: self.is_training(attempt))
        return self.ranks(attempt)

    def wait_until_ended(self, seconds: float = 180) -> None:
        self.wait(lambda: not psutil.pid_exists(self.driver) or self.status() == psutil.STATUS_ZOMBIE, seconds)

    def status(self) -> str:
        try:
            return psutil.Process(self.driver).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_ZOMBIE


def assert_bitwise_equal(one: Path, other: Path) -> None:
    ours, theirs = saved_weights(one), saved_weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
