"""What makes a comparison of runs unfair: mistakes that refuse it, and warnings of one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from boltcutter.analysis.groups import Group, Result, listed, method_of, settings_of
from boltcutter.analysis.record import Run
from boltcutter.analysis.samples import have_same_targets, read_predictions
from boltcutter.config.errors import ConfigError
from boltcutter.run import evaluations
from boltcutter.run.metrics import parse_name

Pairs = Sequence[tuple[Result, Result]]
SAME_SAMPLES = ("data.batch_size", "data.seed")  # settings of the data that a difference of fingerprints shows


def find_caveats(first: Group, second: Group, pairs: Pairs, metric: str) -> list[str]:
    """Warnings of one line; raises ConfigError for other data, folds or metrics, and for runs in both groups."""
    groups, folders = (first, second), {result.run.folder for result in first.results}
    if both := [result.run.id for result in second.results if result.run.folder in folders]:
        raise ConfigError(
            f"{second.label}: {listed(both)} are in both groups; let the filters exclude each other", kind="conflict"
        )
    _check_metric(first, second, metric)
    warnings = [*_check_data(first, second, pairs, metric), *_selection(first, second, metric)]
    warnings += [warning for group in groups for warning in _repeated_tests(group, metric)]
    if settings_of(first.results) == settings_of(second.results):
        warnings.append("both groups have the same settings, so any difference is chance")
    warnings += [warning for group in groups for warning in _within(group)]
    paired = {id(result) for both_results in pairs for result in both_results}
    if pairs and (rest := [r.run.id for group in groups for r in group.results if id(r) not in paired]):
        warnings.append(f"left out, as the other group has no run of the same seed and fold: {listed(rest)}")
    return warnings


def _check_metric(first: Group, second: Group, metric: str) -> None:
    below = f"task.metrics.{parse_name(metric).group}."
    ours, theirs = (
        {key: value for key, value in group.results[0].run.settings.items() if key.startswith(below)}
        for group in (first, second)
    )
    if key := next((key for key in ours | theirs if ours.get(key) != theirs.get(key)), None):
        raise ConfigError(
            f"--metric={metric}: {key} is {ours.get(key)} in {first.label}, and {theirs.get(key)} in {second.label}; "
            "compare another metric, or train both with the same"
        )


def _check_data(first: Group, second: Group, pairs: Pairs, metric: str) -> Iterator[str]:
    ours, theirs = (settings_of(group.results, "data.") for group in (first, second))
    changed = [key for key in ours | theirs if ours.get(key) != theirs.get(key) and key not in SAME_SAMPLES]
    different = [(a, b) for a, b in pairs if (a.data != b.data if a.data and b.data else changed)]
    if not pairs and changed and not {r.data for r in first.results} & {r.data for r in second.results} - {None}:
        different = [(first.results[0], second.results[0])]
    if different:
        a, b = different[0]
        split = parse_name(metric).stage or "test"
        what = f"{a.run.id} and {b.run.id} have different data ({', '.join(changed) or f'{a.data} and {b.data}'})"
        if not all(have_same_targets(*(read_predictions(r.folder, split) for r in both)) for both in different):
            raise ConfigError(f"--metric={metric}: {what}; train or evaluate both on the same")
        yield f"{what}, but the targets of the {split} split are equal"
    if not all(result.data for group in (first, second) for result in group.results):
        yield "some runs have no fingerprint of their data, so check that it has not changed between them"
    if pairs and not pairs[0][0].num_folds and len({a.data for a, _ in pairs}) > 1:
        yield "each seed has its own split of the same data, so the interval is one for these data, not for new ones"


def _selection(first: Group, second: Group, metric: str) -> Iterator[str]:
    """Whether one group had more attempts, or could choose by the metric."""
    if first.trials != second.trials:
        more, less = (first, second) if first.trials > second.trials else (second, first)
        yield (
            f"{more.label} is the best of {more.trials} trials, {less.label} of {less.trials or 1}: unequal tuning may "
            "explain the difference; search both with the same number of trials"
        )
    stage, chosen_by = parse_name(metric).stage, {first.searched, second.searched}
    for settings in (group.results[0].run.settings for group in (first, second)):
        chosen_by |= {str(value) for key, value in settings.items() if key.endswith(".monitor")}
    if leaked := sorted(name for name in chosen_by if stage in ("val", "test") and parse_name(name).stage == stage):
        remedy = "" if first.results[0].num_folds else "; compare test/…" if stage == "val" else "; choose by val/…"
        yield f"{leaked[0]} has chosen weights or settings on the same split, so {metric} is too good{remedy}"


def measured_elsewhere(groups: Sequence[Group], known: Sequence[Run], metric: str) -> list[str]:
    """A warning if the metric of the test split is known of other trainings, by which the groups may be chosen."""
    results = [result for group in groups for result in group.results]
    data, methods = method_of(results[0].run, "data.", SAME_SAMPLES), {method_of(result.run) for result in results}
    others: dict[Any, Run] = {}
    for run in known if parse_name(metric).stage == "test" else ():
        is_tested = metric in run.metrics and run.kind != "search"
        if is_tested and method_of(run, "data.", SAME_SAMPLES) == data and method_of(run) not in methods:
            others[method_of(run)] = run
    if not others:
        return []
    return [
        f"{metric} was also measured with other settings ({listed([run.id for run in others.values()])}): "
        "if it has chosen what is compared, the difference is too good; choose by val/…, with test=false"
    ]


def _repeated_tests(group: Group, metric: str) -> Iterator[str]:
    """Whether the test split may have chosen the checkpoint of a run."""
    tested = {r.run.id: evaluations.of_test(r.folder) for r in group.results if parse_name(metric).stage == "test"}
    texts = [f"{name} {evaluations.describe(entries)}" for name, entries in tested.items()]
    if several := [text for text in texts if "checkpoints" in text]:
        times = f"{sum(map(len, tested.values()))} times for {len(tested)} runs"
        yield (
            f"{group.label}: the test split was evaluated {times}, {listed(several)}: if it has chosen a checkpoint, "
            f"{metric} is too good; choose by val/…"
        )


def _within(group: Group) -> Iterator[str]:
    """What is unusual about the runs of a group."""
    if varying := [key for key, values in settings_of(group.results).items() if len(values) > 1]:
        yield f"{group.label}: runs differ in {listed(varying)}, not only in the seed"
    if inexact := [f"{r.run.id} ({reason})" for r in group.results if (reason := inexact_resume(r))]:
        yield f"{group.label}: resumed inexactly: {listed(inexact)}"
    if odd := [f"{r.run.id} {r.run.reason}" for r in group.results if r.run.reason not in ("", "completed")]:
        yield f"{group.label}: {listed(odd)}"
    steps = {r.run.id: _steps(r) for r in group.results}
    longest = max(steps.values())
    if short := [f"{name} ({n} of {longest} steps)" for name, n in steps.items() if 0 < n < 0.99 * longest]:
        yield f"{group.label}: stopped early: {listed(short)}"


def _steps(result: Result) -> int:
    """Optimizer steps of a run; 0 if unknown."""
    after = result.record.get("measured_after")
    return max((v for v in after.values() if isinstance(v, int)), default=0) if isinstance(after, dict) else 0


def inexact_resume(result: Result) -> str:
    """Why a run that was resumed is not what it would be without the interruption; empty if it is."""
    attempts, settings = result.record.get("attempts") or [], result.run.settings
    if not any(attempt.get("resumed_from") for attempt in attempts):
        return ""
    changed = [str(key) for a in attempts if isinstance(a.get("changed"), list) for key in a["changed"]]
    reasons = {
        f"with another {listed(changed)}": bool(changed),
        "resume_exact=false": settings.get("resume_exact") is False,
        "without trainer.deterministic=true": any(a.get("deterministic") is False for a in attempts),
        "on another number of devices": len({str(a.get("devices")) for a in attempts}) > 1,
        "without callback.reseed": "callback.reseed._target_" not in settings,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
