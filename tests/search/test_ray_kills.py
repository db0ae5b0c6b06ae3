"""Kill searches on Ray at random times: ``SOAK_KILLS=20 pytest -m soak tests/search/test_ray_kills.py``.

``SOAK_SEED`` repeats the sequence of kills.
"""

import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, environment, require, saved_weights
from test_faults import lines, record

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")

TRIALS, EPOCHS = 8, 8
TRAINING = ["logger=null", f"trainer.max_epochs={EPOCHS}", "trainer.accelerator=cpu", "test=false", "report=false"]
SEARCH = ["search=asha", f"search.num_trials={TRIALS}", "search.max_parallel=2", "search.metric=val/accuracy"]
SEARCH += ["search.mode=max", "search.space.optimizer.lr=loguniform(3e-3,3e-2)"]
LIMIT = 900.0  # seconds of a search, which takes less than a minute on a quiet machine
EXIT_LIMIT = 120.0  # seconds until all processes have ended after a kill
OWN = {".config/boltcutter", ".cache/boltcutter"}  # what trainings write to HOME
KINDS = ("driver", "worker", "trial")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder whose path is short enough for Ray's sockets; it is kept if the test fails."""
    failed = request.session.testsfailed
    folder = Path(tempfile.mkdtemp(prefix="bc-", dir="/tmp"))
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    yield folder
    if request.session.testsfailed == failed:
        shutil.rmtree(folder)


class Descendants:
    """Notes all processes that a process starts, and what they start, even if their parents end."""

    def __init__(self) -> None:
        self._found: dict[psutil.Process, str] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._lock = threading.Lock()
        self._thread.start()

    def add(self, pid: int) -> None:
        with self._lock:
            self._found[psutil.Process(pid)] = "driver"

    def alive(self) -> dict[psutil.Process, str]:
        """Processes that have not ended, with their commands."""
        with self._lock:
            return {process: text for process, text in self._found.items() if is_alive(process)}

    def wait(self, seconds: float) -> dict[psutil.Process, str]:
        """Wait until all have ended, and return those that have not."""
        end = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _look(self) -> None:
        while not self._ends.wait(0.1):
            for parent in self.alive():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    for child in parent.children(recursive=True):
                        with self._lock:
                            self._found[child] = " ".join(child.cmdline())


