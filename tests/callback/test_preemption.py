import copy
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from conftest import ROOT, TORCHRUN, Script, environment
from forkserver import Forked, ForkServer, rank_variables

from boltcutter.callback.preemption import Preemption
from boltcutter.callback.reseed import Reseed
from boltcutter.data.digits import Digits
from boltcutter.environment import stop_signals as signals
from boltcutter.logger.csv_logger import CSVLogger
from boltcutter.model.linear import Linear
from boltcutter.task.classification import Classification

# Dropout, BatchNorm, EMA, gradient accumulation, clipping, epoch metrics, best checkpoints.
OVERRIDES = ["logger=null", "report=false", "trainer.max_epochs=10", "trainer.accumulate_grad_batches=2"]
OVERRIDES += ["callback=[default,ema,early_stopping]"]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def record(folder: Path) -> Any:
    return json.loads((folder / "record.json").read_text())


def last(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


@contextmanager
def training(forks: ForkServer, folder: Path, *overrides: str, ranks: int = 0) -> Iterator[list[Forked]]:
    """The ranks of a run, or its only process, once it has a checkpoint and is in the middle of an epoch."""
    argv = ["scripts/train.py", *OVERRIDES, f"folder={folder}", *overrides]
    with ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "wb")).fileno()
        errors = stack.enter_context(open(folder.with_name("errors"), "ab")).fileno()
        processes = [
            stack.enter_context(forks.start(argv, environment(**rank), nothing, errors))
            for rank in (rank_variables(ranks) if ranks else [{}])
        ]
        end = time.monotonic() + 60
        while not (folder / "checkpoints" / "last.ckpt").exists():
            assert [process.poll() for process in processes] == [None] * len(processes)
            assert time.monotonic() < end
            time.sleep(0.005)
        time.sleep(0.06)
        yield processes


