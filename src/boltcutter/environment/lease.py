"""The lease of a run folder: one training at a time writes there, on whichever machine of a shared file system.

``<folder>/.lease`` names the process that holds the folder: host, number, and what tells it from another process that
is given the same number. On the same host a second process sees whether the first one is alive. From another host it
sees the heartbeat, which moves the file's time of modification; no clocks are compared. A job that SLURM or torchrun
starts again takes the lease of its own earlier start, even where that is still alive: the process that has lost its
lease notices, and stops writing.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter.environment import identity, signals

FILE = ".lease"
INTERVAL = 5.0  # seconds between two heartbeats
SETTLES = 0.2  # seconds after which a lease that was taken over stays so
EXPIRES = 60.0  # seconds without a heartbeat, after which a process on another host counts as dead
RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")

_held: Lease | None = None  # by this process


class LeaseHeldError(ValueError):
    """Another process trains in the folder, or it cannot be written."""


class LeaseLostError(RuntimeError):
    """Another process has taken the folder over, so this one must not write there any more."""

    hide_traceback = True  # needs no traceback


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder.

    Args:
        host: Its name.
        pid: Number of the process.
        place: Boot of the machine and namespace of processes, within which the number means something.
        started: What tells the process from an earlier one with its number.
        token: That no other holder has.
        job: Of SLURM or torchrun, if it belongs to one.
        restarts: How often SLURM and torchrun have started the job again.
        since: When it took the folder.
    """

    host: str
    pid: int
    place: str
    started: str
    token: str
    job: str | None
    restarts: list[int]
    since: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            place=_place(),
            started=_start_of(os.getpid()) or "",
            token=secrets.token_hex(8),
            job=identity.job_id(),
            restarts=[int(os.environ.get(name, 0)) for name in RESTARTS],
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_alive(self) -> bool | None:
        """Whether the process runs; None where only its heartbeat can tell."""
        if not self.place or (self.host, self.place) != (socket.gethostname(), _place()):
            return None
        started = _start_of(self.pid)
        return None if started is None else started == self.started

    def is_restarted_as(self, other: Holder) -> bool:
        """Whether ``other`` is a later start of the same job."""
        return self.job is not None and self.job == other.job and self.restarts < other.restarts


def read_holder(folder: Path) -> Holder | None:
    """Who holds the folder, alive or not; None where nobody does."""
    found = _read(folder / FILE)
    return found[0] if found else None


@contextmanager
def hold(folder: Path, *, is_holder: bool = True) -> Iterator[None]:
    """Hold a folder's lease during the block; the folder is made for it.

    Args:
        folder: Of the run.
        is_holder: Whether it is this process that does so for its run; one does.

    Raises:
        LeaseHeldError: Another process trains there, or nothing can be written there.
    """
    global _held
    if not is_holder:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lease = Lease(folder)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lease.acquire()
        except OSError as error:
            raise LeaseHeldError(f"cannot be written ({error.strerror}); choose another folder") from error
        _held = lease
        yield
    finally:
        _held = None
        lease.release()
        with suppress(OSError):
            for path in made:  # as far as they are empty
                path.rmdir()


def check() -> None:
    """See that this process still holds the folder that it trains in, if it is the one which holds it.

    Raises:
        LeaseLostError: Another process has taken it over.
    """
    if _held is not None:
        _held.check()


def is_lost() -> bool:
    """Whether another process is known to have taken over."""
    return _held is not None and _held.lost_to is not None


def current() -> Lease | None:
    """The lease of the folder that this process trains in; it can be pickled for a process that is spawned."""
    return _held


def watch(inherited: Lease | None) -> None:
    """Have a process that ``fork`` or ``spawn`` started from the holder notice, as the holder does, a lost lease.

    Args:
        inherited: From ``current`` in the holder. A forked process has it already, but not the thread of the heartbeat.
    """
    global _held
    _held = _held or inherited
    if _held is not None:
        _held.start()


