"""The secret key of this user, by which records of runs, checkpoints and exports are known to be their own."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter.config.errors import ConfigError
from boltcutter.files import open_file

KEY_FILE = Path("~/.config/boltcutter/key")
DIGEST_LENGTH = 32  # hexadecimal digits


def sign(node: Any) -> str | None:
    """Sign plain values with this user's key; return None if no key can be stored."""
    with suppress(OSError, RuntimeError):  # a folder that is not writable, or no home directory
        path = KEY_FILE.expanduser()
        if not path.is_file():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                (draft := Path(scratch, "key")).touch(mode=0o600)
                draft.write_text(secrets.token_hex(32))
                os.link(draft, path)  # fails if another process has created it
    return _signature(node)


def is_signed(node: Any, signature: object) -> bool:
    """Return whether ``signature`` is this user's signature of these values."""
    expected = _signature(node)
    return expected is not None and hmac.compare_digest(expected.encode(), str(signature).encode())


def signed_content(node: Any) -> bytes:
    """Return the bytes that are signed: the values as stored in the record, without the location of the folder."""
    stored = json.loads(json.dumps(node, default=str))
    if isinstance(stored, dict):
        stored = {key: value for key, value in stored.items() if key not in ("folder", "resume", "ckpt", "reproduce")}
    return json.dumps(stored, sort_keys=True).encode()


def digest(node: Any) -> str:
    """The digest of what would be signed."""
    return hashlib.sha256(signed_content(node)).hexdigest()[:DIGEST_LENGTH]


def _signature(node: Any) -> str | None:
    try:
        with open_file(KEY_FILE.expanduser(), follows=True) as file:
            facts, key = os.fstat(file.fileno()), file.read()
        owners = os.geteuid(), Path("~").expanduser().stat().st_uid  # of root in a container, who uses a user's home
        if len(key) < 64 or facts.st_mode & 0o077 or facts.st_uid not in owners:
            raise ValueError(f"not private (owner {facts.st_uid}, mode {facts.st_mode & 0o777:o}, {len(key)} bytes)")
    except (OSError, RuntimeError):
        return None
    except ValueError as error:
        raise ConfigError(f"{KEY_FILE}: {error}; chmod 600 if it is yours, or remove it for a new one") from error
    return hmac.new(key, signed_content(node), hashlib.sha256).hexdigest()
