import gzip
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from conftest import Script
from wandb_server import GRAPHQL

from boltcutter.analysis import sync
from boltcutter.analysis.sync import SyncError, sync_command
from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.project import Project


class Handler(BaseHTTPRequestHandler):
    """Responds like the W&B server, and records the history it receives."""

    history: list[dict[str, Any]]
    upserted: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.respond(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if "file_stream" in self.path:
            for name, file in json.loads(body).get("files", {}).items():
                if "history" in name:
                    self.history.extend(map(json.loads, file["content"]))
        elif b"upsertBucket" in body:
            self.upserted.append(json.loads(body)["variables"])
        self.respond(body)

    def respond(self, body: bytes) -> None:
        text = json.dumps(GRAPHQL if self.path == "/graphql" else {}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    Handler.history, Handler.upserted = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.slow
def test_each_step_is_uploaded_once(script: Script, trained: Path, server: str, tmp_path: Path) -> None:
    folder = tmp_path / "name" / "run"
    shutil.copytree(trained, folder)
    env = {
        "WANDB_BASE_URL": server,
        "WANDB_API_KEY": "5ec7e7" * 6 + "abcd",
        "WANDB_MODE": "online",
        "HOME": str(tmp_path),
    }
    key = user_key.KEY_FILE.expanduser()  # of the user who trained
    (copied := tmp_path / key.relative_to(Path.home())).parent.mkdir(parents=True)
    shutil.copy2(key, copied)
    done = script("sync", f"run={folder}", fresh=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{folder}: {server}/me/p/runs/")
    lines = (folder / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    assert [row["trainer/global_step"] for row in Handler.history] == [int(line.split(",")[0]) for line in lines[1:]]
    for row, line in zip(Handler.history, lines[1:], strict=True):
        for name, value in zip(names[1:], line.split(",")[1:], strict=True):
            assert row.get(name) == (float(value) if value else None)
    record = json.loads((trained / "record.json").read_text())
    assert any(variables.get("name") == record["id"] for variables in Handler.upserted)


@pytest.mark.parametrize(
    ("overrides", "env", "message"),
    [
        ([], {}, "run is not set; use run=<run>"),
        (["runs=x"], {}, "runs=x: no such argument; use run=<run>"),
        (["run=nowhere"], {}, "nowhere: no run there"),
        (["run={trained}"], {}, "run `wandb login`"),
        (["run={trained}"], {"WANDB_API_KEY": "k" * 40}, "http://127.0.0.1:9 "),
    ],
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    trained: Path,
    tmp_path: Path,
    overrides: list[str],
    env: dict[str, str],
    message: str,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path), **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((SyncError, ConfigError)) as error:
        sync_command(Project.find(__file__), [override.format(trained=trained) for override in overrides])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_record_of_somebody_else_uploads_nothing_of_this_machine(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    for name in ("logged_in", "is_reachable"):
        monkeypatch.setattr(sync, name, lambda *_: True)
    given: dict[str, Any] = {}
    monkeypatch.setattr(sync.wandb, "init", lambda **options: given.update(options) or MagicMock())
    record = json.loads((trained / "record.json").read_text())
    settings = {"save_code": True, "settings": {"base_url": "a"}, "sync_tensorboard": True, "entity": "me", "id": "x"}
    record["config"]["logger"] = {"wandb": settings}
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    (tmp_path / "run" / "config.yaml").write_text("logger: {wandb: {save_code: true}}")
    sync_command(Project.find(__file__), [f"run={tmp_path}/run"])
    assert given.keys() == {"id", "name", "project", "config", "dir", "mode", "settings", "tags"}
    assert given["tags"] == record["config"]["tags"]
    assert given["id"].startswith("run-")  # not that of a run of this user, whose data would be replaced
    assert given["id"] != record["id"]
    record["config"]["data"]["path"] = "https://example.org"
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="would be contacted"):
        sync_command(Project.find(__file__), [f"run={tmp_path}/run"])
