import json
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from boltcutter.assembly.overrides import read_overrides
from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.project import Project
from boltcutter.run.folder import (
    REQUIRED,
    create_folder,
    read_record,
    read_run_config,
    record_attempt,
    update_record,
    writable_place,
)

PROJECT = Project.find(__file__)


def made(tmp_path: Path, *overrides: str) -> Path:
    cfg = read_overrides(PROJECT, overrides)
    cfg = cfg.changed({"folder": str(tmp_path / "run")})
    create_folder(cfg, PROJECT.root)
    return cfg.place.folder


def test_the_folder_records_the_lineage(tmp_path: Path) -> None:
    folder = made(tmp_path, "seed=7")
    record = json.loads((folder / "record.json").read_text())
    assert record["seed"] == 7
    assert record["packages"]["lightning"]
    assert record["hardware"]["threads"] >= 1
    assert record["config"]["data"]["seed"] == "${seed}"  # references stay, so that an override reaches all of them
    assert OmegaConf.load(folder / "config.yaml").data.seed == 7  # type: ignore[union-attr]


def test_a_run_starts_in_a_folder_with_an_empty_record(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text("{}")
    assert read_record(made(tmp_path))["attempts"] == []


@pytest.mark.parametrize("key", ["checkpoints", "name", "runs"])
def test_a_path_with_a_nul_character_is_one_line(tmp_path: Path, key: str) -> None:
    config = dict.fromkeys(REQUIRED) | {key: "a\0b", "data": {"delimiter": "\0"}}
    (tmp_path / "record.json").write_text(json.dumps({"config": config}))
    with pytest.raises(
        ConfigError, match=rf"^run=.*: its record\.json has a NUL character in {key}; restore it from a"
    ):
        read_run_config(PROJECT, tmp_path)
    (tmp_path / "record.json").write_text(json.dumps({"config": config | {key: "ab"}}))
    assert read_run_config(PROJECT, tmp_path, shows=True).get(key) == "ab"


@pytest.mark.parametrize("key", REQUIRED)
def test_a_record_without_a_part_of_the_configuration_is_refused(tmp_path: Path, key: str) -> None:
    config = {name: None for name in REQUIRED if name != key}
    (tmp_path / "record.json").write_text(json.dumps({"config": config}))
    refused = pytest.raises(ConfigError, match=f"run={tmp_path}: its record.json has no {key} in config")
    with refused:
        read_run_config(PROJECT, tmp_path)
    with refused if key in ("name", "checkpoints") else nullcontext():
        assert read_run_config(PROJECT, tmp_path, instantiates=False).folder == str(tmp_path)


def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "planted" + "-" + "secret"  # in parts, since the patch may hold this file
    monkeypatch.setenv("MY_KEY", secret)
    folder = made(tmp_path, "+data.api_key=${oc.env:MY_KEY}")
    for file in folder.rglob("*"):
        assert not file.is_file() or secret not in file.read_text()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, "completed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(3), "exit 3"),
        (SystemExit(0), "completed"),
        (ValueError("too\nbad"), "ValueError: too bad"),
        (ValueError("expected int, found 0123456789abcdef"), "ValueError: expected int, found ***"),
    ],
)
def test_an_attempt_records_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException | None, reason: str
) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "0123456789abcdef")
    folder = made(tmp_path)

    def go() -> None:
        with record_attempt(folder, writes=True, devices=2):
            assert read_record(folder)["attempts"][-1]["reason"] == "running"
            if end:
                raise end

    if end is None:
        go()
    else:
        with pytest.raises(type(end)):
            go()
    (attempt,) = read_record(folder)["attempts"]
    assert (attempt["reason"], attempt["devices"]) == (reason, 2)
    assert attempt["start"] <= attempt["end"]


def test_a_killed_attempt_is_closed_by_the_next(tmp_path: Path) -> None:
    folder = made(tmp_path)
    code = "import os, sys; from pathlib import Path; from boltcutter.run.folder import record_attempt\n"
    code += "with record_attempt(Path(sys.argv[1]), writes=True): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(folder)], timeout=60, check=False)
    with record_attempt(folder, writes=True):
        pass
    reasons = [attempt["reason"] for attempt in read_record(folder)["attempts"]]
    assert reasons == ["killed", "completed"]


def test_only_one_process_writes_the_record(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with record_attempt(folder, writes=False):
        pass
    assert read_record(folder)["attempts"] == []


def test_a_record_is_json_and_its_numbers_are_read_as_they_were(tmp_path: Path) -> None:
    config = {"data": {"limit": math.inf, "fill": math.nan, "range": [-math.inf, 1.0]}, "name": "x"}
    update_record(tmp_path, config=config, test={"test/a": math.nan, "test/b": 1.0}, best_by={"score": math.inf})
    json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    found = read_record(tmp_path)
    assert found["config"]["data"]["limit"] == math.inf
    assert found["config"]["data"]["range"] == [-math.inf, 1.0]
    assert math.isnan(found["config"]["data"]["fill"])
    assert math.isnan(found["test"]["test/a"])
    assert found["best_by"]["score"] is None
    assert user_key.signed_content(found["config"]) == user_key.signed_content(config)


def test_results_of_a_run_that_cannot_be_written_are_below_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writable_place(tmp_path / "a", str(tmp_path / "runs")) == tmp_path / "runs" / "elsewhere" / "a"
    (tmp_path / "a").mkdir()
    assert writable_place(tmp_path / "a", "runs") == tmp_path / "a"
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as of a colleague
    assert writable_place(tmp_path / "a", "runs") == Path("runs/elsewhere/a")
