from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from boltcutter.diagnosis.seam import ActiveDropout


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()

    def once(self, x: Any) -> Any:
        return F.dropout(x, 0.5)

    def often(self, x: Any) -> Any:
        return sum(F.dropout(x, 0.5) for _ in range(3))

    def looped(self, x: Any) -> Any:
        for _ in range(3):
            x = F.dropout(x, 0.5)
        return x

    def right(self, x: Any) -> Any:
        return F.dropout(self.dropout(x), 0.5, training=self.training)


def test_only_functional_dropout_that_is_active_once_is_found() -> None:
    model = Model().eval()
    for method, count in ((model.once, 1), (model.looped, 1), (model.often, 0), (model.right, 0)):
        places: list[str] = []
        ActiveDropout(places)(method, (torch.ones(2),), {})
        assert len(places) == count
    model.dropout.train()  # somebody's decision
    ActiveDropout(places)(model.right, (torch.ones(2),), {})
    assert not places
