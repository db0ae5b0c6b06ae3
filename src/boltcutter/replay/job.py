"""A replay of some steps of a run in a process of its own, which writes to a folder of its own only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.find import list_names
from boltcutter.checkpoint.load import find_damage, read_steps
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.settings import RunPlace
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.startup import PARENT_PID, restored_signals
from boltcutter.project import Project
from boltcutter.run.best import saved_places
from boltcutter.run.folder import read_record
from boltcutter.run.ledger import Ledger, read_ledgers
from boltcutter.run.trust import is_granted

MODULE = "boltcutter.replay.worker"
RESULT = "result-rank-{}.json"
# Variables of a launcher, by which a replay would take itself for one of the launcher's processes.
NOT_INHERITED = (
    *("SLURM_", "TORCHELASTIC_", "PET_", "OMPI_", "PMI_", "BOLTCUTTER_RUN_ID", "BOLTCUTTER_NODES", "BOLTCUTTER_TRIAL"),
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


@dataclass
class Job:
    """What a replay does.

    Args:
        run: Folder of the run.
        folder: Where the replay writes.
        last: The optimizer step after which it ends.
        devices: Number of ranks.
        checkpoint: From which it begins; None: from the beginning of the run.
        save_before: Step before which the state is saved, as ``before.ckpt``.
        inspect: Step whose samples and layers are looked at.
        alter: Step in which samples are left out.
        without: Samples that are left out: rank, number of the batch in the step, row of the batch.
        lr_factor: By which learning rates are multiplied.
        double: Whether all is computed in float64.
        trusts: Whether ``trust=true`` was given.
        forks: Whether ranks are forked, which a GPU does not allow.
    """

    run: str
    folder: str
    last: int
    devices: int = 1
    checkpoint: str | None = None
    save_before: int | None = None
    inspect: int | None = None
    alter: int | None = None
    without: list[tuple[int, int, int]] = field(default_factory=list)
    lr_factor: float = 1.0
    double: bool = False
    trusts: bool = False
    forks: bool = False


@dataclass
class Done:
    """What a replay has done.

    Args:
        ranks: What each rank has written.
        ledgers: Of each rank.
        error: Why it ended before its last step; empty if it did not.
    """

    ranks: list[dict[str, Any]]
    ledgers: list[Ledger]
    error: str = ""

    def losses(self) -> dict[int, float]:
        """The loss at each step, as a mean over the ranks and over the batches of the step."""
        found: dict[int, list[float]] = {}
        for rank in self.ranks:
            for step, values in rank["losses"].items():
                found.setdefault(int(step), []).extend(map(float, values))  # texts, as JSON has no inf
        return {step: sum(values) / len(values) for step, values in sorted(found.items())}

    def norms(self) -> dict[int, float]:
        """Norm of all gradients at each step."""
        rows = self.ledgers[0].rows if self.ledgers else ()
        return {int(row["step"]): float(row["gradient_norm"]) for row in rows}


class Worker:
    """A process that has imported all modules, and forks one for each replay.

    Args:
        project: Whose code is run.
        scratch: Folder for the replays.
        record: Of the run, whose number of threads is used.
    """

    def __init__(self, project: Project, scratch: Path, record: Mapping[str, Any]) -> None:
        self.scratch, self.count = scratch, 0
        self.log = scratch / "log.txt"
        self.forks = (record.get("attempts") or [{}])[-1].get("device") == "cpu"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        threads = (record.get("hardware") or {}).get("threads")
        variables = {"OMP_NUM_THREADS": str(threads)} if isinstance(threads, int) else {}
        environment = {**inherited, **project.environment, **variables, PARENT_PID: str(os.getpid())}
        self._log = self.log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            cwd=project.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )

    def run(self, job: Job) -> Done:
        """Replay, and return what was computed.

        Raises:
            ReplayError: Nothing was replayed.
        """
        self.count += 1
        job.folder = str(self.scratch / str(self.count))
        job.trusts, job.forks = is_granted(), self.forks
        folder = Path(job.folder)
        folder.mkdir()
        shutil.copy(Path(job.run, run_files.RECORD), folder)
        file = folder / "job.json"
        file.write_text(json.dumps(asdict(job)))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{file}\n".encode())
        self._process.stdin.flush()
        self._process.stdout.readline()
        paths = [folder / RESULT.format(rank) for rank in range(job.devices)]
        ranks = [json.loads(path.read_text()) for path in paths if path.is_file()]
        if len(ranks) < job.devices:
            raise ReplayError(self._last_error())
        error = next((rank["error"] for rank in ranks if rank["error"]), "")
        return Done(ranks, list(read_ledgers(folder)), error)

    def _last_error(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if line.startswith("error")]
        return one_line((named or lines or ["the replay ended without a message"])[-1], 300)

    def kill(self) -> None:
        """End a replay that goes on, with its ranks."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


class ReplayError(RuntimeError):
    """A run cannot be replayed."""

    hide_traceback = True


@contextmanager
def worker(project: Project, record: Mapping[str, Any]) -> Iterator[Worker]:
    """A worker, whose folder and process are gone afterwards, also after a signal."""
    with restored_signals(), tempfile.TemporaryDirectory(prefix="boltcutter-replay-") as scratch:
        signals.install_handlers(*signals.SIGNALS)  # which raise
        started = Worker(project, Path(scratch), record)
        try:
            yield started
        except BaseException:
            started.kill()
            raise
        finally:
            started.close()


def checkpoints(run: RunPlace) -> list[tuple[int, str]]:
    """The checkpoints of a run that can be read, by the number of their step."""
    found = []
    for place in saved_places(run):
        for name in list_names(place):
            path = f"{place}/{name}"
            if find_damage(path) is None and (step := read_steps(path)) is not None:
                found.append((step, path))
    return sorted(found)


def newest_before(saved: list[tuple[int, str]], step: int) -> tuple[int, str | None]:
    """The newest checkpoint before a step, with its step: 0 and None if there is none."""
    earlier = [(at, path) for at, path in saved if at < step]
    return max(earlier) if earlier else (0, None)


def ranks_of(record: Mapping[str, Any]) -> list[int]:
    """Number of ranks of each attempt of a run that has begun to train."""
    return [int(attempt["devices"]) for attempt in record.get("attempts") or () if attempt.get("devices")] or [1]


def ledgers_of(folder: Path, record: Mapping[str, Any]) -> list[Ledger]:
    """The ledgers of the ranks of the last attempt of a run, with the steps that each of them has."""
    found = list(read_ledgers(folder))[: ranks_of(record)[-1]]
    begin = max((int(ledger.rows["step"][0]) for ledger in found if len(ledger.rows)), default=0)
    return [Ledger(ledger.device, ledger.rows[ledger.rows["step"] >= begin]) for ledger in found]


def folder_of(text: str | None, key: str = "run") -> Path:
    """The folder that an argument names.

    Raises:
        ConfigError: It names none.
    """
    if not text:
        raise ConfigError(f"{key}: missing; give {key}=<folder>, such as {key}=latest", kind="missing_value")
    folder = Path(text)
    read_record(folder)
    return folder.absolute()
