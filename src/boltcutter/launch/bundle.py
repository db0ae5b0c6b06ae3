"""Pack a run's code and record into one file, for machines that do not share the disk of this one."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_atomically
from boltcutter.config.errors import one_line
from boltcutter.run.snapshot import list_files

CODE = "code"
RECORD = (run_files.RECORD, run_files.CONFIG, "code.patch", "library.patch", run_files.SEARCH, run_files.STUDY)
MIN_LIMIT, MAX_EXPANSION = 1 << 30, 100  # bytes that a bundle may expand to, and in sizes of its file
MAX_SHOWN = 3  # files listed in a message


def check_size(root: Path, folder: Path, max_mb: float) -> None:
    """Check that the project's files are small enough to be sent with each job.

    Args:
        root: Root of the project.
        folder: Folder of the run, whose files are left out.
        max_mb: Largest sum of their sizes, in megabytes.

    Raises:
        ValueError: They are not; the message names the largest files.
    """
    sizes = {name: (root / name).stat().st_size for name in list_files(root, folder) if (root / name).exists()}
    if (total := sum(sizes.values()) / 1e6) > max_mb:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:MAX_SHOWN]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
        raise ValueError(
            f"launch.max_code_mb={max_mb:g}: the project's files have {total:.1f} MB; the largest are {shown}; "
            "have git ignore data, or raise the limit"
        )


def pack(folder: Path, runs: Sequence[Path] = ()) -> Path:
    """Write ``job.tar.gz`` with the code and the records of a run or array; the same content gives the same bytes."""
    target = folder / run_files.BUNDLE
    files = [file for file in (folder / CODE).rglob("*") if file.is_file() or file.is_symlink()]
    files += {file for place in (folder, *runs) for name in RECORD if (file := place / name).is_file()}
    write_atomically(target, lambda out: _archive(out, folder, sorted(files)))
    return target


def _archive(out: IO[bytes], folder: Path, files: Iterable[Path]) -> None:
    with (
        gzip.GzipFile("", "wb", fileobj=out, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", dereference=False) as archive,
    ):
        for file in files:
            leads_out = file.is_symlink() and os.path.isabs(os.readlink(file))  # large files are links in a snapshot
            source = file.resolve() if leads_out else file
            if source.exists() or source.is_symlink():
                archive.add(source, file.relative_to(folder), recursive=False, filter=_without_owner)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def unpack(bundle: Path, folder: Path) -> None:
    """Unpack a bundle, by gzip or xz, into a folder; entries that lead out of it are refused."""
    try:
        with bundle.open("rb") as packed:
            is_xz = packed.read(5) == b"\xfd7zXZ"
        # As a whole, since tarfile overlooks that the end is missing.
        with lzma.open(bundle) if is_xz else gzip.open(bundle) as stream:
            limit = max(MIN_LIMIT, MAX_EXPANSION * bundle.stat().st_size)
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise tarfile.TarError(f"it has more than {limit >> 20} MiB")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:  # Python before 3.10.12 and 3.11.4, such as that of Debian 12
                for entry in archive:
                    archive.extract(_checked(entry, folder.resolve()), folder)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise ValueError(f"{bundle}: cannot be unpacked ({one_line(error)}); launch the run again") from error


def _checked(entry: tarfile.TarInfo, folder: Path) -> tarfile.TarInfo:
    """Return an entry that is a file, a folder or a relative link inside of the folder, with those extracted so far."""
    place = (folder / entry.name).resolve()
    target = (place.parent / entry.linkname).resolve() if entry.issym() else place
    is_inside = place.is_relative_to(folder) and target.is_relative_to(folder)
    if not is_inside or not (entry.isreg() or entry.isdir() or entry.issym()):
        raise tarfile.TarError(f"{entry.name!r} would be extracted outside the folder")
    return entry
