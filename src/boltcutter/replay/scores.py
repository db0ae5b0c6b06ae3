"""How unusual a value is against others: the robust z-score."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 50  # steps before a step, with which it is compared
FEWEST = 5  # steps that a comparison needs
HIGH = 6.0  # from which a value is called unusual
USUAL = 4.0  # below which it is no longer

Floats = npt.NDArray[np.float64]


def robust_z(values: Any, among: Any) -> Floats:
    """Distances from the median in units of the spread of the other values; NaN gives Inf.

    Args:
        values: Shape (N,).
        among: With what they are compared, shape (M,).

    Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993: the median of absolute deviations times
        1.4826 is the standard deviation of normal values. It is at least one percent of the median, so that values
        which hardly vary do not make every other one unusual.
    """
    known = np.asarray(among, np.float64)
    known = known[np.isfinite(known)]
    found = np.asarray(values, np.float64)
    if not len(known):
        return np.where(np.isfinite(found), 0.0, np.inf)
    middle = float(np.median(known))
    spread = 1.4826 * float(np.median(np.abs(known - middle)))
    scale = max(spread, 0.01 * abs(middle), 1e-12)
    return np.where(np.isfinite(found), (found - middle) / scale, np.inf)


def step_scores(values: Any) -> Floats:
    """The robust z-score of each step against the ``WINDOW`` steps before it; 0 where these are too few, shape (N,)."""
    found = np.asarray(values, np.float64)
    scores = np.zeros(len(found))
    for step in range(FEWEST, len(found)):
        scores[step] = robust_z(found[step : step + 1], found[max(0, step - WINDOW) : step])[0]
    return scores
