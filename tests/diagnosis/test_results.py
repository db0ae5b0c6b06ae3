"""Results of dropout, norms and activations are unread until an operation, an output or a list has them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from boltcutter.diagnosis.evidence import tensors_of
from boltcutter.diagnosis.results import Results, drops


class Followed(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.results = Results()

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = tensors_of([args, kwargs])
        self.results.follow(getattr(function, "__name__", ""), args, kwargs or {}, given, result)
        return result


def test_what_is_read_returned_or_kept_is_not_unread() -> None:
    kept: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        F.dropout(x, 0.5)
        F.gelu(x).sum()
        kept.append(F.silu(x))
        F.dropout(x, 0.5, training=False)
        with torch.no_grad():
            F.layer_norm(x, (3,))
        return F.relu(x)

    x = torch.ones(2, 3)
    with Followed() as mode:
        output = step(x)
    assert [(r.name, r.number, r.shape) for r in mode.results.unread(output)] == [("dropout", 1, (2, 3))]


def test_a_dropout_of_nothing_is_not_active() -> None:
    assert drops((0, 0.5), {})
    assert drops((0,), {"p": 0.1, "training": True})
    assert not drops((0, 0.0, True), {})
    assert not drops((0, 0.5, False), {})
