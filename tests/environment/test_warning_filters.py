import warnings

import pytest
from conftest import Script

from boltcutter.environment.warning_filters import filter_warnings


def test_only_expected_warnings_are_filtered() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        filter_warnings()
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("something new", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["something new"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]], ids=str)
def test_a_training_prints_nothing_to_standard_error(script: Script, tmp_path: object, overrides: list[str]) -> None:
    how: dict[str, object] = {"ranks": 2} if overrides else {"fresh": True}
    done = script("train", "report=false", "trainer.max_epochs=1", f"runs={tmp_path}", *overrides, **how)
    assert (done.returncode, done.stderr) == (0, "")
