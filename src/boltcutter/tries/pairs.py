"""The pairs of a try: which runs there are in which order, how each has ended, and which of them exist already."""

from __future__ import annotations

import json
import math
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from boltcutter import files, run_files
from boltcutter.analysis.caveats import inexact_resume
from boltcutter.analysis.facts import Place, read_facts, stamp_of
from boltcutter.analysis.groups import Result as Compared
from boltcutter.analysis.record import Run, as_runs
from boltcutter.config.errors import ConfigError, hint
from boltcutter.environment import lease
from boltcutter.formatting import to_json
from boltcutter.run import lineage, trust
from boltcutter.run.folder import read_record
from boltcutter.search.results import Result
from boltcutter.search.trial import Report, Sampled, Trial
from boltcutter.search.trial import seconds as seconds_of
from boltcutter.tries.measurements import REMEDY, OtherLoad, is_measured, measure
from boltcutter.tries.sides import Side, has_settings
from boltcutter.tries.sign_flips import first_look

JOURNAL = "outcomes.jsonl"  # in the folder of a try: a line for each run that has ended
BASELINE, CHANGE = "baseline", "change"
NAMES = (BASELINE, CHANGE)
MAX_READ = 200  # records that are read for a forecast
NOT_COMPARED = ("threads",)  # of the hardware: what does not affect results of a run on one thread


@dataclass(frozen=True)
class Outcome:
    """How a run of a pair has ended.

    Args:
        pair: Index of the pair, from 0.
        side: ``baseline`` or ``change``.
        seed: Seed of the pair.
        folder: Folder of the run.
        value: The metric; NaN if the run failed, or ended with a value that is not finite.
        seconds: Duration of training.
        error: Why it failed.
        is_reused: Whether the run existed before the try.
        data: Fingerprint of the data.
        others: Metrics that must not get worse, by name.
        load: CPUs that other processes used meanwhile, and percentage of the time of a GPU, if speed matters.
    """

    pair: int
    side: str
    seed: int
    folder: str
    value: float
    seconds: float = 0.0
    error: str = ""
    is_reused: bool = False
    data: str | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    load: tuple[float, float] = (0.0, 0.0)

    @property
    def is_lost(self) -> bool:
        """Whether the run loses its pair."""
        return not math.isfinite(self.value)

    def of(self, metric: str) -> float:
        """Another metric, or the one that decides."""
        return self.others.get(metric, self.value)


class FirstPairError(RuntimeError):
    """No run of the first pair has a value, so that nothing can be compared."""

    hide_traceback = True


def read_run(folder: Path) -> Run | None:
    """A run by its files; None if there is none."""
    stamp = stamp_of(str(folder))
    place = Place(str(folder), stamp)
    return as_runs([(place, read_facts(place))])[0] if stamp else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that is only appended to, of which a line may be torn."""
    content = b""
    with suppress(OSError, ValueError):
        content = trust.read_bytes(path)
    for line in content.splitlines():
        with suppress(ValueError):
            yield trust.parse_json(line)


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append an object as a line, after a line feed if the last line is torn."""
    with open(path, "ab+", opener=files.opener(path.parent)) as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            torn = file.read(1) != b"\n"
        else:
            torn = False
        file.write((b"\n" if torn else b"") + f"{to_json(values)}\n".encode())


