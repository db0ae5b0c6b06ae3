"""The lease of a run on object storage, which has neither modification times that can be set nor exclusive files.

``<url>/.lease`` identifies the holder. Its heartbeats are another object, ``<url>/.lease.<token>``, so that a holder
that has lost the lease cannot overwrite that of its successor. A successor first creates ``<url>/.lease.<token>.next``,
which only one process can, and is the holder from then on; then it replaces ``.lease``, and removes what it replaced.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from boltcutter.environment import lease
from boltcutter.environment.lease import Holder, Lease, parse_holder, successor_file
from boltcutter.run.remote.transfer import call_with_timeout

TIMEOUT = 15.0  # seconds for one request
SETTLE_TIME = 0.2  # seconds after a takeover, within which a concurrent one would show

T = TypeVar("T")


class RemoteLease(Lease):
    """The lease of the URL of a run.

    Args:
        folder: The local folder of the run.
        url: URL of the run.
    """

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        self.name = self.url = url
        self._beats = -1  # not held

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the holder; a copy in another process cannot release the lease."""
        return _copy_of_lease, (self.folder, self.url, self._holder)

    def _read(self) -> tuple[Holder, int] | None:
        holders = self._holders()
        return (holders[-1], zlib.crc32(self._get(f"{lease.FILE}.{holders[-1].token}") or b"")) if holders else None

    def _holders(self) -> list[Holder]:
        """The holder in ``.lease`` and its successors that have not replaced it yet; the last one holds the lease."""
        holders: list[Holder] = []
        text = self._get(lease.FILE)
        while text is not None and (holder := parse_holder(text)) not in holders:
            holders.append(holder)
            text = self._get(successor_file(holder))
        return holders

    def _create(self) -> bool:
        return self._get(lease.FILE) is None and self._put_new(lease.FILE) and self._is_held()

    def _replace(self, holder: Holder) -> bool:
        if not self._put_new(successor_file(holder)):
            return False
        if not self._is_held():  # the holder had been replaced already
            self._remove(successor_file(holder))
            return False
        replaced = self._holders()[:-1]
        self._put(lease.FILE, self._content())
        for one in replaced:
            for name in (f"{lease.FILE}.{one.token}", successor_file(one)):
                with suppress(OSError):
                    self._remove(name)
        return True

    def _put_new(self, name: str) -> bool:
        """Put the holder into a new object; False if it exists."""
        try:
            self._call(name, lambda store, path: _create_object(store, path, self._content()))
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, ValueError):  # this storage has no exclusive objects
            self._put(name, self._content())
        return True

    def _is_held(self) -> bool:
        """Whether this process holds the lease, also where storage let another process put the same object."""
        time.sleep(SETTLE_TIME)
        found = self._read()
        if found is None or found[0].token != self._holder.token:
            return False
        self._beats = 0
        return True

    def _beat(self) -> None:
        if self._beats >= 0:
            self._beats += 1
            self._put(f"{lease.FILE}.{self._holder.token}", str(self._beats).encode())

    def _release(self) -> None:
        if self._beats >= 0:
            self._beats = -1
            with suppress(OSError):
                self._remove(f"{lease.FILE}.{self._holder.token}")
            with suppress(OSError, lease.LeaseLostError):
                self.check()
                self._remove(lease.FILE)

    def _content(self) -> bytes:
        return json.dumps(asdict(self._holder)).encode()

    def _get(self, name: str) -> bytes | None:
        try:
            return self._call(name, lambda store, path: bytes(store.cat_file(path)))
        except FileNotFoundError:
            return None

    def _put(self, name: str, content: bytes) -> None:
        self._call(name, lambda store, path: store.pipe_file(path, content))

    def _remove(self, name: str) -> None:
        self._call(name, lambda store, path: store.rm_file(path))

    def _call(self, name: str, request: Callable[[Any, str], T]) -> T:
        """Send a request about an object.

        Raises:
            OSError: In place of the storage's own exceptions.
        """
        from boltcutter.checkpoint.storage import error_text, resolve_filesystem

        try:
            store, path = resolve_filesystem(f"{self.url}/{name}")
            return call_with_timeout(TIMEOUT, lambda: request(store, path))
        except (OSError, NotImplementedError, TypeError, ValueError):
            raise
        except Exception as error:
            raise OSError(0, error_text(error)[:200]) from error


def _create_object(store: Any, path: str, content: bytes) -> None:
    """Create an object unless it exists; fsspec's ``mode="create"`` is exclusive on object storage only."""
    if "file" in store.protocol:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)
    else:
        store.pipe_file(path, content, mode="create")


def _copy_of_lease(folder: Path, url: str, holder: Holder) -> RemoteLease:
    found = RemoteLease(folder, url)
    found._holder = holder
    return found
