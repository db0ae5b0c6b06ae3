import json
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import _registry

from boltcutter.config.errors import ConfigError
from boltcutter.run.remote.transfer import call_with_timeout, download, fetch, is_file_of_run, publish

FILES = {
    "record.json": '{"id": "7"}',
    "metrics.csv": "step\n",
    "checkpoints/last.ckpt": "weights",
    "checkpoints/last.ckpt.shards-1/.metadata": "names",
    "code/train.py": "",
    "job.tar.gz": "code",
    ".lease": "{}",
}


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("protocol", ["s3", "file"])
def test_what_has_changed_is_fetched(tmp_path: Path, bucket: str, protocol: str) -> None:
    url = bucket if protocol == "s3" else f"file://{tmp_path}/store/run"
    publish(make(tmp_path / "from", FILES), url, FILES)
    there = make(tmp_path / "to", {"record.json": '{"launch": {"id": "job-1"}}', "job.json": "{}"})
    of_run = sorted(FILES.keys() - {"code/train.py", "job.tar.gz", ".lease"})
    assert sorted(fetch(f"{url}/", there)) == of_run
    assert json.loads((there / "record.json").read_text()) == {"id": "7", "launch": {"id": "job-1"}}
    assert (there / "checkpoints" / "last.ckpt").read_text() == "weights"
    assert fetch(url, there) == []
    publish(make(tmp_path / "from", {"metrics.csv": "step\n1\n"}), url, ["metrics.csv"])
    (there / "checkpoints" / "last.ckpt").unlink()
    store, place = fsspec.url_to_fs(url)
    store.rm_file(f"{place}/checkpoints/last.ckpt.shards-1/.metadata")
    assert sorted(fetch(url, there)) == ["checkpoints/last.ckpt", "metrics.csv"]
    assert (there / "metrics.csv").read_text() == "step\n1\n"
    with pytest.raises(ConfigError, match=f"^{url}/nothing: no run there"):
        fetch(f"{url}/nothing", tmp_path)
    assert {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()} == {
        *of_run,
        "job.json",
        ".fetched.json",
    }


def test_a_large_file_is_uploaded_in_parts(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boltcutter.run.remote.transfer.MAX_BUFFERED", 3)
    publish(make(tmp_path, {"record.json": "{ }"}), bucket, ["record.json"])
    assert fetch(bucket, tmp_path / "to") == ["record.json"]


def test_objects_cannot_leave_the_folder() -> None:
    assert is_file_of_run("logs/rank-0.log")
    assert not any(map(is_file_of_run, ("../x", "a/../../x", "/x", "a//x", "..\\x", "")))


def test_what_is_gone_at_the_url_is_listed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    publish(make(tmp_path / "from", {"a": "1", "b": "2"}), url, ["a", "b"])
    assert download(url, tmp_path / "to", tmp_path / "index", lambda name: True) == (["a", "b"], [])
    (tmp_path / "store" / "a").unlink()
    assert download(url, tmp_path / "to", tmp_path / "index", lambda name: True) == ([], ["a"])
    assert download(url, tmp_path / "to", tmp_path / "index", lambda name: True) == ([], [])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://no-bucket/run", "cannot be reached (The specified bucket does not exist); check the address, or log in"),
        ("azure://c/run", "cannot be reached (Protocol not known: azure); use s3://, gs:// or az://"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_reported_in_one_line(
    tmp_path: Path, bucket: str, url: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(url, tmp_path)
    assert str(caught.value).startswith(f"{url}: {message}")
    assert "\n" not in str(caught.value)


def test_missing_credentials_are_reported(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(ConfigError, match=r"Unable to locate credentials.*`aws configure`"):
        fetch(bucket, tmp_path)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)  # if another test has used it
    with pytest.raises(ConfigError, match=r"^gs://bucket/run: gcsfs is not installed; pip install "):
        fetch("gs://bucket/run", tmp_path)


@pytest.mark.parametrize("name", ["a/./b", "code/train.py", "code", "job.tar.gz", ".lease", "logs/.lease-1"])
def test_what_is_no_file_of_a_run_is_not_fetched(name: str) -> None:
    """The code and the lease are those of other processes, and a bundle is only for the node that unpacks it."""
    assert not is_file_of_run(name)
    assert is_file_of_run("logs/code/job.tar.gz")


def test_a_storage_that_does_not_respond_is_given_up() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError, match="no response within 0 s"):
        call_with_timeout(0.01, lambda: released.wait(10))
    released.set()
