"""Copy the files of a run between a folder and a URL, each only if it has changed."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from boltcutter import run_files
from boltcutter.checkpoint.atomic import temporary_path, write_text
from boltcutter.config.errors import ConfigError
from boltcutter.project import install_command
from boltcutter.run import trust

LIST_TIMEOUT = 60.0  # seconds
MAX_BUFFERED = 2**26  # bytes of a file that is read before it is uploaded, so that it cannot change meanwhile
MODULES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
LOGIN = {
    "s3fs": "log in with `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gcsfs": "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "adlfs": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and log in with `az login`",
}

T = TypeVar("T")
Index = dict[str, list[Any]]  # by name: version of the object, and size and modification time of the file equal to it


def fetch(url: str, folder: Path) -> list[str]:
    """Download what has changed of a run with its checkpoints; a ``launch`` entry of the local record is kept.

    Returns:
        Names of the downloaded files.

    Raises:
        ConfigError: The storage cannot be reached, or has no such run.
    """
    record, index = folder / run_files.RECORD, folder / ".fetched.json"
    launch = trust.read_json(record).get("launch") if record.is_file() else None
    with storage_errors(url, url):
        found, _ = download(url.rstrip("/"), folder, index, is_file_of_run)
    if run_files.RECORD not in read_index(index):
        raise ConfigError(f"{url}: no run there (record.json is missing); give the URL of a run", kind="unknown_run")
    if launch and run_files.RECORD in found:
        write_text(record, json.dumps(trust.read_json(record) | {"launch": launch}, indent=2) + "\n")
    return found


def publish(folder: Path, url: str, names: Iterable[str]) -> None:
    """Upload files of a folder."""
    with storage_errors(url, url):
        for name in names:
            upload(folder, url.rstrip("/"), name)


def is_file_of_run(name: str) -> bool:
    """Whether an object belongs to a run, and does not leave its folder."""
    parts = name.split("/")
    is_inside = "\\" not in name and all(part not in ("", ".", "..") for part in parts)
    return is_inside and parts[0] != "code" and name != run_files.BUNDLE and not parts[-1].startswith(".lease")


def download(url: str, folder: Path, file: Path, wanted: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Download the files of a URL that have changed there since they were last equal.

    Args:
        url: Where from.
        folder: Where to.
        file: File of the index, which tells what has changed.
        wanted: Which files, by name.

    Returns:
        Names of the downloaded files, and of those that were downloaded earlier and are no longer at the URL.
    """
    from boltcutter.checkpoint.storage import resolve_filesystem

    store, place = resolve_filesystem(url)
    start = f"{place.rstrip('/')}/"
    listed = call_with_timeout(LIST_TIMEOUT, lambda: store.find(start.rstrip("/"), detail=True))
    objects = {path.removeprefix(start): info for path, info in listed.items() if path.startswith(start)}
    objects = {name: info for name, info in objects.items() if info["type"] == "file" and wanted(name)}
    index, found = read_index(file), list[str]()
    try:
        for name, info in objects.items():
            path, version = folder / name, _version(info)
            if path.is_file() and index.get(name, [None])[0] == version:
                continue  # if the file has changed since, it is still to be uploaded
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = temporary_path(path)
            try:
                store.get_file(info["name"], str(draft))
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            index[name] = [version, *read_stamp(path)]
            found.append(name)
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({name: entry for name, entry in index.items() if name in objects}))
    return found, [name for name in index if name not in objects]


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call of a storage, which may have no timeout of its own.

    Raises:
        TimeoutError: It takes longer.
    """
    future = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="storage").start()
    try:
        return future.result(seconds)
    except (TimeoutError, concurrent.futures.TimeoutError) as error:  # not the same before Python 3.11
        raise error if future.done() else TimeoutError(f"no response within {seconds:.0f} s") from error


def upload(folder: Path, url: str, name: str) -> str:
    """Upload a file, and return the version of the object."""
    from boltcutter.checkpoint.storage import resolve_filesystem

    store, place = resolve_filesystem(f"{url}/{name}")
    file = folder / name
    if file.stat().st_size <= MAX_BUFFERED:
        store.pipe_file(place, file.read_bytes())
    else:
        store.put_file(str(file), place)
    store.invalidate_cache()
    return _version(store.info(place))


def _version(info: dict[str, Any]) -> str:
    """What differs between two versions of an object; the keys depend on the storage."""
    tag = info.get("ETag") or info.get("etag") or info.get("md5Hash")
    return str(tag).strip('"') if tag else f"{info['size']} {info.get('mtime') or info.get('last_modified')}"


def read_stamp(file: Path) -> list[int]:
    """Size and modification time of a file, which change with it."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def read_index(file: Path) -> Index:
    """Read an index; empty if there is none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_text()))
    return {}


@contextmanager
def storage_errors(setting: str, url: str) -> Iterator[None]:
    """Convert the errors of a storage, of which each has its own, to a ConfigError of one line."""
    module = MODULES.get(url.partition("://")[0], "")
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{setting}: {module or error} is not installed; {install_command(module)}", kind="not_installed"
        ) from error
    except Exception as error:  # each storage raises its own
        raise ConfigError(f"{setting}: cannot be reached ({reason(error)}); {remedy_for(url)}") from error


def remedy_for(url: str) -> str:
    """The remedy for a URL that cannot be reached, with the command to log in."""
    module = MODULES.get(url.partition("://")[0])
    return f"check the address, or {LOGIN[module]}" if module else "use s3://, gs:// or az://"


def reason(error: BaseException) -> str:
    """The message of an exception in a part of a line."""
    from boltcutter.checkpoint.storage import error_text

    return error_text(error)[:200]
