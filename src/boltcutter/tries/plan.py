"""Plan a try: find baseline and change, and fix the seeds of its pairs before the first run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter.analysis.record import Run, find_runs
from boltcutter.analysis.scale import Scale
from boltcutter.assembly.overrides import read_overrides
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.formatting import to_json
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter.run.folder import read_record
from boltcutter.run.metrics import Mode
from boltcutter.run.store import refuse
from boltcutter.tries import ledger
from boltcutter.tries.ledger import Entry
from boltcutter.tries.measurements import SCALES
from boltcutter.tries.pairs import Outcome, Pairs, fresh_seeds, parse_state
from boltcutter.tries.question import Constraint, Question, Request, Size
from boltcutter.tries.sides import Side, find_baseline, has_settings, make_side, parse_change
from boltcutter.tries.sign_flips import Verdict, decide

TRIES = "tries"  # in the folder of all runs
STATE = "try.json"
OVERRIDES = ("report=false",)  # of all runs, unless they are given


@dataclass
class Try:
    """A try that was checked: its question, its pairs, and what is known of earlier ones.

    Args:
        id: Name of its folder.
        question: The question.
        key: Fingerprint of baseline, change and metric.
        pairs: The pairs.
        askings: How often the question was asked, this time included.
        known: All runs.
        notes: Lines about the way in which it is asked.
    """

    id: str
    question: Question
    key: str
    pairs: Pairs
    askings: int
    known: Sequence[Run] = ()
    notes: list[str] = field(default_factory=list)
    is_stopped: bool = False
    gpus: float = 0.0
    confirms: tuple[str, ...] = ()
    limit: str = ""  # that was reached
    launch: tuple[str, ...] = ()
    is_without_forecast: bool = False

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.pairs.folder

    def effect(self) -> float | None:
        """The effect in units of the metric; None before the baseline has a value to which it is relative."""
        return self._resolve(self.question.effect, lambda outcome: outcome.value)

    def tolerance(self, constraint: Constraint) -> float | None:
        """The tolerance of a constraint in units of its metric; None before the baseline has a value."""
        return self._resolve(constraint.tolerance, lambda outcome: outcome.others[constraint.metric])

    def _resolve(self, size: Size, value: Callable[[Outcome], float]) -> float | None:
        reference = next((value(pair[0]) for pair in self.pairs.complete() if not pair[0].is_lost), None)
        if reference is None:
            return None if size.is_relative else size.value
        return size.resolve(reference) or None  # of a baseline of 0, no share is known

    def verdict(self, count: int | None = None) -> Verdict:
        """What the complete pairs show, or the first ``count`` of them."""
        pairs, effect = self.pairs.complete()[:count], self.effect()
        if effect is None:  # no run of the baseline has a value
            word = "undecided" if len(pairs) == self.question.budget else "continue"
            return Verdict(word, len(pairs), math.nan, -math.inf, math.inf)  # type: ignore[arg-type]
        margin = effect * self.question.margin.value / self.question.effect.value
        baseline, change = ([self.question.turned(pair[side].value) for pair in pairs] for side in (0, 1))
        constraints = [
            (
                [turned(baseline, constraint) for baseline, _ in pairs],
                [turned(change, constraint) for _, change in pairs],
                self.tolerance(constraint) or 0.0,
            )
            for constraint in self.question.constraints
        ]
        return decide(baseline, change, effect, self.question.budget, margin, constraints=constraints)

    def scale(self, metric: str | None = None, mode: Mode | None = None) -> Scale:
        """How differences of a metric are written, by default of the one that decides, more being better."""
        metric, mode = metric or self.question.metric, mode or self.question.mode
        if metric in SCALES:
            return SCALES[metric]
        values = [side.of(metric) for pair in self.pairs.complete() for side in pair if not side.is_lost]
        values = values or [run.metrics[metric] for run in self.known if metric in run.metrics]
        return Scale.of(metric, mode, values or [math.inf])


def turned(outcome: Outcome, constraint: Constraint) -> float:
    """The value of a constraint's metric with the sign that makes more better; NaN if the run has lost its pair."""
    value = math.nan if outcome.is_lost else outcome.others[constraint.metric]
    return value if constraint.mode == "max" else -value


def prepare(project: Project, request: Request) -> Try:
    """Find baseline and change, and fix the seeds of the pairs.

    Raises:
        ConfigError: Baseline and change are the same, or one of them cannot be composed.
    """
    question = request.question
    runs = runs_folder(project, request)
    place = runs / TRIES
    label, overrides, version = find_baseline(project, request.against, str(runs))
    changes, other = parse_change(project, request.change)
    overrides = [*overrides, *split_override(question, request)]
    trust.make_own_folder(place)
    baseline = make_side(project, place, label, [*overrides, *request.common], version)
    name = " ".join(request.change) or "no change"
    change = make_side(project, place, name, [*overrides, *request.common, *changes], other or version)
    first = read_first_seed(baseline, request)
    check_sides(baseline, change, first)
    known, entries = find_runs(runs), ledger.read_entries(runs)
    key = fingerprint([side_key(baseline, first), side_key(change, first), question.metric])
    tried = find_try(
        place,
        Try("", question, key, Pairs(place, baseline, change, [], question.metric), 1, known),
        first,
        request,
        entries,
    )
    tried.notes += split_notes(tried)
    tried.pairs.parallel, tried.gpus, tried.confirms = request.parallel, request.gpus or 0.0, request.confirms
    tried.launch = request.launch
    return tried


