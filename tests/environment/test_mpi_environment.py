from pathlib import Path

import pytest
from conftest import MPIRUN, QUICK, Script, max_difference, require, run_command

from boltcutter.environment.mpi_environment import ProcessLayoutError, export_torchrun_env

OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "trainer.accelerator=cpu", "test=false"]
RANK_3_OF_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "7",
}
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE")


def exported(env: dict[str, str]) -> list[str]:
    return [env[name] for name in VARIABLES]


@pytest.mark.slow
def test_two_processes_of_mpirun_train_as_one_process(script: Script, tmp_path: Path) -> None:
    require("mpirun", install="apt-get install openmpi-bin")
    done = script("train", *OVERRIDES, f"folder={tmp_path}/one")
    assert done.returncode == 0, done.stderr
    done = run_command([*MPIRUN, "scripts/train.py", *OVERRIDES, "trainer=mpi", f"runs={tmp_path}/two", "name=mpi"])
    assert done.returncode == 0, done.stderr
    (both,) = (tmp_path / "two" / "mpi").iterdir()  # they agreed on one folder
    assert {log.name for log in (both / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert max_difference(tmp_path / "one", both) < 1e-6


def test_ranks_on_several_nodes_have_the_variables_of_torchrun() -> None:
    env = {**RANK_3_OF_4, "MASTER_ADDR": "first", "MASTER_PORT": "1234"}
    export_torchrun_env(env)
    assert exported(env) == ["3", "4", "1", "2", "1", "2"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("first", "1234")


@pytest.mark.parametrize(
    "names",
    [
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ],
)
def test_ranks_of_mpich_and_horovodrun_have_the_variables_of_torchrun(names: tuple[str, ...]) -> None:
    env = dict(zip(names, ("1", "2", "1", "2"), strict=True)) | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "7"}
    first = env | {names[0]: "0", names[2]: "0"}
    export_torchrun_env(env)
    export_torchrun_env(first)
    assert exported(env) == ["1", "2", "1", "2", "0", "1"]
    assert exported(first) == ["0", "2", "0", "2", "0", "1"]
    assert env["MASTER_PORT"] == first["MASTER_PORT"]


def test_variables_of_srun_about_mpirun_are_removed() -> None:
    env = {**RANK_3_OF_4, "MASTER_ADDR": "first", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    export_torchrun_env(env)
    assert {name for name in env if name.startswith("SLURM_")} == {"SLURM_JOB_ID"}


def test_nodes_with_different_numbers_of_processes_are_refused() -> None:
    with pytest.raises(ProcessLayoutError, match="mpirun started 3 processes, 2 of them on this machine"):
        export_torchrun_env({**RANK_3_OF_4, "OMPI_COMM_WORLD_SIZE": "3"})


def test_several_nodes_without_master_addr_are_refused() -> None:
    with pytest.raises(ProcessLayoutError, match="MASTER_ADDR is not set; use mpirun"):
        export_torchrun_env(dict(RANK_3_OF_4))


@pytest.mark.parametrize("env", [{}, {**RANK_3_OF_4, "RANK": "0"}, {**RANK_3_OF_4, "OMPI_COMM_WORLD_SIZE": "1"}])
def test_processes_of_other_launchers_are_not_changed(env: dict[str, str]) -> None:
    before = dict(env)
    export_torchrun_env(env)
    assert env == before


def test_training_runs_with_mpi4py_but_no_mpi_library(script: Script, tmp_path: Path) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text('raise RuntimeError("cannot load MPI library")')  # as mpi4py reports it
    metadata = tmp_path / "mpi4py-4.1.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1.1\n")
    env = {"PYTHONPATH": str(tmp_path)}
    done = script("train", *OVERRIDES, "trainer.max_epochs=1", f"folder={tmp_path}/run", env=env)
    assert (done.returncode, done.stderr) == (0, "")
