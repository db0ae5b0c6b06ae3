"""Servers of Amazon's services for tests: moto, and one whose answers a test determines."""

import json
import re
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

from botocore.model import Shape
from botocore.session import Session

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
    command = ["timeout", "3600", sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
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
        requests: Operation, or its path, and body of each request so far.
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
            operation = self.headers.get("X-Amz-Target", "").partition(".")[2] or self.path
            answers.requests.append((operation, body))
            status, content = answers.replies.pop(0)
            if not status:
                ended.wait(60)
                return
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if "__type" in content:
                self.send_header("x-amzn-errortype", content["__type"])
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


def check_request(service: str, operation: str, request: dict[str, Any]) -> None:
    """Check a request against the service's own model."""
    model = Session().get_service_model(service).operation_model(operation)
    assert not list(mistakes(model.input_shape, request))


def mistakes(shape: Shape, value: Any, place: str = "") -> Iterator[str]:
    """Yield what the service's own model does not allow: unlike botocore, also patterns, enumerations and limits."""
    facts = shape.metadata
    if shape.type_name == "structure":
        yield from (f"{place}.{name}: unknown" for name in value.keys() - shape.members.keys())
        yield from (f"{place}.{name}: missing" for name in set(shape.required_members) - value.keys())
        for name in value.keys() & shape.members.keys():
            yield from mistakes(shape.members[name], value[name], f"{place}.{name}")
        return
    kind = {"string": str, "integer": int, "boolean": bool, "list": list, "map": dict}[shape.type_name]
    if type(value) is not kind:
        yield f"{place}: {value!r} is no {shape.type_name}"
        return
    size = value if shape.type_name == "integer" else len(value) if shape.type_name != "boolean" else 0
    if size < facts.get("min", size) or size > facts.get("max", size):
        yield f"{place}: {value!r} is not in {facts.get('min')}–{facts.get('max')}"
    if shape.type_name == "list":
        for number, item in enumerate(value):
            yield from mistakes(shape.member, item, f"{place}[{number}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from mistakes(shape.key, key, f"{place}.{key}")
            yield from mistakes(shape.value, item, f"{place}.{key}")
    elif shape.type_name == "string":
        if "enum" in facts and value not in facts["enum"]:
            yield f"{place}: {value!r} is not in the enumeration"
        if "pattern" in facts and "\\p{" not in facts["pattern"] and not re.fullmatch(facts["pattern"], value):
            yield f"{place}: {value!r} does not match {facts['pattern']}"
