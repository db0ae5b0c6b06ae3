import contextlib
import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from boltcutter.data import download
from boltcutter.data.download import download_file

CONTENT = bytes(range(256)) * 4000  # 1 MB
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Behaves according to the path: good, cut (drops the first connection), wrong, slow."""

    asked: list[str]

    def do_GET(self) -> None:
        how = self.path.split("/")[1]
        self.asked.append(how)
        body = CONTENT[::-1] if how == "wrong" else CONTENT
        if how not in ("good", "cut", "wrong", "slow"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        part = body[:400_000] if how == "cut" and self.asked.count("cut") == 1 else body
        with contextlib.suppress(ConnectionError):
            if how == "slow":
                self.wfile.write(part[:10])
                self.wfile.flush()
                self.server.stop.wait(5)  # type: ignore[attr-defined]
            else:
                self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server:
    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[str] = []

    def __call__(self, *how: str) -> list[str]:
        return [f"{self.address}/{kind}/" for kind in how]


@pytest.fixture
def server() -> Iterator[Server]:
    handler = type("Asked", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        httpd.stop = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server = Server(f"http://127.0.0.1:{httpd.server_port}")
        server.asked = handler.asked  # type: ignore[attr-defined]
        yield server
        httpd.stop.set()  # type: ignore[attr-defined]
        httpd.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new" / "file.gz"


def files(target: Path) -> list[str]:
    return sorted(file.name for file in target.parent.iterdir())


@pytest.mark.parametrize("checksum", [SHA256, SHA256.upper().replace("SHA", "sha"), None])
def test_a_file_is_downloaded_once(server: Server, target: Path, checksum: str | None) -> None:
    assert download_file("file.gz", server("good"), target, checksum) == target
    assert target.read_bytes() == CONTENT
    assert files(target) == ["file.gz"]
    download_file("file.gz", server("good"), target, checksum)
    assert server.asked == ["good"]


def test_the_next_mirror_is_tried(server: Server, target: Path) -> None:
    download_file("file.gz", ["http://127.0.0.1:9/", *server("missing", "wrong", "good")], target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.asked == ["missing", "wrong", "good"]


def test_a_dropped_connection_is_retried(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download_file("file.gz", server("cut"), target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.asked == ["cut", "cut"]
    monkeypatch.setattr(download, "TRIES", 1)
    server.asked.clear()
    target.unlink()
    with pytest.raises(ValueError, match="broke off after 400000 of 1024000 bytes"):
        download_file("file.gz", server("cut"), target, SHA256)
    assert files(target) == []


def test_a_file_with_another_checksum_is_not_saved(server: Server, target: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^file.gz: not downloaded \(.*missing/: HTTP Error 404.*; .*wrong/: it is sha256:.*, expected",
    ) as error:
        download_file("file.gz", server("missing", "wrong"), target, SHA256)
    assert str(error.value).endswith(f"put it into data.folder={target.parent} by hand")
    assert "\n" not in str(error.value)
    assert files(target) == []


def test_an_unresponsive_server_times_out(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    monkeypatch.setattr(download, "TRIES", 1)
    download_file("file.gz", server("slow", "good"), target, SHA256)
    assert target.read_bytes() == CONTENT


def test_missing_mirrors_are_an_error(target: Path) -> None:
    with pytest.raises(ValueError, match=r"data.mirrors is empty"):
        download_file("file.gz", [], target, SHA256)


def test_concurrent_processes_leave_one_file(server: Server, target: Path) -> None:
    code = (
        "import sys, pathlib; from boltcutter.data.download import download_file;"
        "download_file('file.gz', [sys.argv[1]], pathlib.Path(sys.argv[2]), sys.argv[3])"
    )
    command = [sys.executable, "-c", code, *server("good"), str(target), SHA256]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, b"")
    assert target.read_bytes() == CONTENT
    assert files(target) == ["file.gz"]
