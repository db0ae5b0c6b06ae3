import pytest

from boltcutter.strategy.precision import device_type, full_precision


@pytest.mark.parametrize(("short", "full"), [(16, "16-mixed"), (32, "32-true"), (None, "32-true")])
def test_short_names_are_understood(short: object, full: str) -> None:
    assert full_precision(short) == full


def test_the_device_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [device_type(name) for name in ("auto", "gpu", "cpu", "tpu")] == ["cuda", "cuda", "cpu", "tpu"]
