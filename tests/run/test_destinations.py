from pathlib import Path
from typing import Any

import pytest

from boltcutter.config.compose import compose
from boltcutter.project import Project
from boltcutter.run.destinations import CHECKPOINTS, logged_id, use_own_destinations

PROJECT = Project.find(__file__)
OWN: dict[str, Any] = compose(PROJECT, ["logger=csv"]).written
WANDB = compose(PROJECT, ["logger=wandb"]).written["logger"]["wandb"]


def test_a_run_as_the_project_makes_it_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides in ([], ["logger=csv"], ["logger=tensorboard"], ["trainer=ddp"], ["+callback=ema"]):
        config = compose(PROJECT, overrides).written
        assert use_own_destinations(config, tmp_path, PROJECT) == config
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "place", ["s3://theirs/x", "/elsewhere", "${oc.env:HOME}", "../x", "http://theirs/checkpoints"]
)
def test_checkpoints_are_in_the_folder(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = OWN | {"checkpoints": place, "runs": "s3://theirs"}
    assert use_own_destinations(config, tmp_path, PROJECT) == OWN | {"checkpoints": CHECKPOINTS}
    assert f"checkpoints={place} of the record is not used" in capsys.readouterr().err


def test_loggers_are_those_of_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = WANDB | {"entity": "theirs", "project": "stolen", "code_dir": "~"}
    other = {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": "http://theirs:5000"}
    config = OWN | {"logger": {"wandb": theirs, "mlflow": other, "extra": other}}
    logger = use_own_destinations(config, tmp_path, PROJECT)["logger"]
    assert logger.keys() == {"wandb", "mlflow"}
    assert logger["wandb"] == WANDB
    continued = use_own_destinations(config, tmp_path / "mine", PROJECT, continues=True)["logger"]["wandb"]
    assert continued == WANDB | {"id": logged_id(tmp_path / "mine")}  # not that of the user's own run of this name
    assert "theirs" not in str(logger)
    assert "logger.extra of the record is not used; add a file configs/logger/extra.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dirpath", "/elsewhere"),
        ("dirpath", "${folder}/../other"),
        ("dirpath", "s3://theirs/x"),
        ("save_dir", "~/x"),
        ("filename", "../../x"),
        ("tracking_uri", "http://theirs"),
        ("entity", "theirs"),
    ],
)
def test_what_a_callback_writes_is_in_the_folder(
    tmp_path: Path, key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OWN | {"callback": {"mine": {"_target_": "a.B", key: value, "monitor": "val/loss"}}}
    found = use_own_destinations(config, tmp_path, PROJECT)["callback"]["mine"]
    assert found == {"_target_": "a.B", key: None, "monitor": "val/loss"}
    assert f"callback.mine.{key}={value} of the record is not used" in capsys.readouterr().err
    inside = {"dirpath": "${checkpoints}/best", "filename": "best-{step}", "save_dir": "${folder}"}
    config = OWN | {"callback": {"mine": {"_target_": "a.B"} | inside}}
    assert use_own_destinations(config, tmp_path, PROJECT) == config


def test_a_run_of_somebody_else_has_an_id_of_its_own(tmp_path: Path) -> None:
    own = logged_id(tmp_path / "a" / "20261128-120000-c0ffee")
    assert own == logged_id(tmp_path / "a" / "20261128-120000-c0ffee")
    assert own != logged_id(tmp_path / "b" / "20261128-120000-c0ffee")
    assert logged_id(Path("/x/a/..?%#" + "y" * 100)).isascii()
    assert len(logged_id(Path("/x/" + "y" * 200))) < 64
