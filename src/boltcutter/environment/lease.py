"""The lease of a run folder: only one training at a time writes to a folder, across all hosts of a shared file system.

``<folder>/.lease`` identifies the process that holds the folder: host, process ID, and the start time that tells it
from a later process with the same ID. On the same host, a second process checks whether the holder is alive. From
another host it observes the heartbeat, which updates the file's modification time; no clocks are compared. A job that
SLURM or torchrun restarts takes over the lease of its previous attempt, even if that is still alive: the process that
lost its lease detects this, and stops writing.

A successor first creates ``.lease.<token of the holder>.next``, which only one process can, and is the holder from then
on; then it renames this file to ``.lease``. One that is killed in between has a successor itself.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter.environment import identity
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.process import pid_namespace, start_time
from boltcutter.environment.this_process import this_process

FILE = ".lease"
MAX_BYTES = 1 << 16  # of the file
INTERVAL = 5.0  # seconds between two heartbeats
EXPIRY = 60.0  # seconds without a heartbeat, after which a process on another host is considered dead
RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


class LeaseHeldError(ValueError):
    """Another process trains in the folder, or the folder is not writable."""


class LeaseLostError(RuntimeError):
    """Another process has taken over the folder, so this one must stop writing to it."""

    hide_traceback = True


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder.

    Args:
        host: Host name.
        pid: Process ID.
        pid_namespace: Boot ID and PID namespace, within which the process ID is valid.
        start_time: Start time of the process, in clock ticks since boot; distinguishes processes with the same ID.
        token: Unique among holders.
        job: Job of SLURM or torchrun, if any.
        restarts: Number of restarts by SLURM and by torchrun.
        acquired_at: Time at which it acquired the lease, in ISO 8601.
    """

    host: str
    pid: int
    pid_namespace: str
    start_time: str
    token: str
    job: str | None
    restarts: list[int]
    acquired_at: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            start_time=start_time(os.getpid()) or "",
            token=secrets.token_hex(8),
            job=identity.job_id(),
            restarts=[int(os.environ.get(name, 0)) for name in RESTART_COUNTS],
            acquired_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.acquired_at}"

    def is_alive(self) -> bool | None:
        """Whether the process is running; None if only its heartbeat can tell, as for a process on another host."""
        if not self.pid_namespace or (self.host, self.pid_namespace) != (socket.gethostname(), pid_namespace()):
            return None
        found = start_time(self.pid)
        return None if found is None else found == self.start_time

    def is_restarted_as(self, other: Holder) -> bool:
        """Whether ``other`` is a later attempt of the same job."""
        return self.job is not None and self.job == other.job and self.restarts < other.restarts


def read_holder(folder: Path) -> Holder | None:
    """The holder of the folder, alive or not; None if there is no lease."""
    entry = _read_file(folder / FILE)
    return entry[0] if entry else None


def successor_file(holder: Holder) -> str:
    """Name of the file by which a successor takes over the lease of a holder."""
    return f"{FILE}.{holder.token}.next"


@contextmanager
def hold(folder: Path, *, is_holder: bool = True, lease: Lease | None = None) -> Iterator[None]:
    """Hold the lease of a folder during the block, creating the folder.

    Args:
        folder: The run folder.
        is_holder: Whether this process holds the lease on behalf of the run, which is rank 0; other ranks do nothing.
        lease: The lease, if it is not a file in the folder.

    Raises:
        LeaseHeldError: Another process trains in the folder, or it is not writable.
    """
    if not is_holder:
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    lease = lease or Lease(folder)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lease.acquire()
        except OSError as error:
            raise LeaseHeldError(f"cannot be written ({error.strerror}); choose another folder") from error
        this_process.lease = lease
        yield
    finally:
        this_process.lease = None
        lease.release()
        with suppress(OSError):
            for path in created:
                path.rmdir()  # fails, and ends the loop, at the first folder that is not empty