@pytest.fixture
def descendants() -> Iterator[Descendants]:
    found = Descendants()
    yield found
    found.close()


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Search:
    """A search that is killed, and continued until it is complete.

    Args:
        place: Folder of everything that the search writes.
        name: Name of the search.
        overrides: Overrides of the search.
        descendants: Notes the processes.
        draw: Draws times and trials.
    """

    def __init__(
        self, place: Path, name: str, overrides: list[str], descendants: Descendants, draw: random.Random
    ) -> None:
        self.place, self.folder, self.overrides = place, place / name, overrides
        self.descendants, self.draw = descendants, draw
        self.log = place / f"{name}.txt"
        self.kills: list[str] = []

    def start(self) -> psutil.Popen:
        exists = (self.folder / "search.json").is_file()
        arguments = [f"resume={self.folder}"] if exists else [*self.overrides, f"folder={self.folder}"]
        variables = {"HOME": str(self.place / "home"), "TMPDIR": str(self.place / "tmp")}
        variables["MPLCONFIGDIR"] = str(self.place / "matplotlib")
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "scripts/search.py", *arguments],
                cwd=ROOT,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.descendants.add(process.pid)
        return process

    def run(self, kinds: list[str], within: float = 12.0) -> None:
        """Run to the end, with a kill of each of these kinds at a random time after the start or the last kill."""
        kinds = list(kinds)
        while True:
            driver = self.start()
            began = time.monotonic()
            at = began + self.draw.uniform(0, within)
            while driver.poll() is None and time.monotonic() < began + LIMIT:
                if kinds and time.monotonic() > at and self._kill(kinds[0], driver.pid, time.monotonic() - began):
                    at = time.monotonic() + self.draw.uniform(0, within)
                    kinds.pop(0)
                time.sleep(0.05)
            if driver.poll() is None:
                pytest.fail(f"the search hangs after {self.kills}\n{self.log.read_text()}\n{self.descendants.alive()}")
            if driver.returncode == 0:
                break
            assert driver.returncode == -9, self.log.read_text()
            if self.draw.random() < 0.5:  # else it is continued while its trials save
                assert not self.descendants.wait(EXIT_LIMIT), f"left by a killed search: {self.descendants.alive()}"
        assert not self.descendants.wait(EXIT_LIMIT), f"left by a completed search: {self.descendants.alive()}"

    def _kill(self, kind: str, driver: int, seconds: float) -> bool:
        trials = {p: text for p, text in self.descendants.alive().items() if f"{self.folder}/trials/" in text}
        trials = {p: text for p, text in trials.items() if "-m boltcutter train" in text}
        if kind != "driver" and not trials:
            return False
        with suppress(psutil.NoSuchProcess):
            victim = psutil.Process(driver)
            if kind != "driver":
                victim = self.draw.choice(sorted(trials, key=lambda p: p.pid))
            if kind == "worker":
                victim = victim.parent() or victim
                if not any("TrialProcess" in word for word in victim.cmdline()):
                    return False  # its worker was killed, and it saves
            victim.kill()
            self.kills.append(f"{kind} after {seconds:.1f} s")
            return True
        return False

    def trial(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def check(self) -> dict[int, dict[str, str]]:
        """Assert that each trial has ended, and trained without gaps and repetitions; returns rows of trials.csv."""
        with open(self.folder / "trials.csv", newline="") as file:
            rows = {int(row["trial"]): row for row in csv.DictReader(file)}
        assert sorted(rows) == list(range(TRIALS)), rows
        assert len(rows) == len((self.folder / "trials.csv").read_text().splitlines()) - 1
        assert {row["state"] for row in rows.values()} <= {"complete", "pruned"}, rows
        assert sorted(os.listdir(self.folder / "trials")) == [f"{number:04d}" for number in range(TRIALS)]
        for number, row in rows.items():
            steps = validation_steps(self.trial(number))
            per_epoch = steps[0] + 1
            assert steps == [per_epoch * (epoch + 1) - 1 for epoch in range(len(steps))], (number, steps)
            assert len(steps) == EPOCHS or row["state"] == "pruned", (number, steps, row)
        assert not list((self.place / "tmp").glob("ray-*"))
        assert not (self.folder / "ray").exists()
        written = [path.relative_to(self.place / "home") for path in (self.place / "home").rglob("*")]
        assert not [path for path in written if "ray" in str(path) or str(Path(*path.parts[:2])) not in OWN | ROOTS]
        return rows

    def interrupted(self) -> list[int]:
        """Numbers of the trials that were interrupted and resumed."""
        return [number for number in range(TRIALS) if len(record(self.trial(number))["attempts"]) > 1]

    def compare(self, number: int, row: dict[str, str]) -> None:
        """Assert that a trial is bitwise identical to an uninterrupted run."""
        cfg = record(self.trial(number))["config"]
        values = [
            f"optimizer.lr={cfg['optimizer']['lr']!r}",
            f"optimizer.weight_decay={cfg['optimizer']['weight_decay']!r}",
        ]
        values.append(f"data.batch_size={cfg['data']['batch_size']}")
        other = self.place / f"{self.folder.name}-uninterrupted-{number}"
        command = [sys.executable, "scripts/train.py", *TRAINING, *values, f"folder={other}"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=LIMIT)
        ours, theirs = lines(self.trial(number)), lines(other)
        assert ours == theirs[: len(ours)], number
        if row["state"] == "complete":
            ours_saved, theirs_saved = saved_weights(self.trial(number)), saved_weights(other)
            assert ours_saved.keys() == theirs_saved.keys()
            assert all(torch.equal(ours_saved[name], theirs_saved[name]) for name in theirs_saved), number


ROOTS = {str(parent) for name in OWN for parent in Path(name).parents}


def validation_steps(folder: Path) -> list[int]:
    """Steps of the rows of metrics.csv with a validation, in their order."""
    with open(folder / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["val/accuracy"]]


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT)
def test_a_killed_search_completes_all_trials_once(place: Path, descendants: Descendants) -> None:
    search = Search(place, "asha", [*SEARCH, *TRAINING], descendants, random.Random(0))
    search.run(["trial", "worker", "driver", "trial", "driver"])
    rows = search.check()
    assert len(search.kills) >= 3, search.kills  # a fast machine ends before the last ones
    assert max(float(row["val/accuracy"]) for row in rows.values()) >= 0.98, rows
    assert search.interrupted(), search.kills
    for number in search.interrupted()[:3]:
        search.compare(number, rows[number])


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_kills(place: Path, descendants: Descendants, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32))
    count = int(os.environ.get("SOAK_KILLS", 20))
    draw = random.Random(seed)
    kills: list[str] = []
    compared = searches = 0
    with capsys.disabled():
        print(f"\nseed {seed}", flush=True)
        while len(kills) < count:
            search = Search(place, f"search-{searches}", [*SEARCH, *TRAINING], descendants, draw)
            began = time.monotonic()
            search.run([draw.choice(KINDS) for _ in range(min(5, count - len(kills)))])
            rows = search.check()
            kills += search.kills
            searches += 1
            for number in search.interrupted():
                search.compare(number, rows[number])
                compared += 1
            print(f"{time.monotonic() - began:.0f} s: {', '.join(search.kills)}; 0 hangs", flush=True)
        counts = Counter(kill.split()[0] for kill in kills)
        print(f"{searches} searches of {TRIALS} trials, {len(kills)} kills: {dict(counts)}, 0 hangs, ", end="")
        print(f"{compared} interrupted trials identical to uninterrupted runs", flush=True)


