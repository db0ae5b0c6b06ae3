from typing import Any

import pytest
from torch import Tensor

from boltcutter.planning.device_checks import check_step


def test_gradients_of_a_device_are_compared_with_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_step("cpu") == "forward and backward"
    copy, factor = Tensor.to, 1.0

    def to(tensor: Tensor, device: Any, *options: Any) -> Tensor:
        copied = copy(tensor, "cpu")
        return copied * factor if copied.is_floating_point() and str(device) != "cpu" else copied

    monkeypatch.setattr(Tensor, "to", to)  # the device is the CPU
    assert check_step("cuda") == "gradients differ from those of the CPU by 0.0e+00"
    factor = 2.0  # and computes something else
    with pytest.raises(RuntimeError, match="gradients differ from those of the CPU by"):
        check_step("cuda")
