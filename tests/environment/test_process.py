import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from conftest import run_command

from boltcutter.environment import process
from boltcutter.environment.process import external_world_size, in_slurm_step, is_rank_zero

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("env", "is_zero"),
    [
        pytest.param({}, True, id="one process"),
        pytest.param({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, True, id="torchrun, rank 0"),
        pytest.param({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, False, id="torchrun, rank 2"),
        pytest.param(SRUN | {"SLURM_PROCID": "0"}, True, id="srun, rank 0"),
        pytest.param(SRUN | {"SLURM_PROCID": "3"}, False, id="srun, rank 3"),
        pytest.param(SRUN | {"SLURM_PROCID": "3", "RANK": "0"}, True, id="torchrun under srun"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, True, id="sbatch without srun"),
        pytest.param(SRUN | {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "3"}, True, id="a shell in an allocation"),
        pytest.param({"SLURM_JOB_ID": "7", "LOCAL_RANK": "1"}, False, id="sbatch, a child of Lightning's"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "1"}, False, id="mpirun of Open MPI"),
        pytest.param({"PMI_RANK": "1"}, False, id="mpirun of MPICH"),
        pytest.param({"PMI_RANK": "0"}, True, id="mpirun of MPICH, rank 0"),
        pytest.param({"HOROVOD_RANK": "1"}, False, id="horovodrun"),
        pytest.param({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True, id="Lightning's first process"),
        pytest.param({"LOCAL_RANK": "1"}, False, id="Lightning's child"),
        pytest.param({"NODE_RANK": "1"}, False, id="a second node started by hand"),
    ],
)
def test_is_rank_zero(env: dict[str, str], is_zero: bool) -> None:
    assert is_rank_zero(env) is is_zero


@pytest.mark.parametrize(
    ("env", "inside"),
    [
        ({}, False),
        (SRUN, True),
        ({"SLURM_JOB_ID": "7"}, False),
        (SRUN | {"SLURM_JOB_NAME": "bash"}, False),
        (SRUN | {"SLURM_JOB_NAME": "interactive"}, False),
    ],
)
def test_in_slurm_step(env: dict[str, str], inside: bool) -> None:
    assert in_slurm_step(env) is inside


def test_world_size_of_processes_started_by_a_launcher() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert external_world_size(torchrun) == (4, 2)
    assert external_world_size({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}) is None  # Lightning's own child
    assert external_world_size({}) is None


def test_a_failed_process_terminates_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD_TIMEOUT", 0.3)
    with subprocess.Popen(["sleep", "60"]) as child:
        process.track_children(SimpleNamespace(procs=[child]))
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError), process.distributed_shutdown():
            raise ZeroDivisionError
        assert child.returncode == -signal.SIGKILL
        assert time.monotonic() - began < 30
        process.track_children(None)


HUNG = """
import sys, time, torch.distributed as dist
from boltcutter.environment import process
process.CHILD_TIMEOUT = 0.3
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend_config = lambda: "cpu:gloo,cuda:nccl"
dist.distributed_c10d._abort_process_group = lambda: time.sleep(60)
with process.distributed_shutdown():
    print("reported")
    raise RuntimeError
"""


def test_a_process_group_that_cannot_be_aborted_does_not_keep_the_process() -> None:
    done = run_command([sys.executable, "-c", HUNG], timeout=60)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # of torch 2.10
    assert (done.returncode, lines, done.stderr) == (1, ["reported"], "")


FAULTS = """
import os, resource, sys
from pathlib import Path
from boltcutter.environment.process import call_glibc, retain_freed_memory
assert retain_freed_memory() is (sys.argv[1] == "retained")
def step():
    blocks = [bytearray(1 << 20) for _ in range(32)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
held = resident()
call_glibc("malloc_trim", 0)
if sys.argv[1] == "retained":
    assert held - resident() > 16 << 20
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other allocators")
def test_freed_memory_is_reused_by_the_next_step() -> None:
    def faults(mode: str, **env: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], env=os.environ | env, capture_output=True, text=True, timeout=60
        )
        assert not done.returncode, done.stderr
        return int(done.stdout)

    retained, released = faults("retained"), faults("default", MALLOC_TRIM_THRESHOLD_="1048576")
    assert retained < 1000 < 10 * 32 * 256 / 2 < released  # of 256 pages in each block


def test_a_program_that_goes_on_keeps_the_connections_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(
        process.atexit, "register", lambda *args, **options: registered.append(partial(*args, **options))
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with process.distributed_shutdown(at_exit=True):
        pass
    assert dist.is_initialized()  # as for trainer.test() after boltcutter.train()
    (end,) = registered
    end()
    assert not dist.is_initialized()
