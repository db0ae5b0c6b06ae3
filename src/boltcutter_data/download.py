"""Download files: resumable, verified by checksum, and visible only when complete."""

# torch.hub.download_url_to_file and pooch neither resume a download, try mirrors, nor lock it between processes.

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm  # which Lightning needs as well

if sys.platform != "win32":
    import fcntl

TIMEOUT = 30.0  # seconds without receiving a byte
TRIES = 3  # attempts per mirror that breaks off
CHUNK = 1 << 18  # bytes
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError)


def download_file(name: str, mirrors: Sequence[str], target: Path, checksum: str | None = None) -> Path:
    """Download a file once, even if several processes request it.

    A partial download stays in ``<target>.part``, locked while a process writes; the next attempt resumes it.

    Args:
        name: File name on the mirrors.
        mirrors: Base URLs, tried in order.
        target: Path to save the file to; an existing file is not downloaded again.
        checksum: ``sha256:…`` or ``md5:…`` of the file; None skips verification.

    Raises:
        OSError: No mirror delivered the file.
        ValueError: The checksum's algorithm is unknown.
    """
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    if algorithm not in ("sha256", "md5"):
        raise ValueError(f"data.checksums: {checksum} of {name} is neither sha256:… nor md5:…; correct or remove it")
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    reasons = []
    with _locked(part) as file:
        if target.exists():  # by another process, while this one waited for the lock
            part.unlink()
            return target
        for mirror in mirrors:
            reason = _try_mirror(f"{mirror.rstrip('/')}/{name}", file, algorithm, expected)
            if reason is None:
                os.replace(part, target)
                return target
            reasons.append(f"{mirror}: {reason}")
        if file.seek(0, os.SEEK_END) == 0:
            part.unlink()
    tried = "; ".join(reasons) or "data.mirrors is empty"
    raise OSError(f"{name}: not downloaded ({tried}); put it into data.folder={target.parent} by hand")


def _try_mirror(url: str, file: IO[bytes], algorithm: str, expected: str) -> str | None:
    """Download ``file`` from one mirror; return None, or the reason of the failure."""
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
                continue  # it broke off after some bytes
            return reason
        found = _hash(file, algorithm) if expected else ""
        if found == expected.lower():
            file.flush()
            os.fsync(file.fileno())
            return None
        file.truncate(0)
        reason = f"its {algorithm} is {found}, expected {expected}"
        if not start:
            return reason
    return reason


def _receive(url: str, file: IO[bytes]) -> None:
    """Append the missing bytes of ``file``; start over if the server does not support range requests."""
    start = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "boltcutter", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)  # noqa: S310 - https mirrors
    except urllib.error.HTTPError as error:
        if error.code != 416 or not start:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{start}":
            return  # the file is complete
        file.truncate(0)
        _receive(url, file)
        return
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            file.truncate(0)
            start = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        options: Any = {"desc": url.rpartition("/")[2], "initial": start, "disable": not sys.stderr.isatty()}
        with tqdm.wrapattr(response, "read", total, **options) as stream:
            shutil.copyfileobj(stream, file, CHUNK)
    size = file.seek(0, os.SEEK_END)
    if total is not None and size < total:  # http.client treats a dropped connection as the end of the file
        raise http.client.HTTPException(f"broke off after {size} of {total} bytes")


def _hash(file: IO[bytes], algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    file.seek(0)
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open ``path`` for appending, in one process at a time."""
    while True:
        with path.open("ab+") as file:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX)
            # While this process waited for the lock, another may have finished and renamed the file.
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            yield file
            return
