import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import DEVICE, CountSteps, FakeGPU, fake_gpu  # noqa: F401  named in the configuration

import boltcutter
from boltcutter.callback import progress
from boltcutter.task.base import CountOnDevice
from boltcutter.task.host_copy import Shown, copy_to_host

LOGGED = {4, 9, 14}  # every five steps
LOOKED_AT = {0, 1, 3, 7, 17}  # by callback.invariants: steps 1, 2, 4, 8, and the last one


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def waits(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> FakeGPU:
    """Train 18 steps on a GPU that is not there, with the bar of a terminal that is redrawn at each step."""
    monkeypatch.setattr(progress, "is_terminal", lambda _: True)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(sys, "__stdout__", Terminal())
    common = ["model=mlp", "data.batch_size=20", "trainer.max_epochs=1", "trainer.limit_train_batches=18"]
    common += ["trainer.limit_val_batches=1", "test=false", "report=false", "logger=null", f"folder={folder}"]
    common += ["trainer.log_every_n_steps=5"]
    device = ["trainer.accelerator=cpu", "trainer.strategy={_target_: fake_gpu.FakeStrategy}"]
    device += ["+callback.steps={_target_: fake_gpu.CountSteps}"]
    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        boltcutter.train(*common, *device, *overrides)
    return gpu


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["optimizer=sgd", "trainer.accumulate_grad_batches=1"], marks=pytest.mark.slow),
        pytest.param(["callback=[default,ema]"], marks=pytest.mark.slow),
        pytest.param(["model=convnet", "trainer.precision=bf16-mixed"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_no_step_waits_for_the_device_but_those_that_are_logged_and_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    monkeypatch.setattr("boltcutter.task.base.MAX_PENDING", 1)  # metrics are updated in each step
    monkeypatch.setattr("boltcutter.diagnosis.ledger.CONTENT_SECONDS", math.inf)
    monkeypatch.setattr("boltcutter.diagnosis.ledger.LAST_CONTENT", 4)  # then digests of batches are read
    gpu = waits(monkeypatch, tmp_path / "run", *overrides)
    found = [(step, place) for step, place in gpu.waits if step >= 0 and step not in LOOKED_AT]
    assert [place for step, place in found if step not in LOGGED] == []
    assert {step for step, _ in found} == LOGGED  # so the device does see who waits
    assert len(found) == len(LOGGED)


def test_a_value_is_shown_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        shown, loss = Shown(), torch.ones(()).to(DEVICE)
        shown.update(loss)
        shown.update(loss)
        assert shown.value is None
        assert gpu.waits == []
        gpu.step = 1
        shown.update(2 * loss)
        assert shown.value == 1.0
        assert gpu.waits == []
        shown.update(3 * loss, waits=True)
        assert shown.value == 3.0
        assert len(gpu.waits) == 1
    shown.update(torch.tensor(4.0))
    assert shown.value == 4.0
    assert copy_to_host(torch.ones(2)).wait().tolist() == [1.0, 1.0]


def test_counts_are_those_of_bincount() -> None:
    values = torch.tensor([0, 3, 3, 1], dtype=torch.int32)
    cases: list[dict[str, Any]] = [{"minlength": 4}, {"minlength": 6}, {}, {"weights": torch.ones(4), "minlength": 4}]
    for options in cases:
        expected = torch.bincount(values, **options)
        with CountOnDevice():
            found = torch.bincount(values, **options)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    with CountOnDevice(), pytest.raises(RuntimeError):
        torch.bincount(values, minlength=2)
