import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import MPIRUN, QUICK, ROOT, Script, assert_same, environment, max_difference, require, run_command
from PIL import Image

from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build

MPI = ["trainer=mpi", "trainer.strategy.process_group_backend=mpi4py", "trainer.accelerator=cpu"]
# Adam's first steps go by the sign of the gradient; of 270 samples to validate and test the last batch has 20.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "data.batch_size=50", "trainer.accelerator=cpu"]
BEGIN = """
import sys, time
import torch, torch.distributed as dist
from boltcutter.environment.mpi import export_torchrun_env
from boltcutter.environment.process import distributed_shutdown
from boltcutter.strategy import mpi
export_torchrun_env()
mpi.register()
"""
COLLECTIVES = """
with distributed_shutdown():
    dist.init_process_group("mpi4py")
    rank, op = dist.get_rank(), dist.ReduceOp
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        for how, expected in ((op.SUM, [3, 8]), (op.MAX, [2, 4]), (op.MIN, [1, 4]), (op.PRODUCT, [2, 16])):
            found = torch.tensor([rank + 1, 4], dtype=kind)
            dist.all_reduce(found, how)
            assert found.tolist() == expected and found.dtype == kind, (kind, how, found)
    found = torch.tensor(rank + 1.0)  # no dimension
    dist.all_reduce(found, op.AVG)
    assert found == 1.5
    found = torch.arange(6.0).add(10 * rank).view(2, 3).t()  # not in one piece
    dist.broadcast(found, 1)
    assert found.tolist() == [[10, 13], [11, 14], [12, 15]]
    found = torch.tensor([rank == 1])
    dist.broadcast(found, 1)
    assert found.item() is True
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert torch.stack(parts).tolist() == [[0, 0], [1, 1]]
    found = torch.zeros(4)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(found, torch.full((2,), float(rank)))
    assert found.tolist() == [0, 0, 1, 1]
    found = torch.tensor([rank + 1.0])
    dist.reduce(found, 1)
    assert found.item() == (3 if rank else 1)
    parts = [torch.zeros(1), torch.zeros(1)] if rank else None
    dist.gather(torch.tensor([rank + 5.0]), parts, 1)
    assert not rank or [part.item() for part in parts] == [5, 6]
    every = [None, None]
    dist.all_gather_object(every, "x" * 1000 * rank)
    assert [len(text) for text in every] == [0, 1000]
    alone, both = dist.new_group([1]), dist.new_group([1, 0])
    if rank:
        dist.all_reduce(torch.ones(1), group=alone)
    found = torch.ones(1)
    dist.all_reduce(found, group=both)
    assert found.item() == 2
sys.stdout.write(f"rank {rank} is done\\n")
"""
LEFT = """
with distributed_shutdown():
    dist.init_process_group("mpi4py")
    dist.barrier()
    if dist.get_rank():
        raise ZeroDivisionError
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("told:", error, flush=True)
        raise SystemExit(1)
"""
LATE = """
with distributed_shutdown():
    dist.init_process_group("mpi4py")
    dist.group.WORLD.timeout = 1
    try:
        if dist.get_rank():
            time.sleep(3)
        else:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("told:", error, flush=True)
        raise
"""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    require("mpirun", package="mpi4py", install="apt-get install openmpi-bin; pip install -e '.[mpi]'")


def mpirun(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "code.py").write_text(BEGIN + code)
    return run_command([*MPIRUN, str(tmp_path / "code.py")])


def refused(backend: str) -> str:
    wanted = {"_target_": "boltcutter.strategy.ddp.DDPStrategy", "process_group_backend": backend}
    with pytest.raises(ConfigError) as error:
        build(wanted, "trainer.strategy")
    return str(error.value).removeprefix("trainer.strategy.process_group_backend=")


