"""The loggers of Trackio and Neptune, against modules with the functions of these packages that are used."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import QUICK

import boltcutter
from boltcutter.cli.commands import main


class Run:
    """What the packages return; it keeps all calls."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.ended = 0

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Trackio as a module, with the signature of ``init`` in version 0.43."""
    kept, module = Run(), ModuleType("trackio")

    def init(
        project: str,
        name: str | None = None,
        space_id: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
    ) -> Run:
        kept.started = {"project": project, "name": name, "config": config, "resume": resume}
        return kept

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    return kept


def test_trackio(run: Run, tmp_path: Path) -> None:
    overrides = ["logger=trackio", "tags=[a,b]", "report=false", "test=false", "trainer.max_epochs=1", "model=linear"]
    boltcutter.train(f"folder={tmp_path}/mine", *overrides)
    assert (run.started["name"], run.started["resume"], run.ended) == ("mine", "allow", 1)
    assert run.started["config"]["tags"] == ["a", "b"]
    assert run.started["config"]["trainer"]["max_epochs"] == 1
    assert any("val/loss" in metrics and step for metrics, step in run.logged)


@pytest.mark.parametrize(
    ("logger", "package"),
    [("aim", "aim"), ("comet", "comet-ml"), ("mlflow", "mlflow"), ("neptune", "neptune"), ("trackio", "trackio")],
)
def test_a_missing_package_is_one_line(logger: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--check", f"logger={logger}", *QUICK[1:]])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: logger.{logger}")
    assert f"pip install {package}" in lines[0]


class NeptuneRun(dict[str, Any]):
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
    run, started, module, utils = NeptuneRun(), dict[str, Any](), ModuleType("neptune"), ModuleType("neptune.utils")

    def init_run(
        project: str | None = None,
        custom_run_id: str | None = None,
        mode: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> NeptuneRun:
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
