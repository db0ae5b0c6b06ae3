import warnings

import pytest
from conftest import Script

from boltcutter.environment.warnings import filter_warnings


def test_only_what_is_no_news_is_silenced() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        filter_warnings()
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("something new", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in told] == ["something new"]


@pytest.mark.parametrize("words", [[], ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]], ids=str)
def test_a_training_prints_nothing_to_standard_error(script: Script, tmp_path: object, words: list[str]) -> None:
    how: dict[str, object] = {"ranks": 2} if words else {"fresh": True}
    done = script("train", "report=false", "trainer.max_epochs=1", f"runs={tmp_path}", *words, **how)
    assert (done.returncode, done.stderr) == (0, "")
