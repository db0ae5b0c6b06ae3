"""Records of runs: read within limits, signed, and used only if this user trusts them, or nothing in them is dangerous.

A configuration calls its ``_target_`` values, so opening the run folder of somebody else could execute arbitrary code.
Records that this user has signed are trusted, and all are with ``trust=true``; ``foreign_record`` judges any other.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from boltcutter import files
from boltcutter.config.errors import ConfigError, Mistake, one_line
from boltcutter.config.values import MAX_DEPTH as MAX_DEPTH
from boltcutter.config.values import is_deep
from boltcutter.environment import user_key
from boltcutter.environment.this_process import this_process
from boltcutter.files import REMEDY as REMEDY
from boltcutter.project import Project

MAX_JSON, MAX_LISTS = 1 << 25, 1 << 20  # bytes, and lists and objects, of a record: each list takes 64 bytes of memory
# Bytes of files in the run folder of somebody else that are read into memory; metrics.csv only to be continued.
MAX_READ, MAX_HEADER = {".csv": 1 << 26, ".ledger": 1 << 28}, 1 << 17
OWN_LINKS = ("code", "wandb")  # in a run folder; the snapshot of the code and W&B have links, and nothing reads them
CHECKPOINTS = "checkpoints"  # in a run folder; it may be a link to a larger disk, from which checkpoints are only read
AGENT = "BOLTCUTTER_AGENT"  # variable of processes whose arguments are of an agent, which any text may have persuaded
DIGESTS = "sha256:"  # of trust=sha256:<digest>,… with which a job trusts what was submitted, and no other record


def apply_overrides(overrides: list[str]) -> list[str]:
    """Apply ``trust=…`` to this process, and return the other overrides."""
    for override in (override for override in overrides if override.startswith("trust=")):
        digest = rf"[0-9a-f]{{{user_key.DIGEST_LENGTH}}}"
        if re.fullmatch(rf"trust={DIGESTS}{digest}(,{digest})*", override):
            this_process.trusted_digests = frozenset(override.removeprefix(f"trust={DIGESTS}").split(","))
            continue
        if override.lower() not in ("trust=true", "trust=false"):
            raise ConfigError(f"{override[:200]}: expected trust=true or trust=false", kind="wrong_type")
        this_process.trusted_digests = frozenset()
        this_process.trusts_all = override.lower() == "trust=true"
    return [override for override in overrides if not override.startswith("trust=")]


def is_granted() -> bool:
    """Return whether ``trust=true`` is set."""
    return this_process.trusts_all


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
    with files.open_file(path, files.MAX_BYTES) as file:
        return file.read(os.fstat(file.fileno()).st_size + 1)  # the limit itself would be allocated each time


def read_own_lines(path: Path) -> list[str]:
    """The lines of a file that names folders; none if there is none, or if others own it or may write to it."""
    with suppress(OSError, ValueError), files.open_file(path) as file:
        if is_granted() or files.is_ours(os.fstat(file.fileno())):
            return list(dict.fromkeys(file.read().decode().splitlines()))
    return []


def make_own_folder(place: Path) -> None:
    """Make a folder whose code is executed and whose files are believed, unless it is there and this user's.

    Raises:
        ConfigError: Others own it or may write to it, lead to it by a link, or may exchange it.
    """
    link = files.foreign_link(place)
    if link is None or is_granted():
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        above = place.parent.stat()
        is_fixed = not above.st_mode & stat.S_IWOTH or above.st_mode & stat.S_ISVTX
        if is_granted() or (files.is_ours(place.stat()) and above.st_uid in files.trusted_owners() and is_fixed):
            return
    raise ConfigError(
        f"{link or place}: belongs to another user, or others may write to it or to the folder above, and what is in "
        f"it would be executed; use another folder, such as runs=<one of yours>, or {REMEDY}"
    )


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
        if not is_deep(found, MAX_DEPTH):
            return found
    raise ValueError("nested too deeply")


def check_record(
    node: Any,
    where: str,
    folder: Path,
    project: Project | None = None,
    *,
    signature: object = None,
    instantiates: bool = True,
    runs: bool = False,
    walks: bool = False,
    writes: bool = False,
) -> None:
    """Check references, URLs and targets in a record that is not this user's own.

    Own is what this user has signed, in a folder that is, with all of its files, of this user and writable by nobody
    else.

    Args:
        node: Part of the record.
        where: The override that opens the run, for error messages.
        folder: Folder of the run.
        project: The project, whose configuration files are searched for targets.
        signature: Signature of ``node``, from ``sign``.
        instantiates: Whether the classes in ``node`` will be instantiated.
        runs: Whether commands or overrides in ``node`` will be run, so that a signature is required.
        walks: Whether files in the folder will be read, so that none may be elsewhere.
        writes: Whether they will be written as well.

    Raises:
        ConfigError: A reference, URL, target or file is not allowed.
    """
    if this_process.trusts_all:
        return
    is_own = is_own_record(node, signature, folder)
    if walks and (found := next(_outside(folder, is_own=is_own, writes=writes), None)):
        raise ConfigError(f"{where}: {one_line(found[0])} {found[1]}; {REMEDY}")
    if is_own:
        return
    from boltcutter.run.foreign_record import judge  # only for records of others

    try:
        judge(node, where, folder, project, instantiates=instantiates, runs=runs)
    except ConfigError as error:
        if not user_key.is_signed(node, signature) or (foreign := next(_foreign(folder), None)) is None:
            raise
        note = f"you have signed it, but others own or may write {one_line(foreign)}; chmod -R go-w {folder}, or "
        lines = [Mistake(line.replace(REMEDY, note + REMEDY), line.kind) for line in error.mistakes]
        raise ConfigError(*lines) from None


def check_arguments(overrides: Sequence[str], composed: Any, project: Project) -> None:
    """Check what an agent's arguments name, as the record of somebody else: a report that it has read may ask for it.

    Raises:
        ConfigError: A reference, URL or target is not allowed, or a place to write is outside of the project.
    """
    if not (overrides and os.environ.get(AGENT)):
        return
    from boltcutter.run.destinations import has_foreign_texts, outside_of_project

    if has_foreign_texts(composed, project):
        check_record(composed, "arguments", Path(os.devnull), project)
    if setting := outside_of_project(composed, project):
        raise ConfigError(f"arguments: {setting} leads out of the project, to which an agent may write; leave it out")


def is_own_record(node: Any, signature: object, folder: Path) -> bool:
    """Whether this user has signed a part of a record, in a folder of this user, or submitted or trusts it."""
    trusted = this_process.trusted_digests
    if this_process.trusts_all or (trusted and user_key.digest(node) in trusted):
        return True
    return user_key.is_signed(node, signature) and next(_foreign(folder), None) is None


def _excess(path: Path, limit: int) -> Iterator[str]:
    """Why a table is not read into memory."""
    try:
        with files.open_file(path, limit) as file:
            if path.suffix == ".csv" and len(file.readline(MAX_HEADER)) == MAX_HEADER:
                yield "has more columns than can be read"
    except ValueError as error:
        yield f"is {error}"


def _foreign(folder: Path) -> Iterator[str]:
    """Yield what is in a folder that others own or may write, and the folder itself if that is so."""
    try:
        if not files.is_ours(os.lstat(os.path.realpath(folder))):
            yield str(folder)
        for place, folders, names in os.walk(folder):
            yield from (p for name in (*folders, *names) if not files.is_ours(os.lstat(p := os.path.join(place, name))))
    except OSError:  # removed meanwhile, or there is no folder
        return


def _outside(folder: Path, *, is_own: bool, writes: bool) -> Iterator[tuple[str, str]]:
    """Yield links out of a folder, to which its files would be read and written, FIFOs, which block, and large tables.

    Each with the reason. Tables of a run of somebody else that are continued or compared are read into memory.

    Args:
        folder: Folder of a run.
        is_own: Whether links out of it are followed: those that a trusted user has made.
        writes: Whether files will be written, so that ``checkpoints`` of somebody else must be inside.
    """
    home = folder.resolve()
    for place, folders, names in os.walk(folder):
        if Path(place).parent == folder and Path(place).name in OWN_LINKS:
            folders[:] = []
            continue
        for path in (Path(place, name) for name in [*folders, *names]):
            found, is_top = path.lstat(), Path(place) == folder
            if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
                is_read = is_top and not is_own and (writes or path.suffix != ".csv")
                if is_read and (limit := MAX_READ.get(path.suffix)) is not None:
                    yield from ((path.name, reason) for reason in _excess(path, limit))
                continue
            target = Path(os.path.realpath(path))
            is_link = stat.S_ISLNK(found.st_mode) and not (
                target.exists() and not (target.is_file() or target.is_dir())
            )
            is_read = is_top and path.name == CHECKPOINTS and target.is_dir() and not writes
            if not (is_link and (target.is_relative_to(home) or is_read or (is_own and files.is_ours(found)))):
                yield str(path.relative_to(folder)), "is not a file of the folder, or leads out of it"
