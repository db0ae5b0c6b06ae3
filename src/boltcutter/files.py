"""Files of others: whose a file is, how files of a run are opened for writing, and which decoders read images."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import IO

from boltcutter import run_files

# Pillow opens an image with these decoders only, whatever its name: others, such as that of EPS, run other programs.
IMAGE_FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
# A compressed file of any size may expand to a thousand times its size, and what repeats to much more. Texts and
# images expand to less than 20 times, and a table of little information may be small in any case.
MAX_EXPANSION, ALWAYS_EXPANDED = 100.0, 1 << 27  # in sizes of the file, and bytes
REMEDY = "set trust=true if you trust the source of the folder"
MAX_BYTES = 1 << 26  # of a file of a run
MAX_LEVELS = 5  # how deep files are in the folder of a run
MAX_LINKS = 40  # on the way to a file, as of Linux
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def trusted_owners() -> frozenset[int]:
    """IDs of the users whose files this process may use: itself, root, and the owner of its home directory.

    The last one is another user for root in a container that uses the home directory of the user. For root by sudo,
    also the user who called it.
    """
    invoking = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return _owners(os.geteuid(), os.environ.get("HOME")) | ({int(invoking)} if invoking.isdecimal() else set())


@cache
def _owners(user: int, home: str | None) -> frozenset[int]:
    try:
        return frozenset({user, 0, os.stat(home or os.path.expanduser("~")).st_uid})
    except OSError:
        return frozenset({user, 0})


def owner_name(path: str | Path) -> str:
    """Name of the user who owns a file, or the number if it has none here."""
    import pwd

    number = os.lstat(path).st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def is_ours(found: os.stat_result) -> bool:
    """Whether a file is of a trusted owner, and writable by nobody else; a link is writable by nobody."""
    if found.st_uid not in trusted_owners():
        return False
    if stat.S_ISLNK(found.st_mode) or not found.st_mode & 0o022:
        return True
    return not found.st_mode & 0o002 and _is_private_group(found.st_gid, found.st_uid)


@cache
def _is_private_group(group: int, user: int) -> bool:
    """Whether a group is that of one user alone, as many Linux distributions create one for each user."""
    import grp
    import pwd

    if group == 0:
        return True
    try:
        name, members = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and set(members.gr_mem) <= {name}


def foreign_link(path: str | Path, below: str | Path = "/") -> str | None:
    """The first link of another user on the way to a file, or the file itself if it is one; None if there is none.

    Args:
        path: The file.
        below: A folder above, which the user has named: links to it are not looked at.

    Raises:
        OSError: Links lead in a circle.
    """
    place, count = Path(os.path.abspath(below)), 0
    rest = list(Path(os.path.abspath(path)).relative_to(place).parts)
    while rest:
        place = place / rest.pop(0)
        try:
            found = os.lstat(place)
        except OSError:  # what does not exist is no link
            return None
        if not stat.S_ISLNK(found.st_mode):
            continue
        if found.st_uid not in trusted_owners():
            return str(place)
        if (count := count + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.path.abspath(place.parent / os.readlink(place)))
        place, rest = Path("/"), [*target.parts[1:], *rest]
    return None


def opener(folder: str | Path) -> Callable[[str, int], int]:
    """An opener, for ``open``, of files in the folder of a run, as by ``open_within``."""
    return lambda path, flags: open_within(folder, path, flags)


def open_within(folder: str | Path, path: str | Path, flags: int) -> int:
    """Open a file below the folder of a run for writing, whoever has made the folder; return its descriptor.

    The file is found from a descriptor of the folder, so that nobody can exchange what was checked. FIFOs do not block.

    Raises:
        OSError: It cannot be opened, is a link, not an ordinary file, has several names, or a link of somebody else
            leads to its folder.
    """
    *inner, name = Path(os.path.relpath(path, folder)).parts
    if name == ".." or ".." in inner:
        raise OSError(errno.EPERM, "is not in the folder of the run", str(path))
    place = _open_folders(folder, inner)
    try:
        wanted = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(name, wanted, 0o666, dir_fd=place)
    finally:
        os.close(place)
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(number)
        what = (
            "is not an ordinary file" if not stat.S_ISREG(found.st_mode) else "has another name as well (a hard link)"
        )
        raise OSError(errno.EPERM, what, str(path))
    if flags & os.O_TRUNC:
        os.ftruncate(number, 0)
    return number


def make_empty(folder: str | Path, path: Path) -> None:
    """Make an empty folder below the folder of a run, in place of what is there, whoever has made the folder.

    Raises:
        OSError: It cannot be made, or a link of somebody else leads to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    *inner, name = path.relative_to(folder).parts
    place = _open_folders(folder, inner)
    try:
        if sys.version_info >= (3, 11):
            shutil.rmtree(name, ignore_errors=True, dir_fd=place)
        else:
            shutil.rmtree(path, ignore_errors=True)
        os.mkdir(name, dir_fd=place)
    finally:
        os.close(place)


def open_parent(path: Path) -> int:
    """Open the folder of a file; return its descriptor, from which the file is written.

    Within the folder of a run, links are followed as by ``open_within``: whoever may change that folder could otherwise
    exchange another folder for a link before the file is written.
    """
    path = Path(os.path.abspath(path))
    root = next(
        (place for place in list(path.parents)[:MAX_LEVELS] if (place / run_files.RECORD).exists()), path.parent
    )
    return _open_folders(root, path.parent.relative_to(root).parts)


def _open_folders(folder: str | Path, inner: Iterable[str]) -> int:
    """Open a folder, then the folders below, each from the descriptor of the one before; return that of the last."""
    place = os.open(folder, FOLDER)
    for part in inner:
        try:
            below = _open_folder(part, place)
        finally:
            os.close(place)
        place = below
    return place


def _open_folder(name: str, place: int) -> int:
    """Open a folder relative to a descriptor; follow links that a trusted owner has made."""
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=place)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not hasattr(os, "O_PATH"):
            raise
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode) or found.st_uid not in trusted_owners():
            raise OSError(errno.ELOOP, "is a link of another user", name)
        target = os.readlink("", dir_fd=link)
    finally:
        os.close(link)
    return os.open(target, FOLDER, dir_fd=place)


def open_file(path: Path, limit: int = MAX_BYTES, *, follows: bool = False) -> IO[bytes]:
    """Open a file of a run folder, whoever has written it; a link only if ``follows``.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is not an ordinary file, or has more bytes than the limit.
    """
    try:
        number = without_blocking(path, os.O_RDONLY | (0 if follows else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("not an ordinary file") from None
        raise
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


def expansion_limit(path: Path, max_expansion: float = MAX_EXPANSION) -> int:
    """Bytes to which a file may expand."""
    return max(ALWAYS_EXPANDED, int(max_expansion * path.stat().st_size))
