import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard

from boltcutter.config.errors import ConfigError
from boltcutter.export import hub, runner
from boltcutter.export.exported import load_exported
from boltcutter.export.settings import ExportError
from boltcutter.model.convnet import ConvNet


class Hub(ThreadingHTTPServer):
    """The endpoints of the Hugging Face Hub that an upload uses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created: list[str] = []
        self.objects: dict[str, bytes] = {}  # by SHA-256
        self.files: dict[str, bytes] = {}  # of the last commit

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            request = json.loads(body)
            self.created.append(f"{request['organization']}/{request['name']}")
            return {"url": f"{self.url}/{self.created[-1]}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            return {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": modes[file["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{self.url}/objects/{found['oid']}"}} for found in objects]
            return {
                "transfer": "basic",
                "objects": [found | {"actions": action} for found, action in zip(objects, actions, strict=True)],
            }
        assert path == "/api/models/me/digits/commit/main", path
        for operation in map(json.loads, body.splitlines()):
            value = operation["value"]
            if operation["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
        return {"commitUrl": f"{self.url}/me/digits/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True}


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond({"id": "me/digits", "sha": "b" * 40, "siblings": []})

    def do_POST(self) -> None:
        assert self.headers["authorization"] == "Bearer hf_0123456789"
        self.respond(self.server.post(self.path, self.body()))

    def do_PUT(self) -> None:
        body = self.body()
        assert self.path == f"/objects/{hashlib.sha256(body).hexdigest()}"
        self.server.objects[self.path.rpartition("/")[2]] = body
        self.respond({})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def respond(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def weights(digits: Path, tmp_path: Path) -> Path:
    """An export of plain weights in its run."""
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    shutil.copytree(digits / "export" / "safetensors", run / "export" / "safetensors")
    shutil.copy(digits / "record.json", run)
    return run / "export" / "safetensors"


def test_the_model_card_is_valid(weights: Path) -> None:
    assert (weights / "README.md").is_file()
    hub.write_readme(weights)
    card = ModelCard.load(weights / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["license"], data["license_name"]) == ("boltcutter", "other", "mit")
    assert "safetensors" in data["tags"]
    record = json.loads((weights.parents[1] / "record.json").read_text())
    assert f"| test/accuracy | {record['test']['test/accuracy']:.4g} |\n" in card.text
    assert "It takes `input` (uint8, ['batch', 1, 8, 8]) and returns `probabilities` (" in card.text
    assert "`Digits`. Classes: 0, 1, 2," in card.text
    for part in ("Intended use", "Training data", "Metrics", record["id"], record["git"]["commit"]):
        assert part in card.text


@pytest.mark.slow
def test_the_card_shows_how_the_model_is_loaded(weights: Path) -> None:
    found = re.findall(r"^```python\n(.*?)^```", (weights / "README.md").read_text(), re.M | re.S)
    assert len(found) == 2
    for code in found:
        done = subprocess.run([sys.executable, "-c", code], cwd=weights, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_an_export_of_somebody_else_is_loaded_without_executing_it(weights: Path) -> None:
    assert isinstance(load_exported(weights), ConvNet)
    config = json.loads((weights / "config.json").read_text())
    config["model"]["_target_"] = "os.mkdir"
    (weights / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"refers to os\.mkdir, .*; set trust=true"):
        load_exported(weights)
    (weights / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read .*; give the folder of an export"):
        load_exported(weights)


def push(weights: Path, names: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "import sys, pathlib; from boltcutter.export.hub import push; "
    code += "print(push(pathlib.Path(sys.argv[1]), sys.argv[2:], 'me/digits'))"
    command = [sys.executable, "-c", code, str(weights.parent), *names]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_weights_are_pushed_with_other_exports(weights: Path, digits: Path, server: Hub, tmp_path: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": "hf_0123456789", "HF_HOME": str(tmp_path / "home")}
    env = {**env, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    shutil.copytree(digits / "export" / "onnx", weights.parent / "onnx")
    done = push(weights, ["onnx", "safetensors"], env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{server.url}/me/digits/commit/{'a' * 40}\n"
    assert server.created == ["me/digits"]
    other = {f"onnx/{file.name}": file.read_bytes() for file in (weights.parent / "onnx").iterdir()}
    assert server.files == {file.name: file.read_bytes() for file in weights.iterdir()} | other
    assert {"onnx/model.onnx", "onnx/card.json"} <= other.keys()
    assert {"README.md", "config.json", "model.safetensors"} <= server.files.keys()


@pytest.mark.parametrize("reason", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_failed_upload_is_reported_in_one_line(weights: Path, reason: dict[str, str], tmp_path: Path) -> None:
    env = {**os.environ, "HF_TOKEN": "hf_0123456789", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **reason}
    done = push(weights, ["safetensors"], env)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(r"boltcutter.export\.settings\.ExportError: export\.push=me/digits: \w+: .*; try again$", last)


class Api:
    """What an upload calls of the Hub's client."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def create_repo(self, repo: str, *, exist_ok: bool) -> None:
        self.calls.append(("create", repo, exist_ok))

    def create_commit(self, repo: str, operations: list[Any], *, commit_message: str) -> SimpleNamespace:
        self.calls.append(("commit", repo, [(one.path_in_repo, one.path_or_fileobj) for one in operations]))
        return SimpleNamespace(commit_url="https://hub/commit")


