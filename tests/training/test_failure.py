import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
from conftest import ROOT, Script, run_command
from torch.utils.data import DataLoader

from boltcutter.config.errors import ConfigError
from boltcutter.training.failure import (
    IndexOutOfRangeError,
    NoGradientError,
    OutOfMemoryError,
    explain_errors,
    out_of_memory_message,
)

FAULT = """
import os, signal, subprocess, sys, lightning as L, torch.distributed as dist

def trace():
    # Print what would wait for kernels on a GPU, and the end of the process group.
    from lightning.pytorch.strategies import strategy
    def traced(owner, name):
        real = getattr(owner, name)
        def call(*args, **options):
            print("called", name, file=sys.stderr, flush=True)
            return real(*args, **options)
        setattr(owner, name, call)
    traced(strategy, "_optimizers_to_device")
    traced(L.LightningModule, "cpu")
    traced(dist, "destroy_process_group")
    traced(dist.distributed_c10d, "_abort_process_group")
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"

class Fault(L.Callback):
    def __init__(self, fault):
        self.fault = fault

    def on_train_start(self, trainer, pl_module):
        if os.environ.get("TRACE"):
            trace()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and self.fault != "first" and trainer.global_step == 25:
            if self.fault == "raise":
                raise ZeroDivisionError("of rank 1 only")
            if self.fault == "SIGSTOP":
                subprocess.Popen(["sh", "-c", f"sleep 12; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), getattr(signal, self.fault))
        if trainer.global_rank == 0 and trainer.global_step == 25 and self.fault == "first":
            os.kill(os.getpid(), signal.SIGKILL)
"""
OVERRIDES = [
    "logger=null",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "model=mlp",
    "+callback.fault._target_=fault.Fault",
]


def fail(script: Script, tmp_path: Path, fault: str, *overrides: str, ranks: int = 2, **env: str) -> Any:
    (tmp_path / "fault.py").write_text(FAULT)
    return script(
        "train",
        *(*OVERRIDES, f"+callback.fault.fault={fault}", f"folder={tmp_path}/run", *overrides),
        ranks=ranks,
        timeout=60,
        env={"PYTHONPATH": str(tmp_path)} | env,
    )


def test_an_exception_on_one_rank_ends_all_ranks(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "raise")
    assert done.returncode == 1
    assert "[rank1]: ZeroDivisionError: of rank 1 only" in done.stderr
    assert "error on rank 0: rank 1 of 2 ended or does not respond; its error message" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "of rank 1 only" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    "overrides",
    [pytest.param([], id="torchrun"), pytest.param(["trainer=ddp"], id="Lightning's own", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_named(script: Script, tmp_path: Path, overrides: list[str]) -> None:
    done = fail(script, tmp_path, "SIGKILL", *overrides, ranks=0 if overrides else 2)
    assert "error on rank 0: rank 1 of 2 ended or does not respond" in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_rank_zero_is_named_in_one_line(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "first")
    assert done.stderr.startswith("error on rank 1: rank 0 of 2 ended or does not respond")
    assert done.stderr.count("\n") == 1


def test_a_lost_rank_is_reported_before_anything_waits_for_a_gpu(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "SIGKILL", TRACE="1")
    reported, *after = done.stderr.splitlines()
    assert reported.startswith("error on rank 0: rank 1 of 2 ended or does not respond")
    assert after == ["called _abort_process_group"]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["attempts"][0]["reason"].startswith("RankLostError: rank 1 of 2")


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_the_timeout(script: Script, tmp_path: Path) -> None:
    done = fail(script, tmp_path, "SIGSTOP", "timeout=4")
    assert done.returncode == 1
    assert re.search(r"^rank 1 \(step \d+.*\): .*stopped by a signal", done.stderr, re.M)


def fake_trainer(ranks: int) -> L.Trainer:
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), distributed_sampler_kwargs={"num_replicas": ranks})
    data = SimpleNamespace(batch_size=96)
    facts = {"strategy": strategy, "datamodule": data, "accumulate_grad_batches": 2, "callbacks": []}
    return cast(L.Trainer, SimpleNamespace(**facts))


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50)], ids=["torch", "numpy"])
def test_out_of_memory_is_reported_with_a_smaller_batch(allocate: Any) -> None:
    with pytest.raises(OutOfMemoryError) as error, explain_errors(fake_trainer(4)):
        allocate()
    assert "cuda:0 is out of memory with data.batch_size=96 (24 on each of 4 ranks)" in str(error.value)
    assert "try data.batch_size=48 trainer.accumulate_grad_batches=4" in str(error.value)


DEVICE_ASSERT = "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


def test_an_index_that_a_gpu_found_out_of_range_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with pytest.raises(IndexOutOfRangeError) as error, explain_errors(fake_trainer(1)):
        raise torch.AcceleratorError(DEVICE_ASSERT)
    assert str(error.value).startswith("cuda:0: an index is out of range, such as a target that is no class")
    assert "trainer.accelerator=cpu names the place" in str(error.value)