@dataclass
class Pairs:
    """The runs of a try, which ``run_trials`` asks for one after the other.

    Args:
        folder: Folder of the try.
        baseline: The baseline.
        change: The change.
        seeds: Seed of each pair, in their order.
        metric: Metric whose value counts.
        overrides: Of all runs.
        known: All runs, of which those of the baseline are reused.
        constraints: Further metrics that each run needs.
    """

    folder: Path
    baseline: Side
    change: Side
    seeds: Sequence[int]
    metric: str
    overrides: Sequence[str] = ()
    known: Sequence[Run] = ()
    outcomes: dict[tuple[int, str], Outcome] = field(default_factory=dict)
    parallel: int = 1
    constraints: Sequence[str] = ()
    start: Callable[[str], bool] = lambda name: True  # called with the name of a run; False: it may not start

    def __post_init__(self) -> None:
        self._asked = set[tuple[int, str]]()
        self._is_measured = any(map(is_measured, (self.metric, *self.constraints)))
        self._reuses = not self._is_measured  # runs of the baseline that exist already
        self._load: OtherLoad | None = None
        for entry in read_lines(self.folder / JOURNAL):
            with suppress(TypeError):
                value = math.nan if entry.get("value") is None else entry["value"]
                outcome = Outcome(**{**entry, "value": value, "load": tuple(entry.get("load", (0.0, 0.0)))})
                if not (outcome.is_lost or {*self.constraints} <= outcome.others.keys()):
                    continue  # a damaged line
                self.outcomes[outcome.pair, outcome.side] = outcome
                if not outcome.folder:  # it was reused, but had other data
                    del self.outcomes[outcome.pair, outcome.side]
                    self._reuses = False

    # --- what there is ---

    def complete(self) -> list[tuple[Outcome, Outcome]]:
        """The pairs that are complete, up to the first that is not, in their order."""
        found = []
        for pair in range(len(self.seeds)):
            both = [self.outcomes.get((pair, name)) for name in NAMES]
            if both[0] is None or both[1] is None:
                break
            found.append((both[0], both[1]))
        return found

    def folder_of(self, pair: int, side: str) -> Path:
        """Folder of a run."""
        return self.folder / f"{self.folder.name}-{pair + 1:02d}-{side}"

    def num_reusable(self) -> int:
        """Number of pairs whose baseline exists already."""
        return sum(self._find_reusable(seed) is not None for seed in self.seeds)

    def baseline_values(self) -> list[float]:
        """The metric of runs of the baseline with any seed and code."""
        wanted = self.baseline.settings(self.seeds[0])
        candidates = [run for run in self.known if run.status == "completed" and self.metric in run.metrics]
        return [run.metrics[self.metric] for run in candidates[-MAX_READ:] if _is_of(run, wanted)]

    def earlier_differences(self) -> list[float]:
        """The differences of pairs of the try with the most of them whose baseline has the same settings."""
        wanted, found = self.baseline.settings(self.seeds[0]), list[float]()
        runs = {run.folder: run for run in self.known if self.metric in run.metrics and run.status == "completed"}
        for journal in self.folder.parent.glob(f"*/{JOURNAL}"):
            ended = {
                (entry.get("pair"), entry.get("side")): runs.get(str(entry.get("folder")))
                for entry in read_lines(journal)
            }
            pairs = [
                (run, ended.get((pair, CHANGE))) for (pair, side), run in ended.items() if run and side == BASELINE
            ]
            own = [after.metrics[self.metric] - before.metrics[self.metric] for before, after in pairs if after]
            if len(own) > len(found) and journal.parent != self.folder and _is_of(pairs[0][0], wanted):
                found = own
        return found

    # --- what run_trials asks ---

    def interrupted(self) -> list[Sampled]:
        """None: ``ask`` returns interrupted runs in their order."""
        return []

    def ask(self, total: int) -> Sampled | None:
        """The next run; None if there is none, or none should start before earlier pairs are complete."""
        done = len(self.complete())
        # Before the first look there is no verdict; beyond, only as many pairs as run at the same time.
        limit = max(first_look(), done + max(1, self.parallel // 2))
        for pair in range(min(limit, len(self.seeds))):
            for side in self._order(pair):
                if (pair, side) in self.outcomes or (pair, side) in self._asked:
                    continue
                if side == BASELINE and (reused := self._find_reusable(self.seeds[pair])):
                    self._add(self._outcome(pair, side, Path(reused.folder), is_reused=True))
                    continue
                if self._has_failed(pair, side):
                    continue
                if not self.start(self.folder_of(pair, side).name):
                    return None
                self._asked.add((pair, side))
                return Sampled(2 * pair + NAMES.index(side), {})
        return None

    def report(self, number: int, count: int, metrics: Mapping[str, float]) -> bool:
        """No run stops early."""
        return False

    def tell(self, number: int, state: str, reports: Sequence[Report], error: str = "") -> Result:
        """Store how a run has ended."""
        lease.check_lease()
        pair, side = divmod(number, 2)
        name = NAMES[side]
        folder = self.folder_of(pair, name)
        self._asked.discard((pair, name))
        if state == "failed" and not (folder / run_files.RECORD).is_file():
            label = self.sides[name].label  # nothing was trained: the arguments are wrong
            is_named = error.partition("=")[0] == label.partition("=")[0]
            raise ConfigError(error if is_named else f"{label}: {error}")
        outcome = self._outcome(pair, name, folder, error=(error or "failed") if state == "failed" else "")
        if self._load:
            outcome, self._load = replace(outcome, load=self._load.end()), None
        self._add(outcome)
        self._check_data(pair)
        objectives = {} if outcome.is_lost else {self.metric: outcome.value}
        return Result(number, state, {}, objectives, [], {}, outcome.seconds, folder, outcome.error)

    def make_trial(self, sampled: Sampled, environment: Mapping[str, str]) -> Trial:
        """Make the training of a run."""
        trust.make_own_folder(self.folder.parent)  # it may have been exchanged while other runs trained
        pair, side = divmod(sampled.number, 2)
        own = self.sides[NAMES[side]]
        self._load = OtherLoad() if self._is_measured else None
        # The copy of the code, not the working directory, has the project's modules.
        variables = {"PYTHONSAFEPATH": "1", "WANDB_RUN_GROUP": self.folder.name, **environment}
        given = {override.partition("=")[0] for override in own.overrides}
        defaults = [override for override in self.overrides if override.partition("=")[0] not in given]
        overrides = [*defaults, *own.overrides, f"seed={self.seeds[pair]}"]
        return Trial(sampled.number, self.folder_of(pair, NAMES[side]), overrides, self.metric, own.project, variables)

    @property
    def sides(self) -> dict[str, Side]:
        """The sides by name."""
        return {BASELINE: self.baseline, CHANGE: self.change}

    def _order(self, pair: int) -> tuple[str, str]:
        """Which side of a pair runs first."""
        # The change, so that its mistakes are found at once. What is measured drifts, so there it is drawn.
        is_swapped = random.Random(f"{self.folder.name} {pair}").random() < 0.5 if self._is_measured else not pair  # noqa: S311
        return (CHANGE, BASELINE) if is_swapped else (BASELINE, CHANGE)

    # --- how runs have ended ---

    def _has_failed(self, pair: int, side: str) -> bool:
        """Whether a run has failed, as its record says if the process that ran it was killed before it stored that."""
        run = read_run(folder := self.folder_of(pair, side))
        if run is None or run.status != "failed":
            return False
        self._add(self._outcome(pair, side, folder, error=run.reason or "failed"))
        return True

    def _outcome(self, pair: int, side: str, folder: Path, *, error: str = "", is_reused: bool = False) -> Outcome:
        run, record = read_run(folder), read_record(folder)
        metrics, value, others = dict(run.metrics) if run else {}, math.nan, dict[str, float]()
        for key, name in (("metric", self.metric), *(("not_worse", name) for name in self.constraints)):
            if error:
                break
            last = {**(record.get("metrics") or {}), **(record.get("test") or {})}  # also those that are not finite
            if is_measured(name):
                if not run or (found := measure(folder, run.settings, name)) is None:
                    raise ConfigError(f"{key}={name}: {folder} has not measured it; {REMEDY[name]}")
                metrics[name] = found
            if name not in {**metrics, **last}:
                near = hint(name, metrics) or f" (there are: {', '.join(sorted(metrics))})"
                raise ConfigError(f"{key}={name}: {folder} has no such metric{near}", kind="unknown_key")
            others[name] = metrics.get(name, math.nan)
            newest = last.get(name, others[name])
            if newest is None or not (math.isfinite(others[name]) and math.isfinite(newest)):
                error, others = f"{name} is not finite", {}
        value = others.pop(self.metric, math.nan)
        data = record.get("data")
        return Outcome(
            pair=pair,
            side=side,
            seed=self.seeds[pair],
            folder=str(folder),
            value=value,
            seconds=0.0 if is_reused else seconds_of(folder),
            error=error,
            is_reused=is_reused,
            data=data if isinstance(data, str) else None,
            others=others,
        )

    def _add(self, outcome: Outcome) -> None:
        append_line(self.folder / JOURNAL, asdict(outcome))
        self.outcomes[outcome.pair, outcome.side] = outcome
        both = [self.outcomes.get((0, name)) for name in NAMES]
        if both[0] and both[1] and both[0].error and both[1].error:
            raise FirstPairError(f"both runs of the first pair failed: {both[0].error}; see {both[0].folder}")

    def _check_data(self, pair: int) -> None:
        """Train a baseline anew whose stored run has other data than the change."""
        both = [self.outcomes.get((pair, name)) for name in NAMES]
        if both[0] and both[1] and both[0].is_reused and both[0].data != both[1].data and not both[1].error:
            append_line(self.folder / JOURNAL, asdict(both[0]) | {"folder": ""})
            del self.outcomes[pair, BASELINE]
            self._reuses = False

    # --- runs of the baseline that exist already ---

    def _find_reusable(self, seed: int) -> Run | None:
        """The newest run of the baseline with this seed, of the same code, environment, hardware and configuration."""
        return next(iter(self._candidates.get(seed, [])[::-1]), None) if self._reuses else None

    @cached_property
    def _candidates(self) -> dict[int, list[Run]]:
        """Completed runs by seed that may be those of the baseline."""
        found: dict[int, list[Run]] = {}
        wanted, settings = set(self.seeds), dict[int, dict[str, Any]]()
        for run in self.known if self.baseline.is_identified else ():
            seed = run.settings.get("seed")
            if (
                run.status != "completed"
                or not isinstance(seed, int)  # of somebody else's record
                or seed not in wanted
                or not all(name in run.metrics for name in (self.metric, *self.constraints))
            ):
                continue
            try:
                record = read_record(Path(run.folder))
            except ConfigError:
                continue
            if not trust.is_own_record(record.get("config"), record.get("signature"), Path(run.folder)):
                continue  # of somebody else, who could say anything of the baseline
            if lineage.code_key(record.get("git") or {}, record.get("library") or {}) != self.baseline.code:
                continue
            if seed not in settings:
                settings[seed] = self.baseline.settings(seed)
            is_same = has_settings(record.get("config") or {}, settings[seed]) and is_of_environment(record)
            if is_same and not inexact_resume(Compared(run, 0.0, Path(run.folder), record)):
                found.setdefault(seed, []).append(run)
        return found


def _is_of(run: Run, wanted: Mapping[str, Any]) -> bool:
    """Whether a run has these settings."""
    try:
        return has_settings(read_record(Path(run.folder)).get("config") or {}, wanted)
    except ConfigError:
        return False


def is_of_environment(record: Mapping[str, Any]) -> bool:
    """Whether a run had the Python, packages and hardware of this process."""
    here, then = lineage.hardware(), dict(record.get("hardware") or {})
    same = all(here[key] == then.get(key) for key in here if key not in NOT_COMPARED)
    return same and record.get("packages") == lineage.packages() and record.get("python") == platform.python_version()


def fresh_seeds(first: int, count: int, used: Callable[[int], bool]) -> list[int]:
    """The first seeds from ``first`` on that were not used."""
    found = list[int]()
    while len(found) < count:
        if not used(first):
            found.append(first)
        first += 1
    return found


def parse_state(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    with suppress(OSError, ValueError, json.JSONDecodeError):
        return trust.read_json(path)
    return {}
