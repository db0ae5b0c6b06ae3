"""A server for tests that answers as Google's APIs do, and records the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

ACCOUNT = "train@my-project.iam.gserviceaccount.com"
NO_ANSWER = 0  # instead of a status: the server never answers


class Request(NamedTuple):
    """A request that the server has received.

    Args:
        method: HTTP method.
        path: Path with the query.
        body: Decoded JSON, the fields of a form, or None.
        token: Access token.
    """

    method: str
    path: str
    body: Any
    token: str


class GoogleServer(ThreadingHTTPServer):
    """A server whose answers a test sets.

    Attributes:
        answers: For ``POST /v1/…`` or ``GET /v1/…`` the status and the JSON body of each answer; the last one repeats.
        requests: All requests but those for a token.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[tuple[int, Any]]] = {
            "POST /token": [(200, {"access_token": "t", "expires_in": 3600})]
        }
        self.requests: list[Request] = []
        self.tokens: list[Request] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Records a request and answers it."""

    server: GoogleServer

    def answer(self) -> None:
        """Record a request and answer it."""
        content = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        is_form = self.headers.get("Content-Type", "").endswith("urlencoded")
        body = parse_qs(content) if is_form else json.loads(content) if content else None
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        name = f"{self.command} {self.path}"
        request = Request(self.command, self.path, body, token)
        (self.server.tokens if self.path == "/token" else self.server.requests).append(request)
        answers = self.server.answers.get(name)
        status, reply = answers[0] if answers else (404, error(404, "NOT_FOUND", f"no answer was set for {name}"))
        if answers and len(answers) > 1:
            del answers[0]
        if status == NO_ANSWER:
            self.server.closing.wait(60)
            return
        text = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""


def error(code: int, status: str, message: str) -> dict[str, Any]:
    """Return the body of an error: https://cloud.google.com/apis/design/errors#http_mapping."""
    return {"error": {"code": code, "message": message, "status": status}}


@cache
def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, none).decode()


@contextmanager
def google_server(folder: Path) -> Iterator[tuple[GoogleServer, dict[str, str]]]:
    """Start a server; yields it and the variables with which google-auth, gcloud and the launcher use it.

    Args:
        folder: Folder for the key of a service account and for the configuration of gcloud.
    """
    with GoogleServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        key = {"type": "service_account", "client_email": ACCOUNT, "private_key": _private_key()}
        key |= {"token_uri": f"{server.url}/token", "private_key_id": "1", "project_id": "of-the-key"}
        (folder / "key.json").write_text(json.dumps(key))
        try:
            yield (
                server,
                {
                    "GOOGLE_APPLICATION_CREDENTIALS": str(folder / "key.json"),
                    "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": f"{server.url}/",
                    "CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING": f"{server.url}/",
                    **isolated(folder),
                },
            )
        finally:
            server.closing.set()
            server.shutdown()


def isolated(folder: Path) -> dict[str, str]:
    """Return variables with which neither this machine's configuration nor its metadata server are used."""
    return {"CLOUDSDK_CONFIG": str(folder / "gcloud"), "NO_GCE_CHECK": "true", "no_proxy": "127.0.0.1"}
