"""The command ``boltcutter try``: run pairs of baseline and change until one can be accepted or rejected."""

from __future__ import annotations

import math
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from boltcutter.analysis import luck
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError, printable
from boltcutter.environment import lease, startup
from boltcutter.environment import stop_signals as signals
from boltcutter.extend import NegativeResult
from boltcutter.formatting import to_json
from boltcutter.project import Project, display_path
from boltcutter.search.local import run_trials
from boltcutter.search.results import Result
from boltcutter.tries import confirmation, describe, ledger, page
from boltcutter.tries.launched import run_launched
from boltcutter.tries.ledger import Entry
from boltcutter.tries.limits import RunLimits
from boltcutter.tries.measurements import describe_load
from boltcutter.tries.pairs import BASELINE, CHANGE, Outcome
from boltcutter.tries.plan import Try, fingerprint, now, prepare
from boltcutter.tries.question import parse_request
from boltcutter.tries.sign_flips import Verdict

UNDECIDED = 3  # exit status
MIN_FORECAST = 3  # pairs or runs whose spread is worth telling


def try_command(project: Project, arguments: list[str]) -> dict[str, Any]:
    """Run pairs until there is a verdict, and return it.

    Raises:
        ConfigError: An argument is wrong.
        NegativeResult: The change is rejected (exit status 1), or it is undecided (3).
        PreemptionError: A signal other than SIGINT has stopped it; the same command continues.
    """
    confirms: tuple[str, ...] = ()
    if confirmation.FLAG in arguments:
        arguments, confirms = confirmation.arguments_of(project, arguments)
    tried = prepare(project, replace(parse_request(arguments), confirms=confirms))
    with startup.restored_signals():
        signals.install_handlers()
        try:
            with lease.hold(tried.folder):
                run(tried)
                number = signals.received_signal()
                tried.is_stopped = tried.verdict().word == "continue"
                if tried.is_stopped and number and number != signal.SIGINT:
                    print("the same command continues", file=sys.stderr)
                    signals.exit(number, "interrupted", is_collective=False)
                return conclude(tried)
        except lease.LeaseHeldError as error:
            raise ConfigError(
                f"{tried.folder}: {error}; wait for it, or ask something else", kind="conflict"
            ) from error


def run(tried: Try) -> None:
    """Run pairs until there is a verdict, or a signal."""
    pairs = tried.pairs
    print(printable("\n".join(describe.opening(tried.id, tried.question, pairs))))
    for note in tried.notes:
        print(printable(note))
    for metric in tried.question.metrics:
        if text := luck.describe(tried.known, metric):
            print(printable(f"note: {text}"))
    if tried.askings > 1:
        print(f"note: asked for the {tried.askings}. time, on fresh seeds; the errors of all times add up")
    if reusable := pairs.num_reusable():
        print(f"{reusable} of {len(pairs.seeds)} runs of the baseline exist already")
    if text := forecast(tried):
        print(text)
    tried.is_without_forecast = text.startswith("forecast: after")
    print(f"page: {display_path(page.write_try(tried))}", flush=True)
    limits = RunLimits.of_environment(tried.folder.parent)

    def may_start(name: str) -> bool:
        tried.limit = limits.reached()
        if not tried.limit:
            limits.add(name)
        return not tried.limit

    pairs.start = may_start
    if tried.launch:
        run_launched(
            pairs,
            tried.launch,
            parallel=pairs.parallel,
            should_stop=lambda: bool(signals.received_signal()) or tried.verdict().word != "continue",
            is_decided=lambda: tried.verdict().word != "continue",
            progress=Progress(tried),
        )
        return
    run_trials(
        pairs,
        pairs.make_trial,
        total=2 * len(pairs.seeds),
        parallel=pairs.parallel,
        gpus=tried.gpus,
        should_stop=lambda: bool(signals.received_signal()) or tried.verdict().word != "continue",
        progress=Progress(tried),
    )


class Progress:
    """Prints a line for each complete pair."""

    def __init__(self, tried: Try) -> None:
        self._tried, self._shown = tried, len(tried.pairs.complete())

    def ended(self, result: Result) -> None:
        """Show the pairs that a run has completed."""
        complete = self._tried.pairs.complete()
        for count in range(self._shown + 1, len(complete) + 1):
            verdict = self._tried.verdict(count)
            line = describe.progress(self._tried.question, complete[:count], verdict, self._tried.scale())
            print(printable(line), flush=True)
            loads = zip(*(side.load for side in complete[count - 1]), strict=True)
            if count == 1 and (text := describe_load(*map(max, loads))):
                print(f"note: {text}", flush=True)
            if count == 1 and not any(side.is_lost for side in complete[0]) and not verdict.difference:
                print("note: both runs of the first pair have the same value: the change may do nothing", flush=True)
        if len(complete) > self._shown:
            page.write_try(self._tried)
        self._shown = len(complete)


