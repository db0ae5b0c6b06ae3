"""A W&B server for tests: the responses at the start of a run, and a store of artifacts."""

import base64
import gzip
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = {
    "id": "abc",
    "name": "first",
    "displayName": "name/first",
    "config": "{}",
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}},
    "historyLineCount": 0,
}
GRAPHQL = {
    "data": {
        "model": {"bucket": None},
        "viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
        "upsertBucket": {"inserted": True, "bucket": BUCKET},
        "createRunFiles": {"runID": "abc", "uploadHeaders": [], "files": []},
        "entity": {"organization": {"coreWeaveOrganizationId": None}},
        "serverInfo": {"features": []},
    }
}


class ArtifactServer(ThreadingHTTPServer):
    """Keeps the artifacts that the W&B client uploads, and serves them.

    Attributes:
        artifacts: The versions of each collection.
        files: Uploaded content by path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ArtifactHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.artifacts: dict[str, list[dict[str, Any]]] = {}
        self.files: dict[str, bytes] = {}

    def find(self, id: str) -> dict[str, Any]:
        """An artifact by its id."""
        return next(found for versions in self.artifacts.values() for found in versions if found["id"] == id)

    def named(self, name: str) -> dict[str, Any] | None:
        """An artifact by ``<collection>:<version or alias>``."""
        collection, _, alias = name.partition(":")
        committed = [found for found in self.artifacts.get(collection, ()) if found["state"] == "COMMITTED"]
        return next((found for found in committed if alias in (f"v{found['versionIndex']}", *found["names"])), None)

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        """Respond to a GraphQL operation."""
        query, variables = request["query"], request.get("variables") or {}
        name = re.match(r"\s*(?:query|mutation) (\w+)", query)[1]  # type: ignore[index]
        known = {
            "ArtifactType": lambda: {"project": {"artifact": self.named(variables["name"])}},
            "CreateArtifact": lambda: {"createArtifact": {"artifact": self.create(**variables["input"])}},
            "CreateArtifactManifest": lambda: {"createArtifactManifest": self.manifest(variables["artifactID"])},
            "UpdateArtifactManifest": lambda: {
                "updateArtifactManifest": self.manifest(variables["artifactManifestID"])
            },
            "CreateArtifactFiles": lambda: {"createArtifactFiles": {"files": self.upload(**variables["input"])}},
            "CommitArtifact": lambda: {"commitArtifact": {"artifact": self.commit(variables["artifactID"])}},
            "ArtifactByID": lambda: {"artifact": self.find(variables["id"])},
            "FetchArtifactManifest": lambda: {
                "artifact": {"currentManifest": {"file": {"directUrl": f"{self.url}/manifest/{variables['id']}"}}}
            },
            "ArtifactMembershipByName": lambda: {"project": self.membership(variables["name"])},
            "GetArtifactMembershipFileUrls": lambda: {
                "project": self.membership(f"{variables['collection']}:{variables['alias']}")
            },
        }
        return {"data": known[name]()} if name in known else GRAPHQL

    def create(self, **values: Any) -> dict[str, Any]:
        """Add a version, which is the latest one."""
        versions = self.artifacts.setdefault(values["artifactCollectionName"], [])
        names = [alias["alias"] for alias in values["aliases"]]
        for found in versions:
            found["names"] = [alias for alias in found["names"] if alias not in names]
        project = {
            "id": "p",
            "internalId": "1",
            "name": values["projectName"],
            "entity": {"name": values["entityName"]},
        }
        collection = {"__typename": "ArtifactSequence", "name": values["artifactCollectionName"], "project": project}
        versions.append(
            {
                "__typename": "Artifact",
                "id": f"{values['artifactCollectionName']}{len(versions)}",
                "artifactSequence": {**collection, "latestArtifact": None},
                "versionIndex": len(versions),
                "artifactType": {"name": values["artifactTypeName"]},
                "description": None,
                "metadata": values.get("metadata"),
                "tags": [],
                "state": "PENDING",
                "size": 1,
                "digest": values["digest"],
                "digestAlgorithm": "MANIFEST_MD5",
                "commitHash": "",
                "fileCount": 1,
                "createdAt": "2026-01-01T00:00:00Z",
                "updatedAt": None,
                "ttlDurationSeconds": -1,
                "ttlIsInherited": True,
                "historyStep": None,
                "names": names,
                "aliases": [],
            }
        )
        return versions[-1]

    def manifest(self, id: str) -> dict[str, Any]:
        """Where the manifest of an artifact, which has the same id, is uploaded."""
        file = {"id": id, "uploadUrl": f"{self.url}/manifest/{id}", "uploadHeaders": []}
        return {"artifactManifest": {"id": id, "file": file}}

    def upload(self, artifactFiles: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Where files are uploaded."""
        nodes = [
            {
                "storagePath": file["name"],
                "uploadUrl": f"{self.url}/files/{file['artifactID']}/{file['name']}",
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }
            for file in artifactFiles
        ]
        return {"edges": [{"node": node} for node in nodes]}

    def commit(self, id: str) -> dict[str, Any]:
        """Complete an artifact, whose files have arrived."""
        content = json.loads(self.files[f"/manifest/{id}"])["contents"]
        for name, entry in content.items():
            digest = hashlib.md5(self.files[f"/files/{id}/{name}"]).digest()
            assert base64.b64encode(digest).decode() == entry["digest"], name
        found = self.find(id)
        found["state"] = "COMMITTED"
        return found

    def membership(self, name: str) -> dict[str, Any]:
        """A version in its collection, with its files."""
        found = self.named(name)
        if found is None:
            return {"artifactCollectionMembership": None}
        collection = found["artifactSequence"]
        names = json.loads(self.files[f"/manifest/{found['id']}"])["contents"]
        files = [
            {"__typename": "File", "name": name, "directUrl": f"{self.url}/files/{found['id']}/{name}"}
            for name in names
        ]
        membership = {
            "__typename": "ArtifactCollectionMembership",
            "id": found["id"],
            "versionIndex": found["versionIndex"],
            "createdAt": found["createdAt"],
            "aliases": [{"__typename": "ArtifactAlias", "id": alias, "alias": alias} for alias in found["names"]],
            "artifactCollection": collection,
            "artifact": found,
            "files": {
                "pageInfo": {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False},
                "edges": [{"node": file} for file in files],
            },
        }
        return {
            "artifactCollectionMembership": membership,
            "artifactCollection": {**collection, "artifactMembership": membership},
        }


class ArtifactHandler(BaseHTTPRequestHandler):
    server: ArtifactServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond(self.server.files.get(self.path, b"{}"))

    def do_PUT(self) -> None:
        self.server.files[self.path] = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.respond(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.respond(json.dumps(self.server.respond(json.loads(body)) if self.path == "/graphql" else {}).encode())

    def respond(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def artifact_server() -> Iterator[ArtifactServer]:
    """Run the server."""
    with ArtifactServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