ABORTS = f"""
import atexit, os, sys, torch
from test_failure import fake_trainer
from boltcutter.training.failure import explain_errors

class Freed:
    def __del__(self):  # as torch does for memory of a GPU
        os.abort()

sys.modules["freed"] = Freed()
atexit.register(print, "another handler")
with explain_errors(fake_trainer(1)):
    raise torch.AcceleratorError({DEVICE_ASSERT!r})
"""


@pytest.mark.slow  # in a new process, as the end of a forked one is another
def test_freeing_memory_of_a_failed_gpu_does_not_abort_the_process() -> None:
    path = os.pathsep.join((str(ROOT / "tests"), str(Path(__file__).parent)))
    done = run_command([sys.executable, "-c", ABORTS], env={"PYTHONPATH": path})
    error = next(line for line in done.stderr.splitlines() if "IndexOutOfRangeError" in line)
    assert error.startswith("boltcutter.training.failure.IndexOutOfRangeError: cuda:0: an index")
    assert (done.returncode, done.stdout) == (1, "another handler\n")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["check"], "error: task: Classification.losses (classification.py:"),
        (["check", "--batch"], "error: task: Classification."),
        (["train"], "error: cuda:0: an index is out of range"),
    ],
)
def test_an_index_out_of_range_on_a_gpu(command: list[str], place: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    overrides = ["trainer.accelerator=cuda", f"runs={tmp_path}", "logger=null", "report=false", "model=mlp"]
    done = run_command([sys.executable, "-m", "boltcutter", *command, *overrides, "model.num_classes=3"])
    assert done.returncode in (1, 2), done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error"))
    assert line.startswith(place)
    assert "Traceback" not in done.stderr


def test_a_hook_of_lightning_1_is_one_line() -> None:
    class Module(L.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

        def training_epoch_end(self, outputs: Any) -> None: ...

    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with (
        pytest.raises(ConfigError, match=r"Support for .training_epoch_end") as found,
        explain_errors(trainer),
    ):
        trainer.fit(Module(), [torch.ones(1)])
    assert "\n" not in str(found.value)


def test_the_proposed_batch_divides_over_the_ranks() -> None:
    assert "data.batch_size=40 " in out_of_memory_message(fake_trainer(10))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.val_check_interval=1000"],
            r"trainer\.val_check_interval=1000: an epoch has only 19 batches; lower it, or set trainer\.check_val",
        ),
        (
            ["scheduler=onecycle", "scheduler.total_steps=10"],
            r"scheduler\.total_steps=10: training has more steps; remove it",
        ),
        (["trainer.max_epochs=-2"], r"trainer\.max_epochs=-2 is negative; try 10, or -1 for no limit"),
    ],
)
def test_what_lightning_refuses_is_one_line(script: Script, tmp_path: Path, overrides: list[str], message: str) -> None:
    done = script("train", "logger=null", "model=mlp", f"folder={tmp_path}/run", *overrides)
    assert done.returncode == 2
    assert re.match(f"error: {message}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^of the user$"), explain_errors(fake_trainer(1)):
        raise RuntimeError("of the user")


def test_a_loss_without_gradient_is_explained() -> None:
    trainer = SimpleNamespace(lightning_module=L.LightningModule(), callbacks=[])
    with pytest.raises(NoGradientError, match="depends on no parameter"), explain_errors(cast(L.Trainer, trainer)):
        torch.ones(1).backward()


class Odd(L.LightningModule):
    """Fails in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, torch.nn.Linear(1, 1)

    def train_dataloader(self) -> Any:
        return None if self.kind == "loader" else DataLoader(torch.ones(1, 1))  # type: ignore[arg-type]

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        if self.kind == "gradient":
            self.net(batch).sum().backward()

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(1, 1))  # type: ignore[arg-type]

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=3.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec", "ignore:.*logging interval", "ignore:.*many workers")
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("loader", ConfigError, r"Odd\.train_dataloader returns None; return a DataLoader"),
        ("gradient", NoGradientError, r"enable_grad.*\+trainer\.inference_mode=false"),
        ("clips", ConfigError, r"^trainer\.gradient_clip_val=0\.5: Odd .*trainer\.gradient_clip_val=null"),
    ],
)
def test_what_a_module_does_against_lightning_is_one_line(kind: str, error: type[Exception], message: str) -> None:
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=0.5, enable_model_summary=False, **options)
    with pytest.raises(error, match=message) as found, explain_errors(trainer):
        trainer.fit(Odd(kind))
    assert "\n" not in str(found.value)


def test_memory_that_loading_the_data_needs_is_explained(script: Script, tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(
        "import torch\nfrom boltcutter import Digits\n"
        "class Huge(Digits):\n    def load(self):\n        return torch.empty(1 << 50)\n"
    )
    option = (ROOT / "configs" / "data" / "digits.yaml").read_text()
    (tmp_path / "huge.yaml").write_text(option.replace("boltcutter.data.digits.Digits", "huge.Huge"))
    overrides = ["model=mlp", f"data={tmp_path / 'huge.yaml'}", "logger=null", f"folder={tmp_path / 'run'}"]
    done = script("train", *overrides, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("error: ")
    assert "is out of memory" in done.stderr
    assert done.stderr.count("\n") == 1
