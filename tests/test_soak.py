"""Kill and signal runs at random times: ``SOAK_RUNS=200 pytest -m soak``.

All processes of a run have a mark in their environment, by which those are found that are left, also in sessions of
their own, as the ranks of torchrun are. ``SOAK_SEED`` repeats a sequence of runs, ``SOAK_FIRST`` begins with a later
run of it.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TORCHRUN, environment
from forkserver import Forked, ForkServer, last_of_each, rank_variables
from test_faults import lines, record, weights

OVERRIDES = [
    "logger=null",
    "report=false",
    "model=mlp",
    "model.hidden_sizes=[32]",
    "model.dropout=0.2",
    "model.norm=batchnorm",
]
OVERRIDES += ["trainer.max_epochs=3", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"]
HALVING = ["scheduler=constant", "scheduler._target_=torch.optim.lr_scheduler.ExponentialLR"]
HALVING += ["+scheduler.gamma=0.5", "task.interval=epoch"]
STOPPING = ["+callback.stop._target_=lightning.pytorch.callbacks.EarlyStopping", "+callback.stop.monitor=val/loss"]
STOPPING += ["+callback.stop.patience=1", "+callback.stop.min_delta=10.0"]
# Settings that affect the weights; one of each line is drawn, with equal probability.
CHOICES = [
    (["trainer.accumulate_grad_batches=1"], ["trainer.accumulate_grad_batches=2"]),
    (["callback=default"], ["callback=[default,ema]"]),
    (["scheduler=onecycle"], HALVING),
    (["trainer.val_check_interval=1.0"], ["trainer.val_check_interval=0.5"]),
    ([], ["trainer.max_steps=25"], STOPPING),
]
FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
LIMIT = 60.0  # seconds after a fault within which all processes have to end
PATIENCE = 300.0  # seconds after which they are counted as left, on a machine that may be busy
MARK = "SOAK_MARK"


@dataclass
class Tally:
    """Counts over all runs."""

    faults: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    resumes: int = 0
    hangs: int = 0
    late: int = 0  # ends more than LIMIT after a fault
    left: int = 0  # processes that have not ended
    latest: float = 0  # seconds from a fault to the end of the last process
    unequal_rows: int = 0
    unequal_weights: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Attempt:
    """One start of a run's processes, with an optional fault.

    With ``agent``, torchrun starts the ranks, and gets the fault.
    """

    forks: ForkServer
    overrides: list[str]
    processes: int
    log: Path
    agent: bool = False
    seconds: float = 0  # from the fault, or the start, to the end of the last process
    left: int = 0  # processes after that

    def run(self, after: float | None = None, fault: str = "", hit: tuple[int, ...] = ()) -> list[int | None]:
        """Run, and return the exit status of each rank; None for a rank that hangs.

        Args:
            after: Seconds until the fault.
            fault: Name of a signal.
            hit: Ranks that it is sent to.
        """
        begun = self.log.stat().st_size if self.log.is_file() else 0
        with ExitStack() as stack:
            output = stack.enter_context(open(self.log, "ab")).fileno()
            ranks = list(self._start(stack, output))
            start = time.monotonic()
            if after is not None:
                time.sleep(after)
                start = time.monotonic()
                for rank in hit:
                    ranks[rank].send_signal(getattr(signal, fault))
            # Also a signal before its handler is installed ends only the rank that gets it.
            if fault and len(hit) < self.processes and not self.agent and self._status(ranks[hit[0]], start + PATIENCE):
                time.sleep(0.5)
                with open(self.log, "rb") as text:
                    text.seek(begun)
                    connected = b"\ndevices" in text.read()
                if not connected:  # a rank that waits for the missing one is ended by the launcher
                    for process in ranks:
                        process.kill_group()
            statuses = [self._status(process, start + PATIENCE) for process in ranks]
            while (found := self._marked()) and time.monotonic() < start + PATIENCE:
                time.sleep(0.05)
            self.seconds, self.left = time.monotonic() - start, len(found)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return statuses

    def _start(self, stack: ExitStack, output: int) -> Iterator["Forked | subprocess.Popen[bytes]"]:
        argv, mark = ["scripts/train.py", *self.overrides], {MARK: self.forks.env[MARK]}
        if self.agent:
            process = subprocess.Popen(
                [*TORCHRUN, *last_of_each(argv)],
                cwd=ROOT,
                env=environment(**mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
            yield process
            return
        for rank in rank_variables(self.processes) if self.processes > 1 else [{}]:
            yield stack.enter_context(self.forks.start(argv, environment(**rank, **mark), output, output))

    def _marked(self) -> list[int]:
        """Process IDs of the run: all with the mark, which forks inherit from their server, but the server."""
        own, found = f"{MARK}={self.forks.env[MARK]}".encode(), []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if own in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
        return [pid for pid in found if pid != self.forks.pid]

    @staticmethod
    def _status(process: "Forked | subprocess.Popen[bytes]", end: float) -> int | None:
        while time.monotonic() < end:
            if process.poll() is not None:
                return process.returncode
            time.sleep(0.01)
        return None


class Soak:
    """Runs with faults, and the uninterrupted runs that they are compared with."""

    def __init__(self, forks: ForkServer, place: Path, seed: int) -> None:
        self.forks, self.place, self.seed = forks, place, seed
        self.tally = Tally()
        self._uninterrupted: dict[tuple[str, ...], tuple[Path, float]] = {}

    def uninterrupted(self, overrides: list[str], processes: int) -> tuple[Path, float]:
        """Return the folder of an uninterrupted run, and its duration in seconds."""
        key = (*overrides, str(processes))
        if key not in self._uninterrupted:
            folder = self.place / f"uninterrupted-{len(self._uninterrupted)}"
            began = time.monotonic()
            attempt = Attempt(self.forks, [*overrides, f"folder={folder}"], processes, folder.with_suffix(".txt"))
            assert attempt.run() == [0] * processes, attempt.log.read_text()
            self._uninterrupted[key] = folder, time.monotonic() - began
        return self._uninterrupted[key]

    def run(self, number: int) -> None:
        """Run with one to three faults, then resume without faults until the run is complete."""
        draw = random.Random(f"{self.seed}-{number}")
        processes, agent = draw.choice(((1, False), (2, False), (2, True)))
        overrides = [
            *OVERRIDES,
            f"trainer.devices={processes}",
            *(w for choice in CHOICES for w in draw.choice(choice)),
        ]
        expected, seconds = self.uninterrupted(overrides, processes)
        folder = self.place / f"run-{number}"
        overrides = [*overrides, f"data.num_workers={draw.choice((0, 2))}", f"folder={folder}"]
        log, history = folder.with_suffix(".txt"), []
        for hits in range(draw.choice((1, 2, 3)), -1, -1):
            began = (folder / "record.json").is_file()
            self.tally.resumes += bool(history)
            attempt = Attempt(self.forks, [f"resume={folder}"] if began else overrides, processes, log, agent)
            if hits:
                fault, after = draw.choice(FAULTS), draw.uniform(0, seconds)
                hit = (0,) if agent else draw.choice([(0,), (processes - 1,), tuple(range(processes))])
                whom = "torchrun" if agent else "all" if len(hit) == processes else "one"
                self.tally.faults[f"{fault} to {whom}"] += 1
                statuses = attempt.run(after, fault, hit)
                history.append(f"{fault} to {hit} after {after:.2f} s: {statuses}")
            else:
                statuses = attempt.run()
                history.append(f"no fault: {statuses}")
            if hits:
                self.tally.latest = max(self.tally.latest, attempt.seconds)
                self.tally.late += attempt.seconds > LIMIT
            self.tally.left += attempt.left
            if None in statuses or attempt.left:
                self.tally.hangs += 1
                self._add_failure(number, "hangs", overrides, history, log)
                return
            if not any(statuses):
                break
        self.tally.runs += 1
        self._compare(number, folder, expected, overrides, history, log)

    def _compare(
        self, number: int, folder: Path, expected: Path, overrides: list[str], history: list[str], log: Path
    ) -> None:
        if not (folder / "checkpoints" / "last.ckpt").is_file() or record(folder)["attempts"][-1]["end"] is None:
            self.tally.unequal_weights += 1
            self._add_failure(number, "did not end", overrides, history, log)
            return
        ours, theirs = weights(folder), weights(expected)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in theirs):
            self.tally.unequal_weights += 1
            self._add_failure(number, "has other weights", overrides, history, log)
        if lines(folder) != lines(expected):
            self.tally.unequal_rows += 1
            self._add_failure(number, "has other rows in metrics.csv", overrides, history, log)

    def _add_failure(self, number: int, what: str, overrides: list[str], history: list[str], log: Path) -> None:
        again = f"SOAK_SEED={self.seed} SOAK_FIRST={number} SOAK_RUNS=1 pytest -m soak"
        self.tally.failures.append(
            f"run {number} {what}: {again}\n  {' '.join(overrides)}\n  " + "\n  ".join(history) + f"\n  {log}"
        )


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32))
    first, count = int(os.environ.get("SOAK_FIRST", 0)), int(os.environ.get("SOAK_RUNS", 200))
    with closing(ForkServer(environment(**{MARK: f"{os.getpid()}-{seed}"}))) as forks:
        soak = Soak(forks, tmp_path, seed)
        tally = soak.tally
        for number in range(first, first + count):
            soak.run(number)
            if (number + 1 - first) % 5 == 0:
                with capsys.disabled():
                    counted = f"{sum(tally.faults.values())} faults, {tally.left} left, {tally.late} late"
                    print(f"\n{number + 1 - first} runs, {counted}, {len(tally.failures)} failures", flush=True)
    with capsys.disabled():
        print(f"\nseed {seed}: {tally.runs} runs, {sum(tally.faults.values())} faults, {tally.resumes} resumes")
        print(*(f"  {name}: {times}" for name, times in sorted(tally.faults.items())), sep="\n")
        print(f"processes left {tally.left}, late ends {tally.late}, the latest after {tally.latest:.1f} s")
        print(f"hangs {tally.hangs}, runs with lost or doubled rows {tally.unequal_rows}, ", end="")
        print(f"with unequal weights {tally.unequal_weights}")
        print(*tally.failures, sep="\n", flush=True)
    assert (tally.left, tally.late, tally.hangs, tally.unequal_rows, tally.unequal_weights) == (0, 0, 0, 0, 0)
