"""Runs on object storage: a run at a URL works in a local folder, whose files are copied to the URL as they change.

The local folder is below ``BOLTCUTTER_SCRATCH``, by default the temporary folder, and is the same for all processes of
a user on a node. Checkpoints are not in it: they are written to the URL directly.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.storage import is_url
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.settings import Settings
from boltcutter.environment.lease import Lease
from boltcutter.environment.process import in_slurm_step, is_rank_zero
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.run.remote.lease import RemoteLease
from boltcutter.run.remote.mirror import Mirror, is_copied
from boltcutter.run.remote.transfer import download, storage_errors
from boltcutter.run.remote.transfer import fetch as fetch
from boltcutter.run.remote.transfer import publish as publish
from boltcutter.run.store import RunStore

SCRATCH = "BOLTCUTTER_SCRATCH"  # folder of the local folders
INDEX = "index.json"  # beside a local folder
FLUSH_TIMEOUT = 20.0  # seconds that a checkpoint waits for the upload of urgent files

_urls: dict[Path, str] = {}  # by local folder
_locks: dict[Path, int] = {}  # open files, locked while this process uses a local folder
_mirrors: dict[Path, Mirror] = {}


class ObjectStorage(RunStore):
    """Runs at the URLs of object storage, in local folders that are copied."""

    def locate(self, place: str | Path) -> Path:
        """The local folder of a run: a path itself, or the folder for a URL."""
        if not is_url(place):
            return Path(place)
        url = str(place).rstrip("/")
        root = Path(os.environ.get(SCRATCH) or Path(tempfile.gettempdir(), f"boltcutter-{os.getuid()}"))
        names = [re.sub(r"[^\w.-]|^\.+", "_", name) for name in url.partition("://")[2].split("/")[-2:]]
        folder = root.absolute().joinpath(hashlib.sha256(url.encode()).hexdigest()[:12], *names)
        _urls[folder] = url
        return folder

    def show(self, text: str | Path) -> str:
        """Replace local folders of runs at a URL by the URL."""
        shown = str(text)
        for folder, url in _urls.items():
            shown = shown.replace(str(folder), url)
        return shown

    def pull(self, place: str | Path, setting: str, *, again: bool = False) -> Path:
        """Download the files of a run except for its checkpoints, unless another process of this node uses them.

        Args:
            place: Path or URL of the run; nothing is done for a path.
            setting: Key that was set to ``place``, for error messages.
            again: Whether to download also while others use them.

        Returns:
            The local folder.

        Raises:
            ConfigError: The storage cannot be reached.
        """
        folder = self.locate(place)
        if folder not in _urls:
            return folder
        url = _urls[folder]
        if url.startswith("memory:"):
            raise ConfigError(f"{setting}={url}: memory is lost when the process ends; use s3://, gs:// or az://")
        home = _home(folder)
        filter_warnings()
        with storage_errors(f"{setting}={url}", url):
            lock = _locks.get(home) or os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            _locks[home] = lock
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                again = True
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)  # waits while another process downloads
            try:
                if again:
                    _, removed = download(url, folder, home / INDEX, is_copied)
                    for name in removed:
                        (folder / name).unlink(missing_ok=True)
            finally:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return folder

    def use_url(self, cfg: Settings) -> Settings:
        """The settings with the URL of the checkpoints, if the folder is that of a URL."""
        url = _urls.get(cfg.place.folder)
        if url and str(cfg.checkpoints).startswith(f"{cfg.folder}/"):
            return cfg.changed({"checkpoints": url + str(cfg.checkpoints).removeprefix(str(cfg.folder))})
        return cfg

    def check(self, cfg: Settings) -> None:
        """Check that checkpoints are not folders of Lightning's or DeepSpeed's own if they are written to a URL.

        Raises:
            ConfigError: Each rank would write its shard to such a folder.
        """
        strategy = cfg.trainer.get("strategy")
        options = strategy if isinstance(strategy, dict) else {"_target_": strategy}
        found = None
        if "deepspeed" in str(options.get("_target_")).lower():
            found = f"={cfg.choices['trainer'] if isinstance(strategy, dict) else strategy}"
        elif options.get("state_dict_type") == "sharded":
            found = ".state_dict_type=sharded"
        if found and is_url(cfg.place.checkpoints):
            raise ConfigError(
                f"trainer.strategy{found}: shards need a folder that all ranks can access, not {cfg.checkpoints}; set "
                "checkpoints=<folder>, or trainer=fsdp2 trainer.strategy.save_distributed_checkpoint=true"
            )

    def portable(self, cfg: Settings) -> dict[str, Any]:
        """The values of a configuration, with which the run can be read also from a copy of its folder."""
        values = cfg.written
        if url := _urls.get(cfg.place.folder):
            values["folder"] = url
            values |= {key: self.show(values[key]) for key in ("resume", "reproduce") if values.get(key)}
            if str(cfg.checkpoints).startswith(f"{url}/"):
                values["checkpoints"] = "${folder}" + str(cfg.checkpoints).removeprefix(url)
        return values

    def lease(self, folder: Path) -> Lease | None:
        """The lease at the URL of a local folder; None if it is an ordinary folder."""
        return RemoteLease(folder, _urls[folder]) if folder in _urls else None

    def push(self, folder: Path) -> None:
        """Upload the files of a local folder that have changed; raises UploadError if that fails."""
        if folder in _urls and (error := Mirror(folder, _urls[folder], _home(folder) / INDEX, is_copied).close()):
            raise error

    @contextmanager
    def mirrored(self, folder: Path) -> Iterator[None]:
        """Upload the files of a local folder as they change, in a thread; of nodes but the first one, only their logs.

        At the end, UploadError is raised if the last changes were not uploaded.
        """
        first = is_rank_zero()
        if folder not in _urls or not (first or _is_first_of_node()):
            yield
            return
        if first:
            self.pull(_urls[folder], "folder", again=True)  # the lease is held now, so no other process changes them
        mirror = Mirror(folder, _urls[folder], _home(folder) / INDEX, is_copied if first else _is_log)
        if first:
            _mirrors[folder] = mirror
        failed = True
        try:
            yield
            failed = False
        finally:
            _mirrors.pop(folder, None)
            if error := mirror.close():
                if first and not failed:
                    raise error
                print(f"{'error' if first else 'warning'}: {one_line(error)}", file=sys.stderr)

    def flush(self, folder: Path) -> None:
        """Wait until the record and the metrics of a mirrored folder are uploaded, unless the storage fails."""
        if mirror := _mirrors.get(folder):
            mirror.flush(FLUSH_TIMEOUT)


def _home(folder: Path) -> Path:
    """The folder of a local folder, with its index and lock; readable only by this user.

    Raises:
        ConfigError: It cannot be created, or belongs to another user.
    """
    home = folder.parents[1]
    setting, remedy = f"{SCRATCH}={home.parent}", f"set {SCRATCH} to another folder"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: {home} cannot be created ({error.strerror}); {remedy}") from error
    for path in [home] if os.environ.get(SCRATCH) else [home.parent, home]:
        if path.stat().st_uid != os.getuid():
            raise ConfigError(f"{setting}: {path} belongs to another user; {remedy}")
    return home


def _is_first_of_node() -> bool:
    names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_LOCAL_RANK"]
    if in_slurm_step():
        names.append("SLURM_LOCALID")
    return not any(int(os.environ.get(name, 0)) for name in names)


def _is_log(name: str) -> bool:
    return name.startswith(("logs/", "nonfinite-"))


@cache
def run_store() -> ObjectStorage:
    """The store of this process."""
    return ObjectStorage()
