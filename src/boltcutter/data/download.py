"""Download files: verified by checksum, and visible only when complete."""

# torch.hub.download_url_to_file has neither a timeout nor mirrors.

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm  # which Lightning needs as well

TIMEOUT = 30.0  # seconds without receiving a byte
TRIES = 3  # downloads from each mirror
CHUNK = 1 << 18  # bytes


def download_file(name: str, mirrors: Sequence[str], target: Path, checksum: str | None = None) -> Path:
    """Download a file.

    Args:
        name: File name on the mirrors.
        mirrors: Base URLs, tried in order.
        target: Path to save the file to; an existing file is not downloaded again.
        checksum: ``sha256:…`` of the file; None skips verification.

    Raises:
        ValueError: No mirror delivered the file.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = {}  # of failures, by mirror
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        part = Path(folder) / target.name
        for mirror in [*mirrors] * TRIES:
            try:
                digest = _receive(f"{mirror.rstrip('/')}/{name}", part)
            except (OSError, http.client.HTTPException) as error:
                reasons[mirror] = " ".join(str(error).split()) or type(error).__name__
                continue
            if checksum and digest != checksum.lower():
                reasons[mirror] = f"it is {digest}, expected {checksum}"
                continue
            os.replace(part, target)  # another process may have been first, with the same contents
            return target
    tried = "; ".join(f"{mirror}: {reason}" for mirror, reason in reasons.items()) or "data.mirrors is empty"
    raise ValueError(f"{name}: not downloaded ({tried}); put it into data.folder={target.parent} by hand")


def _receive(url: str, part: Path) -> str:
    """Write what a URL returns to a file, and return its checksum."""
    digest = hashlib.sha256()
    request = urllib.request.Request(url, headers={"User-Agent": "boltcutter", "Accept-Encoding": "identity"})  # noqa: S310 - https mirrors
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, open(part, "wb") as file:  # noqa: S310
        total = int(response.headers.get("Content-Length") or 0)
        with tqdm.wrapattr(response, "read", total, desc=part.name, disable=not sys.stderr.isatty()) as stream:
            while chunk := stream.read(CHUNK):
                file.write(chunk)
                digest.update(chunk)
        if file.tell() < total:  # http.client treats a dropped connection as the end of the file
            raise http.client.HTTPException(f"broke off after {file.tell()} of {total} bytes")
    return f"sha256:{digest.hexdigest()}"
