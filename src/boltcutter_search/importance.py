"""How much each sampled value matters for a metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from boltcutter.run.metrics import Mode
from boltcutter_search.results import Result

MIN_TRIALS = 10  # below which the best tenth is less than one trial


def measure_importance(
    results: Sequence[Result], metric: tuple[str, Mode], log_keys: Collection[str] = ()
) -> dict[str, float]:
    """Importance of each sampled value, summing to one, the largest first.

    It is PED-ANOVA's: how strongly the distribution of a value among the best tenth of the trials differs from that
    among all of them. Pruned and failed trials do not count. Values that never vary are left out.

    Args:
        results: All trials.
        metric: Name and mode of the metric.
        log_keys: Values that were sampled on a logarithmic scale.

    Raises:
        ValueError: There are too few trials, nothing varies, or Optuna is not installed.

    Source:
        Watanabe et al., PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces, 2023.
    """
    name, mode = metric
    found = [r for r in results if r.state == "complete" and math.isfinite(r.objectives.get(name, math.nan))]
    if len(found) < MIN_TRIALS:
        raise ValueError(f"at least {MIN_TRIALS} complete trials are needed, there are {len(found)}")
    if len({r.objectives[name] for r in found}) == 1:
        raise ValueError(f"all trials have the same {name}")
    try:
        import optuna
    except ImportError:
        raise ValueError("Optuna is not installed") from None
    sampled = _distributions(found, log_keys)
    if not sampled:
        raise ValueError("no sampled value varies between trials")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it logs each study that is created
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is experimental
        study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
        optuna.logging.set_verbosity(verbosity)
        for result in found:
            params = {key: _categorize(result.values[key], sampled[key]) for key in sampled if key in result.values}
            distributions = {key: sampled[key] for key in params}
            trial = optuna.create_trial(params=params, distributions=distributions, value=result.objectives[name])
            study.add_trial(trial)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in sorted(importances.items(), key=lambda pair: -pair[1])}


def _distributions(results: Sequence[Result], log_keys: Collection[str]) -> dict[str, Any]:
    """Optuna's distribution over the observed range of each value that varies."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for result in results for key in result.values):
        values = [result.values[key] for result in results if key in result.values]
        if len(set(map(str, values))) < 2:
            continue
        if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            found[key] = IntDistribution(min(values), max(values), log=key in log_keys and min(values) > 0)
        elif all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            found[key] = FloatDistribution(min(values), max(values), log=key in log_keys and min(values) > 0)
        else:
            found[key] = CategoricalDistribution(sorted(set(map(str, values))))
    return found


def _categorize(value: Any, distribution: Any) -> Any:
    return str(value) if type(distribution).__name__ == "CategoricalDistribution" else value
