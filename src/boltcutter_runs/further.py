"""The commands that train a group with further seeds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from boltcutter.config.compose import OVERRIDE, compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import flatten, plain
from boltcutter.project import Project, command
from boltcutter.run import trust
from boltcutter_runs.groups import REPEATED, Group, Result, is_compared

OWN = ("folder", "report", "test", "resume", "reproduce", "ckpt", "trust", *REPEATED)  # of each run


def further_seeds(first: Group, second: Group, count: int) -> tuple[list[int], list[int]]:
    """The seeds that each group lacks for ``count`` pairs: first those that the other group has, then new ones."""
    ours, theirs = ({result.key[0] for result in group.results} for group in (first, second))
    wanted = [*sorted(ours & theirs), *sorted(ours ^ theirs)]
    wanted = [*wanted, *range(max(wanted) + 1, max(wanted) + 1 + count)][: max(count, len(ours & theirs))]
    return [seed for seed in wanted if seed not in ours], [seed for seed in wanted if seed not in theirs]


def commands(project: Project, group: Group, seeds: Sequence[int]) -> Iterator[str]:
    """The commands that train a group with these seeds, one for each range of them."""
    last = group.results[-1]
    base = overrides_of(project, last)
    for start in (seed for seed in sorted(seeds) if seed - 1 not in seeds):
        count = next(length for length in range(1, len(seeds) + 1) if start + length not in seeds)
        given = [f"seed={start}", *base]
        if last.num_folds:
            yield command("search", "search=kfold", f"search.folds={last.num_folds}", f"search.seeds={count}", *given)
        elif count == 1:
            yield command("train", *given)
        else:
            yield command("search", "search=seeds", f"search.seeds={count}", *given)


def overrides_of(project: Project, result: Result) -> list[str]:
    """The overrides of a run, or ``reproduce=`` if they do not lead to its settings any more, or are not the user's."""
    config: Any = result.record.get("config")
    if trust.is_signed(config, result.record.get("signature")):
        try:
            words = shlex.split(str(result.record.get("command") or ""))
            given = [w for w in words if OVERRIDE.fullmatch(w) and w.partition("=")[0].lstrip("+~") not in OWN]
            if _compared(plain(compose(project, given))) == _compared(config):
                return given
        except (ConfigError, ValueError):
            pass
    return [f"reproduce={result.run.folder}"]


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that affect the results, by dotted key."""
    return {key: value for key, value in flatten(config) if is_compared(key)}