def forecast(tried: Try) -> str:
    """What the budget can see, by the spread of pairs, or of runs of the baseline; what is missing without either."""
    question = tried.question
    found, source = differences(tried.pairs.complete()), "the {} pairs so far"
    values = tried.pairs.baseline_values()
    if len(found) < MIN_FORECAST:
        found, source = tried.pairs.earlier_differences(), "{} pairs of other changes with this baseline"
    if len(found) >= MIN_FORECAST:
        spread, source = statistics.stdev(found), source.format(len(found))
    elif len(values) >= MIN_FORECAST:
        spread = math.sqrt(2) * statistics.stdev(values)
        source = f"pairs that share as little as the {len(values)} runs of the baseline, so at most"
    else:
        return f"forecast: after pair {MIN_FORECAST}, as fewer pairs or runs of the baseline ({len(values)}) are known"
    reference = tried.effect() or (question.effect.resolve(values[0]) if values else None)
    if reference is None and question.effect.is_relative:
        return ""
    return describe.forecast(question, reference or question.effect.value, spread, tried.scale(), source)


def differences(pairs: Sequence[tuple[Outcome, Outcome]]) -> list[float]:
    """Of the pairs that no run has lost."""
    return [change.value - baseline.value for baseline, change in pairs if not (baseline.is_lost or change.is_lost)]


def conclude(tried: Try) -> dict[str, Any]:
    """Print the verdict, append it to the ledger, and return it.

    Raises:
        NegativeResult: The change is not accepted.
    """
    verdict, complete, scale = tried.verdict(), tried.pairs.complete(), tried.scale()
    effect = tried.effect() or tried.question.effect.value
    lines = list(
        describe.explanation(
            tried.question, complete, verdict, effect, scale, tried.askings, is_stopped=tried.is_stopped
        )
    )
    lines[1:1] = describe.constraints(tried.question, verdict, complete, tried.tolerance, tried.scale)
    if load := describe.load_line(tried.pairs):
        lines.append(f"  {load}")
    lines += [f"  cost: {describe.cost(tried.pairs)}"]
    if tried.is_stopped:
        lines += [f"  {tried.limit}"] * bool(tried.limit) + ["  the same command continues"]
    elif verdict.word == "undecided":
        lines.append("  --again asks once more on fresh seeds, which adds the errors of both times")
    if verdict.word == "accepted" and not tried.confirms:
        lines.append("  of many tries some are luck: `boltcutter try --confirm` runs all that was accepted once more")
    lines.append(f"  page: {display_path(page.write_try(tried, lines))}")
    print(printable("\n".join(lines)))
    entry = as_entry(tried, verdict)
    runs = tried.folder.parents[1]
    if not any(replaced(known) == replaced(entry) for known in ledger.read_entries(runs)):
        ledger.append(runs, entry)
    result = as_dict(tried, entry, lines)
    write_text(tried.folder / "verdict.json", to_json(result, indent=2) + "\n")
    if entry.verdict != "accepted":
        raise NegativeResult(result, 1 if entry.verdict == "rejected" else UNDECIDED)
    return result


def replaced(entry: Entry) -> dict[str, Any]:
    """An entry without its time."""
    return asdict(entry) | {"time": ""}


def as_entry(tried: Try, verdict: Verdict) -> Entry:
    """The entry of a verdict in the ledger."""
    question, pairs = tried.question, tried.pairs
    trained = [outcome for outcome in pairs.outcomes.values() if not outcome.is_reused]
    numbers = [x if math.isfinite(x) else None for x in (verdict.difference, verdict.low, verdict.high)]
    return Entry(
        id=tried.id,
        time=now(),
        question=tried.key,
        change=pairs.change.label,
        baseline=pairs.baseline.label,
        metric=question.metric,
        mode=question.mode,
        effect=str(question.effect),
        margin=str(question.margin),
        verdict="undecided" if verdict.word == "continue" else verdict.word,
        is_stopped=tried.is_stopped,
        pairs=verdict.pairs,
        budget=question.budget,
        seeds=list(pairs.seeds),
        difference=numbers[0],
        low=numbers[1],
        high=numbers[2],
        runs=len(trained),
        reused=len(pairs.outcomes) - len(trained),
        seconds=round(sum(outcome.seconds for outcome in trained), 1),
        baseline_overrides=list(pairs.baseline.overrides),
        change_overrides=list(pairs.change.overrides),
        confirms=tried.confirms,
        not_worse=tuple(map(str, question.constraints)),
        code="" if pairs.change.project == pairs.baseline.project else fingerprint(pairs.change.code),
    )


def as_dict(tried: Try, entry: Entry, lines: Sequence[str]) -> dict[str, Any]:
    """The result for programs."""
    complete = tried.pairs.complete()
    listed = [{"seed": pair[0].seed, BASELINE: shown(pair[0]), CHANGE: shown(pair[1])} for pair in complete]
    return asdict(entry) | {
        "folder": str(tried.folder),
        "askings": tried.askings,
        "effect_size": tried.effect(),
        "explanation": [line.strip() for line in lines],
        "notes": tried.notes,
        "all_pairs": listed,
    }


def shown(outcome: Outcome) -> dict[str, Any]:
    """A run of a pair."""
    names = ("folder", "value", "seconds", "error", "is_reused", "others", "load")
    return {key: getattr(outcome, key) for key in names}
