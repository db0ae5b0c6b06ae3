import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import boltcutter


class Run(dict[str, Any]):
    """What Neptune returns: a mapping of series and values."""

    ended = 0

    def __missing__(self, key: str) -> "Series":
        self[key] = Series()
        return self[key]

    def stop(self) -> None:
        self.ended += 1


class Series(list[tuple[float, int | None]]):
    """Values with their steps."""

    def append(self, value: float, step: int | None = None) -> None:  # type: ignore[override]
        super().append((value, step))


def test_neptune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against modules with the functions of Neptune 1.14 that are used."""
    run, started, module, utils = Run(), dict[str, Any](), ModuleType("neptune"), ModuleType("neptune.utils")

    def init_run(
        project: str | None = None,
        custom_run_id: str | None = None,
        mode: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> Run:
        started.update(locals())
        return run

    module.init_run = init_run  # type: ignore[attr-defined]
    utils.stringify_unsupported = lambda value: value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "neptune", module)
    monkeypatch.setitem(sys.modules, "neptune.utils", utils)
    overrides = ["logger=neptune", "logger.neptune.project=me/mine", "logger.neptune.mode=offline", "tags=[a]"]
    quick = ["report=false", "test=false", "trainer.max_epochs=1", "model=linear"]
    boltcutter.train(f"folder={tmp_path}/mine", *overrides, *quick)
    assert (started["custom_run_id"], started["project"], started["tags"]) == ("mine", "me/mine", ["a"])
    assert (started["mode"], run.ended) == ("offline", 1)
    assert run["configuration"]["trainer"]["max_epochs"] == 1
    assert any(step for _, step in run["val/loss"])