def train_population(place: Path, name: str, descendants: Descendants, kills: list[str]) -> None:
    """Train a population of two, whose values that affect the weights are copied and not perturbed."""
    space = [
        "~search.space.optimizer.lr",
        "~search.space.optimizer.weight_decay",
        "search.space.data.num_workers=choice(0)",
    ]
    space += ["search.space.optimizer.lr=loguniform(1e-6,1e-2) if data.num_workers == 0"]
    space += ["search.space.trainer.log_every_n_steps=int(5,50)"]
    settings = [
        "search=pbt",
        "search.num_trials=2",
        "search.max_parallel=2",
        "search.scheduler.perturbation_interval=2",
    ]
    # Otherwise a killed trial may continue from the end of the other one.
    settings += ["+search.scheduler.quantile_fraction=0.5", "+search.scheduler.synch=true"]
    search = Search(place, name, [*settings, *space, *TRAINING], descendants, random.Random(0))
    search.run(kills)
    with open(search.folder / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["complete"] * 2, rows
    records = [record(search.trial(number)) for number in range(2)]
    for row, found in zip(rows, records, strict=True):
        assert float(row["optimizer.lr"]) == found["config"]["optimizer"]["lr"]
        assert int(row["trainer.log_every_n_steps"]) == found["config"]["trainer"]["log_every_n_steps"]
    assert rows[0]["optimizer.lr"] == rows[1]["optimizer.lr"], rows  # the worse continued from the better
    assert max(len(found["attempts"]) for found in records) > 1
    ours, theirs = (validations(search.trial(number)) for number in range(2))
    assert len(ours) == len(theirs) == EPOCHS
    assert ours[0] != theirs[0]
    assert ours[-1] == theirs[-1]
    one, other = (saved_weights(search.trial(number)) for number in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def validations(folder: Path) -> list[tuple[str, ...]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [(row["step"], row["val/loss"], row["val/accuracy"]) for row in csv.DictReader(file) if row["val/loss"]]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_worse_trial_of_a_population_continues_from_the_better(place: Path, descendants: Descendants) -> None:
    train_population(place, "pbt", descendants, [])


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
def test_a_killed_population_continues(place: Path, descendants: Descendants) -> None:
    train_population(place, "pbt", descendants, ["driver", "trial"])
