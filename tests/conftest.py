"""What tests share: commands with a time limit, and small runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK = ["logger=null", "report=false", "trainer.max_epochs=2"]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

Script = Callable[..., subprocess.CompletedProcess[str]]


def run_command(
    command: list[str], *, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in a process group of its own, so that none of its children outlives a time limit."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "SLURM_", "BOLTCUTTER_", "PL_"))}
    clean |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONWARNINGS": "default"} | (env or {})
    with subprocess.Popen(
        command, cwd=ROOT, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end in {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def script() -> Script:
    """Run one of ``scripts`` with words."""

    def call(name: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_command([sys.executable, f"scripts/{name}.py", *words], **options)  # type: ignore[arg-type]

    return call


@pytest.fixture(scope="session")
def torchrun() -> Script:
    """Run one of ``scripts`` in two processes of torchrun."""

    def call(name: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_command([*TORCHRUN, f"scripts/{name}.py", *words], **options)  # type: ignore[arg-type]

    return call


@pytest.fixture
def two_ranks(tmp_path: Path) -> Script:
    """Run code in two processes of torchrun that leave together."""

    def call(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "ranks.py"
        body = "\n".join(f"    {line}" for line in code.strip().split("\n"))
        file.write_text(
            f"from boltcutter.environment.process import leaving_together\nwith leaving_together():\n{body}\n"
        )
        done = run_command([*TORCHRUN, str(file), *words])
        assert done.returncode == 0, done.stderr
        return done

    return call


@pytest.fixture(scope="session")
def trained(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of the default configuration, with W&B and report. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = script("train", f"folder={folder}", "trainer.max_epochs=6")
    assert done.returncode == 0, done.stderr
    return folder
