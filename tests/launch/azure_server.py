"""Azure for tests: Resource Manager, Blob Storage and the managed identity of a node, on servers that record requests.

The addresses, variables and formats are those of Azure, so that azure-core, azure-identity and adlfs run as they are.
"""

import base64
import json
import os
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT = "account"
KEY = base64.b64encode(b"key of the account").decode()
WORKSPACE = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/group/providers"
WORKSPACE += "/Microsoft.MachineLearningServices/workspaces/workspace"


class Handler(BaseHTTPRequestHandler):
    """Reads a request, and answers with the status, headers and content that ``reply`` returns."""

    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        status, headers, answer = self.reply(unquote(url.path), query, content)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def reply(self, path: str, query: dict[str, str], content: bytes) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A server that ends with the test, and does not print that a client has closed its connection."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


class ResourceManager:
    """Azure Resource Manager with one workspace, and the endpoint of a managed identity.

    Attributes:
        url: Its address.
        env: Variables with which azure-identity and azure-core use it.
        requests: Method, path with query, and body of each request.
        jobs: Properties of each job by its path.
        clusters: Properties of each compute cluster by name.
        identities: Query of each request for a token of the managed identity.
        secrets: Secrets of a key vault.
        failures: Status, code and message of the answer, by the end of a path.
        delay: Seconds before each answer.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.clusters: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, str] = {}
        self.failures: dict[str, tuple[int, str, str]] = {}
        self.delay = 0.0
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, key)
        self.url = f"https://localhost:{serve(stack, self._handler(), tls=tls)}"
        self.identities: list[dict[str, str]] = []
        identity = f"http://localhost:{serve(stack, identity_handler(self.identities))}/msi/token"
        self.env = {"MSI_ENDPOINT": identity, "MSI_SECRET": "secret", "REQUESTS_CA_BUNDLE": str(certificate)}

    def _handler(self) -> type[Handler]:
        owner = self

        class Requests(Handler):
            def reply(self, path: str, query: dict[str, str], content: bytes) -> tuple[int, dict[str, str], bytes]:
                time.sleep(owner.delay)
                body = json.loads(content) if content else None
                if path == "/metadata/endpoints":  # of azure-ai-ml
                    return 200, {"Content-Type": "application/json"}, json.dumps([owner.endpoints()]).encode()
                owner.requests.append((self.command, f"{path}?{urlsplit(self.path).query}", body))
                status, answer = 200, {}
                if self.headers.get("Authorization") != "Bearer token":
                    status, answer = 401, error("InvalidAuthenticationToken", "The access token is invalid.")
                elif failure := next((owner.failures[end] for end in owner.failures if path.endswith(end)), None):
                    status, answer = failure[0], error(*failure[1:])
                elif path.startswith("/secrets/"):  # of a key vault
                    if value := owner.secrets.get(path.split("/")[2]):
                        answer = {"value": value, "id": f"https://team.vault.azure.net{path}/0", "attributes": {}}
                    else:
                        status, answer = 404, error("SecretNotFound", "A secret with this name was not found.")
                elif not path.startswith(WORKSPACE):
                    status, answer = 404, error("ResourceNotFound", f"The Resource '{path}' was not found.")
                else:
                    status, answer = owner.answer(self.command, path.removeprefix(WORKSPACE), body)
                return status, {"Content-Type": "application/json"}, json.dumps(answer).encode()

        return Requests

    def endpoints(self) -> dict[str, Any]:
        login = {"loginEndpoint": self.url, "audiences": [self.url], "tenant": "common", "identityProvider": "AAD"}
        endpoints = dict.fromkeys(("portal", "resourceManager", "mlDataPlane"), self.url)
        return {"name": "here", **endpoints, "authentication": login, "suffixes": {"storage": "core.local"}}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        if re.fullmatch(r"(/environments/[\w-]+/versions/\w+)?", path):
            return 200, {"id": WORKSPACE + path, "properties": (body or {}).get("properties", {})}
        _, kind, name, *action = path.split("/")
        if kind == "computes" and name in self.clusters:
            return 200, {"id": WORKSPACE + path, "properties": self.clusters[name]}
        if kind == "jobs" and method == "PUT" and not action:
            studio = {"Studio": {"endpoint": f"https://ml.azure.com/runs/{name}"}}
            self.jobs.setdefault(name, {**body["properties"], "status": "Starting", "services": studio})
            return 201, {"id": WORKSPACE + path, "properties": self.jobs[name]}
        if kind == "jobs" and name in self.jobs:
            if action == ["cancel"]:
                self.jobs[name]["status"] = "CancelRequested"
                return 202, {}
            return 200, {"id": WORKSPACE + path, "properties": self.jobs[name]}
        return 404, error("ResourceNotFound", f"{kind} {name} not found in the workspace.")


def identity_handler(queries: list[dict[str, str]]) -> type[Handler]:
    """The endpoint of a managed identity on nodes of Azure ML, which records the queries."""

    class Requests(Handler):
        def reply(self, path: str, query: dict[str, str], content: bytes) -> tuple[int, dict[str, str], bytes]:
            queries.append(query)
            if self.headers.get("secret") != "secret" or not query["resource"].startswith("https://"):
                return 401, {}, b"{}"
            answer = {"access_token": "token", "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"}
            answer["resource"] = query["resource"]
            return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    return Requests


class BlobStorage:
    """Blob Storage with one account.

    Attributes:
        port: Port on all addresses.
        blobs: Content by path, beginning with the name of the container.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.blobs: dict[str, bytes] = {}
        self._times: dict[str, tuple[int, str]] = {}  # number and time of the last write
        self._blocks: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        self._writes = 0
        self.port = serve(stack, self._handler(), host="")

    def env(self, host: str = "localhost") -> dict[str, str]:
        """Return the variable with which adlfs uses this account."""
        parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY}
        parts["BlobEndpoint"] = f"http://{host}:{self.port}/{ACCOUNT}"
        return {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in parts.items())}

    def _handler(self) -> type[Handler]:
        owner = self

        class Requests(Handler):
            def reply(self, path: str, query: dict[str, str], content: bytes) -> tuple[int, dict[str, str], bytes]:
                assert path.startswith(f"/{ACCOUNT}/")
                headers = {name.lower(): value for name, value in self.headers.items()}
                with owner._lock:
                    return owner.answer(self.command, path.removeprefix(f"/{ACCOUNT}/"), query, headers, content)

        return Requests

    def answer(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], content: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if query.get("restype") == "container":
            if query.get("comp") == "list":
                return 200, {"Content-Type": "application/xml"}, self._list(path, query)
            return (200 if method in ("GET", "HEAD") else 409), {"x-ms-error-code": "ContainerAlreadyExists"}, b""
        if method == "PUT":
            if query.get("comp") == "block":
                self._blocks[path, query["blockid"]] = content
                return 201, {}, b""
            if query.get("comp") == "blocklist":
                names = re.findall(r"<(?:Latest|Uncommitted|Committed)>(.*?)</", content.decode())
                content = b"".join(self._blocks[path, name] for name in names)
            if headers.get("if-none-match") == "*" and path in self.blobs:
                return 409, {"x-ms-error-code": "BlobAlreadyExists"}, b""
            self._writes += 1
            self.blobs[path], self._times[path] = content, (self._writes, formatdate(usegmt=True))
            return 201, self._facts(path), b""
        if path not in self.blobs:
            return 404, {"x-ms-error-code": "BlobNotFound"}, b""
        if method == "DELETE":
            del self.blobs[path]
            return 202, {}, b""
        blob, facts = self.blobs[path], self._facts(path)
        if method == "HEAD":
            return 200, {**facts, "Content-Length": str(len(blob))}, b""
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("x-ms-range") or headers.get("range") or ""):
            start, end = int(found[1]), min(int(found[2] or len(blob) - 1), len(blob) - 1)
            if start >= len(blob):
                return 416, {"x-ms-error-code": "InvalidRange"}, b""
            return 206, {**facts, "Content-Range": f"bytes {start}-{end}/{len(blob)}"}, blob[start : end + 1]
        return 200, facts, blob

    def _facts(self, path: str) -> dict[str, str]:
        number, moment = self._times[path]
        facts = {"ETag": f'"{number}"', "Last-Modified": moment, "x-ms-blob-type": "BlockBlob"}
        return {**facts, "x-ms-creation-time": moment, "Content-Type": "application/octet-stream"}

    def _list(self, container: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        entries = dict[str, str]()
        for path in sorted(self.blobs):
            name = path.removeprefix(f"{container}/")
            if not path.startswith(f"{container}/{prefix}"):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = escape(prefix + rest.partition(delimiter)[0] + delimiter)
                entries[folder] = f"<BlobPrefix><Name>{folder}</Name></BlobPrefix>"
                continue
            facts = self._facts(path)
            properties = {"Last-Modified": facts["Last-Modified"], "Etag": facts["ETag"].strip('"')}
            properties |= {"Creation-Time": facts["Last-Modified"], "Content-Length": str(len(self.blobs[path]))}
            properties |= {"BlobType": "BlockBlob", "Content-Type": facts["Content-Type"]}
            xml = "".join(f"<{key}>{value}</{key}>" for key, value in properties.items())
            entries[name] = f"<Blob><Name>{escape(name)}</Name><Properties>{xml}</Properties></Blob>"
        body = f"<Blobs>{''.join(entries.values())}</Blobs><NextMarker/>"
        head = f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{container}">'
        return f"{head}{body}</EnumerationResults>".encode()


def error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def serve(
    stack: ExitStack, handler: type[Handler], *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> int:
    """Serve requests in threads until the stack ends; returns the port."""
    server = Server((host, 0), handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return int(server.server_address[1])


@contextmanager
def azure(folder: Path) -> Iterator[tuple[ResourceManager, BlobStorage]]:
    """Start the servers.

    Args:
        folder: Folder for the certificate.
    """
    with ExitStack() as stack:
        yield ResourceManager(stack, folder), BlobStorage(stack)


def clean_environment() -> dict[str, str]:
    """Return the environment without variables of Azure."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AZURE_", "MSI_", "IDENTITY_"))}