@pytest.fixture(scope="module")
def uninterrupted(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The same run, uninterrupted, on one process or on two: trained when first asked for."""

    @cache
    def trained(processes: int) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        more, ranks = (TWO, 2) if processes == 2 else ([], 0)
        done = script("train", *OVERRIDES, *more, f"folder={folder}", ranks=ranks)
        assert done.returncode == 0, done.stderr
        return folder

    return trained


@pytest.mark.parametrize(
    ("name", "to", "overrides", "resume"),
    [
        ("SIGTERM", "first", [], []),
        pytest.param("SIGTERM", "group", ["data.num_workers=2"], ["data.num_workers=0"], marks=pytest.mark.slow),
        pytest.param("SIGINT", "first", [], ["data.num_workers=1"], marks=pytest.mark.slow),
        pytest.param("SIGUSR2", "group", TWO, [], marks=pytest.mark.slow),  # Lightning starts the second rank
        pytest.param("SIGHUP", "last", TWO, [], marks=pytest.mark.slow),  # both as by torchrun
    ],
)
def test_a_signal_saves_and_the_resumed_run_is_bitwise_identical(
    forks: ForkServer,
    script: Script,
    uninterrupted: Callable[[int], Path],
    tmp_path: Path,
    name: str,
    to: str,
    overrides: list[str],
    resume: list[str],
) -> None:
    folder, number = tmp_path / "run", getattr(signal, name)
    whole = uninterrupted(2 if overrides == TWO else 1)
    ranks = 2 if to == "last" else 0
    with training(forks, folder, *overrides, ranks=ranks) as processes:
        if to == "group":
            processes[0].kill_group(number)
        else:
            processes[-1].send_signal(number)
        assert [process.wait(timeout=20) for process in processes] == [128 + number] * len(processes)
    (attempt,) = record(folder)["attempts"]
    assert attempt["reason"].startswith(f"preempted by {name}, saved ")
    ended = (
        f"preempted by {name}, saved {folder}/checkpoints/last-preempted.ckpt; "
        f"continue with: python scripts/train.py resume={folder}\n"
    )
    printed = folder.with_name("errors").read_text()
    assert ended in printed if name == "SIGUSR2" else printed == ended  # it prints the stacks, too
    saved = torch.load(folder / "checkpoints" / "last-preempted.ckpt", weights_only=True)
    assert saved["global_step"] < record_steps(whole)
    done = script("train", f"resume={folder}", *resume, ranks=2 if overrides == TWO else 0)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    ours, theirs = last(folder), last(whole)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert record(folder)["metrics"] == record(whole)["metrics"]
    assert record(folder)["test"] == record(whole)["test"]


def record_steps(folder: Path) -> int:
    return int(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"])


@pytest.mark.slow
def test_a_run_on_two_processes_resumes_on_one(forks: ForkServer, script: Script, tmp_path: Path) -> None:
    # No dropout, no BatchNorm, and no Adam, which amplifies rounding differences.
    overrides = ["model=mlp", "callback=default", "optimizer=sgd", "optimizer.lr=0.02"]
    whole = script("train", *OVERRIDES, *overrides, f"folder={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    with training(forks, tmp_path / "cut", *overrides, *TWO, ranks=2) as processes:
        processes[0].send_signal(signal.SIGTERM)
        assert [process.wait(timeout=20) for process in processes] == [128 + signal.SIGTERM] * 2
    done = script("train", f"resume={tmp_path}/cut", "trainer=default", "trainer.max_epochs=10", *OVERRIDES[3:4])
    assert done.returncode == 0, done.stderr
    ours, theirs = last(tmp_path / "cut"), last(tmp_path / "whole")
    assert max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in theirs) < 1e-6
    assert record(tmp_path / "cut")["metrics"] == pytest.approx(record(tmp_path / "whole")["metrics"], abs=1e-6)


def test_a_second_interrupt_exits_immediately(forks: ForkServer, tmp_path: Path) -> None:
    with training(forks, tmp_path / "run") as (process,):
        process.send_signal(signal.SIGINT)
        time.sleep(0.0005)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) in (1, 128 + signal.SIGINT)
    assert record(tmp_path / "run")["attempts"][0]["reason"].startswith(("interrupted", "exit 1", "preempted"))


@pytest.mark.parametrize("overrides", [["model=mlp"], ["optimizer=sgd"]], ids=" ".join)
def test_incompatible_overrides_are_refused_before_training(
    script: Script, uninterrupted: Callable[[int], Path], overrides: list[str]
) -> None:
    before = record(uninterrupted(1))
    done = script("train", f"resume={uninterrupted(1)}", *overrides)
    assert done.returncode == 2
    assert "does not match the task" in done.stderr
    assert done.stderr.count("\n") == 1
    assert record(uninterrupted(1)) == before


class SignalAt(L.Callback):
    """Sets the flag like a signal handler, before a training batch or a batch of the validation after it."""

    def __init__(self, epoch: int, batch: int, validation: int | None) -> None:
        self.place, self.validation = (epoch, batch), validation
        self.trained = (0, 0)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.trained = (trainer.current_epoch, batch_idx)
        if self.validation is None and self.trained == self.place:
            signals.handle_signal(signal.SIGTERM)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (*self.trained, batch_idx) == (*self.place, self.validation):
            signals.handle_signal(signal.SIGTERM)


Place = tuple[int, int, int | None]


def fit(folder: Path, interval: float, place: Place | None = None, checkpoint: Path | None = None) -> str:
    """Train, optionally interrupted at (epoch, batch, validation batch) or resumed; returns the contents of the log."""
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=CSVLogger(folder / "metrics.csv"),
        callbacks=[*([SignalAt(*place)] if place else []), Preemption(str(folder)), Reseed(0)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        val_check_interval=interval,
        log_every_n_steps=4,
    )
    task = Classification(Linear((1, 8, 8), 10), optimizer=torch.optim.SGD)
    if place:
        with pytest.raises(signals.PreemptionError) as error:
            trainer.fit(task, datamodule=Digits(), ckpt_path=checkpoint)
        assert error.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    else:
        trainer.fit(task, datamodule=Digits(), ckpt_path=checkpoint, weights_only=True)
    return (folder / "metrics.csv").read_text() if (folder / "metrics.csv").is_file() else ""


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*your dataloader is not resumable")
@pytest.mark.parametrize(
    ("interval", "place"),
    [
        *((1.0, (*place, None)) for place in ((1, 1),)),
        *((0.5, (*place, None)) for place in ((1, 9),)),
        *((1.0, place) for place in ((1, 18, 2),)),
        *((0.5, place) for place in ((2, 17, 4),)),
        *(pytest.param(1.0, (*place, None), marks=pytest.mark.slow) for place in ((0, 0), (1, 0), (2, 18))),
        *(pytest.param(0.5, (*place, None), marks=pytest.mark.slow) for place in ((1, 10), (1, 18))),
        *(pytest.param(1.0, place, marks=pytest.mark.slow) for place in ((0, 18, 0), (2, 18, 4))),
        *(pytest.param(0.5, place, marks=pytest.mark.slow) for place in ((0, 8, 0), (1, 8, 2))),
    ],
)
def test_logged_metrics_do_not_depend_on_the_interruption(tmp_path: Path, interval: float, place: Place) -> None:
    whole = fit(tmp_path / "whole", interval)
    fit(tmp_path / "cut", interval, place)
    assert fit(tmp_path / "cut", interval, checkpoint=tmp_path / "cut" / "last-preempted.ckpt") == whole


def test_a_checkpoint_that_is_saved_after_a_batch_is_not_changed() -> None:
    trainer: Any = SimpleNamespace(validating=False, loggers=[])
    progress = {"total": {"ready": 3, "started": 3}, "current": {"ready": 3, "started": 3}, "is_last_batch": True}
    checkpoint = {"loops": {"fit_loop": {"epoch_loop.batch_progress": copy.deepcopy(progress)}}}
    Preemption("folder").on_save_checkpoint(trainer, L.LightningModule(), checkpoint)
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"] == progress


TIME_LIMIT = """
import os, time
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from boltcutter.callback.preemption import Preemption
dist.init_process_group("gloo")
strategy = SimpleNamespace(_timeout=timedelta(seconds=1))
callback = Preemption("folder")
loop = SimpleNamespace(epoch_loop=SimpleNamespace())
trainer = SimpleNamespace(strategy=strategy, _signal_connector=SimpleNamespace(), fit_loop=loop)
callback.setup(trainer, None, "fit")
began = time.monotonic()
if dist.get_rank() == 0:
    try:
        callback._agree()
    except RuntimeError:
        assert time.monotonic() - began < 10
    else:
        raise AssertionError("agreed alone")
else:
    time.sleep(2)
"""


def test_ranks_wait_for_each_other_until_the_timeout(two_ranks: Script) -> None:
    two_ranks(TIME_LIMIT)


@pytest.mark.slow
@pytest.mark.timeout(300)  # on a busy machine, torchrun and its two ranks start slowly
def test_torchrun_signals_all_process_groups_and_all_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = [*TWO, "logger=null", "report=false", "model=linear", "trainer.max_epochs=100000", "data.num_workers=2"]
    command = [*TORCHRUN, "scripts/train.py", *overrides, f"folder={folder}"]
    with (
        open(tmp_path / "output", "wb") as output,
        subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output) as process,
    ):
        try:
            end = time.monotonic() + 200
            while not (folder / "checkpoints" / "last.ckpt").exists():
                assert process.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < end
                time.sleep(0.05)
            process.terminate()
            process.wait(timeout=60)
        finally:
            process.kill()
    text = (tmp_path / "output").read_text()
    assert "DataLoader worker" not in text
    assert record(folder)["attempts"][0]["reason"].startswith("preempted by SIGTERM, saved "), text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_that_is_lost_without_a_signal_continues_from_a_regular_save(
    forks: ForkServer, script: Script, uninterrupted: Callable[[int], Path], tmp_path: Path, ranks: int
) -> None:
    folder, overrides = tmp_path / "run", TWO if ranks else []
    saved = folder / "checkpoints" / "last-preempted.ckpt"
    with training(forks, folder, *overrides, "callback.preemption.save_minutes=0.0005", ranks=ranks) as processes:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        assert [process.wait(timeout=20) for process in processes] == [-signal.SIGKILL] * len(processes)
    assert 0 < torch.load(saved, weights_only=True)["global_step"] < record_steps(uninterrupted(ranks or 1))
    done = script("train", f"resume={folder}", "callback.preemption.save_minutes=null", ranks=ranks)
    assert done.returncode == 0, done.stderr
    whole, resumed = last(uninterrupted(ranks or 1)), last(folder)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_interval_of_regular_saves_is_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^callback\.preemption\.save_minutes=0 is not positive; try 10"):
        Preemption(str(tmp_path), save_minutes=0)
