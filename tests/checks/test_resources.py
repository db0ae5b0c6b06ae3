from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import AS_ROOT, ROOT, environment, unavailable

from boltcutter.checks.resources import available_memory, describe_contention
from boltcutter.environment import threads
from boltcutter.environment.this_process import this_process


def test_available_memory_is_a_part_of_all() -> None:
    assert 2**26 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("load", "ranks", "workers", "expected"),
    [
        (0.0, 1, 0, None),
        (0.0, 1, 3, None),
        (2.0, 1, 0, "threads: 4, but about 2 of 4 cores are free, so a .*; try OMP_NUM_THREADS=2"),
        (1.0, 1, 2, "threads: 4 and 2 loader workers, but about 3 of 4 cores are free, .*; try OMP_NUM_THREADS=1"),
        (0.0, 2, 0, "threads: 8, but about 4 of 4 cores are free, .*; try OMP_NUM_THREADS=2"),
    ],
)
def test_more_threads_than_free_cores_are_reported(
    monkeypatch: pytest.MonkeyPatch, load: float, ranks: int, workers: int, expected: str | None
) -> None:
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(num_processes=ranks),
        datamodule=SimpleNamespace(num_workers=workers),
        **{"num_nodes": 1, "num_devices": ranks, "world_size": ranks},
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "available_cores", lambda: 4)
    monkeypatch.setattr(this_process, "free_cores", None)
    assert describe_contention(trainer) is None  # not measured
    monkeypatch.setattr(this_process, "free_cores", 4 - load)
    line = describe_contention(trainer)
    assert re.fullmatch(expected, line or "") if expected else line is None


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "shown"), [(2, True), (0, False)])
def test_small_shared_memory_is_reported_before_workers_need_it(workers: int, shown: bool, tmp_path: Path) -> None:
    # As in a container: 64 MiB, which SageMaker and Vertex AI do not let jobs change.
    options = [f"folder={tmp_path}/run", f"data.num_workers={workers}", "trainer.fast_dev_run=true", "logger=null"]
    train = shlex.join([sys.executable, "scripts/train.py", *options])
    script = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {train}"
    in_namespace = [*AS_ROOT, "unshare", "--mount"]
    try:
        subprocess.run([*in_namespace, "true"], check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:  # another system, or a container
        unavailable(f"this machine allows no namespaces: {error} {getattr(error, 'stderr', '')}")
    command = [*in_namespace, "sh", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    line = "shared memory: /dev/shm has 64 MiB, through which 2 loader workers pass batches; if one dies with a bus"
    assert (line in done.stdout) is shown, done.stdout
