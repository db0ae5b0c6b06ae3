from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, Timer

from boltcutter.callback.ema import EMA
from boltcutter.strategy.averaging import averages_full_model


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([], False),
        ([Timer(), EMA()], False),
        ([EMA(), EMAWeightAveraging()], True),
        ([StochasticWeightAveraging(swa_lrs=0.1)], True),
    ],
)
def test_only_ema_averages_what_a_rank_has(callbacks: list[Any], expected: bool) -> None:
    assert averages_full_model(callbacks) is expected
