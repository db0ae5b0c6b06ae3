import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from object_storage import names

from boltcutter.environment import lease
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.lease import Holder
from boltcutter.run.remote import mirror
from boltcutter.run.remote.store import run_store
from boltcutter.run.remote.transfer import publish

STORE = run_store()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_only_files_of_the_run_that_changed_are_uploaded(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mirror, "INTERVAL", 0.05)
    uploaded: list[str] = []
    upload = mirror.upload
    monkeypatch.setattr(mirror, "upload", lambda *given: (uploaded.append(given[2]), upload(*given))[1])
    folder = STORE.pull(f"{place}/", "folder")
    assert (STORE.show(f"see {folder}/x"), STORE.locate(place), folder.parts[-2:]) == (
        f"see {place}/x",
        folder,
        ("name", "1"),
    )
    copied = ["record.json", "logs/rank-0.log", "wandb/offline-run-1/a.wandb"]
    other = [".record.json.1", "checkpoints/last.ckpt", "ckpt/last.ckpt", "code/train.py", "wandb/run-1/a.wandb"]
    with STORE.mirrored(folder):
        for name in (*copied, *other):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        (folder / "wandb" / "latest-run").symlink_to("offline-run-1")
        (folder / "wandb" / "debug.log").symlink_to(folder / "record.json")
        wait_until(lambda: names(place) == set(copied))
        time.sleep(0.3)
        assert sorted(uploaded) == sorted(copied)
        (folder / "metrics.csv").write_text("step\n")
        STORE.flush(folder)
        assert "metrics.csv" in names(place)
        (folder / "report.html").write_text("")
    assert names(place) == {*copied, "metrics.csv", "report.html"}


@contextmanager
def failing(folder: Path) -> Iterator[None]:
    """Let a storage in a folder refuse to write."""
    away = folder.rename(folder.with_name("away"))
    folder.touch()
    yield
    folder.unlink()
    away.rename(folder)


def test_a_storage_that_fails_for_a_while(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirror, "INTERVAL", 0.05)
    monkeypatch.setattr(mirror, "FINAL_TIMEOUT", 0.1)
    store, url = tmp_path / "store", f"file://{tmp_path}/store/name/1"
    store.mkdir()
    folder = STORE.pull(url, "folder")

    with STORE.mirrored(folder):
        with failing(store):
            for step in range(3):
                (folder / "metrics.csv").write_text(f"step\n{step}\n")
                STORE.flush(folder)  # does not wait for long
            time.sleep(0.5)
            warned = capsys.readouterr().err
        wait_until(lambda: names(url) == {"metrics.csv"})
    assert warned.startswith(f"warning: {url}: files are not uploaded (")
    assert warned.count("\n") == 1
    assert not capsys.readouterr().err
    (folder / "metrics.csv").write_text("step\n4\n")
    with suppress(KeyboardInterrupt), STORE.mirrored(folder):
        raise KeyboardInterrupt
    assert not capsys.readouterr().err
    assert (store / "name" / "1" / "metrics.csv").read_text() == "step\n4\n"


@pytest.mark.parametrize("error", [None, ValueError("of the training")])
def test_changes_that_cannot_be_uploaded_in_the_end_are_reported(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception | None,
) -> None:
    monkeypatch.setattr(mirror, "FINAL_TIMEOUT", 0.1)
    store, url = tmp_path / "store", f"file://{tmp_path}/store/name/1"
    store.mkdir()
    folder = STORE.pull(url, "folder")

    def train() -> None:
        with STORE.mirrored(folder):
            (folder / "metrics.csv").write_text("step\n")
            store.rmdir()
            store.touch()
            if error:
                raise error

    with pytest.raises(ValueError if error else mirror.UploadError) as caught:
        train()
    text = capsys.readouterr().err.splitlines()[-1] if error else str(caught.value)
    assert f"{url}: the last changes are not uploaded (" in text
    assert f"they are in {folder}; resume={url} on this machine uploads them" in text
    assert "\n" not in text
    store.unlink()
    STORE.push(STORE.pull(url, "run"))
    assert names(url) == {"metrics.csv"}


def test_nothing_is_uploaded_once_another_process_has_taken_over(place: str, tmp_path: Path) -> None:
    folder, began = STORE.pull(place, "folder"), time.monotonic()
    with lease.hold(folder, lease=STORE.lease(folder)), STORE.mirrored(folder):
        taken = json.dumps(asdict(replace(Holder.here(), host="other-host")))
        (tmp_path / ".lease").write_text(taken)
        publish(tmp_path, place, [".lease"])
        (folder / "metrics.csv").write_text("")
        STORE.flush(folder)
    assert "metrics.csv" not in names(place)
    assert time.monotonic() - began < 15  # without waiting for an upload
    signals.restore_handlers()


def test_a_missing_bucket_is_an_error_and_a_removed_file_is_not(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_text("")
    found = mirror.Mirror(tmp_path, "s3://no-bucket/run", tmp_path / ".index", mirror.is_copied).close()
    assert "s3://no-bucket/run: the last changes are not uploaded (The specified bucket does not exist)" in str(found)
    (tmp_path / "metrics.csv").unlink()
    only_removed = mirror.Mirror(tmp_path, bucket, tmp_path / ".index", mirror.is_copied)
    only_removed.flush(20)
    assert only_removed.close() is None
