import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from boltcutter_data import download
from boltcutter_data.download import download_file

CONTENT = bytes(range(256)) * 4000  # 1 MB
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Behaves according to the path: good, plain (no range requests), cut (drops the connection), wrong, slow."""

    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        how = self.path.split("/")[1]
        wanted = self.headers.get("Range")
        self.asked.append((how, wanted))
        body = CONTENT[::-1] if how == "wrong" else CONTENT
        if how not in ("good", "plain", "cut", "wrong", "slow"):
            self.send_error(404)
            return
        start = int(wanted[len("bytes=") : -1]) if wanted and how != "plain" else 0
        if start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start : start + 400_000] if how == "cut" else body[start:]
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
        self.asked: list[tuple[str, str | None]] = []

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


def part(target: Path, content: bytes) -> None:
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(content)


def files(target: Path) -> list[str]:
    return sorted(file.name for file in target.parent.iterdir())


@pytest.mark.parametrize(
    "checksum", [SHA256, SHA256.upper().replace("SHA", "sha"), f"md5:{hashlib.md5(CONTENT).hexdigest()}", None]
)
def test_a_file_is_downloaded_once(server: Server, target: Path, checksum: str | None) -> None:
    assert download_file("file.gz", server("good"), target, checksum) == target
    assert target.read_bytes() == CONTENT
    assert files(target) == ["file.gz"]
    download_file("file.gz", server("good"), target, checksum)
    assert server.asked == [("good", None)]


def test_the_next_mirror_is_tried(server: Server, target: Path) -> None:
    download_file("file.gz", ["http://127.0.0.1:9/", *server("missing", "wrong", "good")], target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("missing", None), ("wrong", None), ("good", None)]


def test_a_partial_download_is_resumed(server: Server, target: Path) -> None:
    part(target, CONTENT[:600_001])
    download_file("file.gz", server("good"), target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("good", "bytes=600001-")]
    assert files(target) == ["file.gz"]


def test_a_server_without_range_requests_sends_the_whole_file(server: Server, target: Path) -> None:
    part(target, CONTENT[:600_001])
    download_file("file.gz", server("plain"), target, SHA256)
    assert target.read_bytes() == CONTENT


def test_a_complete_partial_file_is_only_verified(server: Server, target: Path) -> None:
    part(target, CONTENT)
    download_file("file.gz", server("good"), target, SHA256)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"rubbish", CONTENT + b"more", CONTENT[::-1]])
def test_a_damaged_partial_file_is_discarded(server: Server, target: Path, content: bytes) -> None:
    part(target, content)
    download_file("file.gz", server("good"), target, SHA256)
    assert target.read_bytes() == CONTENT


def test_a_dropped_connection_is_retried(server: Server, target: Path) -> None:
    download_file("file.gz", server("cut"), target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("cut", None), ("cut", "bytes=400000-"), ("cut", "bytes=800000-")]


def test_a_partial_download_is_kept_for_the_next_run(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TRIES", 1)
    with pytest.raises(OSError, match="broke off after 400000 of 1024000 bytes"):
        download_file("file.gz", server("cut"), target, SHA256)
    assert files(target) == ["file.gz.part"]
    download_file("file.gz", server("good"), target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.asked[1:] == [("good", "bytes=400000-")]


def test_a_file_with_another_checksum_is_not_saved(server: Server, target: Path) -> None:
    with pytest.raises(
        OSError, match=r"^file.gz: not downloaded \(.*missing/: HTTP 404 .*; .*wrong/: its sha256 is .*, expected"
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


def test_missing_mirrors_and_unknown_checksum_algorithms_are_an_error(target: Path) -> None:
    with pytest.raises(OSError, match=r"data.mirrors is empty"):
        download_file("file.gz", [], target, SHA256)
    with pytest.raises(ValueError, match=r"data.checksums: crc:1 of file.gz is neither sha256:… nor md5:…"):
        download_file("file.gz", [], target, "crc:1")


def test_concurrent_processes_download_a_file_once(server: Server, target: Path) -> None:
    code = (
        "import sys, pathlib; from boltcutter_data.download import download_file;"
        "download_file('file.gz', [sys.argv[1]], pathlib.Path(sys.argv[2]), sys.argv[3])"
    )
    command = [sys.executable, "-c", code, *server("good"), str(target), SHA256]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, b"")
    assert target.read_bytes() == CONTENT
    assert files(target) == ["file.gz"]
    assert server.asked == [("good", None)]


def test_a_waiting_process_locks_the_new_file_if_the_old_one_was_renamed(target: Path) -> None:
    target.parent.mkdir()
    moved = target.with_name("moved")
    sizes: list[int] = []
    waiting = threading.Thread(target=lambda: sizes.append(_size(target)))
    with download._locked(target) as first:
        first.write(b"whole")
        first.flush()
        waiting.start()
        _wait_until_open(target, 2)
        target.replace(moved)
        target.write_bytes(b"new")
    waiting.join()
    assert sizes == [3]
    assert moved.read_bytes() == b"whole"


def _wait_until_open(path: Path, count: int) -> None:
    """Wait until this process has opened a file ``count`` times."""
    while sum(os.path.samefile(file, path) for file in _open_files()) < count:
        time.sleep(0.01)


def _open_files() -> Iterator[str]:
    for link in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):
            os.stat(link)
            yield str(link)


def _size(path: Path) -> int:
    with download._locked(path) as file:
        return file.seek(0, 2)
