"""A server of Amazon's services for tests: moto, which records the requests."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ACCOUNT = "123456789012"  # of moto
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
CREDENTIALS |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
CREDENTIALS |= {"AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}


@contextmanager
def aws_server(host: str = "127.0.0.1", **env: str) -> Iterator[dict[str, str]]:
    """Start moto; yields the variables with which the SDKs and s3fs use it.

    Args:
        host: Address to bind.
        env: Further variables of moto itself, such as MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION.
    """
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    command = ["timeout", "600", sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    url, end = f"http://{host}:{port}", time.monotonic() + 60
    with subprocess.Popen(
        ["env", *(f"{name}={value}" for name, value in env.items()), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=20).close()
                    break
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            yield CREDENTIALS | {"AWS_ENDPOINT_URL": url}
        finally:
            process.terminate()
