"""Files by which one of several processes claims a short exclusive task, which a killed process leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def remove_abandoned(claim: Path, timeout: float) -> bool:
    """Remove the claim of a process that was killed, or wait for one that is alive.

    Args:
        claim: The file that such a process creates, and locks.
        timeout: Seconds.

    Returns:
        False if the process neither removed its claim nor died.
    """
    before, end = identity_of(claim), time.monotonic() + timeout
    while time.monotonic() < end:
        time.sleep(1.0)  # for file systems without locks
        try:
            file = os.open(claim, os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            if identity_of(claim) != before:
                return True
            if lock(file, claim, wait=False):
                claim.unlink(missing_ok=True)
                return True
        finally:
            os.close(file)
    return False


def lock(file: int, path: Path, *, wait: bool = True) -> bool:
    """Lock an open file, where the file system has locks; False if it is locked, or no longer the file at ``path``."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:
            pass  # no locks
    return identity_of(file) == identity_of(path)


def identity_of(file: Path | int) -> tuple[int, int] | None:
    """Inode and modification time, which differ if the file was recreated; None if it does not exist."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
