"""``boltcutter bisect``: replays two runs up to the step at which they begin to differ, and says where and why."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from boltcutter.assembly.overrides import load_run_config
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.config.values import split_overrides
from boltcutter.extend import NegativeResult
from boltcutter.project import Project
from boltcutter.replay.factors import Factor, find_factors
from boltcutter.replay.job import (
    FOREIGN_SECONDS,
    Done,
    Job,
    ReplayError,
    Surroundings,
    Workers,
    changed_data,
    checkpoints,
    folder_of,
    ledgers_of,
    ranks_of,
    seconds_given,
    settings_before,
    surroundings,
    taken,
    unrestored,
    with_values,
)
from boltcutter.replay.traces import Place, first_places, read_traces
from boltcutter.run import lineage, snapshot, trust
from boltcutter.run.folder import is_own, read_record
from boltcutter.run.foreign_references import check_references
from boltcutter.run.ledger import Difference, Ledger, first_difference, mean_over_ranks

SIDES = ("A", "B")
INHERENT = ("data", "packages", "hardware", "environment")  # what is equal in both replays on one machine
TRIED = ("setting", "code", "threads", "packages", "environment")  # what A can have from B
MOST_TRIED = 12  # factors
MAX_STEPS = 2000  # which are replayed once more from the beginning for each of them
TOLERANCE = 1e-4  # of what other numbers of ranks round differently
ROUNDING = {"loss": TOLERANCE, "gradient_norm": TOLERANCE}
RANKS = ("trainer.devices", "trainer.num_nodes", "trainer.strategy", "choices.trainer")
SHOWN = 12  # samples in a line
OF_ORDER = frozenset({"gradient", "gradient_norm"})  # columns that the order of parameters in an optimizer changes


@dataclass
class Answer:
    """What ``bisect`` found.

    Args:
        runs: Folders of both runs.
        equal: Whether no step differs.
        step: The first optimizer step that differs, from 1.
        epoch: In which it is.
        columns: Of the ledger, which differ at that step.
        begin: Step of the checkpoint from which both were replayed; 0: from the beginning.
        exact: Whether both replays were equal to the ledgers of the runs before the step at which these differ.
        places: What of the step differs first; several if none of them follows from another one.
        causes: What of the other run makes this difference disappear.
        factors: All that differs in the records; what cannot change a step is last.
        lines: What else is to be said.
    """

    runs: tuple[str, str]
    equal: bool = False
    step: int | None = None
    epoch: int | None = None
    columns: list[str] = field(default_factory=list)
    begin: int = 0
    exact: bool = True
    places: list[Place] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def bisect_command(project: Project, overrides: list[str]) -> Answer:
    """Print where and why two runs begin to differ; the exit status is 1 if they do.

    Args:
        project: Whose code is run.
        overrides: ``run=<folder> with=<folder>``, ``python_a=`` and ``python_b=``, the interpreters of their
            environments, and ``timeout=<seconds>`` of each replay.

    Raises:
        ConfigError: There is no such run, or one cannot be replayed.
    """
    given, rest = split_overrides(overrides, "run", "with", "python_a", "python_b", "timeout")
    if rest:
        raise ConfigError(
            f"{rest[0]}: not an argument of bisect; use boltcutter bisect <run> <run> [--python-a=<python>] "
            "[--python-b=<python>] [timeout=<seconds>]"
        )
    seconds = seconds_given(given.get("timeout"))
    pythons = [given.get("python_a"), given.get("python_b")]
    for name, python in zip(("--python-a", "--python-b"), pythons, strict=True):
        if python and not Path(python).is_file():
            raise ConfigError(f"{name}={python}: no such file; give the interpreter of an environment")
    folders = folder_of(given.get("run")), folder_of(given.get("with"), "with")
    limit = seconds or (None if all(map(is_own, folders)) else FOREIGN_SECONDS)
    with ExitStack() as stack:
        answer = Bisection(project, folders, pythons, Workers(stack, limit)).answer()
    print(*(printable(line) for line in text(answer)), sep="\n")
    if not answer.equal:
        raise NegativeResult(answer)
    return answer


class Bisection:
    """Two runs, and their replays.

    Args:
        project: Whose code is run.
        folders: Of both runs.
        pythons: Interpreters of their environments; None: the current one.
        workers: Processes of the replays.
    """

    def __init__(
        self,
        project: Project,
        folders: tuple[Path, Path],
        pythons: Sequence[str | None],
        workers: Workers,
    ) -> None:
        self.project, self.folders, self.pythons, self.workers = project, folders, pythons, workers
        self.cfgs = load_run_config(project, folders[0]), load_run_config(project, folders[1], setting="with")
        self.records = read_record(folders[0]), read_record(folders[1])
        self.own = [is_own(folder) for folder in folders]
        self.ledgers = [ledgers_of(*each) for each in zip(folders, self.records, strict=True)]
        self.devices = [ranks_of(record)[-1] for record in self.records]
        self.found = Answer((str(folders[0]), str(folders[1])))
        self.found.factors = find_factors(self.cfgs, folders, self.records, project.root)
        self.before: list[tuple[dict[str, Any], list[str]]] = [({}, []), ({}, [])]  # settings that a run had at first
        self.shared = list[str]()  # keys of settings that A has from B in each replay
        self.unknown_code = False  # of a run that was in no repository
        self.skipped: frozenset[str] = frozenset()  # columns of the ledger
        self._codes: dict[tuple[Any, ...], Project] = {}

    def answer(self) -> Answer:
        """Find the first step, what of it differs first, and what causes it."""
        found = self.found
        if missing := [str(folder) for folder, each in zip(self.folders, self.ledgers, strict=True) if not each]:
            raise ConfigError(
                f"{missing[0]}: it has no steps.ledger, so its steps are not known; train with callback.ledger"
            )
        if self.devices[0] != self.devices[1]:
            self.answer_for_other_ranks()
            return found
        recorded = self.first(*self.ledgers)
        if recorded is None:
            self.conclude_equal()
            return found
        self.ask_about(recorded)
        found.lines.append(f"the ledgers differ first at {recorded}")
        found.begin, saved = self.common_state(recorded.step)
        known = self.ledgers[0][0].rows["step"]  # increasing
        before = int(known[at - 1]) if (at := int(np.searchsorted(known, recorded.step))) else 0
        steps = sorted({before, recorded.step} - {0, found.begin})
        done = [self.replay(side, saved[side], recorded.step, steps) for side in (0, 1)]
        early = [side for side in (0, 1) if self.is_early(side, done[side], recorded.step)]
        if len(early) == 1:  # as the settings with which it was resumed are not those of its first steps
            saved = self.state_of_other(1 - early[0], saved[1 - early[0]], recorded.step, before)
            done = [self.replay(side, saved[side], recorded.step, [recorded.step]) for side in (0, 1)]
            early = [side for side in (0, 1) if self.is_early(side, done[side], recorded.step)]
            steps = [recorded.step]
        found.exact = not early
        self.prove(done)
        first = self.first(done[0].ledgers, done[1].ledgers)
        if first is None:
            self.conclude_not_repeated(done, recorded.step)
            return found
        found.step, found.epoch, found.columns = first.step, first.epoch, list(first.columns)
        if first.step not in steps:  # weights are hashed at each step of a replay
            done = [self.replay(side, saved[side], first.step, [first.step]) for side in (0, 1)]
        found.places = self.places(*done)
        if not found.places and OF_ORDER.issuperset(first.columns) and not self.skipped:
            return self.answer_without_order()
        self.find_causes(done[1], saved[0])
        return found

    def answer_without_order(self) -> Answer:
        """Compare once more without what the order of the gradients changes, as no value of the step differs."""
        self.skipped = OF_ORDER
        self.found = Answer(self.found.runs, factors=self.found.factors)
        self.found.lines.append(
            "gradients are in another order, as of parameters in an optimizer; without their norm and digest:"
        )
        return self.answer()

    def ask_about(self, recorded: Difference) -> None:
        """Note the step, and with which settings and in which surroundings each run has done it."""
        found = self.found
        found.step, found.epoch, found.columns = recorded.step, recorded.epoch, list(recorded.columns)
        self.before = [
            settings_before(record, recorded.step, own=own) for record, own in zip(self.records, self.own, strict=True)
        ]
        for label, record, own in zip(SIDES, self.records, self.own, strict=True):
            if not own and any(settings_before(record, recorded.step, own=True)):
                found.lines.append(
                    f"{label}: replayed with its last settings, as you have not signed those before it was resumed; "
                    f"{trust.REMEDY}"
                )
        if any(any(each) for each in self.before):
            first, second = (with_values(cfg, *each) for cfg, each in zip(self.cfgs, self.before, strict=True))
            self.cfgs = first, second
            found.factors = find_factors(self.cfgs, self.folders, self.records, self.project.root)
        self.given = [self.surroundings_of(side) for side in (0, 1)]

    def answer_for_other_ranks(self) -> None:
        """Compare runs with different numbers of ranks: the means over the ranks, then A on as many ranks as B."""
        found, (own, theirs) = self.found, self.devices
        who = f"A has {own} ranks and B {theirs}"
        means = [mean_over_ranks(ledgers) for ledgers in self.ledgers]
        recorded = first_difference(means[0], means[1], tolerance=ROUNDING)
        if recorded is None:
            lasts = [each.last for each in means]
            found.equal = lasts[0] == lasts[1]
            found.lines.append(
                f"{who}: as means over the ranks, loss, gradient norm and learning rate of the "
                f"{'' if found.equal else 'first '}{min(lasts)} steps differ by less than {TOLERANCE:g} of their size, "
                "as rounding does"
            )
            return
        self.ask_about(recorded)
        found.lines.append(f"{who}: their means over the ranks differ first at {recorded}")
        ranks = self.factor_of_ranks()
        self.shared, self.devices[0] = ranks.keys, theirs
        try:
            done = [self.replay(side, None, recorded.step, [recorded.step]) for side in (0, 1)]
        except ConfigError as error:
            found.lines.append(f"what of it differs first is not known: {one_line(error, 200)}")
            found.causes = [str(ranks)]
            return
        self.prove([None, done[1]])
        again = first_difference(means[0], mean_over_ranks(done[0].ledgers), tolerance=ROUNDING)
        ranks.removes = again is not None and again.step <= recorded.step
        first = self.first(done[0].ledgers, done[1].ledgers)
        if first is None:
            ranks.removes = True
            found.lines.append(f"A is equal to B on {theirs} ranks")
        else:
            found.step, found.epoch, found.columns = first.step, first.epoch, list(first.columns)
            found.lines.append(f"on {theirs} ranks, A differs from B first at {first}")
            if first.step != recorded.step:
                done = [self.replay(side, None, first.step, [first.step]) for side in (0, 1)]
            found.places = self.places(*done)
            found.factors.remove(ranks)
            self.find_causes(done[1], None)
            found.factors.insert(0, ranks)
        if ranks.removes:
            found.causes.insert(0, str(ranks))

    def factor_of_ranks(self) -> Factor:
        """The settings by which the numbers of ranks differ, as one factor."""
        keys = [*RANKS]
        sizes = [(cfg.written.get("data") or {}).get("batch_size") for cfg in self.cfgs]
        of_steps = [size * ranks for size, ranks in zip(sizes, self.devices, strict=True) if isinstance(size, int)]
        if sizes[0] != sizes[1] and len(of_steps) == 2 and of_steps[0] == of_steps[1]:
            keys.append("data.batch_size")  # of each rank, so that steps have equally many samples
        prefixes = tuple(f"{key}." for key in keys)
        parts = [each for each in self.found.factors if any(f"{key}.".startswith(prefixes) for key in each.keys)]
        lines = [f"hardware  devices {self.devices[0]} → {self.devices[1]}"]
        lines += [line for each in parts for line in each.lines]
        ranks = Factor("setting", lines, [key for each in parts for key in each.keys])
        kept = [each for each in self.found.factors if each not in parts]
        for each in kept:
            each.lines = [line for line in each.lines if line != lines[0]]
        self.found.factors = [ranks, *(each for each in kept if each.lines)]
        return ranks

    # The steps

    def first(self, one: Sequence[Ledger], other: Sequence[Ledger]) -> Difference | None:
        """The first step of any rank that differs."""
        pairs = enumerate(zip(one, other, strict=False))
        each = (first_difference(*pair, rank=rank, without=self.skipped) for rank, pair in pairs)
        found = [different for different in each if different]
        return min(found, key=lambda each: each.step, default=None)

    def common_state(self, step: int) -> tuple[int, tuple[str | None, str | None]]:
        """The newest step before, at which both have a checkpoint and equal digests; the beginning if there is none."""
        saved = [dict(checkpoints(cfg.place)) for cfg in self.cfgs]
        for at in sorted({*saved[0]} & {*saved[1]}, reverse=True):
            if at < step and all(_is_hashed(each[0], at) for each in self.ledgers):  # equal, as it is before the first
                return at, (saved[0][at], saved[1][at])
        return 0, (None, None)

    def is_early(self, side: int, done: Done, step: int) -> bool:
        """Whether a replay is not that of the run already before the step at which the runs differ."""
        different = self.first(self.ledgers[side], done.ledgers)
        return different is not None and different.step < step

    def state_of_other(
        self, side: int, checkpoint: str | None, step: int, before: int
    ) -> tuple[str | None, str | None]:
        """The state before a step in a replay of one run, which is that of both, as their ledgers are equal."""
        done = self.replay(side, checkpoint, step, [], save_before=step)
        if not (saved := done.ranks[0]["saved"]):
            return (checkpoint, checkpoint)
        other = SIDES[1 - side]
        self.found.begin = before
        self.found.lines.append(
            f"{other}: its last settings do not repeat its first steps; both are replayed from the state of "
            f"{SIDES[side]} after step {before}, up to which the ledgers are equal"
        )
        return (saved, saved)

    def conclude_equal(self) -> None:
        """Say that no step differs that both runs have."""
        lasts = [each[0].last for each in self.ledgers]
        self.found.equal = lasts[0] == lasts[1]
        if self.found.equal:
            self.found.lines.append(f"no difference: all {lasts[0]} steps are equal")
        else:
            self.found.lines.append(f"the first {min(lasts)} steps are equal; A has {lasts[0]}, B has {lasts[1]}")

    def conclude_not_repeated(self, done: Sequence[Done], step: int) -> None:
        """Say what is left where both replays are equal."""
        found = self.found
        known = "settings" if self.unknown_code else "settings or code"
        found.lines.append(f"replayed here, both are equal: the difference is not in {known}")
        left = [each for each in found.factors if each.matters and each.kind in INHERENT]
        left = [each for each in left if each.kind != "environment" or self.with_factor(each) == self.given[0]]
        for factor in left:
            factor.removes = True
        found.causes = [str(each) for each in left if each.kind == "data"] or [str(each) for each in left]
        traces = read_traces(done[0].folder, step, self.devices[0])
        names = [str(i) for entries in traces for e in entries if e["kind"] == "samples" for i in e["indices"]]
        if names and "samples" not in found.columns:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            found.lines.append(f"the step has the samples {', '.join(names[:SHOWN])}{more}")

    def prove(self, done: Sequence[Done | None]) -> None:
        """Say whether the replays are equal to what was recorded; of None, nothing."""
        begin = self.found.begin
        since = f"step {begin}" if begin else "the beginning"
        for side, ledgers, record, each in zip(SIDES, self.ledgers, self.records, done, strict=True):
            if each is None:
                continue
            if each.error:
                self.found.lines.append(f"{side}: its replay ended: {one_line(each.error, 160)}")
            if different := self.first(ledgers, each.ledgers):
                reason = changed_data(record, each)
                self.found.lines.append(
                    f"{side}: its replay from {since} is not equal to its ledger from {different} on"
                    + (f": {reason}" if reason else "")
                )
            else:
                self.found.lines.append(f"{side}: replayed from {since}, equal to its ledger")

    # Replays

    def surroundings_of(self, side: int) -> Surroundings:
        """Code, packages and threads of a run."""
        record, python = self.records[side], self.pythons[side]
        own, label = self.own[side], SIDES[side]
        found = replace(surroundings(self.project, record, own=own), project=self.code_of(side))
        reason = "its record has no value of it" if own else "the run is not yours"
        for name in unrestored(self.records, side, own=own):
            self.found.lines.append(f"{label}: replayed with {name} of the environment as it is now, as {reason}")
        if python:
            return replace(found, python=python)
        installed, theirs = lineage.packages(), record.get("packages") or {}
        others = self.records[1 - side].get("packages") or {}
        names = [name for name in {**theirs, **others} if theirs.get(name) != others.get(name)]
        if wrong := [name for name in names if theirs.get(name) != installed.get(name)]:
            name = wrong[0]
            now, was = installed.get(name, "absent"), theirs.get(name, "absent")
            self.found.lines.append(
                f"{label}: replayed with {name} {now}, was {was}; give --python-{label.lower()}=<interpreter of its "
                "environment>"
            )
        return found

    def code_of(self, side: int) -> Project:
        """The project as it was: itself, or a copy that is removed afterwards.

        Raises:
            ConfigError: Its code is not available, or is that of somebody else.
        """
        folder, state = self.folders[side], self.records[side].get("git") or {}
        now, label = lineage.git_state(self.project.root), SIDES[side]
        commit, changes = state.get("commit"), state.get("changes")
        if (commit, changes) == (now.get("commit"), now.get("changes")):
            return self.project
        if not commit:
            self.unknown_code = True
            self.found.lines.append(
                f"{label}: its code is not known, as it was in no git repository; replayed as it is now"
            )
            return self.project
        if (commit, changes) in self._codes:
            return self._codes[commit, changes]
        if not (trust.is_granted() or self.own[side]):
            raise ConfigError(f"{folder}: its code would be run, which is that of somebody else; {trust.REMEDY}")
        if snapshot.find_commit(self.project.root, str(commit)) is None:
            raise ConfigError(
                f"{folder}: its commit {commit} is not in the repository of {self.project.root}; fetch it"
            )
        patch = b""
        if changes:
            try:
                patch = trust.read_bytes(folder / "code.patch")
            except (OSError, ValueError):
                raise ConfigError(f"{folder}: it had uncommitted changes, but code.patch cannot be read") from None
        target = Path(self.workers.stack.enter_context(tempfile.TemporaryDirectory(prefix="boltcutter-code-")), "code")
        snapshot.copy_commit(self.project.root, target, str(commit), [patch] if patch else [])
        self._codes[commit, changes] = found = Project.find(target)
        return found

    def replay(
        self,
        side: int,
        checkpoint: str | None,
        last: int,
        trace: Sequence[int],
        given: Surroundings | None = None,
        keys: Sequence[str] = (),
        save_before: int | None = None,
    ) -> Done:
        """Replay a run up to a step; with settings of the other one.

        Raises:
            ConfigError: It cannot be replayed.
        """
        folder = self.folders[side]
        job = Job(str(folder), "", last, self.devices[side], checkpoint, save_before, trace=list(trace))
        values, unset = taken(self.cfgs[1], [*keys, *(self.shared if side == 0 else ())])
        own, own_unset = self.before[side]
        job.values = {key: value for key, value in own.items() if key not in unset} | values
        job.unset = [*(key for key in own_unset if key not in values), *unset]
        try:
            self.check_mixed(side, job)
            done = self.workers.find(given or self.given[side], self.records[side]).run(job)
            if done.error and not (given or keys) and done.ranks[0]["ended"] < last:  # the run has done this step
                raise ReplayError(one_line(done.error, 160))
            return done
        except ReplayError as error:
            if given or keys:
                raise
            raise ConfigError(f"{SIDES[side]} ({folder}) cannot be replayed: {error}") from error

    def check_mixed(self, side: int, job: Job) -> None:
        """Check that no text of somebody else refers to a value of this user, as to one of the environment.

        Raises:
            ReplayError: Settings of both runs together would compute values, multiply, or read the environment.
        """
        if trust.is_granted() or all(self.own) or "${" not in str(job.values):
            return
        try:
            mixed = with_values(self.cfgs[side], job.values, job.unset)
            check_references(mixed.written, "with the settings of both runs", self.project)
        except ConfigError as error:
            raise ReplayError(str(error)) from None

    def places(self, one: Done, other: Done) -> list[Place]:
        """What of the step differs first."""
        assert self.found.step is not None
        traces = [read_traces(done.folder, self.found.step, self.devices[0]) for done in (one, other)]
        return first_places(*traces)

    # Causes

    def find_causes(self, second: Done, checkpoint: str | None) -> None:
        """Let A have each difference from B, and note after which the first difference is gone."""
        found, step = self.found, self.found.step
        assert step is not None
        tried = [factor for factor in found.factors if factor.kind in TRIED]
        begins: list[str | None] = [checkpoint, None] if checkpoint and step <= MAX_STEPS else [checkpoint]
        for begin in begins:  # what A has from B may need a state that the checkpoint of A does not have
            for factor in tried[:MOST_TRIED]:
                self.attempt(factor, second, begin, step)
                if factor.removes and not factor.left:
                    break  # A is equal to B
            if removing := [factor for factor in found.factors if factor.removes]:
                break
        if not removing:
            together = [factor for factor in tried if factor.kind == "setting"]
            if len(together) > 1:
                keys = [key for factor in together for key in factor.keys]
                all_settings = Factor("setting", [line for factor in together for line in factor.lines], keys)
                self.attempt(all_settings, second, begins[-1], step)
                removing = [all_settings] if all_settings.removes else []
        if not removing:
            untried = [f for f in found.factors if f.removes is None and f.matters]
            found.lines.append(
                "no difference of the records removes it when A has it from B"
                + (f"; not tried: {', '.join(map(str, untried))}" if untried else "")
            )
        found.causes = [str(factor) for factor in removing]
        found.factors.sort(key=lambda factor: (not factor.removes, not factor.matters))

    def with_factor(self, factor: Factor) -> Surroundings:
        """The surroundings of A with one difference from B; those of A, if it is none of them."""
        own, theirs = self.given
        if factor.kind == "code":
            return replace(own, project=theirs.project)
        if factor.kind == "threads":
            return replace(own, threads=theirs.threads)
        if factor.kind == "packages":
            return replace(own, python=theirs.python)
        return own.with_environment(theirs, factor.keys) if factor.kind == "environment" else own

    def attempt(self, factor: Factor, second: Done, checkpoint: str | None, step: int) -> None:
        """Replay A with one difference from B."""
        given, is_setting = self.with_factor(factor), factor.kind == "setting"
        if not is_setting and given == self.given[0]:  # it cannot be taken from B
            return
        try:
            done = self.replay(0, checkpoint, step, [step], given, factor.keys if is_setting else ())
        except ReplayError as error:
            factor.left = f"not tried: {one_line(error, 160)}"
            return
        different = self.first(done.ledgers, second.ledgers)
        places = self.places(done, second)
        if different and different.step < step:
            factor.removes, factor.left = False, f"{different}"
        elif not places:
            factor.removes = different is None
            factor.left = f"{different}" if different else ""
        else:
            factor.removes, factor.left = places[0].order > self.found.places[0].order, places[0].text


def _is_hashed(ledger: Ledger, step: int) -> bool:
    at = np.flatnonzero(ledger.rows["step"] == step)
    return bool(len(at)) and bool(ledger.rows["weights"][at[0]])


def text(answer: Answer) -> list[str]:
    """The answer for a terminal."""
    lines = []
    for place in answer.places:
        where = f" of rank {place.rank}" if place.rank else ""
        lines.append(f"first difference: step {answer.step} (epoch {answer.epoch}){where}: {place.text}")
    if not answer.places and answer.step is not None:
        lines.append(f"first difference: step {answer.step} (epoch {answer.epoch}): {', '.join(answer.columns)}")
    lines += [f"cause: {cause}" for cause in answer.causes]
    lines += answer.lines
    for factor in answer.factors:
        state = ""
        if factor.removes:
            state = "" if not factor.left else f": with it of B, what is left is: {factor.left}"
        elif factor.left:
            state = f": {factor.left}" if factor.removes is None else ": with it of B, the difference is the same"
        elif not factor.matters:
            state = ", without effect on a step"
        lines += [f"{line}{state}" for line in factor.lines]
    return lines
