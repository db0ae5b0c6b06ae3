import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import QUICK, run_command

from boltcutter.environment.mpi import Scattered, adopt

WORDS = [*QUICK, "model=mlp", "optimizer=sgd", "trainer.accelerator=cpu", "test=false"]
TWO_OF_FOUR = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "7",
}


@pytest.mark.skipif(not shutil.which("mpirun") and "CI" not in os.environ, reason="Open MPI is not installed")
def test_two_processes_of_mpirun_train_one_run_as_one_process(tmp_path: Path) -> None:
    python = [sys.executable, "scripts/train.py", *WORDS]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    done = run_command([*python, f"folder={tmp_path}/one"])
    assert done.returncode == 0, done.stderr
    done = run_command([*mpirun, *python, "trainer=mpi", f"runs={tmp_path}/two", "name=mpi"])
    assert done.returncode == 0, done.stderr
    (both,) = (tmp_path / "two" / "mpi").iterdir()  # they agreed on one folder
    assert {log.name for log in (both / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    one, two = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (tmp_path / "one", both)
    )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_ranks_of_several_machines_are_told_as_torchrun_would() -> None:
    env = {**TWO_OF_FOUR, "MASTER_ADDR": "first", "MASTER_PORT": "1234"}
    adopt(env)
    told = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")}
    assert list(told.values()) == ["3", "4", "1", "2", "1"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("first", "1234")


def test_machines_that_do_not_know_the_first_are_refused() -> None:
    with pytest.raises(Scattered, match="mpirun started 4 processes, 2 of them on this machine, but MASTER_ADDR"):
        adopt(dict(TWO_OF_FOUR))


@pytest.mark.parametrize("env", [{}, {**TWO_OF_FOUR, "RANK": "0"}, {**TWO_OF_FOUR, "OMPI_COMM_WORLD_SIZE": "1"}])
def test_what_others_have_started_is_left_alone(env: dict[str, str]) -> None:
    before = dict(env)
    adopt(env)
    assert env == before
