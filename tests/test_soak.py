"""Runs that are killed and signalled at random moments, again and again: ``SOAK_RUNS=200 pytest -m soak``.

``SOAK_SEED`` repeats what was chosen, ``SOAK_FIRST`` begins with a later run of it.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import environment
from forkserver import Forked, ForkServer, rank_variables
from test_faults import LIMIT, lines, record, weights

WORDS = [
    "logger=null",
    "report=false",
    "model=mlp",
    "model.hidden_sizes=[32]",
    "model.dropout=0.2",
    "model.norm=batchnorm",
]
WORDS += ["trainer.max_epochs=3", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"]
HALVING = ["scheduler=constant", "scheduler._target_=torch.optim.lr_scheduler.ExponentialLR"]
HALVING += ["+scheduler.gamma=0.5", "task.interval=epoch"]
STOPPING = ["+callback.stop._target_=lightning.pytorch.callbacks.EarlyStopping", "+callback.stop.monitor=val/loss"]
STOPPING += ["+callback.stop.patience=1", "+callback.stop.min_delta=10.0"]
# What the weights depend on; each is as likely as the others of its line.
CHOICES = [
    (["trainer.accumulate_grad_batches=1"], ["trainer.accumulate_grad_batches=2"]),
    (["callback=default"], ["callback=[default,ema]"]),
    (["scheduler=onecycle"], HALVING),
    (["trainer.val_check_interval=1.0"], ["trainer.val_check_interval=0.5"]),
    ([], ["trainer.max_steps=25"], STOPPING),
]
FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


@dataclass
class Tally:
    """What happened in all runs."""

    faults: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    resumes: int = 0
    hangs: int = 0
    unequal_rows: int = 0
    unequal_weights: int = 0
    told: list[str] = field(default_factory=list)


@dataclass
class Attempt:
    """One start of a run's processes, which may be hit after some time."""

    forks: ForkServer
    words: list[str]
    processes: int
    said: Path

    def run(self, after: float | None = None, fault: str = "", hit: tuple[int, ...] = ()) -> list[int | None]:
        """The status of each rank; None for one that did not end by itself.

        Args:
            after: Seconds until the fault.
            fault: Name of a signal.
            hit: Ranks that it is sent to.
        """
        begun = self.said.stat().st_size if self.said.is_file() else 0
        with ExitStack() as stack:
            told = stack.enter_context(open(self.said, "ab")).fileno()
            variables = rank_variables(self.processes) if self.processes > 1 else [{}]
            argv = ["scripts/train.py", *self.words]
            ranks = [stack.enter_context(self.forks.start(argv, environment(**rank), told, told)) for rank in variables]
            if after is not None:
                time.sleep(after)
                for rank in hit:
                    ranks[rank].send_signal(getattr(signal, fault))
            if fault == "SIGKILL" and len(hit) < self.processes:
                ranks[hit[0]].wait(LIMIT)
                time.sleep(0.5)
                with open(self.said, "rb") as text:
                    text.seek(begun)
                    met = b"\ndevices" in text.read()
                if not met:  # a rank that waits for one that never came is ended by what started it
                    for process in ranks:
                        process.kill_group()
            end = time.monotonic() + LIMIT
            return [self._status(process, end) for process in ranks]

    @staticmethod
    def _status(process: Forked, end: float) -> int | None:
        while time.monotonic() < end:
            if process.poll() is not None:
                return process.returncode
            time.sleep(0.01)
        return None


