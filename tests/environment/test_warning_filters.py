import warnings

import pytest
from conftest import Script

from boltcutter.environment import warning_filters
from boltcutter.environment.warning_filters import filter_warnings


def test_only_expected_warnings_are_filtered() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        filter_warnings()
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("something new", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["something new"]


@pytest.mark.parametrize("own", [True, False])
def test_a_warning_is_one_line_without_source_code(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    filter_warnings()
    file = warning_filters.__file__ if own else "/some/project.py"
    text = warnings.formatwarning("data: 3 files are not read", UserWarning, file, 5)
    assert text == f"{'warning: ' if own else '/some/project.py:5: UserWarning: '}data: 3 files are not read\n"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]], ids=str)
def test_a_training_prints_nothing_to_standard_error(script: Script, tmp_path: object, overrides: list[str]) -> None:
    how: dict[str, object] = {"ranks": 2} if overrides else {"fresh": True}
    done = script("train", "report=false", "trainer.max_epochs=1", f"runs={tmp_path}", *overrides, **how)
    assert (done.returncode, done.stderr) == (0, "")
