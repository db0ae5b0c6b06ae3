"""``boltcutter why``: replays a step of a run, and says what causes it: what removes it when it is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from boltcutter.assembly.overrides import load_run_config
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.config.values import split_overrides
from boltcutter.formatting import aligned
from boltcutter.project import Project
from boltcutter.replay import page
from boltcutter.replay.job import (
    FOREIGN_SECONDS,
    Done,
    Job,
    ReplayError,
    Worker,
    changed_data,
    checkpoints,
    folder_of,
    ledgers_of,
    newest_before,
    ranks_of,
    seconds_given,
    settings_before,
    surroundings,
    worker,
)
from boltcutter.replay.question import KINDS, Question, ask, describe
from boltcutter.replay.scores import HIGH, USUAL, WINDOW, robust_z
from boltcutter.run.folder import is_own, read_record
from boltcutter.run.ledger import Ledger, first_difference

AFTER = 20  # steps after the step, at which the loss is compared once more
FURTHER = 20  # steps before it, from which another learning rate is tried
MAX_FURTHER = 2000  # steps that this may replay
LOWER = 0.1  # the learning rate that is tried, relative to that of the run
MOST_GROWN = 10.0  # of a loss or gradient, relative to the largest of the steps before
MOST_SUSPECTS = 8  # samples that are left out together


@dataclass
class Change:
    """What a change of the step would have done.

    Args:
        name: The change.
        loss: Loss of the step.
        gradient_norm: Norm of its gradients.
        after_1: Loss of the next step.
        after_20: Loss ``AFTER`` steps later.
        removes: Whether what is asked about is gone; None: the change could not be tried.
        note: Why it could not.
    """

    name: str
    loss: float | None = None
    gradient_norm: float | None = None
    after_1: float | None = None
    after_20: float | None = None
    removes: bool | None = None
    note: str = ""


@dataclass
class Answer:
    """What ``why`` found.

    Args:
        run: Folder of the run.
        step: The step.
        kind: ``nonfinite``, ``error``, ``spike`` or ``step``.
        cause: ``sample``, ``weights``, ``learning_rate``, ``precision``, ``none``, or empty where nothing is unusual.
        lines: The answer in words.
        replayed: From which step on.
        exact: Whether each row of the ledger on the way was equal.
        exactness: The same in words.
        values: Loss, gradient norm and learning rate of the step, and their scores.
        samples: The samples that are the cause, or else the most unusual ones.
        layers: Norms of each layer.
        origin: What is not finite first.
        changes: What each change would have done.
    """

    run: str
    step: int
    kind: str
    cause: str = ""
    lines: list[str] = field(default_factory=list)
    replayed: int = 0
    exact: bool = True
    exactness: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    origin: str | None = None
    changes: list[Change] = field(default_factory=list)


def why_command(project: Project, overrides: list[str]) -> Answer:
    """Print why a step of a run is as it is.

    Args:
        project: Whose code is run.
        overrides: ``run=<folder>``, ``step=<number>|spike|nonfinite|error|last``, ``html=<file>`` for a page, and
            ``timeout=<seconds>`` of each replay.

    Raises:
        ConfigError: There is no such run or step, or it cannot be replayed.
    """
    words = [f"step={word}" if word in KINDS else word for word in overrides]
    given, rest = split_overrides(words, "run", "step", "html", "timeout")
    if rest:
        raise ConfigError(
            f"{rest[0]}: not an argument of why; use run=<folder> [step=<number>|{'|'.join(KINDS)}] [html=<file>] "
            "[timeout=<seconds>]"
        )
    seconds, folder = seconds_given(given.get("timeout")), folder_of(given.get("run"))
    record = read_record(folder)
    question = ask(folder, record, given.get("step"))
    try:
        own = is_own(folder)
        limit = seconds or (None if own else FOREIGN_SECONDS)
        with worker(surroundings(project, record, own=own), record, limit) as started:
            answer = Case(project, folder, question, started).answer()
    except ReplayError as error:
        raise ConfigError(f"run={folder}: it cannot be replayed: {error}") from error
    print(*(printable(line) for line in text(answer)), sep="\n")
    if html := given.get("html"):
        print(f"page: {page.write_page(asdict(answer), Path(html))}")
    return answer


class Case:
    """A step of a run, and its replays.

    Args:
        project: Whose code is run.
        folder: Of the run.
        question: The step.
        started: Process of the replays.
    """

    def __init__(self, project: Project, folder: Path, question: Question, started: Worker) -> None:
        self.folder, self.question, self.worker = folder, question, started
        self.saved = checkpoints(load_run_config(project, folder).place)
        self.record = read_record(folder)
        self.devices = ranks_of(self.record)[-1]
        self.before = settings_before(self.record, question.step, own=is_own(folder))
        self.ledgers = ledgers_of(folder, self.record)
        self.earlier = {
            name: np.concatenate([self._before(ledger, name) for ledger in self.ledgers])
            if self.ledgers
            else np.zeros(0)
            for name in ("loss", "gradient_norm")
        }

    def _before(self, ledger: Ledger, name: str) -> Any:
        return ledger.rows[name][ledger.rows["step"] < self.question.step][-WINDOW:]

    def job(self, **options: Any) -> Job:
        """A replay of this run."""
        values, unset = self.before
        return Job(str(self.folder), "", devices=self.devices, values=values, unset=unset, **options)

    def answer(self) -> Answer:
        """Replay the step, look into it, and try what may have caused it."""
        step = self.question.step
        begin, checkpoint = newest_before(self.saved, step)
        first = self.worker.run(self.job(last=step, checkpoint=checkpoint, save_before=step, inspect=step))
        found = Answer(str(self.folder), step, self.question.kind, replayed=begin)
        found.exact, found.exactness = self.prove(first, begin)
        found.values = self.values(first)
        found.layers = first.ranks[0]["layers"]
        found.origin = next((rank["origin"] for rank in first.ranks if rank["origin"]), None)
        rows = [row for rank in first.ranks for row in rank["rows"]]
        for row in rows:
            row["loss"], row["gradient_norm"] = float(row["loss"]), float(row["gradient_norm"])
        before = first.ranks[0]["saved"] or checkpoint
        self.is_unusual(first)
        if self.question.kind == "error":
            found.lines.append(f"training ended with {printable(first.error or self.question.error)}")
        if self.question.kind == "step":
            found.samples = by_size(rows)[:3]
            found.lines = [
                "nothing is unusual: neither its loss nor its gradient is far from those of the steps before"
            ]
            return found
        if first.ranks[0]["ended"] >= step and self.removed(first) is not False:
            found.lines.append("the replayed step does not show it, so it was not caused by what a run records")
            return found
        if self.question.kind == "error" and not any(rank.get("whole") for rank in first.ranks):
            self.conclude_without_batch(found, first)
            return found
        suspects = self.suspects(rows)
        found.changes.append(self.row("as it was", before))
        self.try_samples(found, rows, suspects, before)
        self.try_settings(found, before)
        self.conclude(found, first, rows, suspects)
        return found

    def prove(self, done: Done, begin: int) -> tuple[bool, str]:
        """Whether each row of the replay equals that of the run."""
        if not self.ledgers:
            return False, "not compared, as the run has no steps.ledger"
        compared = 0
        for rank, (ours, theirs) in enumerate(zip(done.ledgers, self.ledgers, strict=False)):
            if different := first_difference(theirs, ours, rank):
                return False, f"not exact from {different} on: {self._why_inexact(done, begin)}"
            compared = max(compared, len(np.intersect1d(ours.rows["step"], theirs.rows["step"])))
        since = f"the checkpoint of step {begin}" if begin else "the beginning"
        return True, f"replayed from {since}: {compared} steps, all equal to the ledger"

    def _why_inexact(self, done: Done, begin: int) -> str:
        if len(set(ranks := ranks_of(self.record))) > 1:
            return f"attempts of the run had {', '.join(map(str, ranks))} ranks; it is replayed with {self.devices}"
        attempts = self.record.get("attempts") or [{}]
        for attempt in attempts:
            at, changed = attempt.get("resumed_at"), attempt.get("changed")
            if (
                changed
                and isinstance(at, int)
                and (begin < at < self.question.step or (self.question.step <= at and not any(self.before)))
            ):
                return f"after step {at} it was resumed with another {' and '.join([*changed][:3])}"
        if found := changed_data(self.record, done):
            return found
        attempt = attempts[-1]
        if attempt.get("deterministic") is False:
            return f"{attempt.get('device')} without trainer.deterministic=true"
        if inexact := self.record.get("inexact"):
            return one_line(inexact[0])
        return "code, packages, data or hardware are not those of the run"

    def values(self, done: Done) -> dict[str, Any]:
        """Loss, gradient norm and learning rate of the step, of the run or else of its replay."""
        found = describe(self.question, self.ledgers)
        whole = [rank.get("whole") or {} for rank in done.ranks]
        batches = [loss for rank in done.ranks for loss in rank["losses"].get(str(self.question.step), ())]
        norm = whole[0].get("gradient_norm") if len(batches) == 1 else math.nan  # that of a mean is not known
        for name, value in (("loss", done.losses().get(self.question.step)), ("gradient_norm", norm)):
            if name not in found and value is not None and not whole[0].get("error"):
                found[name] = {"value": float(value), "z": float(robust_z([float(value)], self.earlier[name])[0])}
        return found

    def is_unusual(self, done: Done) -> None:
        """Note which of loss and gradient are unusual at the step."""
        step = self.question.step
        self.unusual = [
            name
            for name, value in (("loss", done.losses().get(step)), ("gradient_norm", done.norms().get(step)))
            if value is not None and robust_z([value], self.earlier[name])[0] >= HIGH
        ]

    def removed(self, done: Done, later: int = 0) -> bool | None:
        """Whether what is asked about is gone in a replay, or some steps later; None if it did not get that far."""
        step = self.question.step + later
        if self.question.kind == "error":
            return int(done.ranks[0]["ended"]) >= step
        loss = done.losses().get(step)
        if loss is None:
            return None
        norm = done.norms().get(step, math.nan)
        if self.question.kind == "nonfinite":
            return done.ranks[0]["ended"] >= step and math.isfinite(loss) and not math.isinf(norm)
        found = {"loss": loss, "gradient_norm": norm}
        return all(robust_z([found[name]], self.earlier[name])[0] < USUAL for name in self.unusual or ["loss"])

    def suspects(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Samples that may be the cause: not finite alone, or far from the others of their step."""
        bad = [row for row in rows if not (math.isfinite(row["loss"]) and math.isfinite(row["gradient_norm"]))]
        if self.question.kind == "error":
            bad = [row for row in rows if row["error"]]
        if self.question.kind in ("nonfinite", "error"):
            return bad if len(bad) <= min(MOST_SUSPECTS, len(rows) // 2) else []
        scores: Any = (
            np.max([robust_z([r[n] for r in rows], [r[n] for r in rows]) for n in ("loss", "gradient_norm")], axis=0)
            if rows
            else []
        )
        for row, score in zip(rows, scores, strict=True):
            row["z"] = float(score)
        return sorted((row for row in rows if row["z"] >= USUAL), key=lambda row: -row["z"])[:3]

    def row(self, name: str, checkpoint: str | None, last: int = AFTER, **options: Any) -> Change:
        """Replay the step with a change, and some steps after it."""
        step = self.question.step
        try:
            done = self.worker.run(self.job(last=step + last, checkpoint=checkpoint, **options))
        except ReplayError as error:
            return Change(name, note=one_line(error, 160))
        losses, removed = done.losses(), self.removed(done, later=1 if options.get("delays") else 0)
        note = "" if removed is not None else done.error.partition("\n")[0][:160]
        loss, norm = losses.get(step), done.norms().get(step)
        return Change(name, loss, norm, losses.get(step + 1), losses.get(step + AFTER), removed, note)

    def try_samples(
        self, found: Answer, rows: list[dict[str, Any]], suspects: list[dict[str, Any]], before: str | None
    ) -> None:
        """Leave out suspicious samples, together and then fewer, and as many others."""
        if not suspects:
            return
        tried = [suspects] if self.question.kind != "spike" else [suspects[:n] for n in range(1, len(suspects) + 1)]
        others = [row for row in rows if row not in suspects]
        middle = float(np.median([row["loss"] for row in others])) if others else 0.0
        others.sort(key=lambda row: abs(row["loss"] - middle))
        self.culprits: list[dict[str, Any]] = []
        self.harmless: list[dict[str, Any]] = []  # which do no harm in another step
        for each in tried:
            change = self.without(each, before)
            found.changes.append(change)
            if change.removes:
                control = others[: len(each)]
                if len(control) == len(each):
                    check = self.without(control, before, " instead")
                    found.changes.append(check)
                    if check.removes:
                        return
                name = f"without {named(each)}, {'its' if len(each) == 1 else 'their'} batch one step later"
                options = {"alter": self.question.step, "without": places(each), "delays": True}
                later = self.stays(self.row(name, before, last=1, **options))
                found.changes.append(later)
                self.culprits, self.harmless = ([], each) if later.removes else (each, [])
                return

    def without(self, rows: list[dict[str, Any]], before: str | None, more: str = "") -> Change:
        """Leave samples out of the step."""
        name = f"without {named(rows)}{more}"
        return self.stays(self.row(name, before, alter=self.question.step, without=places(rows)), is_next=False)

    def try_settings(self, found: Answer, before: str | None) -> None:
        """Compute in float64, and with a lower learning rate from some steps before on."""
        found.changes.append(self.stays(self.row("in float64", before, double=True)))
        step = self.question.step
        at, checkpoint = newest_before(self.saved, max(1, step - FURTHER + 1))
        name = f"learning rate × {LOWER:g} from step {at + 1} on"
        if step - at > MAX_FURTHER:
            found.changes.append(Change(name, note=f"not tried, as it is {step - at} steps"))
        elif at + 1 < step:
            found.changes.append(self.stays(self.row(name, checkpoint, lr_factor=LOWER)))

    def stays(self, change: Change, *, is_next: bool = True) -> Change:
        """A change, which removes nothing if loss and gradient are only finite, but grow all the same.

        Args:
            change: What was tried.
            is_next: Whether the loss of the next step counts, too: a sample that is left out does not alter that batch.
        """
        after = [loss for loss in (change.after_1, change.after_20) if loss is not None]
        # The first step has none before it.
        losses = self.earlier["loss"] if len(self.earlier["loss"]) else np.asarray(after)
        seen = [loss for loss in (change.loss, change.after_1 if is_next else None) if loss is not None]
        norms = [norm for norm in (change.gradient_norm,) if norm is not None and not math.isnan(norm)]
        stays = _all_usual(seen, losses) and _all_usual(norms, self.earlier["gradient_norm"])
        change.removes = change.removes and stays
        return change

    def conclude(self, found: Answer, first: Done, rows: list[dict[str, Any]], suspects: list[dict[str, Any]]) -> None:
        """Name the cause that a replay has shown, or say that there is none."""
        bad: list[str] = next((rank["bad"] for rank in first.ranks if rank["bad"]), [])
        removing = {change.name.partition(" ")[0] for change in found.changes if change.removes}
        culprits = getattr(self, "culprits", [])
        found.samples = culprits or by_size(rows)[:3]
        shared = {"learning": "with a lower learning rate", "in": "in float64"}  # then the sample is only the first
        self.shared = [text for word, text in shared.items() if word in removing] if culprits else []
        what = "the spike" if self.question.kind == "spike" else "it"
        if bad:
            found.cause = "weights"
            found.lines.append(
                f"before the step, {', '.join(bad[:3])} {'is' if len(bad) == 1 else 'are'} not finite already"
            )
        elif culprits and not self.shared:  # else the sample shows it first, as in weights that are too large
            found.cause = "sample"
            verb = "is" if len(culprits) == 1 else "are"
            found.lines.append(
                f"{named(culprits)} {verb} the cause: without {'it' if len(culprits) == 1 else 'them'}, {self.gone()}"
            )
            found.lines += [
                f"{named([row])}: {'; '.join(row.get('values') or ['nothing unusual in its values'])}"
                + (f"; alone it raises {printable(row['error'])}" if row["error"] else "")
                for row in culprits
            ]
            found.lines.append(
                f"remedy that was tried: correct or remove {'this sample' if len(culprits) == 1 else 'these samples'}"
            )
        else:
            wholes = [rank.get("whole") or {} for rank in first.ranks]
            reason = next((whole["reason"] for whole in wholes if whole.get("reason")), "")
            found.lines.append(f"no single sample: {self.no_sample(rows, suspects, reason)}")
            if "in" in removing:
                found.cause = "precision"
                found.lines.append(
                    f"in float64, {self.gone()}: a number leaves the range or the precision of the run's type"
                )
                found.lines.append(
                    "remedy that was tried: trainer.precision=64-true; better, compute that operation in another way"
                )
            elif "learning" in removing:
                found.cause = "learning_rate"
                lower = next(change.name for change in found.changes if change.name.startswith("learning"))
                found.lines.append(f"with {lower}, {self.gone()}")
                found.lines.append("remedy that was tried: lower the learning rate")
            else:
                found.cause = "none"
                found.lines.append(f"no change that was tried removes {what}")
        if found.origin and not culprits:
            found.lines.append(f"first: {found.origin}")

    def conclude_without_batch(self, found: Answer, first: Done) -> None:
        """Say which samples cannot be read, or that no batch has caused the error."""
        each = [row for rank in first.ranks for row in rank["unreadable"]]
        found.samples = [{"loss": math.nan, "gradient_norm": math.nan, **row} for row in each]
        if not found.samples:
            found.cause = "none"
            found.lines.append(f"it is not raised by a batch of training; {first.ranks[0]['ended']} steps were done")
            return
        found.cause = "sample"
        found.lines += [f"{named([row])} cannot be read: {printable(row['error'])}" for row in found.samples]

    def gone(self) -> str:
        """What a change has done, in words."""
        if self.question.kind == "error":
            return "the step is done"
        if self.question.kind == "nonfinite":
            return "loss and gradients are finite"
        return f"{' and '.join(name.replace('_', ' ') for name in self.unusual) or 'loss'} of the step are as before"

    def no_sample(self, rows: list[dict[str, Any]], suspects: list[dict[str, Any]], reason: str) -> str:
        """Why no sample is named."""
        if reason:
            return f"they could not be computed alone ({reason})"
        bad = [row for row in rows if not math.isfinite(row["loss"])]
        if self.shared:
            return f"without {named(self.culprits)} {self.gone()}, but also {' and '.join(self.shared)}"
        if harmless := getattr(self, "harmless", []):
            return f"without {named(harmless)} {self.gone()}, but so they are with the same batch one step later"
        if suspects:
            return f"without {named(suspects)} it is there, too, or without others it is gone as well"
        if self.question.kind == "error":
            count = sum(bool(row["error"]) for row in rows)
            return f"{count} of {len(rows)} samples raise it alone" if count else "none raises it alone"
        if self.question.kind == "nonfinite":
            return f"{len(bad)} of {len(rows)} samples are not finite alone" if bad else "each one alone is finite"
        return "none is far from the others of its batch"


def _all_usual(values: Sequence[float], earlier: Any) -> bool:
    """Whether values are finite, and none is much larger than those of the steps before."""
    known = np.abs(earlier[np.isfinite(earlier)])
    most = MOST_GROWN * float(known.max()) if len(known) else math.inf
    return all(math.isfinite(value) and abs(value) <= most for value in values)


def by_size(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples, those with the largest losses first."""
    return sorted(rows, key=lambda row: -row["loss"] if math.isfinite(row["loss"]) else -math.inf)


def places(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Rank, number of the batch in the step, and row of samples."""
    return [(row["rank"], row["batch"], row["row"]) for row in rows]


def named(rows: Sequence[dict[str, Any]]) -> str:
    """Samples by their index in the data, or else by their place in the batch."""
    names = [name_of(row) for row in rows]
    return f"sample {names[0]}" if len(names) == 1 else f"samples {', '.join(names[:MOST_SUSPECTS])}"


def name_of(row: dict[str, Any]) -> str:
    """The name of a sample."""
    if "index" in row:
        return f"{row['index']} ({row['where']})" if row.get("where") else str(row["index"])
    return f"{row['row']} of the batch of rank {row['rank']}"


def text(answer: Answer) -> list[str]:
    """The answer for a terminal."""
    shown = [f"{name.replace('_', ' ')} {each['value']:.6g}{score(each['z'])}" for name, each in answer.values.items()]
    lines = [f"step {answer.step}: {', '.join(shown)}", answer.exactness, *answer.lines]
    if answer.cause != "sample":
        lines += [f"largest loss: sample {name_of(row)}: {row['loss']:.6g}" for row in answer.samples[:3]]
    unusual = [
        (layer["layer"], name, layer[name], float(z))
        for layer in answer.layers
        for name, z in layer["z"].items()
        if float(z) >= HIGH
    ]
    for layer, name, value, z in sorted(unusual, key=lambda each: -each[3])[:3]:
        lines.append(f"layer {layer}: {name} {float(value):.4g}{score(z)}")
    if answer.changes:
        lines.append("")
        header = ("change", "loss", "gradient", "1 step later", f"{AFTER} steps later", "removes it")
        body = [
            (
                c.name,
                *(number(v) for v in (c.loss, c.gradient_norm, c.after_1, c.after_20)),
                c.note or ("yes" if c.removes else "no"),
            )
            for c in answer.changes
        ]
        lines += aligned([header, *body])
    return lines


def number(value: float | None) -> str:
    """A number of the table; a dash where it is not known."""
    return "–" if value is None else f"{value:.5g}"


def score(z: float) -> str:
    """A robust z-score, where it is unusual."""
    return f" (z {z:.0f})" if abs(z) >= USUAL and math.isfinite(z) else ""
