"""What tests share: the script in processes of its own, and in this one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from boltcutter.cli import main

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "scripts/train.py"]
QUICK = ["trainer.max_epochs=3", "trainer.enable_progress_bar=false", "trainer.accelerator=cpu"]
LEADS_ASTRAY = ("WANDB_", "SLURM_", "PL_", "BOLTCUTTER_")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(LEADS_ASTRAY)}
torch.set_num_threads(1)  # with another number the last bits differ

Train = Callable[..., None]


def start(*words: str, command: Sequence[str] = (sys.executable, "scripts/train.py")) -> subprocess.Popen[str]:
    """A training in processes of its own, in a group that can be ended as one."""
    return subprocess.Popen(
        [*command, *QUICK, *words],
        cwd=ROOT,
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """Its exit status and what it said, once it has ended; nothing of it outlives a time limit."""
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def reached(process: subprocess.Popen[str], folder: Path, file: str, seconds: float = 120) -> None:
    """Wait until the training has written a file below ``folder``."""
    limit = time.monotonic() + seconds
    while not list(folder.glob(file)):
        assert process.poll() is None, end(process)
        assert time.monotonic() < limit, f"{file} is not written"
        time.sleep(0.01)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train in this process."""
    for name in os.environ.keys() - ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def call(*words: str) -> None:
        main(CONFIGS, "", [*QUICK, *words])

    return call


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing has touched."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    main(CONFIGS, "", [*QUICK, f"folder={folder}"])
    return folder