def test_what_torch_asks_for_is_carried(tmp_path: Path) -> None:
    done = mpirun(COLLECTIVES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.parametrize(
    ("code", "said"),
    [(LEFT, "Connection closed by peer"), pytest.param(LATE, "Timed out waiting 1 s", marks=pytest.mark.slow)],
    ids=["left", "late"],
)
def test_a_rank_learns_of_another_that_left_or_is_late(code: str, said: str, tmp_path: Path) -> None:
    done = mpirun(code, tmp_path)
    assert done.returncode != 0
    assert f"told: mpi4py: {said}" in done.stdout, done.stderr


def test_two_ranks_train_and_test_as_one_process(alone: Path, tmp_path: Path) -> None:
    done = run_command([*MPIRUN, "scripts/train.py", *OVERRIDES, *MPI, f"runs={tmp_path}", "name=mpi"])
    assert done.returncode == 0, done.stderr
    (both,) = (tmp_path / "mpi").iterdir()  # they agreed on one folder
    assert_same(alone, both)


def test_without_mpirun_one_line_tells_how_to_start_it(script: Script, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, *MPI, "trainer.devices=2", f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "MPI did not start these 2 processes; run mpirun -np 2 python" in done.stderr


def test_without_mpi4py_one_line_tells_what_is_missing() -> None:
    assert refused("mpi4py") == "mpi4py: mpi4py is not installed; pip install 'boltcutter[mpi]'"


@pytest.mark.parametrize("backend", ["mpi", "cpu:glo"])
def test_a_backend_that_torch_lacks_is_refused(backend: str) -> None:
    name = backend.removeprefix("cpu:")
    assert refused(backend) == f"{backend}: torch has no {name} here; try gloo, nccl or mpi4py"


@pytest.mark.slow
def test_gradients_are_compressed_and_accumulated(script: Script, alone: Path, tmp_path: Path) -> None:
    words = [*OVERRIDES, "test=false"]
    more = {"bf16": ["trainer.strategy.compress=bf16"], "parts": ["trainer.accumulate_grad_batches=3"]}
    for name, some in more.items():
        done = run_command([*MPIRUN, "scripts/train.py", *words, *MPI, *some, f"folder={tmp_path}/{name}"])
        assert done.returncode == 0, done.stderr
    assert 1e-5 < max_difference(alone, tmp_path / "bf16") < 1e-2
    assert script("train", *words, *more["parts"], f"folder={tmp_path}/one").returncode == 0
    assert max_difference(tmp_path / "one", tmp_path / "parts") < 1e-6


@pytest.mark.slow
def test_a_signal_is_heeded_and_the_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    words = [*OVERRIDES, *MPI, "trainer.max_epochs=30", "test=false"]
    done = run_command([*MPIRUN, "scripts/train.py", *words, f"folder={tmp_path}/whole"])
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cut"
    with subprocess.Popen(
        [*MPIRUN, "scripts/train.py", *words, f"folder={folder}"], cwd=ROOT, env=environment(), start_new_session=True
    ) as process:
        try:
            end = time.monotonic() + 60
            while not (folder / "checkpoints/last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(signal.SIGUSR1)  # which mpirun hands on
            assert process.wait(60) == 138
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert json.loads((folder / "record.json").read_text())["attempts"][0]["reason"].startswith("preempted by SIGUSR1")
    done = run_command([*MPIRUN, "scripts/train.py", f"resume={folder}"])
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "whole", folder) == 0


@pytest.mark.slow
def test_a_run_is_evaluated_and_asked_on_two_ranks(script: Script, alone: Path, tmp_path: Path) -> None:
    done = run_command([*MPIRUN, "scripts/evaluate.py", f"run={alone}", *MPI, f"output={tmp_path}/two"])
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        json.loads((place / "metrics.json").read_text()) for place in (tmp_path / "two", alone / "evaluation/test")
    )
    assert ours == pytest.approx(theirs, abs=1e-6)
    Image.new("L", (8, 8), 99).save(tmp_path / "image.png")
    words = [f"run={alone}", f"input={tmp_path}/image.png"]
    assert script("predict", *words, f"output={tmp_path}/one.csv").returncode == 0
    done = run_command([*MPIRUN, "scripts/predict.py", *words, *MPI, f"output={tmp_path}/two.csv"])
    assert (done.returncode, done.stderr) == (0, "")  # mpirun would tell of a process that left MPI behind
    assert (tmp_path / "two.csv").read_text() == (tmp_path / "one.csv").read_text()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_with_one_line(tmp_path: Path) -> None:
    words = [*OVERRIDES, *MPI, "trainer.max_epochs=500", f"folder={tmp_path}/run"]
    code = f"""
import os, runpy, sys
sys.argv[1:] = {words!r}
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    from boltcutter.task.base import Task
    step = Task.training_step
    def fail(self, batch, batch_idx):
        if self.global_step == 30:
            raise ZeroDivisionError("here")
        return step(self, batch, batch_idx)
    Task.training_step = fail
runpy.run_path("scripts/train.py", run_name="__main__")
"""
    done = run_command([*MPIRUN, "-c", code], timeout=60)
    assert done.returncode != 0
    assert "ZeroDivisionError: here" in done.stderr
    assert "error on rank 0: rank 1 of 2 ended or does not respond" in done.stderr
    reason = json.loads((tmp_path / "run" / "record.json").read_text())["attempts"][0]["reason"]
    assert reason.startswith("RankLostError: rank 1 of 2")
