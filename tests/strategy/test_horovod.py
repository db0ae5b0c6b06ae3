"""Most tests require Horovod, built by ``src/boltcutter/strategy/build_horovod.sh``, and are skipped without it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import QUICK, ROOT, Script, assert_same, environment, max_difference, run_command
from forkserver import last_of_each

from boltcutter.strategy.horovod import HorovodStrategy

built = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed: bash src/boltcutter/strategy/build_horovod.sh"
)
HOROVODRUN = [str(Path(sys.executable).parent / "horovodrun"), "-np", "2", sys.executable]
HOROVOD = ["trainer=horovod", "trainer.accelerator=cpu"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors. The last of the batches
# that validate and test 270 samples has 20.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "data.batch_size=50", "trainer.accelerator=cpu"]
MISSING = """
import torch
from torch import nn
from lightning.pytorch.plugins.environments import LightningEnvironment
from boltcutter.strategy.horovod import HorovodStrategy
from boltcutter.environment.process import distributed_shutdown
with distributed_shutdown():
    strategy = HorovodStrategy()
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.setup_distributed()
    rank = strategy.global_rank
    both, second, neither = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    both.grad = torch.full((3,), 1.0 + rank)
    half.grad = torch.full((2,), 4.0 * rank, dtype=torch.bfloat16)
    if rank:
        second.grad = torch.ones(3)
    strategy._average([both, second, neither, half])
    assert both.grad.tolist() == [1.5] * 3
    assert second.grad.tolist() == [0.5] * 3
    assert neither.grad is None
    assert half.grad.tolist() == [2.0, 2.0] and half.grad.dtype == torch.bfloat16
"""


def train(*overrides: str, env: dict[str, str] | None = None) -> None:
    done = run_command([*HOROVODRUN, "scripts/train.py", *OVERRIDES, *HOROVOD, *overrides], env=env)
    assert done.returncode == 0, done.stderr


@contextmanager
def training(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """A long run that has saved a checkpoint."""
    command = last_of_each([*HOROVODRUN, "scripts/train.py", *OVERRIDES, *HOROVOD, *overrides, f"folder={folder}"])
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True) as process:
        try:
            end = time.monotonic() + 60
            while not (folder / "checkpoints/last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.02)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_missing_horovod_is_reported_with_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ValueError, match=r"^trainer=horovod: .* not installed; build it: bash ") as raised:
        HorovodStrategy()
    assert Path(shlex.split(str(raised.value))[-1]).is_file()


@built
def test_two_ranks_train_and_test_as_one_process(reference: Path, tmp_path: Path) -> None:
    train(f"runs={tmp_path}", "name=horovod")
    (both,) = (tmp_path / "horovod").iterdir()  # they agreed on one folder
    assert {log.name for log in (both / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert_same(reference, both)


@built
def test_compressed_gradients_differ_by_their_rounding(reference: Path, tmp_path: Path) -> None:
    train("trainer.strategy.compress=fp16", "test=false", f"folder={tmp_path}/run")
    assert 1e-6 < max_difference(reference, tmp_path / "run") < 1e-2


@built
def test_accumulated_gradients_are_sent_once_in_a_single_bucket(script: Script, tmp_path: Path) -> None:
    overrides = ["trainer.accumulate_grad_batches=3", "test=false"]
    train(*overrides, f"folder={tmp_path}/two", env={"HOROVOD_TIMELINE": str(tmp_path / "timeline.json")})
    assert script("train", *OVERRIDES, *overrides, f"folder={tmp_path}/one").returncode == 0
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6
    sent = (tmp_path / "timeline.json").read_text().count('"GLOO_ALLREDUCE"')
    assert sent == 2 * 9  # of each epoch's 26 batches, by three, the last two by themselves


@built
def test_a_gradient_missing_on_one_rank_counts_as_zero(two_ranks: Script) -> None:
    two_ranks(MISSING)


@built
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["trainer.precision=16-mixed"], ["trainer.precision=bf16-true", "model.norm=batchnorm"]]
)
def test_other_precisions_train_as_ddp(more: list[str], script: Script, tmp_path: Path) -> None:
    train(*more, f"folder={tmp_path}/horovod")
    ddp = ["trainer=ddp", "trainer.devices=2", f"folder={tmp_path}/ddp"]
    assert script("train", *OVERRIDES, *more, *ddp, ranks=2).returncode == 0
    ours, theirs = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("horovod", "ddp"))
    assert ours["test"] == pytest.approx(theirs["test"], abs=1e-2)
    assert max_difference(tmp_path / "horovod", tmp_path / "ddp") < 1e-2


@built
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_a_signal_resumes_bitwise_identical(number: signal.Signals, tmp_path: Path) -> None:
    overrides = ["trainer.max_epochs=30", "test=false"]
    train(*overrides, f"folder={tmp_path}/uninterrupted")
    folder = tmp_path / "resumed"
    with training(folder, *overrides) as process:
        process.send_signal(number)
        assert process.wait(60) != 0
    assert json.loads((folder / "record.json").read_text())["attempts"][0]["reason"].startswith("preempted by SIG")
    done = run_command([*HOROVODRUN, "scripts/train.py", f"resume={folder}"])
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "uninterrupted", folder) == 0


@built
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training(folder, "trainer.max_epochs=5000") as process:
        pid = json.loads((folder / "record.json").read_text())["attempts"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(60) != 0


@built
def test_processes_of_another_launcher_are_refused(script: Script, tmp_path: Path) -> None:
    done = script("train", *OVERRIDES, *HOROVOD, "trainer.devices=2", f"folder={tmp_path}/run")
    assert done.returncode == 1
    assert "horovodrun -np 2" in done.stderr
    assert "Traceback" not in done.stderr


@built
def test_a_run_is_evaluated_on_two_ranks(reference: Path, tmp_path: Path) -> None:
    done = run_command([*HOROVODRUN, "scripts/evaluate.py", f"run={reference}", *HOROVOD, f"output={tmp_path}/two"])
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        json.loads((folder / "metrics.json").read_text())
        for folder in (tmp_path / "two", reference / "evaluation/test")
    )
    assert ours == pytest.approx(theirs, abs=1e-6)