class Soak:
    """Runs, and the untouched ones that they are compared with."""

    def __init__(self, forks: ForkServer, place: Path, seed: int) -> None:
        self.forks, self.place, self.seed = forks, place, seed
        self.tally = Tally()
        self._untouched: dict[tuple[str, ...], tuple[Path, float]] = {}

    def untouched(self, words: list[str], processes: int) -> tuple[Path, float]:
        """A run that is let alone, and its seconds."""
        key = (*words, str(processes))
        if key not in self._untouched:
            folder = self.place / f"untouched-{len(self._untouched)}"
            began = time.monotonic()
            whole = Attempt(self.forks, [*words, f"folder={folder}"], processes, folder.with_suffix(".txt"))
            assert whole.run() == [0] * processes, whole.said.read_text()
            self._untouched[key] = folder, time.monotonic() - began
        return self._untouched[key]

    def run(self, number: int) -> None:
        """One run, hit one to three times; then let alone until it is done."""
        draw = random.Random(f"{self.seed}-{number}")
        processes = draw.choice((1, 2))
        words = [*WORDS, f"trainer.devices={processes}", *(w for choice in CHOICES for w in draw.choice(choice))]
        whole, seconds = self.untouched(words, processes)
        folder = self.place / f"run-{number}"
        words = [*words, f"data.num_workers={draw.choice((0, 2))}", f"folder={folder}"]
        said, history = folder.with_suffix(".txt"), []
        for hits in range(draw.choice((1, 2, 3)), -1, -1):
            began = (folder / "record.json").is_file()
            self.tally.resumes += bool(history)
            attempt = Attempt(self.forks, [f"resume={folder}"] if began else words, processes, said)
            if hits:
                fault, after = draw.choice(FAULTS), draw.uniform(0, seconds)
                hit = draw.choice([(0,), (processes - 1,), tuple(range(processes))])
                self.tally.faults[f"{fault} to {'all' if len(hit) == processes else 'one'}"] += 1
                statuses = attempt.run(after, fault, hit)
                history.append(f"{fault} to {hit} after {after:.2f} s: {statuses}")
            else:
                statuses = attempt.run()
                history.append(f"let alone: {statuses}")
            if None in statuses:
                self.tally.hangs += 1
                self._tell(number, "hangs", words, history, said)
                return
            if not any(statuses):
                break
        self.tally.runs += 1
        self._compare(number, folder, whole, words, history, said)

    def _compare(
        self, number: int, folder: Path, whole: Path, words: list[str], history: list[str], said: Path
    ) -> None:
        if not (folder / "checkpoints" / "last.ckpt").is_file() or record(folder)["attempts"][-1]["end"] is None:
            self.tally.unequal_weights += 1
            self._tell(number, "did not end", words, history, said)
            return
        ours, theirs = weights(folder), weights(whole)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in theirs):
            self.tally.unequal_weights += 1
            self._tell(number, "has other weights", words, history, said)
        if lines(folder) != lines(whole):
            self.tally.unequal_rows += 1
            self._tell(number, "has other rows in metrics.csv", words, history, said)

    def _tell(self, number: int, what: str, words: list[str], history: list[str], said: Path) -> None:
        again = f"SOAK_SEED={self.seed} SOAK_FIRST={number} SOAK_RUNS=1 pytest -m soak"
        self.tally.told.append(
            f"run {number} {what}: {again}\n  {' '.join(words)}\n  " + "\n  ".join(history) + f"\n  {said}"
        )


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_faults(forks: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32))
    first, count = int(os.environ.get("SOAK_FIRST", 0)), int(os.environ.get("SOAK_RUNS", 200))
    soak = Soak(forks, tmp_path, seed)
    tally = soak.tally
    for number in range(first, first + count):
        soak.run(number)
        if (number + 1 - first) % 20 == 0:
            with capsys.disabled():
                print(f"\n{number + 1 - first} runs, {len(tally.told)} of them not as they should be", flush=True)
    with capsys.disabled():
        print(f"\nseed {seed}: {tally.runs} runs, {sum(tally.faults.values())} faults, {tally.resumes} resumes")
        print(*(f"  {name}: {times}" for name, times in sorted(tally.faults.items())), sep="\n")
        print(f"hangs {tally.hangs}, runs with lost or doubled rows {tally.unequal_rows}, ", end="")
        print(f"with unequal weights {tally.unequal_weights}")
        print(*tally.told, sep="\n", flush=True)
    assert (tally.hangs, tally.unequal_rows, tally.unequal_weights) == (0, 0, 0)
