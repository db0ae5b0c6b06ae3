"""Reading run folders."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boltcutter import run_files
from boltcutter.analysis.facts import Place, read_facts, read_labels, scan, stamp_of
from boltcutter.analysis.page import write_table
from boltcutter.analysis.record import find_runs

from .conftest import Write


def facts(folder: Path) -> dict[str, Any]:
    return read_facts(Place(str(folder), stamp_of(str(folder))))


def test_folders_of_runs_and_searches_are_found(tmp_path: Path, write: Write) -> None:
    for name in ("a/1", "a/array/array-0", "search/s/trials/0000", "search/s/trials/0001", "search/s/s-0"):
        write(tmp_path / name)
    (tmp_path / "search/s/search.json").write_text("{}")
    write(tmp_path / "a/1/code/runs/of/others")  # in a run
    write(tmp_path / "a/.trash/2")
    elsewhere = write(tmp_path.with_name(f"{tmp_path.name}-elsewhere") / "3")
    (tmp_path / ".folders").write_text(f"{elsewhere}\n{elsewhere}\n{tmp_path}/gone\n")
    found = [(os.path.relpath(place.folder, tmp_path), place.search) for place in scan(str(tmp_path))]
    search = str(tmp_path / "search/s")
    assert found == [
        ("a/1", None),
        ("a/array/array-0", None),
        ("search/s", None),
        ("search/s/s-0", search),
        ("search/s/trials/0000", search),
        ("search/s/trials/0001", search),
        (f"../{elsewhere.parent.name}/3", None),
    ]
    assert [place.folder for place in scan(str(tmp_path / "a/1"))] == [str(tmp_path / "a/1")]
    assert [*scan(str(tmp_path / "nowhere"))] == []


def test_a_folder_that_may_not_be_read_is_no_missing_run(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "digits" / "a")
    (hidden := tmp_path / "digits" / "b").mkdir()
    scandir = os.scandir

    def refuse(folder: str) -> Any:
        if folder == str(hidden):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [(run.id, run.status) for run in find_runs(tmp_path)] == [("a", "completed"), ("b", "unreadable")]
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: (path.parent == hidden and refuse(str(hidden))) or is_file(path))
    assert write_table(find_runs(tmp_path), tmp_path / "page.html", "").is_file()


def test_settings_are_flat_and_references_resolved_but_not_the_environment(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "planted")
    references = {"loop": "${loop}", "gone": "${nowhere.x}", "text": "a ${seed}"}
    found = facts(write(tmp_path / "run", settings={"seed": 3} | references))
    settings = found["settings"]
    assert (settings["data.seed"], settings["model.input_shape"], settings["optimizer.lr"]) == (3, [1, 8, 8], 0.1)
    assert (settings["text"], "gone" in settings) == ("a 3", False)
    assert not {"checkpoints", "folder"} & settings.keys()  # which differ in each run
    assert settings["name"] == "digits-convnet"
    assert "task.model" not in settings
    assert settings["task.token"] == "${oc.env:SECRET_TOKEN}"
    assert "planted" not in json.dumps(found)
    assert {"data.seed", "model.input_shape"} <= {*found["references"]}


def test_metrics_are_those_of_the_best_checkpoint_and_of_the_test(tmp_path: Path, write: Write) -> None:
    last = {"val/loss": 0.7, "train/loss": 0.1}
    folder = write(tmp_path / "run", metrics=last, best_after=10, test={"test/loss": 0.6, "bad": "x"})
    assert facts(folder)["metrics"] == last | {"test/loss": 0.6}  # without metrics.csv
    (folder / "metrics.csv").write_text("step,epoch,val/loss,train/loss\n9,0,0.5,\n19,1,0.7,0.1\n109,1,3,\n")
    assert facts(folder)["metrics"] == {"val/loss": 0.5, "train/loss": 0.1, "test/loss": 0.6}


def test_metrics_of_a_running_run_are_its_last_rows(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "run", reason="running")
    (folder / "metrics.csv").write_text('step,epoch,val/loss,"a,b",throughput/x\n9,0,0.5,2,1\n19,1,,3,1\n29,1,0.')
    assert facts(folder)["metrics"] == {"val/loss": 0.5, "a,b": 3.0}  # without the row that is being written


def test_a_search_has_its_objectives(tmp_path: Path) -> None:
    folder = tmp_path / "digits" / "s"
    folder.mkdir(parents=True)
    record: Any = {"created": "2026-01-01T00:00:00+00:00", "settings": {"folds": 5}, "metrics": [["val/loss", "min"]]}
    (folder / "search.json").write_text(json.dumps(record | {"fixed": [{"data.fold": 0}]}))
    found = facts(folder)
    assert (found["name"], found["objectives"], found["trials"]) == ("digits", [["val/loss", "min"]], "fold")
    assert (found["settings"], found["reason"], found["started"]) == ({"search.folds": 5}, "running", 1767225600.0)
    rows = "trial,state,seed,seconds\n0,complete,0,1.5\n1,complete,1,0\n"
    for reason in ("completed", "running", "interrupted"):  # by a signal
        (folder / "search.json").write_text(json.dumps(record | {"reason": reason}))
        assert facts(folder)["reason"] == reason
        (folder / "trials.csv").write_text(rows)
    (folder / "search.json").write_text(json.dumps(record))
    assert facts(folder)["reason"] == "completed"


def test_labels_change_what_the_record_says(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "run", tags=["old", "kept"])
    assert (facts(folder)["tags"], facts(folder)["note"]) == (["old", "kept"], "")
    (folder / "labels.json").write_text('{"tags": ["new", "kept"], "untagged": ["old"], "note": "text"}')
    assert (facts(folder)["tags"], facts(folder)["note"]) == (["kept", "new"], "text")
    (folder / "labels.json").write_text('{"tags": 1, "note": null}')
    assert read_labels(folder) == {"tags": [], "untagged": [], "note": ""}


@pytest.mark.parametrize("content", ["", "[", "[]", "[" * 200_000], ids=["empty", "cut", "list", "deep"])
def test_a_damaged_record_is_unreadable(tmp_path: Path, content: str) -> None:
    (tmp_path / "record.json").write_text(content)
    found = facts(tmp_path)
    assert (found["status"], found["started"] > 0) == ("unreadable", True)
    assert found["reason"].startswith("record.json: ")


def test_metrics_of_somebody_else_with_a_million_names_are_none(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "a")
    names = [f"m{number}" for number in range(1 << 15)]
    (folder / "metrics.csv").write_text(f"step,epoch,{','.join(names)}\n1,1,{','.join('1' for _ in names)}\n")
    assert not any(name.startswith("m") for name in facts(folder)["metrics"])


@pytest.mark.parametrize("name", ["record.json", "metrics.csv", "labels.json"])
def test_a_fifo_does_not_block(tmp_path: Path, write: Write, name: str) -> None:
    folder = write(tmp_path / "run", reason="running")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    signal.alarm(20)
    assert facts(folder).get("status") == ("unreadable" if name == "record.json" else None)
    signal.alarm(0)


def test_a_duration_that_is_not_finite_is_none(tmp_path: Path, write: Write) -> None:
    assert facts(write(tmp_path / "run", attempts=[{"seconds": 1e400}]))["seconds"] is None


@pytest.mark.parametrize("value", [1, "x", [1], {"a": 1}, None, True, 1e400])
def test_entries_of_other_types_are_left_out(tmp_path: Path, write: Write, value: Any) -> None:
    names = ("metrics", "test", "tags", "hardware", "best_after", "config", "launch", "attempts")
    found = facts(write(tmp_path / "run", **dict.fromkeys(names, value)))
    assert isinstance(found["started"], float)
    for name in ("seconds", "start", "reason", "device", "devices"):
        assert facts(write(tmp_path / "run", attempts=[{name: value}]))["tags"] == []


def test_folders_elsewhere_are_those_that_this_user_has_listed(
    tmp_path: Path, write: Write, hand_over: Callable[[Path], None]
) -> None:
    folder = write(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs").mkdir()
    (listed := tmp_path / "runs" / run_files.FOLDERS).write_text(f"{folder}\n")
    assert [place.folder for place in scan(str(tmp_path / "runs"))] == [str(folder)]
    hand_over(listed)
    assert not scan(str(tmp_path / "runs"))
