"""Records of runs: read within limits, signed, and used only if this user or a part trusts them.

A configuration calls its ``_target_`` values, so opening the run folder of somebody else could execute arbitrary code.
Records that this user has signed are trusted, and all are with ``trust=true``. Any other is judged by a part, and
refused without it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from boltcutter import extend
from boltcutter.config.errors import ConfigError
from boltcutter.project import LIBRARY, Project, install_command

KEY_FILE = Path("~/.config/boltcutter/key")  # secret key of this user, with which records are signed
MAX_BYTES = 1 << 26  # of a file of a run
MAX_JSON, MAX_LISTS = 1 << 25, 1 << 20  # bytes, and lists and objects, of a record: each list takes 64 bytes of memory
MAX_DEPTH = 100  # of a record; where it is used, many more levels would exceed Python's limit of recursion
REMEDY = "set trust=true if you trust the source of the folder"
_granted = False


def apply_overrides(overrides: list[str]) -> list[str]:
    """Apply ``trust=…`` to this process, and return the other overrides."""
    global _granted
    for override in (override for override in overrides if override.startswith("trust=")):
        if override.lower() not in ("trust=true", "trust=false"):
            raise ConfigError(f"{override}: expected trust=true or trust=false")
        _granted = override.lower() == "trust=true"
    return [override for override in overrides if not override.startswith("trust=")]


def is_granted() -> bool:
    """Return whether ``trust=true`` is set."""
    return _granted


def read_json(path: Path) -> dict[str, Any]:
    """Read a record, whoever has written it: the only function that opens one.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is not a JSON object, not an ordinary file, or too large.
    """
    return parse_json(read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Read a file of a run folder, whoever has written it.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is not an ordinary file, or too large.
    """
    with open_file(path, MAX_BYTES) as file:
        return file.read(os.fstat(file.fileno()).st_size + 1)  # the limit itself would be allocated each time


def open_file(path: Path, limit: int = MAX_BYTES) -> IO[bytes]:
    """Open a file of a run folder, whoever has written it.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is not an ordinary file, or has more bytes than the limit.
    """
    number = without_blocking(path, os.O_RDONLY)
    found = os.fstat(number)
    if stat.S_ISREG(found.st_mode) and found.st_size <= limit:
        return open(number, "rb")
    os.close(number)
    raise ValueError(f"larger than {limit >> 20} MiB" if stat.S_ISREG(found.st_mode) else "not an ordinary file")


def without_blocking(path: str | Path, flags: int) -> int:
    """Open a file, which may be a FIFO of somebody else, without waiting for its other end; an opener for ``open``.

    Raises:
        OSError: It cannot be opened, or is a FIFO that nobody reads.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def parse_json(content: bytes) -> dict[str, Any]:
    """Parse the content of a record.

    Raises:
        ValueError: It is not a JSON object, too large, nested too deeply, or has text that cannot be encoded.
    """
    if len(content) > MAX_JSON or content.count(b"[") + content.count(b"{") > MAX_LISTS:
        raise ValueError(f"larger than {MAX_JSON >> 20} MiB, or more than {MAX_LISTS} lists and objects")
    with suppress(RecursionError):
        found = json.loads(content.decode())
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        if b"\\ud" in content or b"\\uD" in content:  # half of a character, which may stand for a byte of a path
            json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")
        level, containers = [found], (dict, list)
        for _ in range(MAX_DEPTH):
            inner = (node.values() if type(node) is dict else node for node in level)
            if not (level := [value for values in inner for value in values if type(value) in containers]):
                return found
    raise ValueError("nested too deeply")


def check(
    node: Any,
    where: str,
    folder: Path,
    project: Project | None = None,
    *,
    signature: object = None,
    instantiates: bool = True,
    runs: bool = False,
    walks: bool = False,
) -> None:
    """Have a part check references, URLs and targets in a record that this user has not signed.

    Args:
        node: Part of the record.
        where: The override that opens the run, for error messages.
        folder: Folder of the run.
        project: The project, whose configuration files are searched for targets.
        signature: Signature of ``node``, from ``sign``.
        instantiates: Whether the classes in ``node`` will be instantiated.
        runs: Whether commands or overrides in ``node`` will be run, so that a signature is required.
        walks: Whether files in the folder will be read or written, so that none may be elsewhere.

    Raises:
        ConfigError: A reference, URL, target or file is not allowed, or no part can judge that.
    """
    if _granted or is_signed(node, signature):
        return
    if (judge := extend.find("judge_record")) is None:
        raise ConfigError(
            f"{where}: its record.json is not signed by you; {REMEDY}, or install the part that checks it: "
            f"{install_command(LIBRARY)}"
        )
    judge(node, where, folder, project, instantiates=instantiates, runs=runs, walks=walks)


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


def _signature(node: Any) -> str | None:
    try:
        with open_file(KEY_FILE.expanduser()) as file:
            facts, key = os.fstat(file.fileno()), file.read()
        owners = os.geteuid(), Path("~").expanduser().stat().st_uid  # of root in a container, who uses a user's home
        if len(key) < 64 or facts.st_mode & 0o077 or facts.st_uid not in owners:
            raise ValueError(f"not private (owner {facts.st_uid}, mode {facts.st_mode & 0o777:o}, {len(key)} bytes)")
    except (OSError, RuntimeError):
        return None
    except ValueError as error:
        raise ConfigError(f"{KEY_FILE}: {error}; chmod 600 if it is yours, or remove it for a new one") from error
    return hmac.new(key, signed_content(node), hashlib.sha256).hexdigest()