class Lease:
    """The lease of one folder, for this process.

    Args:
        folder: Which exists.

    Attributes:
        lost_to: Who has taken the folder over.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / FILE
        self.lost_to: Holder | None = None
        self._holder = Holder.here()
        self._file: int | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_pid = 0  # of the process that has the thread

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process belongs to the same holder, but cannot release the lease."""
        return _copy_of_lease, (self.folder, self._holder)

    def acquire(self) -> None:
        """Take the lease, after waiting where only that tells whether its holder is alive.

        Raises:
            LeaseHeldError: Its holder is.
        """
        while not self._create():
            found = _read(self.path)
            if found is None:
                continue  # released just now
            holder, beat = found
            alive, restarted = holder.is_alive(), holder.is_restarted_as(self._holder)
            if alive and not restarted:
                raise _refusal(holder)
            if alive is None and not restarted:
                self._wait_for_heartbeat(holder, beat)
            if self._replace(holder):
                if restarted and alive is not False:
                    time.sleep(2 * INTERVAL)  # in which an earlier start that is still alive notices, and stops
                break
        self.start()

    def start(self) -> None:
        """Start the heartbeat, if this process has none."""
        if self._thread_pid != os.getpid():
            self._thread_pid, self._stopped = os.getpid(), threading.Event()
            self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")
            self._thread.start()

    def check(self) -> None:
        """See that nobody has taken the lease over.

        Raises:
            LeaseLostError: Somebody has.
        """
        with suppress(OSError):  # of a file system that does not answer now
            found = _read(self.path)
            if found is not None and found[0].token != self._holder.token:
                self.lost_to = found[0]
            elif found is None and self.folder.is_dir():
                self._create()  # a person has removed it
        if self.lost_to:
            raise LeaseLostError(
                f"{self.folder} was taken over by {self.lost_to}; this process stops, and writes no more"
            )

    def release(self) -> None:
        """Give the lease back, if it is still this process's."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(INTERVAL)  # else it could create the file again; a file system may not answer, though
        if self._file is None:
            return
        with suppress(OSError, LeaseLostError):
            self.check()
            self.path.unlink()
        os.close(self._file)
        self._file = None

    def _beat(self) -> None:
        while not self._stopped.wait(INTERVAL):
            with suppress(OSError):
                if self._file is not None:
                    os.utime(self._file)  # of this process's own file, also when another has taken its place
                try:
                    self.check()
                except LeaseLostError:
                    signals.handle_signal(signals.LEASE_LOST)
                    return

    def _wait_for_heartbeat(self, holder: Holder, beat: int) -> None:
        """Return once the holder counts as dead, or the lease has changed hands.

        Raises:
            LeaseHeldError: It is alive.
        """
        now = time.monotonic()
        end, said = now + EXPIRES, now + INTERVAL + 1
        while True:
            now = time.monotonic()  # before the look, as this process may be suspended between the two
            found = _read(self.path)
            if found is None or found[0] != holder:
                return
            if found[1] != beat:
                raise _refusal(holder)
            if now >= end:
                return
            if now > said:
                said = end
                print(f"{self.folder}: {holder} gives no sign of life; taking its place in {EXPIRES:.0f} s", flush=True)
            time.sleep(min(0.5, INTERVAL / 4))

    def _create(self) -> bool:
        """Whether there was no lease, and this process's is there now."""
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        self._keep(file, self.path)
        return True

    def _replace(self, holder: Holder) -> bool:
        """Whether the lease was still ``holder``'s, and is this process's now; of several that try, one succeeds."""
        claim = self.path.with_name(f"{FILE}.claim")
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            before = _identity(claim)
            time.sleep(1.0)
            if before and _identity(claim) == before:  # of a process that was killed in between
                claim.unlink(missing_ok=True)
            return False
        draft = self.path.with_name(f"{FILE}.{self._holder.token}")
        try:
            if (found := _read(self.path)) is None or found[0] != holder:
                return False
            self._keep(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), draft)
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)
            claim.unlink(missing_ok=True)
        time.sleep(SETTLES)  # in which one that removed this claim as a dead one's replaces the lease as well
        return (found := _read(self.path)) is not None and found[0].token == self._holder.token

    def _keep(self, file: int, path: Path) -> None:
        try:
            text = json.dumps(asdict(self._holder)).encode()
            if os.write(file, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:  # a full disk has room for an empty file, which nobody would hold and nobody could take at once
            os.close(file)
            path.unlink()
            raise
        before, self._file = self._file, file
        if before is not None:
            os.close(before)


def _copy_of_lease(folder: Path, holder: Holder) -> Lease:
    lease = Lease(folder)
    lease._holder = holder
    return lease


def _refusal(holder: Holder) -> LeaseHeldError:
    return LeaseHeldError(f"in use by {holder}; wait for it, end it, or choose another folder")


def _read(path: Path) -> tuple[Holder, int] | None:
    """The holder, and what changes with each heartbeat; a lease whose writing was cut short has a holder unknown."""
    try:
        with open(path) as file:  # opened, as a network file system may otherwise tell what it has seen before
            text, beat = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        return Holder(**json.loads(text)), beat
    except (ValueError, TypeError):
        return Holder("an unknown host", 0, "", "", "", None, [], "an unknown time"), beat


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one of its name; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _place() -> str:
    """Within which a process's number means one process: the boot of the machine, and the namespace of processes."""
    if sys.platform != "linux":
        return sys.platform
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process began; empty where it has ended, None where it runs and the system does not tell more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # has ended, is another user's and hidden, or there is no /proc
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return None
    return "" if fields[0] in "ZX" else fields[19]
