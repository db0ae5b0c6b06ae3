"""Nodes that find one another through the storage."""

import os
import threading
import time
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from boltcutter.launch import rendezvous
from boltcutter.launch.rendezvous import EndedError, join


def join_all(place: Path, *addresses: str) -> dict[str, tuple[int, str]]:
    """Join as several nodes at once, the later ones after a moment; returns the rank and the first address of each."""
    found: dict[str, tuple[int, str]] = {}

    def run(address: str) -> None:
        found[address] = join(f"file://{place}", address, len(addresses))

    threads = [threading.Thread(target=run, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(20)
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous, "REFRESH_SECONDS", 0.1)


def test_nodes_agree_on_their_ranks(tmp_path: Path) -> None:
    expected = {"10.0.0.9": (0, "10.0.0.9"), "10.0.0.10": (1, "10.0.0.9"), "10.0.0.11": (2, "10.0.0.9")}
    place = tmp_path / "nodes" / "job"
    assert join_all(place, "10.0.0.11", "10.0.0.9", "10.0.0.10") == expected
    assert join_all(place, "10.0.0.10", "10.0.0.11", "10.0.0.9") == expected  # after a restart


def test_a_node_waits_for_the_others_to_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join_all(tmp_path, "10.0.0.1", "10.0.0.2")
    before = time.time() - rendezvous.FRESH_SECONDS - 1
    for file in tmp_path.iterdir():
        os.utime(file, (before, before))
    # Of the earlier nodes only one is there, and another takes the place of the other.
    assert join_all(tmp_path, "10.0.0.1", "10.0.0.3") == {"10.0.0.1": (0, "10.0.0.1"), "10.0.0.3": (1, "10.0.0.1")}


def test_a_node_may_leave_while_another_one_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = LocalFileSystem.find
    monkeypatch.setattr(LocalFileSystem, "find", lambda store, path: [*find(store, path), f"{path}/10.0.0.9"])
    assert join_all(tmp_path, "10.0.0.1", "10.0.0.2")["10.0.0.2"] == (1, "10.0.0.1")


def test_a_node_does_not_wait_for_one_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / rendezvous.ENDED).write_text("completed\n")
    with pytest.raises(EndedError, match=r"^another node of the job job has ended for good: completed$"):
        join(f"file://{tmp_path}/job", "10.0.0.1", 2)


def test_a_node_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(EndedError, match=r"^only 1 of 2 nodes were there within 0\.001 minutes$"):
        join(f"file://{tmp_path}/job", "10.0.0.1", 2, 0.001)
