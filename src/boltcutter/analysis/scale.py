"""How differences of a metric are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from boltcutter.analysis.significance import Interval
from boltcutter.run.metrics import Mode

FRACTIONS = ("acc", "f1", "precision", "recall", "auroc", "auc", "iou", "dice")  # shown in points of 100


@dataclass(frozen=True)
class Scale:
    """How differences of a metric are written: fractions in points of 100."""

    factor: float
    unit: str

    @classmethod
    def of(cls, metric: str, mode: Mode, values: Sequence[float]) -> Scale:
        """The scale of a metric with these values."""
        is_fraction = mode == "max" and any(name in metric.lower() for name in FRACTIONS)
        in_points = is_fraction and min(values) >= 0 and max(values) <= 1
        return cls(100.0, " points") if in_points else cls(1.0, f" in {metric}")

    def size(self, value: float) -> str:
        """The size of a difference."""
        return f"{rounded(abs(value) * self.factor, 2)}{self.unit}"

    def signed(self, value: float, interval: Interval | None = None) -> str:
        """A difference, with digits that its interval, if any, supports."""
        digits = _two_digits(value * self.factor / 2)
        if interval:  # whose digits are enough for a larger value; of a smaller one, rounding would leave nothing
            digits = max(self._digits(interval), min(digits, self._digits(interval) + 2))
        return f"{value * self.factor:+.{digits}f}{self.unit}"

    def interval(self, ends: Interval | None) -> str:
        """An interval of differences."""
        return " to ".join(f"{end * self.factor:.{self._digits(ends)}f}" for end in ends) if ends else "–"

    def estimate(self, difference: float, interval: Interval | None, p: float) -> str:
        """A difference with its interval and its p value."""
        shown = f", 95% interval {self.interval(interval)}" if interval else ""
        return f"{self.signed(difference, interval)}{shown}, {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}"

    def _digits(self, ends: Interval) -> int:
        return _two_digits((ends[1] - ends[0]) / 2 * self.factor)


def rounded(value: float, digits: int) -> str:
    """A number with so many significant digits; a larger one without decimals, not as 1e+02."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def _two_digits(value: float) -> int:
    """Decimals with which a number has at least two significant digits."""
    return min(max(1 - math.floor(math.log10(abs(value))), 0), 8) if value else 2
