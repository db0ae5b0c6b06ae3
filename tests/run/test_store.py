"""Run folders on disk; object storage is tested in tests/run/remote."""

from pathlib import Path

import pytest

from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run import store

LOCAL = store.RunStore()


def test_folders_on_disk_stay_where_they_are(tmp_path: Path) -> None:
    assert LOCAL.pull(tmp_path, "run") == LOCAL.locate(str(tmp_path)) == tmp_path
    assert LOCAL.localize([f"run={tmp_path}", "seed=1"]) == [f"run={tmp_path}", "seed=1"]
    assert LOCAL.show(f"see {tmp_path}") == f"see {tmp_path}"
    assert LOCAL.lease(tmp_path) is None
    with LOCAL.mirrored(tmp_path):
        LOCAL.push(tmp_path)
        LOCAL.flush(tmp_path)
    cfg = compose(Project.find(__file__), ["seed=7"])
    assert LOCAL.portable(cfg)["seed"] == 7


def test_paths_and_urls_are_joined() -> None:
    assert store.join("runs", "a", "b") == "runs/a/b"
    assert store.join("s3://bucket/", "a", "b") == "s3://bucket/a/b"
    with pytest.raises(ConfigError, match=r"^folder=s3://b: only locally; set folder to a folder$"):
        store.refuse({"runs": "runs", "folder": "s3://b"}, "only locally")