def test_an_upload_is_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    paths = {}
    for name in ("safetensors/model.safetensors", "safetensors/README.md", "onnx/model.onnx"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        listed = {} if file.name == hub.README else {file.name: {"sha256": runner.sha256(file)}}
        if listed:
            card = {"format": file.parent.name, "program": None, "files": listed, "inputs": [], "outputs": []}
            (file.parent / runner.CARD).write_text(json.dumps(card))
        for path in (file, file.parent / runner.CARD):
            paths[str(path.relative_to(tmp_path)).removeprefix("safetensors/")] = str(path)
    assert hub.push(tmp_path, ["onnx", "safetensors"], "me/digits") == "https://hub/commit"
    names = ("onnx/card.json", "onnx/model.onnx", "README.md", "card.json", "model.safetensors")
    files = [(name, paths[name]) for name in names]
    assert api.calls == [("create", "me/digits", True), ("commit", "me/digits", files)]
    monkeypatch.setattr(api, "create_repo", lambda *_, **__: [][0])
    with pytest.raises(ExportError, match=r"^export\.push=me/digits: IndexError: list index out of range; try again$"):
        hub.push(tmp_path, ["onnx"], "me/digits")
    assert len(api.calls) == 2


def test_without_a_token_the_remedy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"^export.push=me/digits: not logged in to the Hub; run `hf auth login`"):
        hub.check_repository("me/digits")
    with pytest.raises(ConfigError, match=r"^export.push=digits: not a repository of the Hub; use <user>/<name>$"):
        hub.check_repository("digits")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_0123456789")
    for repo in ("me/digits", "me/" + 96 * "x", "m.e/_-."):
        hub.check_repository(repo)
    for repo in ("me/" + 97 * "x", "me/", "me/dig/its", "me/dígits"):
        with pytest.raises(ConfigError, match=rf"^export.push={repo}: not a repository of the Hub"):
            hub.check_repository(repo)


def test_only_files_of_the_export_are_uploaded(weights: Path) -> None:
    """Whoever may write to the folder could put a link to a key there, while it is exported."""
    names = {file.name for file in hub.written_files(weights)}
    assert {"model.safetensors", "config.json", "card.json", "README.md"} <= names
    (weights / "planted.txt").symlink_to("/etc/passwd")
    (weights / "notes.txt").write_text("x")
    assert {file.name for file in hub.written_files(weights)} == names
    (weights / "config.json").unlink()
    (weights / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(ExportError, match=r"config\.json was changed"):
        hub.written_files(weights)
