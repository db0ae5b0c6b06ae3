"""The logger of Trackio, against a module with the functions of the package that are used."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import QUICK

import boltcutter
from boltcutter.cli.commands import main


class Run:
    """What the package returns; it keeps all calls."""

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
    [("aim", "aim"), ("comet", "comet-ml"), ("mlflow", "mlflow"), ("trackio", "trackio")],
)
def test_a_missing_package_is_one_line(logger: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--check", f"logger={logger}", *QUICK[1:]])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: logger.{logger}")
    assert f"pip install {package}" in lines[0]
