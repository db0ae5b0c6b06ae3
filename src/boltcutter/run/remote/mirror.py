"""Upload the files of a run as they change."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.environment import lease
from boltcutter.run.remote.transfer import Index, is_file_of_run, read_index, read_stamp, reason, upload
from boltcutter.run.store import UploadError

INTERVAL = 10.0  # seconds between two uploads of changed files
MAX_INTERVAL = 300.0  # seconds between two attempts while the storage cannot be reached
BYTES_PER_SECOND = 2**20  # of a file that keeps growing, which is uploaded as a whole each time
URGENT = (
    run_files.RECORD,
    run_files.METRICS,
)  # uploaded before each checkpoint, so that a checkpoint never has more steps
FINAL_TIMEOUT = 30.0  # seconds that the last upload is repeated, if the storage cannot be reached
STALL_TIMEOUT = 300.0  # seconds without a complete object, after which the last upload fails
PERMANENT = (FileNotFoundError, PermissionError)  # errors that an immediate repetition does not change


class Mirror:
    """Uploads the files of a local folder that have changed, in a thread.

    Args:
        folder: The local folder.
        url: Where to.
        index: File of the index, which tells what has changed.
        wanted: Which files, by name.
    """

    def __init__(self, folder: Path, url: str, index: Path, wanted: Callable[[str], bool]) -> None:
        self.folder, self.url, self.wanted = folder, url, wanted
        self._file = index
        self._index = read_index(self._file)
        self._due: dict[str, float] = {}  # time at which a large file may be uploaded again
        self._uploaded = 0
        self._error: Exception | None = None
        self._warned = self._stopped = self._everything = False
        self._asked = self._done = 0  # uploads
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name="upload")
        self._thread.start()

    def flush(self, timeout: float) -> None:
        """Wait until urgent files are uploaded, unless the storage fails or this is a forked process."""
        if self._thread.is_alive() and self._error is None:
            self._upload_now(timeout)

    def close(self) -> UploadError | None:
        """Upload all that has changed, and stop; returns an error if that fails."""
        self._everything = True
        end = time.monotonic() + FINAL_TIMEOUT
        while not lease.is_lost():
            before = self._uploaded
            if not self._upload_now(STALL_TIMEOUT) and self._uploaded == before:
                self._error = TimeoutError(f"no progress in {STALL_TIMEOUT:.0f} s")
                break
            if self._error is None or isinstance(self._error, PERMANENT) or time.monotonic() > end:
                break
            time.sleep(1.0)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._error is None or lease.is_lost():
            return None
        return UploadError(
            f"{self.url}: the last changes are not uploaded ({reason(self._error)}); they are in {self.folder}; "
            f"resume={self.url} on this machine uploads them"
        )

    def _upload_now(self, timeout: float) -> bool:
        """Ask for an upload, and wait for it; returns whether it ended, with or without an error."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= asked, timeout)

    def _run(self) -> None:
        delay = INTERVAL
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._stopped, delay)
                if self._stopped:
                    return
                asked = self._asked
            try:
                lease.check_lease()
                self._upload_changed(only=URGENT if asked > self._done and not self._everything else ())
                self._error, delay = None, INTERVAL
            except lease.LeaseLostError:
                with self._changed:
                    self._done = sys.maxsize  # nobody waits any more
                    self._changed.notify_all()
                return
            except Exception as error:  # each storage raises its own
                if not self._warned:
                    text = f"warning: {self.url}: files are not uploaded ({reason(error)}); trying again until it works"
                    print(text, file=sys.stderr)
                self._warned, self._error, delay = True, error, min(2 * delay, MAX_INTERVAL)
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    @contextmanager
    def _skip_removed(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if (self.folder / name).exists():
                raise  # the bucket is missing

    def _upload_changed(self, only: tuple[str, ...]) -> None:
        found: Index = {}
        try:
            for name in only or list_files(self.folder):
                with self._skip_removed(name):
                    stamp = read_stamp(self.folder / name)
                    is_due = self._everything or name in URGENT or time.monotonic() >= self._due.get(name, 0.0)
                    if self.wanted(name) and is_due and self._index.get(name, [])[1:] != stamp:
                        version = upload(self.folder, self.url, name)
                        found[name] = self._index[name] = [version, *stamp]
                        self._due[name] = time.monotonic() + stamp[0] / BYTES_PER_SECOND
                        self._uploaded += 1
        finally:
            if found:
                write_text(self._file, json.dumps(read_index(self._file) | found))


def is_copied(name: str) -> bool:
    """Whether a file of a run is in the local folder as well."""
    is_online = name.startswith("wandb/run-")  # uploaded by W&B
    return is_file_of_run(name) and not name.startswith("checkpoints/") and ".ckpt" not in name and not is_online


def list_files(folder: Path) -> Iterator[str]:
    """Names of the files in a local folder that are uploaded."""
    for parent, folders, files in os.walk(folder):
        place = Path(parent)
        folders[:] = [name for name in folders if place != folder or name not in ("checkpoints", "code")]
        for name in files:
            path = str((place / name).relative_to(folder))
            if not name.startswith(".") and is_copied(path) and not (place / name).is_symlink():
                yield path
