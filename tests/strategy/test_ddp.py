import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import QUICK, ROOT, Script, environment, max_difference, saved_weights
from forkserver import Forked, ForkServer
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from boltcutter.strategy import ddp
from boltcutter.strategy.ddp import WorkerExitError, has_sparse_gradients, unsynchronized_buffers

TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
# Adam's first steps go by the sign of the gradient, and blow rounding up to a whole step.
WORDS = [*QUICK, "model=mlp", "test=false", "optimizer=sgd"]


def test_a_static_graph_trains_as_one_process(script: Script, alone: Path, tmp_path: Path) -> None:
    done = script("train", *WORDS, *TWO, "+trainer.strategy.static_graph=true", f"folder={tmp_path}", ranks=2)
    assert done.returncode == 0, done.stderr
    assert max_difference(alone, tmp_path) < 1e-6


def test_only_buffers_that_a_step_may_read_go_around() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(3))
            self.register_buffer("constant", torch.ones(1), persistent=False)
            self.norm = nn.BatchNorm1d(3)

    statistics = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(unsynchronized_buffers(Codebook())) == {"constant", *statistics}
    assert unsynchronized_buffers(nn.Linear(3, 3)) == []


def test_accumulated_batches_are_sent_once_and_train_as_one_process(script: Script, tmp_path: Path) -> None:
    words = [*WORDS, "trainer.accumulate_grad_batches=3"]
    for name, more in (("one", []), ("two", TWO)):
        done = script("train", *words, *more, f"folder={tmp_path}/{name}", ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def test_a_static_graph_with_accumulated_batches_is_refused(script: Script, tmp_path: Path) -> None:
    words = [*WORDS, *TWO, "+trainer.strategy.static_graph=true", "trainer.accumulate_grad_batches=2"]
    done = script("train", *words, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert ": trainer.strategy.static_graph=true, trainer.accumulate_grad_batches=2: torch cannot" in done.stderr


def test_gradients_sent_in_two_bytes_differ_by_their_rounding(script: Script, alone: Path, tmp_path: Path) -> None:
    done = script("train", *WORDS, *TWO, "trainer.strategy.compress=bf16", f"folder={tmp_path}", ranks=2)
    assert done.returncode == 0, done.stderr
    assert 1e-5 < max_difference(alone, tmp_path) < 1e-2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_copies_of_the_process_train_as_one(script: Script, alone: Path, tmp_path: Path, method: str) -> None:
    words = [*WORDS, *TWO, f"trainer.strategy.start_method={method}", "test=true"]
    done = script("train", *words, f"folder={tmp_path}/run", fresh=method == "spawn", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert max_difference(alone, tmp_path / "run") < 1e-6
    known = json.loads((tmp_path / "run" / "record.json").read_text())
    assert known["attempts"][0]["reason"] == "completed"
    assert known["metrics"]["val/accuracy"] > 0.5
    assert known["test"]["test/accuracy"] > 0.5
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) > 4  # the test's row is after those of fit
    assert not list(tmp_path.rglob(".temp.ckpt"))


def test_a_signal_to_the_parent_reaches_the_copies(forks: ForkServer, tmp_path: Path) -> None:
    words = [*WORDS, *TWO, "trainer.strategy.start_method=fork", "trainer.max_epochs=500", f"folder={tmp_path}/run"]
    with (tmp_path / "log").open("w") as log:
        run: Forked
        with forks.start(["scripts/train.py", *words], environment(), log.fileno(), log.fileno()) as run:
            end = time.monotonic() + 60
            while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 143, (tmp_path / "log").read_text()
    known = json.loads((tmp_path / "run" / "record.json").read_text())
    assert known["attempts"][0]["reason"].startswith("preempted by SIGTERM, saved")
    assert saved_weights(tmp_path / "run", "last-preempted")


@pytest.mark.slow  # as the server of forks ends all that a killed one has started
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has gone")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_copies_of_a_process_that_is_killed_save_and_end(tmp_path: Path, method: str) -> None:
    words = [*WORDS, *TWO, f"trainer.strategy.start_method={method}", "trainer.max_epochs=100000"]
    command = [sys.executable, "scripts/train.py", *words, f"folder={tmp_path}/run"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + 100
            while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.05)
            copies = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            run.kill()
            end = time.monotonic() + 30
            while any(map(is_running, copies)):
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    assert len(copies) >= 2
    assert saved_weights(tmp_path / "run", "last-preempted"), (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_interrupt_that_nobody_handles_ends_all_copies(forks: ForkServer, tmp_path: Path) -> None:
    words = [*WORDS, *TWO, "trainer.strategy.start_method=fork", "trainer.max_epochs=100000", f"folder={tmp_path}/run"]
    with (tmp_path / "log").open("w") as log:
        run: Forked
        command = ["scripts/train.py", *words, "callback.preemption=null"]
        with forks.start(command, environment(), log.fileno(), log.fileno()) as run:
            end = time.monotonic() + 60
            while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.05)
            os.killpg(run.pid, signal.SIGINT)  # as a keyboard does
            assert run.wait(30) == 130, (tmp_path / "log").read_text()
    known = json.loads((tmp_path / "run" / "record.json").read_text())
    assert known["attempts"][0]["reason"] == "interrupted"


def is_running(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["3 s", "10 s", "record.json", "checkpoints/last.ckpt"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_signal_at_any_moment_ends_a_run_with_wandb(tmp_path: Path, method: str, moment: str) -> None:
    run = tmp_path / "run"
    words = ["model=mlp", *TWO, f"trainer.strategy.start_method={method}", "logger=wandb", "trainer.max_epochs=5000"]
    command = [sys.executable, "scripts/train.py", *words, "report=false", f"folder={run}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True, text=True
        )
        try:
            if moment.endswith(" s"):
                time.sleep(float(moment.split()[0]))  # while the first process, or those that it starts, import
            end = time.monotonic() + 200
            while not moment.endswith(" s") and not (run / moment).exists() and time.monotonic() < end:
                time.sleep(0.05)
            process.terminate()
            assert process.wait(200) == 143, (tmp_path / "log").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()
    if not moment.endswith(" s"):
        attempts = json.loads((run / "record.json").read_text())["attempts"]
        assert all(attempt["reason"].startswith("preempted by SIGTERM") for attempt in attempts)
        assert attempts or moment == "record.json"  # which is there before the attempt begins


def test_a_signal_comes_again_until_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "AGAIN", 0.05)
    came = threading.Event()
    before = signal.signal(signal.SIGUSR2, ddp._again)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.2)
        signal.signal(signal.SIGUSR2, lambda number, frame: came.set())
        assert came.wait(10)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_spawned_process_has_the_settings_of_the_first() -> None:
    logs, filters = logging.getLogger("lightning.pytorch"), list(warnings.filters)
    before = torch.get_float32_matmul_precision(), logs.level
    try:
        torch.set_float32_matmul_precision("medium")
        logs.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "no news")
        packed = pickle.dumps(ddp.Launcher(None, "spawn"))
        torch.set_float32_matmul_precision("highest")
        logs.setLevel(logging.INFO)
        warnings.filters[:] = filters
        pickle.loads(packed)
        assert (torch.get_float32_matmul_precision(), logs.level) == ("medium", logging.ERROR)
        warnings.warn("no news", stacklevel=1)
    finally:
        torch.set_float32_matmul_precision(before[0])
        logs.setLevel(before[1])
        warnings.filters[:] = filters


def test_what_a_copy_says_of_its_failure_is_told_in_one_line(script: Script, tmp_path: Path) -> None:
    words = [*WORDS, *TWO, "trainer.strategy.start_method=fork", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *words, f"folder={tmp_path}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: the gradient of " in done.stderr


def test_a_process_that_has_used_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", number) for number in range(2)]
    made = ddp.DDPStrategy(start_method="fork", parallel_devices=gpus, cluster_environment=LightningEnvironment())
    made._configure_launcher()  # as in a notebook, before anything runs on a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"^trainer\.strategy\.start_method=fork: .* take popen, or spawn"):
        made._configure_launcher()
    assert made.launcher is not None
    with pytest.raises(ddp.WorkerError, match=r"^trainer\.strategy\.start_method=fork"):
        made.launcher.launch(print)
    for method, devices in (("spawn", gpus), ("popen", gpus), ("fork", [torch.device("cpu")])):
        ddp.check_fork(method, devices)


@pytest.mark.slow  # it waits half a minute for the other rank
def test_ranks_set_by_hand_in_part_are_refused(script: Script, tmp_path: Path) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    done = script("train", *WORDS, *TWO, f"folder={tmp_path}/run", env=told)
    assert done.returncode == 2
    assert "error: RANK=0, WORLD_SIZE=2 are set, but LOCAL_RANK is not" in done.stderr


def test_how_a_process_left_is_known_where_it_was_started() -> None:
    left = pickle.loads(pickle.dumps(WorkerExitError(0, 143, "preempted")))
    assert (left.code, left.status, left.reason) == (0, 143, "preempted")


def test_sparse_gradients_are_left_to_gloo() -> None:
    assert has_sparse_gradients(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    assert not has_sparse_gradients(nn.Embedding(3, 2))
