"""Files from the network: resumed, verified, and seen only when whole."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if sys.platform != "win32":
    import fcntl

TIMEOUT = 30.0  # seconds without a single byte
TRIES = 3  # of one mirror that breaks off
CHUNK = 1 << 18  # bytes
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError)


def fetch(name: str, mirrors: Sequence[str], target: Path, checksum: str | None = None) -> Path:
    """Download a file once, however many processes ask for it.

    What arrived of it stays in ``<target>.part``, locked while a process writes; the next attempt goes on from there.

    Args:
        name: Of the file on the mirrors.
        mirrors: URLs of folders, tried in turn.
        target: Where the file goes; left alone if it is there.
        checksum: ``sha256:…`` or ``md5:…`` of the whole file, or none.

    Raises:
        OSError: No mirror gave the file.
        ValueError: The checksum is of an unknown kind.
    """
    kind, _, wanted = (checksum or "sha256:").partition(":")
    if kind not in ("sha256", "md5"):
        raise ValueError(f"data.checksums: {checksum} of {name} is neither sha256:… nor md5:…; correct or remove it")
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    reasons = []
    with _locked(part) as file:
        if target.exists():  # by another process, while this one waited
            part.unlink()
            return target
        for mirror in mirrors:
            reason = _try_mirror(f"{mirror.rstrip('/')}/{name}", file, kind, wanted)
            if reason is None:
                os.replace(part, target)
                return target
            reasons.append(f"{mirror}: {reason}")
        if file.seek(0, os.SEEK_END) == 0:
            part.unlink()
    tried = "; ".join(reasons) or "data.mirrors is empty"
    raise OSError(f"{name}: not downloaded ({tried}); put it into data.folder={target.parent} by hand")


def _try_mirror(url: str, file: IO[bytes], kind: str, wanted: str) -> str | None:
    """Fill ``file`` from one mirror; nothing, or the reason why not."""
    reason = ""
    for _ in range(TRIES):
        start = file.seek(0, os.SEEK_END)
        try:
            _receive(url, file)
        except NETWORK_ERRORS as error:
            reason = " ".join(str(getattr(error, "reason", "") or error or type(error).__name__).split())
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                reason = f"HTTP {error.code} {reason}"
            if file.seek(0, os.SEEK_END) > start:
                continue  # it broke off, but not without some bytes
            return reason
        found = _hash(file, kind) if wanted else ""
        if found == wanted.lower():
            file.flush()
            os.fsync(file.fileno())
            return None
        file.truncate(0)
        reason = f"its {kind} is {found}, not {wanted}"
        if not start:
            return reason
    return reason


def _receive(url: str, file: IO[bytes]) -> None:
    """Append what ``file`` lacks; begin again where the server cannot send a part."""
    start = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "boltcutter", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not start:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{start}":
            return  # nothing was missing
        file.truncate(0)
        _receive(url, file)
        return
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            file.truncate(0)
            start = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        for chunk in _shown(response, url, start, total):
            file.write(chunk)
    size = file.seek(0, os.SEEK_END)
    if total is not None and size < total:  # http.client reads a connection cut short as the end
        raise http.client.HTTPException(f"broke off after {size} of {total} bytes")


def _shown(response: IO[bytes], url: str, start: int, total: int | None) -> Iterator[bytes]:
    """Chunks as they come, under a progress bar where a person looks on."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(url.rpartition("/")[2], total=total, completed=start)
        while chunk := response.read(CHUNK):
            yield chunk
            progress.advance(task, len(chunk))


def _hash(file: IO[bytes], kind: str) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    file.seek(0)
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """``path`` open for appending, by one process at a time."""
    while True:
        with path.open("ab+") as file:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX)
            # While this process waited, another may have finished and moved the file away from under its name.
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            yield file
            return
