"""Containers for tests: podman with a storage of its own, and an image that consists of empty folders.

Python, its packages and this repository are mounted, so that no registry and no download is needed.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from conftest import ROOT, require

EMPTY = "localhost/empty:latest"
LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
INSTALL = "apt-get install -y --no-install-recommends podman runc"


class Podman:
    """Podman with a folder of its own for images and containers.

    Attributes:
        variables: Environment variables with which podman uses this folder.
    """

    def __init__(self) -> None:
        require("podman", "runc", install=INSTALL)
        # Not in a folder of pytest, which could not remove what is mounted if this process is killed.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="podman-"))
        storage = {"driver": "overlay", "graphroot": str(folder / "images"), "runroot": str(folder / "run")}
        # A machine of tests may refuse higher limits than its own, and lack systemd.
        limits = ["nofile=4096:4096", "nproc=4096:4096"]
        self.variables = {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}
        self.variables["CONTAINERS_CONF"] = str(folder / "containers.conf")
        engine = {"runtime": "runc", "cgroup_manager": "cgroupfs", "events_logger": "file"}
        (folder / "storage.conf").write_text(_toml("storage", storage))
        text = _toml("containers", {"default_ulimits": limits}) + _toml("engine", engine)
        (folder / "containers.conf").write_text(text)

    def __call__(
        self, *arguments: str, given: bytes | None = None, status: int = 0, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run podman; it has to end with this exit status."""
        done = subprocess.run(
            ["podman", *arguments], input=given, capture_output=True, timeout=timeout, env=os.environ | self.variables
        )
        out, err = done.stdout.decode(), done.stderr.decode()
        assert done.returncode == status, f"podman {' '.join(arguments)}: {done.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, done.returncode, out, err)

    def remove(self) -> None:
        """End all containers, and remove the folder."""
        self("rm", "--all", "--force", "--time", "1")
        overlay = self.folder / "images" / "overlay"  # which podman mounts on itself
        subprocess.run(["umount", "--recursive", overlay], capture_output=True)  # not mounted without root
        remove = ["rm", "-r"] if os.getuid() == 0 else ["podman", "unshare", "rm", "-r"]
        subprocess.run([*remove, self.folder], check=True, timeout=300, env=os.environ | self.variables)

    def import_empty(self) -> None:
        """Create the image ``EMPTY``."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            for name in ("dev", "etc", "proc", "sys", "tmp", "usr"):
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                archive.addfile(folder)
            for name, target in LINKS.items():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, target
                archive.addfile(link)
        self("import", "-q", "-", EMPTY, given=content.getvalue())


def mounts(without: Path | None = None) -> list[str]:
    """Return what a container needs of this machine to run this Python, as the setting ``launch.mounts``."""
    places = {"/usr", sys.prefix, sys.base_prefix, str(ROOT)}
    inner = {place for place in places for other in places - {place} if Path(place).is_relative_to(other)}
    return [f"{place}:{place}:ro" for place in sorted(places - inner - {str(without)})]


def _toml(table: str, values: dict[str, object]) -> str:
    return f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
