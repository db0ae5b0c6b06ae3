"""Tags, notes, removal and archives."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from boltcutter.analysis import actions
from boltcutter.analysis.record import Run, find_runs
from boltcutter.config.errors import ConfigError

from .conftest import Write

HOLD = """import sys, time
from pathlib import Path
from boltcutter.environment.lease import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


LABEL = """import sys
from pathlib import Path
from boltcutter.analysis import actions
from boltcutter.analysis.record import find_runs
runs = find_runs(sys.argv[1])
for number in range(20):
    actions.tag(runs, [f"{sys.argv[2]}{number}"])
"""


def one(root: Path) -> Run:
    (run,) = find_runs(root)
    return run


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Path]:
    """A folder that another process holds."""
    folder = tmp_path / "digits" / "held"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"held\n"
    yield folder
    process.kill()
    process.communicate()


def test_tags_and_notes_are_beside_the_record(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "run", tags=["own"])
    record = (folder / "record.json").read_bytes()
    actions.tag([one(tmp_path)], ["a", "b", "a"])
    actions.note([one(tmp_path)], "first\nsecond")
    assert (one(tmp_path).tags, one(tmp_path).note) == (("own", "a", "b"), "first\nsecond")
    actions.tag([one(tmp_path)], ["a", "own"], removes=True)
    assert one(tmp_path).tags == ("b",)
    actions.tag([one(tmp_path)], ["own"])
    assert one(tmp_path).tags == ("own", "b")
    assert (folder / "record.json").read_bytes() == record
    assert sorted(os.listdir(folder)) == ["labels.json", "record.json"]


def test_processes_that_label_a_run_at_once_lose_nothing(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "run")
    processes = [subprocess.Popen([sys.executable, "-c", LABEL, str(tmp_path), name]) for name in "abc"]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert sorted(one(tmp_path).tags) == sorted(f"{name}{number}" for name in "abc" for number in range(20))


def test_removal_asks(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "digits" / "a")
    write(tmp_path / "digits" / "b", day=2)
    runs = find_runs(tmp_path)
    questions: list[str] = []

    def no(question: str) -> str:
        questions.append(question)
        return ""

    assert actions.remove(runs[:1], is_confirmed=False, ask=no) == []
    assert "cannot be undone" in questions[0]
    assert "digits/a" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "digits")) == ["a", "b"]
    assert actions.remove(runs[:1], is_confirmed=False, ask=lambda _: "yes") == runs[:1]
    assert os.listdir(tmp_path / "digits") == ["b"]
    actions.remove(runs[1:], is_confirmed=True)
    assert not (tmp_path / "digits").exists()


@pytest.mark.parametrize("verb", ["remove", "archive"])
def test_a_run_that_is_held_is_not_moved(tmp_path: Path, write: Write, holder: Path, verb: str) -> None:
    write(holder, reason="running")
    write(tmp_path / "digits" / "other", day=2)
    runs = find_runs(tmp_path)
    assert runs[0].status == "running"
    act = {
        "remove": partial(actions.remove, runs, is_confirmed=True),
        "archive": partial(actions.archive, tmp_path, runs),
    }
    with pytest.raises(ConfigError, match=rf"{verb} held: in use by process \d+"):
        act[verb]()
    assert [run.folder for run in find_runs(tmp_path)] == [run.folder for run in runs]
    assert not (tmp_path / "digits" / "other" / ".lease").exists()


def test_what_a_removal_leaves_is_named(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "digits" / "a")

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", "0000")

    monkeypatch.setattr(actions.shutil, "rmtree", refuse)
    left = tmp_path / "digits" / ".removed-a"
    with pytest.raises(ConfigError, match=rf"^remove a: {left} is left: 0000 cannot be .*; delete it yourself$"):
        actions.remove(find_runs(tmp_path), is_confirmed=True)
    assert left.is_dir()


def test_a_search_whose_trial_is_running_is_not_moved(tmp_path: Path, write: Write) -> None:
    search = tmp_path / "digits" / "s"
    trial = write(search / "trials" / "0000")
    (search / "search.json").write_text("{}")
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(trial)], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        process.stdout.readline()
        with pytest.raises(ConfigError, match="remove s: in use by"):
            actions.remove([run for run in find_runs(tmp_path) if run.kind == "search"], is_confirmed=True)
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(ConfigError, match=r"remove s/0000: part of the search s; remove the search"):
        actions.remove([run for run in find_runs(tmp_path) if run.kind == "trial"], is_confirmed=True)
    actions.remove([run for run in find_runs(tmp_path) if run.kind == "search"], is_confirmed=True)
    assert find_runs(tmp_path) == []


def test_links_and_submitted_jobs_stay(tmp_path: Path, write: Write) -> None:
    target = write(tmp_path / "elsewhere" / "run")
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="is a link"):
        actions.remove([one(tmp_path / "runs")], is_confirmed=True)
    job = write(tmp_path / "jobs" / "digits" / "job", reason=None, launch={"id": "1"})
    with pytest.raises(ConfigError, match="its job has not started; boltcutter launch cancel run="):
        actions.remove([one(tmp_path / "jobs")], is_confirmed=True)
    assert (target / "record.json").exists()
    assert job.exists()


def test_what_a_link_in_a_folder_leads_to_is_kept(tmp_path: Path, write: Write) -> None:
    outside = tmp_path / "data"
    outside.mkdir()
    (outside / "file").touch()
    folder = write(tmp_path / "runs" / "digits" / "run")
    (folder / "link").symlink_to(outside)
    actions.remove([one(tmp_path / "runs")], is_confirmed=True)
    assert (outside / "file").exists()


def test_archives_are_listed_and_restored(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "digits" / "a")
    (folder / "labels.json").write_text(json.dumps({"note": "kept"}))
    before = one(tmp_path)
    (place,) = actions.archive(tmp_path, [before])
    assert find_runs(tmp_path) == []
    assert place == tmp_path / ".archive" / "digits" / "a"
    archived = one(tmp_path / ".archive")
    assert (archived.id, archived.note) == ("a", "kept")
    write(tmp_path / "digits" / "a")
    with pytest.raises(ConfigError, match="exists; move one of the two"):
        actions.archive(tmp_path, [archived], restores=True)
    actions.remove([one(tmp_path)], is_confirmed=True)
    actions.archive(tmp_path, [archived], restores=True)
    assert one(tmp_path) == before
    assert sorted(os.listdir(folder)) == ["labels.json", "record.json"]
    with pytest.raises(ConfigError, match="is not in"):
        actions.archive(tmp_path / "other", [one(tmp_path)])


def test_no_link_of_another_user_leads_to_what_is_removed_or_moved(
    tmp_path: Path, write: Write, hand_over: Callable[[Path], None]
) -> None:
    folder = write(tmp_path / "mine" / "digits" / "a")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").symlink_to(tmp_path / "mine")
    hand_over(tmp_path / "runs" / "x")
    with pytest.raises(ConfigError, match="link of another user"):
        actions.remove([one(tmp_path / "runs")], is_confirmed=True)
    (tmp_path / "mine" / actions.ARCHIVE).symlink_to(tmp_path / "runs")
    hand_over(tmp_path / "mine" / actions.ARCHIVE)
    with pytest.raises(ConfigError, match="link of another user"):
        actions.archive(tmp_path / "mine", [one(tmp_path / "mine")])
    assert folder.is_dir()
