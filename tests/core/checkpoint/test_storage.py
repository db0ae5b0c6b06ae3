import fsspec
import pytest
from conftest import STATE

from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.checkpoint.load import load
from boltcutter.checkpoint.select import find_newest


def test_a_file_at_a_url_is_downloaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, url, fetched = AtomicCheckpointIO(), "memory://far/run/last.ckpt", list[str]()
    kind = fsspec.get_filesystem_class("memory")
    plain = kind.get_file
    monkeypatch.setattr(kind, "get_file", lambda fs, place, *a, **o: fetched.append(place) or plain(fs, place, *a, **o))
    store.save_checkpoint(STATE, url)
    found = str(find_newest("memory://far/run"))
    assert load(found, lazy=True)["epoch"] == store.load_checkpoint(found)["epoch"] == 3
    assert len(fetched) == 1
    store.save_checkpoint(STATE | {"epoch": 4}, url)
    assert store.load_checkpoint(url)["epoch"] == 4
    assert len(fetched) == 2
    store.remove_checkpoint(url)
