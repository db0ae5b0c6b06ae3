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
from typing import Any

import lightning as L
import planted
import pytest
import torch
from conftest import QUICK, ROOT, Script, environment, max_difference, saved_weights
from forkserver import Forked, ForkServer, last_of_each
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from torch import nn

from boltcutter.config.settings import Settings
from boltcutter.project import Project
from boltcutter.run.folder import read_record
from boltcutter.run.ledger import read_ledgers
from boltcutter.strategy import process_launcher
from boltcutter.strategy.ddp import DDPStrategy, spawning_strategy
from boltcutter.strategy.errors import StrategyError
from boltcutter.strategy.process_launcher import WorkerExitError
from boltcutter.training import train

TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors.
OVERRIDES = [*QUICK, "model=mlp", "test=false", "optimizer=sgd"]
NON_FINITE = ["optimizer.lr=1e38", "trainer.gradient_clip_val=null"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_forked_and_spawned_ranks_have_the_weights_of_one_process(
    script: Script, reference: Path, tmp_path: Path, method: str
) -> None:
    overrides = [*OVERRIDES, *TWO, f"trainer.strategy.start_method={method}", "test=true"]
    done = script("train", *overrides, f"folder={tmp_path}/run", fresh=method == "spawn", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert max_difference(reference, tmp_path / "run") < 1e-6
    known = json.loads((tmp_path / "run" / "record.json").read_text())
    assert known["attempts"][0]["reason"] == "completed"
    assert known["metrics"]["val/accuracy"] > 0.5
    assert known["test"]["test/accuracy"] > 0.5
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) > 4  # the test's row is after those of fit
    assert not list(tmp_path.rglob(".temp.ckpt"))


def test_a_signal_to_the_parent_is_forwarded_to_the_ranks(forks: ForkServer, tmp_path: Path) -> None:
    overrides = [
        *OVERRIDES,
        *TWO,
        "trainer.strategy.start_method=fork",
        "trainer.max_epochs=500",
        f"folder={tmp_path}/run",
    ]
    with (tmp_path / "log").open("w") as log:
        run: Forked
        with forks.start(["scripts/train.py", *overrides], environment(), log.fileno(), log.fileno()) as run:
            end = time.monotonic() + 60
            while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 143, (tmp_path / "log").read_text()
    known = json.loads((tmp_path / "run" / "record.json").read_text())
    assert known["attempts"][0]["reason"].startswith("preempted by SIGTERM, saved")
    assert saved_weights(tmp_path / "run", "last-preempted")


PARENT_DEATH = """
import ctypes
from pathlib import Path
from lightning.pytorch.callbacks import Callback

class Spy(Callback):
    def __init__(self, file):
        self.file = file

    def on_train_start(self, trainer, pl_module):
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        Path(f"{self.file}-{trainer.global_rank}").write_text(str(number.value))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
def test_ranks_of_a_killed_parent_get_a_signal_that_may_repeat(script: Script, tmp_path: Path) -> None:
    (tmp_path / "spy.py").write_text(PARENT_DEATH)
    overrides = [*OVERRIDES, *TWO, "trainer.strategy.start_method=fork", "trainer.max_steps=1"]
    spy = f"+callback.spy={{_target_: spy.Spy, file: {tmp_path}/signal}}"
    done = script("train", *overrides, spy, f"folder={tmp_path}/run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    # Linux may send it once for each thread of the parent, and a second SIGINT ends a rank before it has saved.
    assert [int((tmp_path / f"signal-{rank}").read_text()) for rank in range(2)] == [signal.SIGTERM] * 2


@pytest.mark.slow  # needs a new process: the fork server kills all children of a killed one
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_of_a_killed_parent_save_and_exit(tmp_path: Path, method: str) -> None:
    overrides = [*OVERRIDES, *TWO, f"trainer.strategy.start_method={method}", "trainer.max_epochs=100000"]
    command = [sys.executable, "scripts/train.py", *last_of_each(overrides), f"folder={tmp_path}/run"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + 100
            while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < end:
                time.sleep(0.05)
            ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            run.kill()
            end = time.monotonic() + 30
            while any(map(is_running, ranks)):
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    assert len(ranks) >= 2
    assert saved_weights(tmp_path / "run", "last-preempted"), (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_unhandled_interrupt_ends_all_ranks(forks: ForkServer, tmp_path: Path) -> None:
    overrides = [
        *OVERRIDES,
        *TWO,
        "trainer.strategy.start_method=fork",
        "trainer.max_epochs=100000",
        f"folder={tmp_path}/run",
    ]
    with (tmp_path / "log").open("w") as log:
        run: Forked
        command = ["scripts/train.py", *overrides, "callback.preemption=null"]
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
    overrides = [
        "model=mlp",
        *TWO,
        f"trainer.strategy.start_method={method}",
        "logger=wandb",
        "trainer.max_epochs=5000",
    ]
    command = last_of_each([sys.executable, "scripts/train.py", *overrides, "report=false", f"folder={run}"])
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


def test_a_signal_is_retried_until_a_handler_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_launcher, "RETRY_DELAY", 0.05)
    received = threading.Event()
    before = signal.signal(signal.SIGUSR2, process_launcher._retry)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.2)
        signal.signal(signal.SIGUSR2, lambda number, frame: received.set())
        assert received.wait(10)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_spawned_process_has_the_settings_of_its_parent() -> None:
    logs, filters = logging.getLogger("lightning.pytorch"), list(warnings.filters)
    before = torch.get_float32_matmul_precision(), logs.level
    try:
        torch.set_float32_matmul_precision("medium")
        logs.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "not shown")
        packed = pickle.dumps(process_launcher.MultiProcessingLauncher(None, "spawn"))
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        logs.setLevel(logging.INFO)
        warnings.filters[:] = filters
        pickle.loads(packed)
        assert torch.backends.cudnn.allow_tf32
        assert (torch.get_float32_matmul_precision(), logs.level) == ("medium", logging.ERROR)
        warnings.warn("not shown", stacklevel=1)
    finally:
        torch.set_float32_matmul_precision(before[0])
        logs.setLevel(before[1])
        warnings.filters[:] = filters


def test_the_weights_of_spawned_ranks_are_loaded_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, weights = DDPStrategy(start_method="spawn"), tmp_path / "folder" / "weights.ckpt"
    module = L.LightningModule()
    module.layer = nn.Linear(2, 1)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.strategy._lightning_module = module
    weights.parent.mkdir()
    with monkeypatch.context() as patched:  # as if the ranks had trained on a GPU
        patched.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        torch.save({"layer.weight": torch.ones(1, 2), "layer.bias": torch.ones(1)}, weights)
    launcher = process_launcher.MultiProcessingLauncher(strategy, "spawn")
    output = _WorkerOutput(None, str(weights), trainer.state, None, launcher.get_extra_results(trainer))
    launcher._recover_results_in_main_process(output, trainer)
    assert torch.equal(module.layer.weight, torch.ones(1, 2))
    assert not weights.parent.exists()


def test_an_error_of_a_forked_rank_is_reported_in_one_line(script: Script, tmp_path: Path) -> None:
    overrides = [
        *OVERRIDES,
        *TWO,
        "trainer.strategy.start_method=fork",
        "optimizer.lr=1e38",
        "trainer.gradient_clip_val=null",
    ]
    done = script("train", *overrides, f"folder={tmp_path}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: the gradient of " in done.stderr


def test_a_process_with_initialized_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", number) for number in range(2)]
    strategy = DDPStrategy(start_method="fork", parallel_devices=gpus, cluster_environment=LightningEnvironment())
    strategy._configure_launcher()  # as in a notebook, before anything runs on a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"^trainer\.strategy\.start_method=fork: .* use popen, or spawn"):
        strategy._configure_launcher()
    assert strategy.launcher is not None
    with pytest.raises(StrategyError, match=r"^trainer\.strategy\.start_method=fork"):
        strategy.launcher.launch(print)
    for method, devices in (("spawn", gpus), ("popen", gpus), ("fork", [torch.device("cpu")])):
        process_launcher.check_fork(method, devices)


def test_a_worker_exit_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(WorkerExitError(0, 143, "preempted")))
    assert (error.code, error.status, error.reason) == (0, 143, "preempted")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp_spawn", {"start_method": "spawn"}),
        ("ddp_notebook", {"start_method": "fork"}),
        ("ddp_fork_find_unused_parameters_true", {"start_method": "fork", "find_unused_parameters": True}),
    ],
)
def test_lightnings_names_of_spawning_strategies(name: str, options: dict[str, Any]) -> None:
    strategy: Any = spawning_strategy(Settings({"strategy": name}))["strategy"]
    assert type(strategy) is DDPStrategy
    assert strategy._start_method == options["start_method"]
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) == ("find_unused_parameters" in options)


def test_other_strategies_are_not_replaced() -> None:
    assert spawning_strategy(Settings({"strategy": "ddp"})) == spawning_strategy(Settings({})) == {}


@pytest.mark.slow  # each rank imports torch
def test_a_spawned_run_is_tested(script: Script, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["trainer.strategy=ddp_spawn", "trainer.devices=2", "trainer.accelerator=cpu", "model=linear"]
    done = script("train", *QUICK, *overrides, f"folder={folder}", fresh=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "record.json").read_text())["test"]["test/loss"] > 0


def test_callbacks_of_forked_ranks_learn_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, run = planted.write_project(tmp_path / "project"), tmp_path / "run"
    monkeypatch.chdir(root)
    project = Project.at(root)

    def start() -> None:
        project.activate()
        train.train_command(project, planted.overrides("log-of-zero", run, ranks=2))

    assert planted.forked(start) == 1
    assert [ledger.last for ledger in read_ledgers(run)] == [8, 8]  # of which nothing was written before the error
    assert read_record(run)["attempts"][0]["reason"].startswith("NonFiniteGradientError: the gradient of")
