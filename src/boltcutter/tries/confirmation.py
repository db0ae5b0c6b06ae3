"""``boltcutter try --confirm``: all that was accepted, together, once more on fresh seeds.

Of twenty tries that change nothing, one is accepted on average. One further try of all that was accepted keeps anything
false in 2 to 3% of such series.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from boltcutter.analysis.references import runs_folder
from boltcutter.config.errors import ConfigError, printable
from boltcutter.config.values import last_of_each
from boltcutter.project import Project
from boltcutter.tries import ledger
from boltcutter.tries.ledger import Entry
from boltcutter.tries.listing import unconfirmed
from boltcutter.tries.question import COMMON

FLAG = "--confirm"
TAKEN = ("metric", "mode", "effect", "not_worse", "against", "seed")  # from the ledger, unless given


def arguments_of(project: Project, arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments of the try that confirms, and the ids of what it confirms.

    Of several values of a setting the last is taken, which a note says, or the given one.

    Args:
        project: The project.
        arguments: Those of the command. Where code was changed, they have a git ref or patch that joins the changes.

    Raises:
        ConfigError: Nothing was accepted since, or not by one metric, or nothing with the given values.
    """
    entries = ledger.read_entries(Path(runs_folder(project, arguments)))
    accepted = [entry for entry in unconfirmed(entries) if entry.verdict == "accepted"]
    if not accepted:
        raise ConfigError(
            f"{FLAG}: nothing was accepted that is not confirmed; boltcutter tries lists all", kind="missing_value"
        )
    given = [argument for argument in arguments if argument != FLAG]
    keys = {argument.partition("=")[0] for argument in given}
    metrics = {entry.metric for entry in accepted}
    if len(metrics) > 1 and "metric" not in keys:
        raise ConfigError(
            f"{FLAG}: accepted by {' and '.join(sorted(metrics))}; give metric=… of one of them", kind="missing_value"
        )
    versions = [entry.change for entry in accepted if entry.code]
    if versions and not any("=" not in word and not word.startswith(("-", "~")) for word in given):
        raise ConfigError(
            f"{FLAG}: {versions[0]} has changed the code; join what was accepted in a branch, and give that as well"
        )
    overrides, confirmed = list[str](), list[Entry]()
    for entry in accepted:
        added = [override for override in entry.change_overrides if override not in entry.baseline_overrides]
        for new in without_common(added):
            key = new.partition("=")[0]
            old = next((one for one in reversed(overrides) if one.partition("=")[0] == key and one != new), None)
            if old and old not in entry.baseline_overrides and key not in keys:  # else it was tried on top of that
                print(f"note: {printable(f'{new} replaces {old}, which was accepted, too')}", file=sys.stderr)
        # Not if another value is given.
        if all(one in given or one.partition("=")[0] not in keys for one in without_common(added)):
            overrides += added
            confirmed.append(entry)
    if not confirmed:
        raise ConfigError(f"{FLAG}: nothing that was accepted has the given values; boltcutter tries lists all")
    first = confirmed[0]
    own = without_common(first.baseline_overrides)
    if "against" not in keys:
        _note_baselines(confirmed, {override.partition("=")[0] for override in overrides})
    found = {
        "metric": first.metric,
        "mode": first.mode,
        "effect": largest_effect(confirmed),
        "seed": str(1 + max(seed for entry in entries if not entry.confirms for seed in entry.seeds)),
    }
    if constraints := {text.rpartition(":")[0]: text for entry in confirmed[::-1] for text in entry.not_worse}:
        found["not_worse"] = ",".join(text for metric, text in constraints.items() if metric != first.metric)
    if own:
        found["against"] = shlex.join(own)
    more = [f"{key}={value}" for key, value in found.items() if key not in keys]
    return [*given, *more, *last_of_each(without_common(overrides))], tuple(entry.id for entry in confirmed)


def _note_baselines(confirmed: Sequence[Entry], changed: set[str]) -> None:
    """Say which tries were accepted against another baseline than the first, by other settings than are changed."""
    own, *others = (without_common(entry.baseline_overrides) for entry in confirmed)
    for entry, other in zip(confirmed[1:], others, strict=True):
        if any(one.partition("=")[0] not in changed for one in {*own} ^ {*other}):
            text = (
                f"{entry.id} was accepted against {shlex.join(other) or 'the defaults'}, but the baseline is that of "
            )
            text += f"{confirmed[0].id}, {shlex.join(own) or 'the defaults'}; give against=… to choose another"
            print(f"note: {printable(text)}", file=sys.stderr)


def without_common(overrides: Sequence[str]) -> list[str]:
    """The overrides apart from those that both sides of each try have anyway."""
    return [override for override in overrides if override.partition("=")[0] not in COMMON]


def largest_effect(entries: Sequence[Entry]) -> str:
    """The largest of the effects in the unit of the first, which all together should reach."""
    is_relative = entries[0].effect.endswith("%")
    same = [entry.effect for entry in entries if entry.effect.endswith("%") == is_relative]
    return max(same, key=lambda text: float(text.removesuffix("%")))
