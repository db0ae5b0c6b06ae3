"""Text of the sbatch script; test_slurm_cluster.py runs it."""

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch.job import Job
from boltcutter.launch.slurm import SlurmLauncher

SCRIPT = Path("/p/scripts/train.py")
JOB = Job("digits convnet", Path("/runs/a b/x"), SCRIPT, nodes=2, devices=4, gpus=True, num_workers=3)
ARRAY = Job("digits", Path("/runs/100%/x"), SCRIPT, array_size=4, environment={"WANDB_RUN_GROUP": "x"})


def render(job: Job = JOB, **settings: Any) -> str:
    text = SlurmLauncher(**({"python": "/venv/bin/python"} | settings)).render(job)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    return text


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)", text, re.M)


def command(text: str) -> str:
    return re.sub(r" \\\n +", " ", text[text.index("\nsrun") + 1 : text.index("\nstatus=")])


def test_directives_follow_the_trainer() -> None:
    text = render(gpu_type="a100", partition="gpu", time="1-00:00:00", memory="64G", exclusive=True, constraint="ib")
    assert directives(text) == [
        "--job-name=digits-convnet",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=4",
        "--gres=gpu:a100:4",
        "--time=1-00:00:00",
        "--signal=USR2@120",
        "--requeue",
        '--output="/runs/a b/x/logs/slurm.log"',
        "--open-mode=append",
        "--partition=gpu",
        "--constraint=ib",
        "--exclusive",
        "--mem=64G",
    ]
    assert command(text) == (
        'srun --kill-on-bad-exit=1 --wait=60 --export=ALL /venv/bin/python /p/scripts/train.py "resume=$folder"'
    )
    assert "folder='/runs/a b/x' job=$SLURM_JOB_ID\n" in text


def test_an_array_has_a_folder_and_a_log_for_each_task() -> None:
    text = render(ARRAY, array="seed=1,2;lr=1,2", max_parallel=2)
    assert {"--array=0-3%2", "--output=/runs/100%%/x/x-%a/logs/slurm.log"} <= set(directives(text))
    assert "folder=/runs/100%/x/x-$SLURM_ARRAY_TASK_ID job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID\n" in text
    assert "export WANDB_RUN_GROUP=x\n" in text


def test_site_setup_comes_before_the_run(tmp_path: Path) -> None:
    text = render(
        modules=["cuda/12.4", "gcc"],
        conda="my env",
        venv=str(tmp_path),
        purge_modules=True,
        setup=["ulimit -n 4096"],
        environment={"A": "b c"},
        sbatch=["--mail-type=END"],
        python=None,
    )
    lines = [
        "set -e",
        "module purge",
        "module load cuda/12.4 gcc",
        'eval "$(conda shell.bash hook)"',
        "conda activate 'my env'",
    ]
    lines += [f"source {tmp_path}/bin/activate", "ulimit -n 4096", "set +e", "trap - ERR", ""]
    lines += ["# Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.", "export OMP_NUM_THREADS=4"]
    lines += ["export SRUN_CPUS_PER_TASK=4"]
    assert "\n".join([*lines, "export A='b c'"]) in text
    assert "--mail-type=END" in directives(text)
    assert "--export=ALL python /p/" in command(text)


def test_commands_of_container_engines() -> None:
    mounts = ["/data", "/a:/b"]
    assert "apptainer exec --nv --bind /p --bind '/runs/a b/x' --bind /data --bind /a:/b 'my image.sif' python /p/" in (
        command(render(container="my image.sif", container_mounts=mounts, python=None))
    )
    pyxis = render(container="nvcr.io/x:1", container_engine="pyxis", container_mounts=mounts, python=None)
    assert (
        " --container-image=nvcr.io/x:1 --container-mounts='/p:/p,/runs/a b/x:/runs/a b/x,/data:/data,/a:/b' "
        "--container-workdir=/p python /p/"
    ) in command(pyxis)


def test_torchrun_has_one_task_on_each_node_and_ignores_the_signal() -> None:
    text = render(torchrun=True)
    assert {"--ntasks-per-node=1", "--cpus-per-task=16", "--gres=gpu:4"} <= set(directives(text))
    assert "export OMP_NUM_THREADS=4\nexport SRUN_CPUS_PER_TASK=16\n" in text
    assert command(text).startswith(
        'srun --kill-on-bad-exit=1 --wait=60 --export=ALL bash -c \'trap "" USR1 USR2; exec "$@"\' bash '
        "/venv/bin/python -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d"
    )


def test_requeue_or_chain() -> None:
    assert 'scontrol requeue "$job"' in render()
    assert {"--no-requeue"} <= set(directives(render(max_restarts=0)))
    chain = render(chain=3)
    assert "scontrol requeue" not in chain
    assert "the next job of the chain continues" in chain


def test_values_of_directives_are_quoted() -> None:
    job = replace(JOB, name='it\'s "new" #3', folder=Path('/r/a#b\'c "d"'))
    given = directives(render(job, constraint="a&b|[c]"))
    assert {'--job-name="it\'s-\\"new\\"-#3"', "--constraint=a&b|[c]"} <= set(given)
    assert '--output="/r/a#b\'c \\"d\\"/logs/slurm.log"' in given


def test_gpu_option() -> None:
    assert "--gpus-per-node=a100:4" in directives(render(gpu_option="gpus-per-node", gpu_type="a100"))
    assert not [line for line in directives(render(gpu_option="none")) if "gpu" in line or "gres" in line]


def test_srun_options_and_job_variables() -> None:
    text = render(
        srun=["--cpu-bind=cores", "--mpi=pmix", "--network=single node"],
        environment={"TMPDIR": "$SLURM_TMPDIR/a b", "PRICE": "$5 `x`"},
        container="env.toml",
        container_engine="edf",
    )
    assert " --cpu-bind=cores --mpi=pmix '--network=single node' --environment=env.toml /venv" in command(text)
    assert 'export TMPDIR="$SLURM_TMPDIR/a b"\n' in text
    assert "export PRICE='$5 `x`'\n" in text


def test_a_failing_setup_line_is_reported() -> None:
    text = render(setup=["echo before", "cd /no/such/folder", "echo never"])
    setup = text[text.index("trap 'report") : text.index("trap - ERR")]
    done = subprocess.run(["bash", "-c", f'report() {{ echo "launch: $*"; }}\n{setup}'], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "before\nlaunch: launch.setup failed with status 1 at: cd /no/such/folder\n"


@pytest.mark.parametrize(("saved", "gives_up"), [("last.ckpt", False), (".probe-7", True), (".last.ckpt.7", True)])
def test_only_a_checkpoint_is_progress(tmp_path: Path, saved: str, gives_up: bool) -> None:
    folder = tmp_path / "run"
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    text = render(replace(JOB, folder=folder))
    guard = text[text.index("folder=") : text.index("MASTER_ADDR=")]
    for start in range(4):
        done = subprocess.run(["bash", "-c", guard], env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}, text=True)
        later = time.time() + 2 * start + 1
        (folder / "checkpoints" / saved).touch()
        os.utime(folder / "checkpoints" / saved, (later, later))
    assert done.returncode == gives_up
