from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boltcutter.diagnosis import baselines
from boltcutter.diagnosis.baselines import errors_of, fit
from boltcutter.diagnosis.checks import Line
from boltcutter.diagnosis.graph import Loss


@pytest.mark.parametrize("features", [5, 400])  # fewer and more than samples
def test_a_linear_model_learns_linear_targets(features: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, features, generator=g).double()
    y = x[:, 0] * 3 + 1
    classes, (mean, last, linear) = fit(x[:100], y[:100], x[100:], y[100:])
    assert not classes
    assert linear.errors.mean() < 0.9 * mean.errors.mean() < last.errors.mean()
    if features == 5:
        assert linear.errors.mean() < 0.01
        classes, (frequent, linear) = fit(x[:100], (y[:100] > 2).long(), x[100:], (y[100:] > 2).long())
        assert classes
        assert linear.errors.mean() < 0.2 < frequent.errors.mean()


def test_errors_of_the_model_are_those_of_its_loss_function() -> None:
    call = Loss("cross_entropy", torch.eye(3), torch.tensor([0, 1, 0]))
    found = errors_of([call], classes=True)
    assert found is not None
    assert found.tolist() == [0, 0, 1]
    assert errors_of([call], classes=False) is None


@pytest.mark.parametrize(
    ("wrong", "is_converged", "level", "text"),
    [
        (60, True, "likely", "is behind always class 0 by 50 ± "),
        (60, False, None, "but its validation was still improving: train longer"),
        (11, True, None, "which may be chance"),
        (0, True, None, "beats always class 0 by 10 ± "),
    ],
)
def test_a_model_that_is_clearly_behind_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, wrong: int, is_converged: bool, level: str | None, text: str
) -> None:
    def errors(count: int) -> torch.Tensor:
        return (torch.arange(100) < count).double()

    found = [baselines.Baseline("always class 0", errors(10))]
    monkeypatch.setattr(baselines, "baselines", lambda splits: (True, found))
    monkeypatch.setattr(baselines, "errors_of", lambda calls, *, classes: errors(wrong))
    seen: Any = SimpleNamespace(splits=object(), predictions=[], is_converged=is_converged)
    (line,) = baselines.baseline(seen)
    assert isinstance(line, Line)
    assert text in line.text
    assert line.level == level
