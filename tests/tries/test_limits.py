from __future__ import annotations

from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.tries import limits
from boltcutter.tries.limits import RunLimits


def test_runs_are_counted_within_an_hour_and_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RunLimits(tmp_path, per_hour=2, total=3)
    for name in ("a", "b"):
        assert not found.reached()
        found.add(name)
    assert "max_runs_per_hour=2" in found.reached()
    now = limits.time.time()
    monkeypatch.setattr(limits.time, "time", lambda: now + 3601)
    assert not found.reached()
    found.add("c")
    assert "max_runs=3" in found.reached()
    assert not RunLimits(tmp_path).reached()


def test_the_limits_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLTCUTTER_TRY_LIMITS", "30/200")
    assert RunLimits.of_environment(tmp_path) == RunLimits(tmp_path, 30, 200)
    monkeypatch.setenv("BOLTCUTTER_TRY_LIMITS", "many")
    with pytest.raises(ConfigError, match="BOLTCUTTER_TRY_LIMITS=many"):
        RunLimits.of_environment(tmp_path)
