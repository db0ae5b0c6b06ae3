"""A server that speaks S3, for tests of runs and checkpoints on object storage."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def s3_server(port: int = 0) -> Iterator[dict[str, str]]:
    """Start a server with a bucket ``bucket``; yields the variables with which it is used."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = ["timeout", "600", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=20).close()
                    break
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            yield variables | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """Variables of a server for the whole session."""
    with s3_server() as variables:
        yield variables


@pytest.fixture
def bucket(s3_variables: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a place for this test on an S3 server, whose variables are set."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name.translate({91: '-', 93: None})}"
