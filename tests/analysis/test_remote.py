"""Runs on object storage."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import fsspec
import pytest
from compared_runs import write_group

from boltcutter.analysis import index
from boltcutter.analysis.comparison import compare_groups_command
from boltcutter.analysis.record import find_runs
from boltcutter.analysis.references import resolve
from boltcutter.analysis.remote import is_read
from boltcutter.config.errors import ConfigError
from boltcutter.environment.lease import Holder
from boltcutter.project import Project
from boltcutter.run import evaluations

from .conftest import Write


def test_runs_at_a_url_are_listed_and_downloaded_once(
    bucket: str, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOLTCUTTER_SCRATCH", str(tmp_path / "scratch"))
    for number in range(3):
        folder = write(tmp_path / "runs" / "digits" / f"{number}", day=number + 1, metrics={"val/accuracy": number / 4})
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.ckpt").write_bytes(b"x" * 1000)
    write(tmp_path / "runs" / "digits" / "2", day=9, reason="running")
    holder = replace(Holder.here(), host="another", pid_namespace="x")
    (tmp_path / "runs" / "digits" / "2" / ".lease").write_text(json.dumps(asdict(holder)))
    store, place = fsspec.url_to_fs(bucket)
    store.put(f"{tmp_path}/runs/", f"{place}/", recursive=True)
    runs = find_runs(bucket)
    assert [(run.id, run.folder, run.status) for run in runs] == [
        ("0", f"{bucket}/digits/0", "completed"),
        ("1", f"{bucket}/digits/1", "completed"),
        ("2", f"{bucket}/digits/2", "running"),
    ]
    names = {path.name for path in (tmp_path / "scratch").rglob("*") if path.is_file()}
    assert names == {"record.json", ".lease", index.FILE, "index-of-runs.json"}
    got: list[str] = []
    original = store.get_file
    monkeypatch.setattr(store, "get_file", lambda path, *rest: (got.append(path), original(path, *rest)))
    store.pipe_file(f"{place}/digits/1/labels.json", b'{"note": "new"}')
    store.rm_file(f"{place}/digits/0/record.json")
    assert [(run.id, run.note) for run in find_runs(bucket)] == [("1", "new"), ("2", "")]
    assert [path.rpartition("/")[2] for path in got] == ["labels.json"]
    found = resolve(Project.at(tmp_path), ["run=best:val/accuracy", f"runs={bucket}"])
    assert found[0] == f"run={bucket}/digits/1"


def test_a_storage_that_cannot_be_reached_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^runs=nothing://bucket: .*"):
        find_runs("nothing://bucket")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("digits/1/record.json", True),
        ("digits/s/trials/0001/metrics.csv", True),
        ("digits/1/.lease", True),
        ("digits/1/checkpoints/last.ckpt", False),
        ("digits/1/code/record.json", False),
        ("../record.json", False),
        ("digits//record.json", False),
        ("digits/a\\b/record.json", False),
        (".archive/digits/1/record.json", False),
        ("a/b/c/d/e/f/g/record.json", False),
    ],
)
def test_only_what_is_shown_is_downloaded(name: str, wanted: bool) -> None:
    assert is_read(name) == wanted


def test_runs_at_a_url_are_compared_with_their_predictions(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOLTCUTTER_SCRATCH", str(tmp_path / "scratch"))
    for name, right in (("a", [True] * 12 + [False] * 8), ("b", [True] * 20)):
        write_group(tmp_path / "runs", name, [sum(right) / 20], right=right)
        for checkpoint in ("best.ckpt", "last.ckpt"):
            evaluations.append(tmp_path / "runs" / name / f"{name}-0", {"split": "test", "checkpoint": checkpoint})
    store, place = fsspec.url_to_fs(bucket)
    store.put(f"{tmp_path}/runs/", f"{place}/", recursive=True)
    arguments = ["--metric", "test/accuracy", "model=a", "model=b", f"runs={bucket}"]
    (comparison,) = compare_groups_command(Project.at(tmp_path), arguments)["comparisons"]
    assert comparison["samples"]["count"] == 20
    assert any("a-0 2 times, at 2 checkpoints" in line for line in comparison["warnings"])
    assert str(tmp_path / "scratch") not in capsys.readouterr().out
