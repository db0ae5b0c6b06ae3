from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
from conftest import Script

from boltcutter.failure import OutOfMemoryError, explain_errors, out_of_memory_message

FAULT = """
import os, signal, subprocess, lightning as L

class Fault(L.Callback):
    def __init__(self, how):
        self.how = how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and self.how != "first" and trainer.global_step == 25:
            if self.how == "raise":
                raise ZeroDivisionError("of rank 1 alone")
            if self.how == "SIGSTOP":
                subprocess.Popen(["sh", "-c", f"sleep 12; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), getattr(signal, self.how))
        if trainer.global_rank == 0 and trainer.global_step == 25 and self.how == "first":
            os.kill(os.getpid(), signal.SIGKILL)
"""
WORDS = [
    "logger=null",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "model=mlp",
    "+callback.fault._target_=fault.Fault",
]


def fail(script: Script, tmp_path: Path, how: str, *words: str, ranks: int = 2) -> Any:
    (tmp_path / "fault.py").write_text(FAULT)
    return script(
        "train",
        *(*WORDS, f"+callback.fault.how={how}", f"folder={tmp_path}/run", *words),
        ranks=ranks,
        timeout=60,
        env={"PYTHONPATH": str(tmp_path)},
    )


def test_an_exception_on_one_rank_is_told_with_its_number_and_ends_all(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "raise")
    assert done.returncode == 1
    assert "[rank1]: ZeroDivisionError: of rank 1 alone" in done.stderr
    assert "error on rank 0: rank 1 of 2 ended or does not answer; its own message" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "of rank 1 alone" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    "words",
    [pytest.param([], id="torchrun"), pytest.param(["trainer=ddp"], id="Lightning's own", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_named(script: Script, tmp_path: Path, words: list[str]) -> None:
    done = fail(script, tmp_path, "SIGKILL", *words, ranks=0 if words else 2)
    assert "error on rank 0: rank 1 of 2 ended or does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_first_rank_is_named_in_one_line(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "first")
    assert done.stderr.startswith("error on rank 1: rank 0 of 2 ended or does not answer")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_stopped_rank_is_named_when_the_time_is_over(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "SIGSTOP", "timeout=4")
    assert "error on rank 0: rank 1 of 2 ended or does not answer" in done.stderr


def parts(ranks: int) -> L.Trainer:
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), distributed_sampler_kwargs={"num_replicas": ranks})
    data = SimpleNamespace(batch_size=96)
    return cast(L.Trainer, SimpleNamespace(strategy=strategy, datamodule=data, accumulate_grad_batches=2))


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50)], ids=["torch", "numpy"])
def test_memory_that_runs_out_is_told_with_the_batch_and_what_to_try(allocate: Any) -> None:
    with pytest.raises(OutOfMemoryError) as error, explain_errors(parts(4)):
        allocate()
    assert "cuda:0 is out of memory with data.batch_size=96 (24 on each of 4 ranks)" in str(error.value)
    assert "try data.batch_size=48 trainer.accumulate_grad_batches=4" in str(error.value)


def test_what_is_tried_instead_divides_over_the_ranks() -> None:
    assert "data.batch_size=40 " in out_of_memory_message(parts(10))


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^of the user$"), explain_errors(parts(1)):
        raise RuntimeError("of the user")
