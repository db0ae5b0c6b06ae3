import json
import pickle
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from boltcutter.environment import lease
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.lease import Holder, LeaseHeldError, LeaseLostError, hold
from boltcutter.run.remote.lease import RemoteLease


def other_host(**changed: object) -> Holder:
    return replace(Holder.here(), host="other-host", token="x", **changed)  # type: ignore[arg-type]


def put(url: str, name: str, text: str) -> None:
    store, place = fsspec.url_to_fs(f"{url}/{name}")
    if url.startswith("file"):
        store.makedirs(place.rpartition("/")[0], exist_ok=True)
    store.pipe_file(place, text.encode())


def names(url: str) -> list[str]:
    store, place = fsspec.url_to_fs(url)
    store.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in store.find(place))


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, bucket: str, tmp_path: Path) -> str:
    return bucket if request.param == "s3" else f"file://{tmp_path}/store"


def test_a_url_is_held_by_one_process(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "INTERVAL", 0.1)
    with hold(tmp_path / "a", lease=RemoteLease(tmp_path / "a", url)):
        with pytest.raises(LeaseHeldError, match="in use by process"):
            RemoteLease(tmp_path / "b", url).acquire()
        lease.check_lease()
        copy = pickle.loads(pickle.dumps(lease.current()))  # of a spawned rank
        copy.check()
        copy.release()
        token = lease.current()._holder.token  # type: ignore[union-attr]
        end = time.monotonic() + 20
        while names(url) != [".lease", f".lease.{token}"]:
            assert time.monotonic() < end
    assert names(url) == []
    assert not any(thread.name == "lease" for thread in threading.enumerate())


def test_the_heartbeat_shows_whether_a_holder_on_another_host_is_alive(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRY", 1.0)
    monkeypatch.setattr(lease, "INTERVAL", 0.1)
    put(url, ".lease", json.dumps(asdict(other_host())))
    stopped = threading.Event()

    def beat() -> None:
        count = 0
        while not stopped.wait(0.1):
            put(url, ".lease.x", str(count := count + 1))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LeaseHeldError, match="on other-host"):
            RemoteLease(tmp_path, url).acquire()
    finally:
        stopped.set()
        thread.join()
    began = time.monotonic()
    with hold(tmp_path, lease=RemoteLease(tmp_path, url)):
        assert time.monotonic() - began > 0.9
        assert ".lease.x" not in names(url)


def test_a_restarted_job_takes_over_and_its_previous_attempt_stops(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "INTERVAL", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    try:
        with hold(tmp_path, lease=RemoteLease(tmp_path, url)):
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
            later = RemoteLease(tmp_path, url)
            later.acquire()
            end = time.monotonic() + 20
            while not signals.received_signal():  # set by the heartbeat thread
                assert time.monotonic() < end
                time.sleep(0.02)
            assert lease.is_lost()
            with pytest.raises(LeaseLostError, match=rf"{url} was taken over by process"):
                lease.check_lease()
            later.check()
        assert ".lease" in names(url)  # a lost lease is not released
        later.release()
        assert ".lease" not in names(url)
    finally:
        signals.restore_handlers()


def test_an_object_is_created_by_one_process_only(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = RemoteLease(tmp_path, url), RemoteLease(tmp_path, url)
    assert first._put_new("new")
    monkeypatch.setattr(LocalFileSystem, "exists", lambda *_: False)  # as seen just before the first created it
    assert not second._put_new("new")


def test_storage_without_exclusive_objects_holds_leases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("boltcutter.run.remote.lease._create_object", refuse)
    url = f"file://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    with hold(tmp_path / "a", lease=RemoteLease(tmp_path / "a", url)):
        assert ".lease" in names(url)
        with pytest.raises(LeaseHeldError, match="in use by process"):
            RemoteLease(tmp_path / "b", url).acquire()
    assert names(url) == []


def test_one_of_several_concurrent_takeovers_succeeds(url: str, tmp_path: Path) -> None:
    put(url, ".lease", json.dumps(asdict(replace(Holder.here(), start_time="1", token="x"))))
    leases, refused = [RemoteLease(tmp_path, url) for _ in range(4)], []

    def acquire(one: RemoteLease) -> None:
        try:
            one.acquire()
        except LeaseHeldError:
            refused.append(one)

    threads = [threading.Thread(target=acquire, args=[one]) for one in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    for one in leases:
        one.release()
    assert names(url) == []


def test_a_slow_takeover_does_not_replace_a_finished_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(url, ".lease", json.dumps(asdict(replace(Holder.here(), start_time="1", token="x"))))
    first, second = RemoteLease(tmp_path, url), RemoteLease(tmp_path, url)
    put_new = second._put_new

    def put_late(name: str) -> bool:  # after the holder was found to be dead
        monkeypatch.undo()
        first.acquire()
        return put_new(name)

    monkeypatch.setattr(second, "_put_new", put_late)
    monkeypatch.setattr(second, "_create", lambda: False)
    with pytest.raises(LeaseHeldError, match="in use by process"):
        second.acquire()
    first.check()
    assert ".lease" in names(url)
    assert not [name for name in names(url) if name.endswith(".next")]
    first.release()
    assert names(url) == []


def test_a_successor_that_died_in_the_takeover_is_replaced(url: str, tmp_path: Path) -> None:
    dead = replace(Holder.here(), start_time="1", token="x")
    put(url, ".lease", json.dumps(asdict(dead)))
    put(url, ".lease.x.next", json.dumps(asdict(replace(dead, token="y"))))
    one = RemoteLease(tmp_path, url)
    one.acquire()
    one.check()
    assert [name for name in names(url) if name.endswith("next") or name in (".lease.x", ".lease.y")] == []
    one.release()
    assert names(url) == []


@pytest.mark.parametrize("token", ["x", "y"])
def test_a_living_successor_holds_the_lease(url: str, tmp_path: Path, token: str) -> None:
    dead = replace(Holder.here(), start_time="1", token="x")
    put(url, ".lease", json.dumps(asdict(dead)))
    put(url, ".lease.x.next", json.dumps(asdict(replace(Holder.here(), token=token))))
    with pytest.raises(LeaseHeldError, match="in use by process"):
        RemoteLease(tmp_path, url).acquire()


def test_a_deleted_lease_is_acquired_again(url: str, tmp_path: Path) -> None:
    with hold(tmp_path, lease=RemoteLease(tmp_path, url)):
        store, place = fsspec.url_to_fs(f"{url}/.lease")
        store.rm_file(place)
        lease.check_lease()
        assert ".lease" in names(url)
