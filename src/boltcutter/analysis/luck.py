"""How often the test split of a project was read, and by how much the best of so many models is expected to be luck."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from boltcutter.analysis.caveats import SAME_SAMPLES
from boltcutter.analysis.groups import method_of
from boltcutter.analysis.record import Run, metric_mode
from boltcutter.analysis.samples import read_predictions
from boltcutter.analysis.scale import Scale
from boltcutter.checkpoint.storage import is_url
from boltcutter.run.evaluations import count_tests, describe_luck, luck_of_best
from boltcutter.run.metrics import parse_name


def describe(known: Sequence[Run], metric: str, of: Sequence[Run] = ()) -> str:
    """One line, by the standard deviation of the metric over seeds and samples; empty unless several models were read.

    Args:
        known: All runs.
        metric: A metric of the test split; of others nothing is said.
        of: Runs that are compared or listed; those of other data do not count. By default those that have the metric.
    """
    tested = [run for run in known if metric in run.metrics and run.kind != "search" and not is_url(run.folder)]
    if parse_name(metric).stage != "test" or not tested:
        return ""
    data = {method_of(run, "data.", SAME_SAMPLES) for run in of or tested}
    tested = [run for run in tested if method_of(run, "data.", SAME_SAMPLES) in data]
    counts = [count_tests([run.folder]) for run in tested]
    reads, models = (sum(max(count[place], 1) for count in counts) for place in (0, 1))  # also those of no log
    if models < 2:
        return ""
    size, scale = (
        luck_of_best(models),
        Scale.of(metric, metric_mode(tested, metric) or "min", values_of(tested, metric)),
    )
    found = spread(tested, metric, is_fraction=scale.factor != 1.0)
    if found is None:
        luck = f"{size:.2f} standard deviations over seeds, of which none is known"
        return f"{metric}: {describe_luck(reads, models, luck)}"
    luck = f"{scale.size(size * found)} ({size:.2f} standard deviations over seeds and samples)"
    return f"{metric}: {describe_luck(reads, models, luck)}"


def values_of(runs: Sequence[Run], metric: str) -> list[float]:
    """The metric of each run."""
    return [run.metrics[metric] for run in runs]


def spread(runs: Sequence[Run], metric: str, *, is_fraction: bool) -> float | None:
    """The standard deviation of a metric around what each training would have on average; None if unknown.

    That of seeds is pooled over trainings that were repeated. That of the samples, which is known of fractions of
    samples, is added where repetitions share a split.
    """
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(method_of(run, without=("data.seed",)), []).append(run)
    repeated = [group for group in groups.values() if len(group) > 1]
    squares = sum(statistics.variance(values_of(group, metric)) * (len(group) - 1) for group in repeated)
    seeds = squares / sum(len(group) - 1 for group in repeated) if repeated else None
    has_own_splits = any(len({repr(run.settings.get("data.seed")) for run in group}) > 1 for group in repeated)
    share = statistics.median(values_of(runs, metric))
    if is_fraction and 0 < share < 1 and not has_own_splits:
        samples = next(
            (len(t["target"]) for r in runs[::-1] if "target" in (t := read_predictions(Path(r.folder), "test"))), 0
        )
        if samples:
            return math.sqrt((seeds or 0.0) + share * (1 - share) / samples)
    return None if seeds is None else math.sqrt(seeds)
