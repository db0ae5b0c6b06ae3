import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run import folder as run

PROJECT = Project.find(__file__)


def made(tmp_path: Path, *overrides: str) -> Path:
    cfg = run.read_overrides(PROJECT, overrides)
    cfg.folder = str(tmp_path / "run")
    run.create(cfg, PROJECT.root)
    return Path(cfg.folder)


def test_split_overrides() -> None:
    special, rest = run.split_overrides(["run=a", "x.run=b", "ckpt=e=3.ckpt", "~y"], "run", "ckpt")
    assert special == {"run": "a", "ckpt": "e=3.ckpt"}
    assert rest == ["x.run=b", "~y"]


def test_the_folder_records_the_lineage(tmp_path: Path) -> None:
    folder = made(tmp_path, "seed=7")
    record = json.loads((folder / "record.json").read_text())
    assert record["seed"] == 7
    assert record["packages"]["lightning"]
    assert record["hardware"]["threads"] >= 1
    assert record["config"]["data"]["seed"] == "${seed}"  # references stay, so that an override reaches all of them
    assert OmegaConf.load(folder / "config.yaml").data.seed == 7  # type: ignore[union-attr]


def test_a_run_is_loaded_with_new_overrides(tmp_path: Path) -> None:
    folder = made(tmp_path, "model=mlp", "model.hidden_sizes=[5]", "seed=3")
    cfg = run.read_overrides(PROJECT, [f"resume={folder}", "trainer.max_epochs=9"])
    assert cfg.model.hidden_sizes == [5]
    assert (cfg.data.seed, cfg.trainer.max_epochs, cfg.folder) == (3, 9, str(folder))
    again = run.read_overrides(PROJECT, [f"reproduce={folder}", "seed=4"])
    assert (again.data.seed, again.folder, again.reproduce) == (4, None, str(folder))


def test_a_group_can_be_overridden(tmp_path: Path) -> None:
    cfg = run.load_run_config(PROJECT, made(tmp_path, "trainer=ddp", "trainer.devices=2"), ["trainer=default"])
    assert cfg.trainer.devices == 1
    assert cfg.choices.trainer == "default"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resume=nowhere"], "=nowhere: "),
        (["reproduce=nowhere"], "=nowhere: "),
        (["resume=a", "reproduce=b"], "^resume and reproduce "),
    ],
)
def test_a_missing_run_is_reported_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.read_overrides(PROJECT, overrides)


@pytest.mark.parametrize("left", ["{", "", "{}", "[]", "null", '{"config": 1}', "\x00" * 20])
def test_a_damaged_record_is_reported_in_one_line(tmp_path: Path, left: str) -> None:
    folder = made(tmp_path)
    (folder / "record.json").write_text(left)
    for verb in ("resume", "reproduce"):
        with pytest.raises(ConfigError, match=r"record\.json .*; restore it") as error:
            run.read_overrides(PROJECT, [f"{verb}={folder}"])
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="damaged"):
        run.load_evaluation_config(PROJECT, {"run": str(folder)}, [])


def test_a_run_starts_in_a_folder_with_an_empty_record(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text("{}")
    assert run.read_record(made(tmp_path))["attempts"] == []


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
    ],
)
def test_an_attempt_records_how_it_ended(tmp_path: Path, end: BaseException | None, reason: str) -> None:
    folder = made(tmp_path)

    def go() -> None:
        with run.record_attempt(folder, writes=True, devices=2):
            assert run.read_record(folder)["attempts"][-1]["reason"] == "running"
            if end:
                raise end

    if end is None:
        go()
    else:
        with pytest.raises(type(end)):
            go()
    (attempt,) = run.read_record(folder)["attempts"]
    assert (attempt["reason"], attempt["devices"]) == (reason, 2)
    assert attempt["start"] <= attempt["end"]


def test_a_killed_attempt_is_closed_by_the_next(tmp_path: Path) -> None:
    folder = made(tmp_path)
    code = "import os, sys; from pathlib import Path; from boltcutter.run.folder import record_attempt\n"
    code += "with record_attempt(Path(sys.argv[1]), writes=True): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(folder)], timeout=60, check=False)
    with run.record_attempt(folder, writes=True):
        pass
    reasons = [attempt["reason"] for attempt in run.read_record(folder)["attempts"]]
    assert reasons == ["killed", "completed"]


def test_only_one_process_writes_the_record(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with run.record_attempt(folder, writes=False):
        pass
    assert run.read_record(folder)["attempts"] == []
