"""The commands that train a group with further seeds or folds, and the filter that selects these runs too."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter import files
from boltcutter.analysis.groups import REPEATED, Group, Result, is_compared, method_of, pair
from boltcutter.analysis.query import FIELDS, equals, parse, value_of
from boltcutter.analysis.record import Run
from boltcutter.config.compose import OVERRIDE, compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.redaction import MAX_COMMAND
from boltcutter.config.values import flatten
from boltcutter.project import Project, command, display_path
from boltcutter.run import trust

OWN = ("folder", "report", "test", "resume", "reproduce", "ckpt", "trust", *REPEATED)  # of each run
LASTING = ("name", "status", "devices")  # fields that further runs have in common with those of a group


def check_folds(project: Project, first: Group, second: Group) -> None:
    """Check that two groups have the same folds, if any.

    Raises:
        ConfigError: They do not; with the command that trains one of them on the folds of the other.
    """
    folds = {result.num_folds for group in (first, second) for result in group.results}
    if folds == {None} or (len(folds) == 1 and pair(first, second)):
        return
    given, lacking = (first, second) if first.results[0].num_folds else (second, first)
    seeds, num_folds = {result.key[0] for result in given.results}, given.results[0].num_folds
    numbers = " and ".join(sorted(str(number or "null") for number in folds))
    trainings = " && ".join(commands(project, lacking, sorted(seeds), num_folds))
    raise ConfigError(
        f"data.num_folds={numbers}: folds are compared with the same folds; run {trainings}, and compare its folder "
        f"with {given.label}"
    )


def further_seeds(first: Group, second: Group, count: int) -> tuple[list[int], list[int]]:
    """The seeds that each group lacks for ``count`` pairs: first those that the other group has, then new ones.

    The best trial of a search is no repetition, as it was chosen: its seed is lacking as well.
    """
    known = {result.key[0] for group in (first, second) for result in group.results}
    ours, theirs = ({r.key[0] for r in group.results if r.run.kind != "trial"} for group in (first, second))
    wanted = [*sorted(ours & theirs), *sorted(known - (ours & theirs))]
    wanted = [*wanted, *range(max(wanted) + 1, max(wanted) + 1 + count)][: max(count, len(ours & theirs))]
    return [seed for seed in wanted if seed not in ours], [seed for seed in wanted if seed not in theirs]


def commands(project: Project, group: Group, seeds: Sequence[int], num_folds: int | None = None) -> Iterator[str]:
    """The commands that train a group with these seeds, one for each range of them."""
    last = group.results[-1]
    base, num_folds = overrides_of(project, last), num_folds or last.num_folds
    for start in (seed for seed in sorted(seeds) if seed - 1 not in seeds):
        count = next(length for length in range(1, len(seeds) + 1) if start + length not in seeds)
        given = [f"seed={start}", *base]
        if num_folds:
            yield command("search", "search=kfold", f"search.folds={num_folds}", f"search.seeds={count}", *given)
        elif count == 1:
            yield command("train", *given)
        else:
            yield command("search", "search=seeds", f"search.seeds={count}", *given)


def lasting_filter(group: Group, known: Sequence[Run]) -> str:
    """What selects further runs of a group too: its filter, or else the settings that no other run has."""
    own, folders = [result.run for result in group.results], {result.run.folder for result in group.results}
    last, keys = own[-1], list[str]()
    passing = {*FIELDS, "seed", "data.fold", *last.metrics} - {*LASTING}
    if group.is_filter and passing.isdisjoint(key for key, _ in parse(group.label).keys):
        return group.label
    for run in known:
        is_other = run.folder not in folders and run.kind not in ("search", "job", "trial") and run.settings
        if is_other and all(value_of(run, key) == value_of(last, key) for key in keys):
            names = (
                name
                for key in (*sorted(key for key, _ in method_of(last) ^ method_of(run)), "data.num_folds")
                for name in (key.partition(".")[0], key)
                if value_of(run, name) != value_of(last, name) and len({repr(value_of(r, name)) for r in own}) == 1
            )
            keys += sorted(names, key=lambda name: "." in name)[:1]  # rather a config group than a setting
    is_known = keys and folders <= {run.folder for run in known}
    return " and ".join(equals(last, key) for key in keys) if is_known else group.label


def overrides_of(project: Project, result: Result) -> list[str]:
    """The overrides of a run, or ``reproduce=`` if they do not lead to its settings any more, or are not the user's.

    Those of the best trial of a search are in its ``best.yaml``, from which the number of trials is known later.
    """
    config: Any = result.record.get("config")
    # The command is not signed: a copy of this user's record in the folder of somebody else may have any.
    if trust.is_own_record(config, result.record.get("signature"), result.folder):
        best = Path(result.run.folder, "..", "..", "best.yaml").absolute()
        is_trial = result.run.kind == "trial" and best.is_file() and files.is_ours(os.lstat(best))
        with suppress(ConfigError, ValueError):
            words = shlex.split(str(result.record.get("command") or "")[:MAX_COMMAND])
            given = [w for w in words if OVERRIDE.fullmatch(w) and w.partition("=")[0].lstrip("+~") not in OWN]
            short = [f"experiment={display_path(best.resolve())}", *(word for word in given if word.startswith("~"))]
            for overrides in [short, given] if is_trial else [given]:
                if _compared(compose(project, overrides).written) == _compared(config):
                    return overrides
    return [f"reproduce={result.run.folder}"]


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that affect the results, by dotted key."""
    return {key: value for key, value in flatten(config) if is_compared(key)}
