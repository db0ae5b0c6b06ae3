import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MPIRUN, QUICK, ROOT, Script, assert_same, environment, max_difference, require, run_command
from forkserver import last_of_each
from PIL import Image

from boltcutter.config.errors import ConfigError
from boltcutter.config.instantiate import build

MPI = ["trainer=mpi", "trainer.strategy.process_group_backend=mpi4py", "trainer.accelerator=cpu"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors. The last of the batches
# that validate and test 270 samples has 20.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "data.batch_size=50", "trainer.accelerator=cpu"]
BEGIN = """
import sys, time
import torch, torch.distributed as dist
from boltcutter.environment.mpi_environment import export_torchrun_env
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
    found = torch.arange(6.0).add(10 * rank).view(2, 3).t()  # not contiguous
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
    every = [None, None]
    dist.all_gather_object(every, "x" * 1000 * rank)
    assert [len(text) for text in every] == [0, 1000]
    single, both = dist.new_group([1]), dist.new_group([1, 0])
    if rank:
        dist.all_reduce(torch.ones(1), group=single)
    found = torch.ones(1)
    dist.all_reduce(found, group=both)
    assert found.item() == 2
sys.stdout.write(f"rank {rank} is done\\n")
"""
FAILED = """
with distributed_shutdown():
    dist.init_process_group("mpi4py")
    dist.barrier()
    if dist.get_rank():
        raise ZeroDivisionError
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("error:", error, flush=True)
        raise SystemExit(1)
"""
TIMED_OUT = """
with distributed_shutdown():
    dist.init_process_group("mpi4py")
    dist.group.WORLD.timeout = 1
    try:
        if dist.get_rank():
            time.sleep(3)
        else:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("error:", error, flush=True)
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


@pytest.mark.slow
def test_collectives_of_torch_run_by_mpi(tmp_path: Path) -> None:
    done = mpirun(COLLECTIVES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [(FAILED, "Connection closed by peer"), pytest.param(TIMED_OUT, "Timed out waiting 1 s", marks=pytest.mark.slow)],
    ids=["failed", "timed out"],
)
def test_a_failed_or_late_rank_is_reported_to_the_others(code: str, message: str, tmp_path: Path) -> None:
    done = mpirun(code, tmp_path)
    assert done.returncode != 0
    assert f"error: mpi4py: {message}" in done.stdout, done.stderr


@pytest.mark.slow
def test_two_ranks_train_and_test_as_one_process(reference: Path, tmp_path: Path) -> None:
    done = run_command([*MPIRUN, "scripts/train.py", *OVERRIDES, *MPI, f"runs={tmp_path}", "name=mpi"])
    assert done.returncode == 0, done.stderr
    (both,) = (tmp_path / "mpi").iterdir()  # they agreed on one folder
    assert_same(reference, both)


def test_a_start_without_mpirun_is_refused(script: Script, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, *MPI, "trainer.devices=2", f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "MPI did not start these 2 processes; run mpirun -np 2 python" in done.stderr


def test_a_missing_mpi4py_is_reported() -> None:
    assert refused("mpi4py") == "mpi4py: mpi4py is not installed; pip install 'boltcutter[mpi]'"


ON_A_GPU = """
import torch
torch.accelerator.current_accelerator = lambda *args, **options: torch.device("cuda")
torch.accelerator.device_count = lambda: 1
with distributed_shutdown():
    dist.init_process_group("mpi4py", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda", 0))
    found = torch.ones(2)
    dist.all_reduce(found)
    subgroup = dist.new_group([0])
    dist.all_reduce(found, group=subgroup)
    devices = []
    mpi.Future = lambda devices: print(*devices) or torch.futures.Future()
    mpi.completed_work([[torch.empty(1, device="meta")], [torch.empty(1)]])
print("trained", found.tolist())
"""


@pytest.mark.slow
def test_a_gpu_that_is_bound_to_the_group(tmp_path: Path) -> None:
    (tmp_path / "gpu.py").write_text(BEGIN.replace("export_torchrun_env()\n", "", 1) + ON_A_GPU)
    done = run_command([sys.executable, str(tmp_path / "gpu.py")])
    assert (done.returncode, done.stdout.split()) == (0, ["meta", "trained", "[1.0,", "1.0]"]), done.stderr


@pytest.mark.parametrize("backend", ["mpi", "cpu:glo"])
def test_a_backend_that_torch_lacks_is_refused(backend: str) -> None:
    name = backend.removeprefix("cpu:")
    assert refused(backend) == f"{backend}: torch has no {name} here; try gloo, nccl or mpi4py"


@pytest.mark.slow
def test_gradients_are_compressed_and_accumulated(script: Script, reference: Path, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "test=false"]
    more = {"bf16": ["trainer.strategy.compress=bf16"], "accumulated": ["trainer.accumulate_grad_batches=3"]}
    for name, options in more.items():
        done = run_command([*MPIRUN, "scripts/train.py", *overrides, *MPI, *options, f"folder={tmp_path}/{name}"])
        assert done.returncode == 0, done.stderr
    assert 1e-5 < max_difference(reference, tmp_path / "bf16") < 1e-2
    assert script("train", *overrides, *more["accumulated"], f"folder={tmp_path}/one").returncode == 0
    assert max_difference(tmp_path / "one", tmp_path / "accumulated") < 1e-6


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_resumes_bitwise_identical(tmp_path: Path) -> None:
    overrides = last_of_each([*OVERRIDES, *MPI, "trainer.max_epochs=30", "test=false"])
    done = run_command([*MPIRUN, "scripts/train.py", *overrides, f"folder={tmp_path}/uninterrupted"])
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "resumed"
    with subprocess.Popen(
        [*MPIRUN, "scripts/train.py", *overrides, f"folder={folder}"],
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    ) as process:
        try:
            end = time.monotonic() + 60
            while not (folder / "checkpoints/last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(signal.SIGUSR1)  # which mpirun forwards
            assert process.wait(60) == 138
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert json.loads((folder / "record.json").read_text())["attempts"][0]["reason"].startswith("preempted by SIGUSR1")
    done = run_command([*MPIRUN, "scripts/train.py", f"resume={folder}"])
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "uninterrupted", folder) == 0


@pytest.mark.slow
def test_a_run_is_evaluated_and_predicts_on_two_ranks(script: Script, reference: Path, tmp_path: Path) -> None:
    done = run_command([*MPIRUN, "scripts/evaluate.py", f"run={reference}", *MPI, f"output={tmp_path}/two"])
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        json.loads((folder / "metrics.json").read_text())
        for folder in (tmp_path / "two", reference / "evaluation/test")
    )
    assert ours == pytest.approx(theirs, abs=1e-6)
    Image.new("L", (8, 8), 99).save(tmp_path / "image.png")
    overrides = [f"run={reference}", f"input={tmp_path}/image.png"]
    assert script("predict", *overrides, f"output={tmp_path}/one.csv").returncode == 0
    done = run_command([*MPIRUN, "scripts/predict.py", *overrides, *MPI, f"output={tmp_path}/two.csv"])
    assert (done.returncode, done.stderr) == (0, "")  # mpirun would report a process that did not finalize MPI
    assert (tmp_path / "two.csv").read_text() == (tmp_path / "one.csv").read_text()


@pytest.mark.slow
def test_a_failed_rank_ends_the_others_with_a_one_line_error(tmp_path: Path) -> None:
    overrides = last_of_each([*OVERRIDES, *MPI, "trainer.max_epochs=500", f"folder={tmp_path}/run"])
    code = f"""
import os, runpy, sys
sys.argv[1:] = {overrides!r}
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
