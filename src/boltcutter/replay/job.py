"""A replay of some steps of a run in a process of its own, which writes to a folder of its own only."""

from __future__ import annotations

import copy
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.find import list_names
from boltcutter.checkpoint.load import find_damage, read_steps
from boltcutter.config.errors import ConfigError, one_line, prefix_errors
from boltcutter.config.redaction import MASK
from boltcutter.config.settings import RunPlace, Settings
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.cluster_variables import LAUNCHER_VARIABLES
from boltcutter.environment.startup import PARENT_PID, restored_signals
from boltcutter.project import Project
from boltcutter.run.best import saved_places
from boltcutter.run.differences import other_batch
from boltcutter.run.folder import read_record
from boltcutter.run.inputs import HASH_SEED, PYTHON_PATH, input_differences, recorded_path, recorded_variables
from boltcutter.run.ledger import Ledger, read_ledgers
from boltcutter.run.lineage import LIBRARY_FOLDER
from boltcutter.run.trust import is_granted

MODULE = "boltcutter.replay.worker"
RESULT = "result-rank-{}.json"
TIMES, FEWEST_SECONDS, LONGEST_SECONDS = 20, 600.0, 86400.0  # limits of how long a replay may take
FOREIGN_SECONDS = 180.0  # the limit for a run of somebody else, whose record may claim anything
MAX_THREADS = 4096  # of a process; OpenMP starts as many as a variable says
COPY = "BOLTCUTTER_CODE_COPY"  # set if the code is a copy, which is not where the process starts
# Variables that a replay does not take from the record: these, and those that say where things are on a machine.
NOT_RESTORED = (
    *(*LAUNCHER_VARIABLES, "BOLTCUTTER_", "PYTHON", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_", "XDG_", "SSH_"),
    *("HOME", "PATH", "PWD", "OLDPWD", "TMP", "TEMP", "USER", "LOGNAME", "HOSTNAME", "VIRTUAL_ENV", "CONDA_", "TERM"),
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
        delays: Whether the next step has the whole batches of the altered one.
        lr_factor: By which learning rates are multiplied.
        double: Whether all is computed in float64.
        trace: Steps of which all that they compute is written.
        values: Settings by dotted key that are not those of the run now: of another run, or before it was resumed.
        unset: Keys of settings that are not set.
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
    delays: bool = False
    lr_factor: float = 1.0
    double: bool = False
    trace: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    trusts: bool = False
    forks: bool = False


@dataclass
class Done:
    """What a replay has done.

    Args:
        ranks: What each rank has written.
        ledgers: Of each rank.
        error: Why it ended before its last step; empty if it did not.
        folder: In which it has written.
    """

    ranks: list[dict[str, Any]]
    ledgers: list[Ledger]
    error: str = ""
    folder: Path = Path()

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


@dataclass(frozen=True)
class Surroundings:
    """In what a replay is done.

    Args:
        project: Whose code is run: the project, or a copy of it as it was.
        root: Of the project, where relative paths begin.
        threads: Number of threads; None: as it is.
        python: Interpreter of the environment with the packages.
        variables: Environment variables that the run has read; None for one that was not set.
        path: ``PYTHONPATH`` of the run, by which it has found modules and ``sitecustomize``; None: as it is now.
    """

    project: Project
    root: Path
    threads: int | None = None
    python: str = sys.executable
    variables: tuple[tuple[str, str | None], ...] = ()
    path: str | None = None

    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        found = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
        found |= {name: value for name, value in self.variables if value is not None}
        for name in (name for name, value in self.variables if value is None):
            found.pop(name, None)
        found |= {**self.project.environment, PARENT_PID: str(os.getpid())}
        if self.threads:
            found["OMP_NUM_THREADS"] = str(self.threads)
        now = [place for place in found.pop("PYTHONPATH", "").split(os.pathsep) if place]
        places = now if self.path is None else [*filter(None, self.path.split(os.pathsep))]
        places += [place for place in now if place not in places and LIBRARY_FOLDER.is_relative_to(place)]
        if self.project.root != self.root:  # a copy, before what is where the process starts
            places = [str(self.project.root / "src"), str(self.project.root), *places]
            found[COPY] = "1"
        return found | ({"PYTHONPATH": os.pathsep.join(places)} if places else {})

    def with_environment(self, other: Surroundings, names: Sequence[str]) -> Surroundings:
        """These surroundings, with some environment variables of others."""
        variables = {name: value for name, value in self.variables if name not in names}
        variables |= {name: value for name, value in other.variables if name in names}
        path = other.path if PYTHON_PATH in names else self.path
        return replace(self, variables=tuple(sorted(variables.items())), path=path)


def surroundings(project: Project, record: Mapping[str, Any], *, own: bool) -> Surroundings:
    """The surroundings of a replay of a run with the code of a project as it is.

    Args:
        project: Whose code is run.
        record: Of the run.
        own: Whether it is this user's. Of somebody else's no variable is set: some name programs and libraries that are
            executed, proxies and servers.
    """
    threads = (record.get("hardware") or {}).get("threads")
    is_number = isinstance(threads, int) and 0 < threads <= MAX_THREADS
    known = _known(record, own=own)
    found = {name: each for name, each in known.items() if name == HASH_SEED or not name.startswith(NOT_RESTORED)}
    return Surroundings(
        project,
        project.root,
        threads if is_number else None,
        variables=tuple(sorted(found.items())),
        path=recorded_path(record) if own else None,
    )


def _known(record: Mapping[str, Any], *, own: bool) -> dict[str, str | None]:
    return recorded_variables(record) if own else {}


def changed_data(record: Mapping[str, Any], done: Done) -> str:
    """What a replay from the beginning shows of changed data; empty if it shows nothing."""
    number = other_batch(record, read_record(done.folder))
    return f"batch {number} has another content now than in the run" if number else ""


def unrestored(records: Sequence[Mapping[str, Any]], side: int, *, own: bool) -> list[str]:
    """Variables that differ between two records and are not as in that of one side: secrets, and all if not ``own``."""
    names = [name for kind, name, *_ in input_differences(*records) if kind == "variable"]
    read = (records[side].get("environment") or {}).get("variables") or {}
    return [name for name in names if name in read and name not in _known(records[side], own=own)]


def settings_before(record: Mapping[str, Any], step: int, *, own: bool) -> tuple[dict[str, Any], list[str]]:
    """The settings that a step was done with, where the run was resumed later with others: values, and keys not set.

    Args:
        record: Of the run.
        step: Number of the optimizer step.
        own: Whether it is this user's. Of somebody else's there are none, as attempts are not signed.
    """
    values, unset = dict[str, Any](), set[str]()
    for attempt in reversed(record.get("attempts") or () if own else ()):  # the first one after the step decides
        changed, at = attempt.get("changed"), attempt.get("resumed_at")
        if isinstance(changed, dict) and isinstance(at, int) and step <= at:
            for key, each in changed.items():
                if not isinstance(each, dict):
                    continue
                if "was" not in each:
                    values.pop(key, None)
                    unset.add(key)
                elif is_plain(key, each["was"]):
                    values[key] = each["was"]
                    unset.discard(key)
    return values, sorted(unset)


def is_plain(key: str, value: Any) -> bool:
    """Whether a value may be taken from what a record has beside its signed configuration: no class, path or secret."""
    if isinstance(value, list):
        return all(is_plain(key, each) for each in value)
    is_text = isinstance(value, str) and not {*"/\\$"} & {*value} and value != MASK
    is_value = is_text or value is None or isinstance(value, bool | int | float)
    return is_value and not key.rpartition(".")[2].startswith("_")


def seconds_of(record: Mapping[str, Any]) -> float:
    """How long a replay may take, as a multiple of what the run took: a step that is looked into takes many passes."""
    seconds = [attempt.get("seconds") for attempt in record.get("attempts") or ()]
    known = [float(each) for each in seconds if isinstance(each, int | float)]
    return (
        min(max(FEWEST_SECONDS, TIMES * sum(known)), LONGEST_SECONDS) if len(known) == len(seconds) else LONGEST_SECONDS
    )


class Worker:
    """A process that has imported all modules, and forks one for each replay.

    Args:
        given: Code, packages and threads of the replays.
        scratch: Folder for the replays.
        record: Of the run.
        seconds: After which a replay is ended; by default by how long the run took.
    """

    def __init__(
        self, given: Surroundings, scratch: Path, record: Mapping[str, Any], seconds: float | None = None
    ) -> None:
        self.given, self.scratch, self.count = given, scratch, 0
        self.log = scratch / "log.txt"
        self.seconds = seconds or seconds_of(record)
        self.forks = (record.get("attempts") or [{}])[-1].get("device") == "cpu"
        self._log = self.log.open("ab")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.given.python, "-m", MODULE],
            cwd=self.given.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self.given.environment(),
            start_new_session=True,
        )

    def run(self, job: Job) -> Done:
        """Replay, and return what was computed.

        Raises:
            ReplayError: Nothing was replayed, or it takes too long.
        """
        self.count += 1
        job.folder = str(self.scratch / str(self.count))
        job.trusts, job.forks = is_granted(), self.forks
        folder = Path(job.folder)
        folder.mkdir()
        shutil.copy(Path(job.run, run_files.RECORD), folder)
        file = folder / "job.json"
        file.write_text(json.dumps(asdict(job)))
        if self._process.poll() is not None:
            raise ReplayError(self._last_error())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, as its log says
            self._process.stdin.write(f"{file}\n".encode())
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], self.seconds)[0]:
            self._restart()
            raise ReplayError(f"not done after {self.seconds:.0f} seconds; give timeout=<more seconds>")
        self._process.stdout.readline()
        paths = [folder / RESULT.format(rank) for rank in range(job.devices)]
        ranks = [json.loads(path.read_text()) for path in paths if path.is_file()]
        if len(ranks) < job.devices:
            raise ReplayError(self._last_error())
        error = next((rank["error"] for rank in ranks if rank["error"]), "")
        return Done(ranks, list(read_ledgers(folder)), error, folder)

    def _restart(self) -> None:
        """End what goes on, for the next replay."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process = self._start()

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
        with suppress(BrokenPipeError):
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
def worker(given: Surroundings, record: Mapping[str, Any], seconds: float | None = None) -> Iterator[Worker]:
    """A worker, whose folder and process are gone afterwards, also after a signal."""
    with restored_signals(), tempfile.TemporaryDirectory(prefix="boltcutter-replay-") as scratch:
        signals.install_handlers(*signals.SIGNALS)  # which raise
        started = Worker(given, Path(scratch), record, seconds)
        try:
            yield started
        except BaseException:
            started.kill()
            raise
        finally:
            started.close()


class Workers:
    """Processes of replays by their surroundings, each started when it is needed.

    Args:
        stack: Ends them.
        seconds: After which a replay is ended.
    """

    def __init__(self, stack: ExitStack, seconds: float | None = None) -> None:
        self.stack, self.seconds = stack, seconds
        self._started: dict[Surroundings, Worker] = {}

    def find(self, given: Surroundings, record: Mapping[str, Any]) -> Worker:
        """The process for these surroundings."""
        if given not in self._started:
            self._started[given] = self.stack.enter_context(worker(given, record, self.seconds))
        return self._started[given]


def checkpoints(run: RunPlace) -> list[tuple[int, str]]:
    """The checkpoints of a run that can be read, by the number of their step."""
    found = []
    for place in saved_places(run):
        for name in list_names(place):
            path = f"{place}/{name}"
            if find_damage(path) is None and (step := read_steps(path)) is not None:
                found.append((step, path))
    return sorted(found)


def with_values(own: Settings, values: Mapping[str, Any], unset: Sequence[str] = ()) -> Settings:
    """A configuration with other values of some dotted keys, and without some others."""
    if not values and not unset:
        return own
    content = copy.deepcopy(own.texts)
    for key in (*unset, *values):
        *above, name = key.split(".")
        node: dict[str, Any] = content
        for part in above:
            inner = node.get(part)
            node[part] = inner if isinstance(inner, dict) else {}
            node = node[part]
        node.pop(name, None)
        if key in values:
            node[name] = values[key]
    return Settings(content)


def taken(other: Settings, keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of some dotted keys of a configuration, and those that it does not set."""
    values, unset = dict[str, Any](), list[str]()
    for key in keys:
        node: Any = other.written
        for part in key.split("."):
            node = node.get(part, Settings) if isinstance(node, Mapping) else Settings
        if node is Settings:  # no value
            unset.append(key)
        else:
            values[key] = node
    return values, unset


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


def seconds_given(text: str | None) -> float | None:
    """The value of ``timeout=``: seconds after which a replay is ended; None if it is not given.

    Raises:
        ConfigError: It is no positive number.
    """
    with suppress(ValueError):
        if text is None or float(text) > 0:
            return None if text is None else float(text)
    raise ConfigError(f"timeout={text}: not a positive number of seconds; try timeout=3600")


def folder_of(text: str | None, key: str = "run") -> Path:
    """The folder that an argument names.

    Raises:
        ConfigError: It names none.
    """
    if not text:
        raise ConfigError(f"{key}: missing; give {key}=<folder>, such as {key}=latest", kind="missing_value")
    folder = Path(text)
    with prefix_errors(f"{key}={folder}"):
        read_record(folder)
    return folder.absolute()
