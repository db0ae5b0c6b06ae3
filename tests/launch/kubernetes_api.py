"""An API server of Kubernetes for tests: it keeps objects, and records each request that the client sends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

TOKEN = "token-of-the-user"


@dataclass
class Request:
    """A request.

    Args:
        method: HTTP method.
        path: Path without the query.
        query: Query parameters.
        body: JSON body; None without one.
        token: Value of the Authorization header.
    """

    method: str
    path: str
    query: dict[str, str]
    body: Any
    token: str | None


@dataclass
class ApiServer:
    """Objects by path, and what was requested.

    Args:
        url: Address of the server.
        requests: All requests, in order.
        objects: Objects by path.
        pods: All pods; the label selector of a request is not evaluated, but asserted on.
        logs: Output of each pod.
        rotated: Lines of each pod that the node has moved to another file, which it does not send.
        failures: Status and answer by method and end of the path, instead of the object; status 0: no answer.
        stopping: Deleted jobs, and the number of reads after which each is gone.
    """

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    pods: list[Any] = field(default_factory=list)
    logs: dict[str, list[bytes]] = field(default_factory=dict)
    rotated: dict[str, int] = field(default_factory=dict)
    failures: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    stopping: dict[str, int] = field(default_factory=dict)

    def sent(self, method: str) -> list[Request]:
        """Requests of one method."""
        return [request for request in self.requests if request.method == method]

    def answer(self, request: Request) -> tuple[int, Any]:
        """Return the status and the answer to a request."""
        for (method, end), failure in self.failures.items():
            if request.method == method and request.path.endswith(end):
                return failure
        if request.path.endswith("/pods"):
            return 200, {"kind": "PodList", "items": self.pods}
        path = request.path
        if request.method == "POST":
            path = f"{path}/{request.body['metadata']['name']}"
            if path in self.objects:
                return 409, status(409, "AlreadyExists", f'jobs.batch "{path}" already exists', kind="jobs")
            uid = f"uid-{len(self.objects)}"
            self.objects[path] = request.body | {"metadata": request.body["metadata"] | {"uid": uid}, "status": {}}
            return 201, self.objects[path]
        if path not in self.objects:
            return 404, status(404, "NotFound", f'jobs.batch "{path}" not found', kind="jobs")
        if request.method == "DELETE" and path.startswith("/api/"):
            return 200, self.objects.pop(path)
        if request.method == "DELETE":  # a job, which waits for its pods
            self.objects[path]["metadata"]["deletionTimestamp"] = "2026-11-22T10:00:00Z"
            self.stopping[path] = 2
        elif path in self.stopping:
            self.stopping[path] -= 1
            if self.stopping[path] < 0:
                del self.objects[path], self.stopping[path]
                return 404, status(404, "NotFound", "not found", kind="jobs")
        return 200, self.objects[path]

    def log(self, pod: str) -> Iterator[bytes]:
        """Chunks of the output of a pod; each line has a time of fixed width, as kubelet writes it."""
        lines = b"".join(self.logs[pod]).splitlines(keepends=True)
        timed = [f"2026-11-22T10:00:00.{number:09}Z ".encode() + line for number, line in enumerate(lines)]
        content = b"".join(timed[self.rotated.get(pod, 0) :])
        yield from (content[start : start + 7] for start in range(0, len(content), 7))


def status(code: int, reason: str, message: str, **details: str) -> dict[str, Any]:
    """Return an error as the API server answers it."""
    found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return found | {"message": message} | ({"details": details} if details else {})


def pod(name: str, phase: str, *, index: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a pod, as the API server describes it."""
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-11-22T10:00:00Z"}
    metadata |= {"labels": {}, "annotations": annotations}
    return {"metadata": metadata, "status": {"phase": phase, **fields}}


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """Run an API server; yields it and a kubeconfig file."""
    state = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            body = json.loads(content) if content else None
            request = Request(self.command, parts.path, query, body, self.headers.get("Authorization"))
            state.requests.append(request)
            if parts.path.endswith("/log") and parts.path.split("/")[-2] in state.logs:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                assert query.get("timestamps", "").lower() == "true"
                for chunk in [*state.log(parts.path.split("/")[-2]), b""]:
                    self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                return
            code, answer = state.answer(request)
            if not code:  # as if the server was away
                self.close_connection = True
                return
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json" if text.startswith(b"{") else "text/plain")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = handle_request

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state, write_kubeconfig(folder / "kubeconfig", state.url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_kubeconfig(file: Path, url: str) -> Path:
    """Write a kubeconfig file with the contexts lab, whose namespace is vision, and other."""
    contexts = [
        {"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": "vision"}},
        {"name": "arn:aws:eks:eu-west-1:1:cluster/other", "context": {"cluster": "lab", "user": "me"}},
    ]
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "lab", "contexts": contexts}
    config |= {"clusters": [{"name": "lab", "cluster": {"server": url}}]}
    file.write_text(yaml.safe_dump(config | {"users": [{"name": "me", "user": {"token": TOKEN}}]}))
    return file