def check_lease() -> None:
    """Check that this process still holds its lease, if it holds one.

    Raises:
        LeaseLostError: Another process has taken over the folder.
    """
    if this_process.lease is not None:
        this_process.lease.check()


def is_lost() -> bool:
    """Whether another process is known to have taken over the folder."""
    return this_process.lease is not None and this_process.lease.lost_to is not None


def current() -> Lease | None:
    """The lease that this process holds; it can be pickled for a spawned process."""
    return this_process.lease


def watch(inherited: Lease | None) -> None:
    """Detect a lost lease in a process that the holder started by ``fork`` or ``spawn``.

    A spawned process gets the result of ``current``; a forked one has the lease already, but no heartbeat thread.
    """
    this_process.lease = this_process.lease or inherited
    if this_process.lease is not None:
        this_process.lease.start()


class Lease:
    """The lease of a folder, held by this process.

    Args:
        folder: An existing folder.

    Attributes:
        lost_to: The process that has taken over the folder, if any.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.name = folder, folder / FILE, str(folder)
        self.lost_to: Holder | None = None
        self._holder = Holder.here()
        self._file: int | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_pid = 0  # ID of the process in which the thread runs

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the holder; a copy in another process cannot release the lease."""
        return _copy_of_lease, (self.folder, self._holder)

    def acquire(self) -> None:
        """Acquire the lease; wait for a heartbeat if nothing else tells whether its current holder is alive.

        Raises:
            LeaseHeldError: The current holder is alive.
        """
        while not self._create():
            found = self._read()
            if found is None:
                continue  # released in the meantime
            holder, mtime = found
            alive, restarted = holder.is_alive(), holder.is_restarted_as(self._holder)
            if alive and not restarted:
                raise _refusal(holder)
            if alive is None and not restarted:
                self._wait_for_heartbeat(holder, mtime)
            if self._replace(holder):
                if restarted and alive is not False:
                    time.sleep(2 * INTERVAL)  # a previous attempt that is still alive detects the loss, and stops
                break
        self.start()

    def start(self) -> None:
        """Start the heartbeat thread, unless it runs in this process."""
        if self._thread_pid != os.getpid():
            self._thread_pid, self._stopped = os.getpid(), threading.Event()
            self._thread = threading.Thread(target=self._send_heartbeats, daemon=True, name="lease")
            self._thread.start()

    def check(self) -> None:
        """Check that no other process has taken over the lease.

        Raises:
            LeaseLostError: Another process has.
        """
        with suppress(OSError):  # the file system may be temporarily unavailable
            found = self._read()
            if found is not None and found[0].token != self._holder.token:
                self.lost_to = found[0]
            elif found is None and self.folder.is_dir():
                self._create()  # a user has deleted the file
        if self.lost_to:
            raise LeaseLostError(f"{self.name} was taken over by {self.lost_to}; this process stops writing and exits")

    def release(self) -> None:
        """Release the lease, if this process still holds it."""
        self._stopped.set()
        if self._thread is not None:
            # The thread could create the file again; with a timeout, as it may block on the file system.
            self._thread.join(INTERVAL)
        self._release()

    def _release(self) -> None:
        if self._file is None:
            return
        with suppress(OSError, LeaseLostError):
            self.check()
            self.path.unlink()
        self._close()

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(INTERVAL):
            with suppress(OSError):
                self._beat()
                try:
                    self.check()
                except LeaseLostError:
                    signals.handle_signal(signals.LEASE_LOST)
                    return

    def _beat(self) -> None:
        if (file := self._file) is not None:
            os.utime(file)  # by descriptor: never the file of a process that replaced it

    def _read(self) -> tuple[Holder, int] | None:
        """The holder, and a number that changes with each heartbeat; None if there is no lease."""
        chain = self._chain()
        return chain[-1] if chain else None

    def _chain(self) -> list[tuple[Holder, int]]:
        """The holder in ``.lease`` and its successors that have not replaced it yet, with their modification times."""
        chain: list[tuple[Holder, int]] = []
        entry = _read_file(self.path)
        while entry and entry[0].token not in [holder.token for holder, _ in chain]:
            holder, mtime = entry
            chain.append((holder if holder.token else replace(holder, token=str(len(chain))), mtime))
            entry = _read_file(self.folder / successor_file(chain[-1][0]))
        return chain

    def _wait_for_heartbeat(self, holder: Holder, mtime: int) -> None:
        """Return once the holder is considered dead, or the lease has another holder.

        Raises:
            LeaseHeldError: The holder is alive.
        """
        now = time.monotonic()
        end, next_message = now + EXPIRY, now + INTERVAL + 1
        while True:
            now = time.monotonic()  # before reading the file, as this process may be suspended between the two
            found = self._read()
            if found is None or found[0] != holder:
                return
            if found[1] != mtime:
                raise _refusal(holder)
            if now >= end:
                return
            if now > next_message:
                next_message = end
                print(f"{self.name}: no heartbeat from {holder}; taking over in {EXPIRY:.0f} s", flush=True)
            time.sleep(min(0.5, INTERVAL / 4))

    def _create(self) -> bool:
        """Create the lease; False if there is one."""
        return self._put_new(FILE)

    def _replace(self, holder: Holder) -> bool:
        """Take over the lease of ``holder``; of several processes that try, exactly one succeeds."""
        path, is_held = self.folder / successor_file(holder), False
        if not self._put_new(path.name):
            return False
        try:
            *replaced, last = [one for one, _ in self._chain()] or [holder]
            if last.token == self._holder.token:  # else the holder had been replaced, or has released the lease
                # From the last to the first: if one that was replaced runs after all, it renames this process's file.
                for earlier in [*map(successor_file, replaced[-2::-1]), FILE]:
                    with suppress(FileNotFoundError):
                        path = path.replace(self.folder / earlier)
                is_held = (now := self._read()) is not None and now[0].token == self._holder.token
        finally:
            if not is_held:
                self._close()
                if path != self.path:
                    path.unlink(missing_ok=True)
        return is_held

    def _put_new(self, name: str) -> bool:
        """Create a file with the holder, and keep it open for heartbeats; False if it exists."""
        path = self.folder / name
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        self._close()
        self._file = file
        text = json.dumps(asdict(self._holder)).encode()
        try:
            if os.write(file, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:  # a full disk still creates empty files: a lease without a holder, which would have to expire
            self._close()
            path.unlink()
            raise
        return True

    def _close(self) -> None:
        file, self._file = self._file, None  # before it is closed: another thread sends heartbeats
        if file is not None:
            os.close(file)


def _copy_of_lease(folder: Path, holder: Holder) -> Lease:
    lease = Lease(folder)
    lease._holder = holder
    return lease


def _refusal(holder: Holder) -> LeaseHeldError:
    return LeaseHeldError(f"in use by {holder}; wait for it, stop it, or choose another folder")


def _read_file(path: Path) -> tuple[Holder, int] | None:
    """The holder and the modification time in ns; None if there is no lease."""
    try:
        # Opening revalidates attributes that a network file system may have cached. A FIFO would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            text, mtime = file.read(MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    return parse_holder(text), mtime


def parse_holder(text: str | bytes) -> Holder:
    """The holder in the contents of a lease; an unknown one if it is partially written, or damaged."""
    with suppress(ValueError, TypeError, RecursionError):
        found = Holder(**json.loads(text))
        texts = (found.host, found.pid_namespace, found.start_time, found.token, found.acquired_at, found.job or "")
        is_typed = type(found.pid) is int and isinstance(found.restarts, list)
        is_text = all(isinstance(text, str) and text.isprintable() for text in texts)  # host and time are printed
        if is_typed and is_text and found.token.isalnum():  # part of a file's name
            return found
    return Holder("an unknown host", 0, "", "", "", None, [], "an unknown time")
