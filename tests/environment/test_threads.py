from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from boltcutter.environment import threads
from boltcutter.environment.this_process import this_process

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Sets the number of cores of this machine, its load, and the quota of the container."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", *threads.WAITING):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(this_process, "free_cores", None)
    monkeypatch.setattr(threads, "LOAD", tmp_path / "load")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "quota")

    def set_machine(cores: int, load: float = 0.0, running: int = 1, quota: str = "max 100000") -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
        (tmp_path / "load").write_text(f"{load} 9.0 9.0 {running}/300 4711\n")
        (tmp_path / "quota").write_text(f"{quota}\n")

    yield set_machine
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "available", "free"),
    [
        ({}, 8, 8),
        ({"quota": "200000 100000"}, 2, 2),
        ({"load": 6.0, "running": 7}, 8, 2),
        ({"load": 6.0, "running": 1}, 8, 8),  # another run has just ended
        ({"load": 0.0, "running": 7}, 8, 8),  # programs that run for a moment
        ({"load": 20.0, "running": 21}, 8, 0),
        ({"load": 6.0, "running": 7, "quota": "100000 100000"}, 1, 1),
    ],
)
def test_free_cores(machine: Machine, settings: dict[str, Any], available: int, free: int) -> None:
    machine(8, **settings)
    assert (threads.available_cores(), threads.count_free_cores()) == (available, free)


@pytest.mark.parametrize(
    ("load", "given", "expected"), [(3.0, {}, "PASSIVE"), (0.0, {}, None), (3.0, {"GOMP_SPINCOUNT": "9"}, None)]
)
def test_threads_sleep_on_a_busy_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, load: float, given: dict[str, str], expected: str | None
) -> None:
    machine(4, load=load, running=1 + int(load))
    monkeypatch.delitem(sys.modules, "torch")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    threads.prepare()
    assert os.environ.get("OMP_WAIT_POLICY") == expected


def test_ranks_and_containers_have_as_many_threads_as_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, quota, expected in ((4, 2, "max 100000", 2), (4, 1, "100000 100000", 1), (4, 8, "max 100000", 1)):
        machine(cores, quota=quota)
        torch.set_num_threads(4)
        threads.limit_threads(ranks)
        assert torch.get_num_threads() == expected
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads.limit_threads(2)
    assert torch.get_num_threads() == 4  # as the user wants
