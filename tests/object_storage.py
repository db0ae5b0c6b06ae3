"""Servers of object storage, for tests of runs and checkpoints there."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest

from boltcutter.run.remote import store as remote


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start a server with a bucket ``bucket``; yields the variables with which it is used."""
    process, url = _start_server()
    with process:
        try:
            variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            yield variables | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        finally:
            process.terminate()


def _start_server() -> tuple[subprocess.Popen[bytes], str]:
    """Start a server on a free port; on another one if a process beside it takes this first."""
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["timeout", "3600", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=20).close()
                return process, url
            time.sleep(0.1)
        process.terminate()
        process.wait(20)
    raise AssertionError("the server does not start")


@pytest.fixture(scope="module")
def s3_variables() -> Iterator[dict[str, str]]:
    """Variables of a server for the tests of a file."""
    with s3_server() as variables:
        yield variables


@pytest.fixture
def bucket(s3_variables: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a place for this test on an S3 server, whose variables are set."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of other servers do not depend on the variables
    return f"s3://bucket/{request.node.name.translate({91: '-', 93: None})}"


@contextmanager
def google_storage(host: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """Start a server of Cloud Storage with the bucket ``bucket``; yields the variables with which gcsfs uses it.

    Args:
        host: Address to bind.
    """
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    command = [
        "timeout",
        "3600",
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        f"--host={host}",
        f"--port={port}",
    ]
    url, end = f"http://{host}:{port}", time.monotonic() + 60
    with subprocess.Popen(
        [*command, "--in-memory", "--default-bucket=bucket"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/storage/v1/b/bucket", timeout=20).close()
                    break
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            # The second: gcsfs asks another service, which the server lacks, for the kind of the bucket.
            yield {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        finally:
            process.terminate()


def names(url: str) -> set[str]:
    """Names of all objects below a URL."""
    store, path = fsspec.url_to_fs(url)
    store.invalidate_cache()
    return {found.removeprefix(f"{path}/") for found in store.find(path)}


@pytest.fixture
def place(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a run, for a test with its own scratch folder."""
    monkeypatch.setenv("BOLTCUTTER_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(remote, "_urls", {})
    monkeypatch.setattr(remote, "_locks", {})
    return f"{bucket}/name/1"


class Gate:
    """A proxy of a server, which refuses connections while it is closed; to be used as a context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address, self.port = (parts.hostname, parts.port), 0
        self._server: socket.socket | None = None
        self._connections: set[socket.socket] = set()

    def open(self) -> None:
        """Accept connections."""
        if self._server is None:
            self._server = socket.create_server(("127.0.0.1", self.port))
            self.port = self._server.getsockname()[1]
            threading.Thread(target=self._accept, args=[self._server], daemon=True).start()

    def close(self) -> None:
        """Break all connections, and refuse new ones."""
        server, self._server = self._server, None
        for connection in [*([server] if server else []), *self._connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if server:
            server.close()

    def __enter__(self) -> "Gate":
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                target = socket.create_connection(self.address)
                for pair in ((client, target), (target, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        self._connections.add(source)
        with source, suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        self._connections.discard(source)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