def runs_folder(project: Project, request: Request) -> Path:
    """The folder of all runs."""
    runs = str(read_overrides(project, [o for o in request.common if o.startswith("runs=")]).runs)
    refuse({"runs": runs}, "the pairs of a try are in a folder")
    return Path(runs).absolute()


def split_override(question: Question, request: Request) -> list[str]:
    """The override that ``split=`` stands for."""
    values = {"by-seed": "data.seed=${seed}", "fixed": f"data.seed={request.seed or 0}"}
    return [values[question.split]] if question.split else []


def read_first_seed(baseline: Side, request: Request) -> int:
    """Seed of the first pair: that of the arguments, or of the configuration."""
    cfg = read_overrides(baseline.project, list(baseline.overrides))
    return int(cfg.seed) if request.seed is None else request.seed


def check_sides(baseline: Side, change: Side, seed: int) -> None:
    """Compose both configurations.

    Raises:
        ConfigError: One of them has a mistake, or they are the same.
    """
    is_same = baseline.settings(seed) == change.settings(seed)
    if is_same and baseline.project == change.project:
        raise ConfigError(
            f"{change.label}: the same as {baseline.label}; give overrides, a git ref or a patch", kind="conflict"
        )


def side_key(side: Side, seed: int) -> list[Any]:
    """What identifies a side: its code and its settings."""
    code = side.code if side.is_identified else str(side.project.root)
    return [code, side.version.commit, hashlib.sha256(side.version.patch).hexdigest(), side.settings(seed)]


def fingerprint(value: Any) -> str:
    """A short hash of plain values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def find_try(place: Path, draft: Try, first: int, request: Request, entries: Sequence[Entry]) -> Try:
    """The try of a question: the one that was begun, or a new one with seeds that the question has not used.

    Each time that a question is asked again, with another effect or budget or by ``--again``, has fresh seeds: the
    errors of all times add up, but seeds that are looked at twice would prove nothing.
    """
    question, pairs = draft.question, draft.pairs
    asked = {key: value for key, value in asdict(question).items() if key not in ("split", "constraints")}
    if question.constraints:
        asked["not_worse"] = list(map(str, question.constraints))
    earlier = [entry for entry in entries if entry.question == draft.key]
    begun = sorted(read_states(place, draft.key), key=lambda state: state["asking"])
    for state in reversed(begun):
        ended = next((entry for entry in earlier if entry.id == state["id"]), None)
        is_open = ended is None or ended.is_stopped
        if state["asked"] == asked and state["first"] == first and (is_open or not request.again):
            return opened(draft, place / state["id"], state["seeds"], state["asking"])
    used = {seed for state in begun for seed in state["seeds"]}
    wanted = pairs.change.settings(first)
    used |= {run.settings["seed"] for run in draft.known if is_seen(run, pairs.change, wanted)}
    seeds = fresh_seeds(first, question.budget, used.__contains__)
    asking = len(begun) + 1
    id = fingerprint([draft.key, asked, first, asking])
    state = {"id": id, "key": draft.key, "asked": asked, "asking": asking, "first": first, "seeds": seeds}
    (place / id).mkdir(parents=True, exist_ok=True)
    write_text(place / id / STATE, to_json(state | {"created": now()}, indent=2) + "\n")
    return opened(draft, place / id, seeds, asking)


def opened(draft: Try, folder: Path, seeds: list[int], asking: int) -> Try:
    """A try in its folder."""
    pairs, is_final = draft.pairs, draft.question.is_final
    overrides = (*OVERRIDES, f"test={str(is_final).lower()}")
    constraints = draft.question.metrics[1:]
    made = Pairs(
        folder, pairs.baseline, pairs.change, seeds, pairs.metric, overrides, draft.known, constraints=constraints
    )
    return Try(folder.name, draft.question, draft.key, made, asking, draft.known)


def read_states(place: Path, key: str) -> list[dict[str, Any]]:
    """The tries of a question that were begun."""
    found = [(file.parent.name, parse_state(file)) for file in sorted(place.glob(f"*/{STATE}"))]
    return [state for name, state in found if state.get("key") == key and state.get("id") == name]


def is_seen(run: Run, change: Side, wanted: dict[str, Any]) -> bool:
    """Whether a run outside of tries is one of the change, whose seed may have suggested the question."""
    if TRIES in Path(run.folder).parts or not isinstance(run.settings.get("seed"), int):
        return False
    try:
        return has_settings(read_record(Path(run.folder)).get("config") or {}, wanted)
    except ConfigError:
        return False


def split_notes(tried: Try) -> list[str]:
    """What the configuration says of the split of the data."""
    side = tried.pairs.baseline
    data = read_overrides(side.project, list(side.overrides)).written.get("data") or {}
    if "seed" not in data:
        return ["note: data has no seed, so all pairs share one split: the verdict is one for this split"]
    if data["seed"] != "${seed}":
        return [
            f"note: data.seed={data['seed']}: all pairs share one split, so the verdict is one for it; split=by-seed "
            "draws one for each pair, which also halves the spread of changed architectures"
        ]
    return []


def now() -> str:
    """This time in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
