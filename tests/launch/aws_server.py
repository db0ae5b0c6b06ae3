"""Servers of Amazon's services for tests: moto, and one whose answers a test determines."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


class AwsAnswers:
    """A service with the JSON protocol that gives certain answers.

    Attributes:
        url: Its address.
        replies: The next answers: status, which is 0 for none, and body.
        requests: Operation and body of each request so far.
        client: Makes clients for it.
    """

    client: Callable[..., Any]

    def __init__(self) -> None:
        self.url = ""
        self.replies: list[tuple[int, dict[str, Any]]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []


@contextmanager
def aws_answers() -> Iterator[AwsAnswers]:
    """Start a server whose answers the test determines."""
    answers, ended = AwsAnswers(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers.requests.append((self.headers["X-Amz-Target"].partition(".")[2], body))
            status, content = answers.replies.pop(0)
            if not status:
                ended.wait(60)
                return
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
