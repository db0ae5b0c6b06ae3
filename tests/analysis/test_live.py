"""The page that follows runs, in a real browser while they are written, and who may ask for it."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import pytest
from browser import Tab

from boltcutter.analysis import live, query
from boltcutter.cli import commands
from boltcutter.config.errors import ConfigError
from boltcutter.environment.lease import Holder

from .conftest import Write
from .test_page import fill

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef+/="
Open = Callable[[str], Tab]


@dataclass
class Server:
    """A server that has printed its address."""

    process: subprocess.Popen[str]
    url: str


Start = Callable[..., Server]
Serve = Callable[..., str]
COMMAND = [sys.executable, "-m", "boltcutter", "runs", "--live"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def run(*arguments: str) -> Server:
            command = [*COMMAND, f"runs={tmp_path / 'runs'}", "port=0", *arguments]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0]
            line = process.stdout.readline()
            assert line.startswith("http://"), process.communicate()
            return Server(process, line.split()[0])

        yield run


def append(run: Path, number: int, value: float) -> None:
    with (run / "metrics.csv").open("a") as file:
        file.write(f"{10 * number},{number // 10},{value},{1 / number}\n")


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve in this process, which looks at the files at each request; returns the URL."""
    monkeypatch.setattr(live, "INTERVAL", 0)
    monkeypatch.setattr(live, "SHARE", float("inf"))
    with ExitStack() as stack:

        def run(text: str = "", host: str = "127.0.0.1", token: str = "") -> str:
            watch = live.Watch(str(tmp_path / "runs"), query.parse(text))
            server = stack.enter_context(live.LiveServer(watch, host, 0, token))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield run


@pytest.mark.slow
def test_a_run_is_followed_and_what_was_chosen_is_kept(
    start: Start, open_tab: Open, tmp_path: Path, write: Write
) -> None:
    root = fill(tmp_path / "runs", write, 3)
    tab = open_tab(start().url)
    tab.wait("document.querySelectorAll('#runs tbody tr').length === 3")
    tab.evaluate("""{
      window.mine = true;  // lost when a page is loaded again
      document.querySelector('tr[data-run="0001"] input').click();
      document.querySelector('tr[data-run="0001"] input').focus();
      const box = document.querySelector('#runs input'); box.value = 'status!=failed'; box.oninput();
      [...document.querySelectorAll('#runs th')].find(th => th.textContent === 'optimizer.lr').click();
      document.querySelector('.smoothing').value = 0.5;
      brushes.set('seed', [0, 1]); select();
    }""")
    before = tab.evaluate("document.querySelector('[data-run=\"0002\"].curve').getAttribute('d')")
    append(root / "0002", 40, 0.9)
    tab.wait(f"document.querySelector('[data-run=\"0002\"].curve')?.getAttribute('d') !== {json.dumps(before)}")
    fill(tmp_path / "more", write, 6)
    for number in (3, 4, 5):
        (tmp_path / "more" / f"{number:04}").rename(root / f"{number:04}")
    tab.wait("document.querySelectorAll('#runs tbody tr').length === 6")
    kept = """[window.mine, [...checked].join(), document.activeElement.ariaLabel, visible.length,
      document.querySelector('tr[data-run="0001"] input').checked, document.querySelector('.smoothing').value,
      document.querySelector('#runs input').value, document.querySelector('.live').textContent,
      document.querySelector('#runs th[aria-sort=ascending]').textContent]"""
    expected = [True, "0001", "Emphasize run 0001", 6, True, "0.5", "status!=failed", "live", "optimizer.lr"]
    assert tab.evaluate(kept) == expected
    rates = tab.evaluate("""{
      const rate = columns.find(c => c.name === 'optimizer.lr');
      [...document.querySelectorAll('#runs tbody tr')].map(row => rate.value(row.item))
    }""")
    assert rates == sorted(rates)
    for file in (root / "0000").iterdir():
        file.unlink()
    tab.wait("!document.querySelector('tr[data-run=\"0000\"]')")


@pytest.mark.slow
def test_the_report_of_a_run_follows_it(start: Start, open_tab: Open, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 2, reason="running")
    server = start()
    tab = open_tab(server.url)
    tab.wait("document.querySelector('tr[data-run=\"0001\"] a') != null")
    tab.evaluate("document.querySelector('tr[data-run=\"0001\"] a').click()")
    tab.wait("location.pathname === '/0001/report.html' && document.querySelectorAll('[data-chart] svg').length === 2")
    assert "running" in tab.evaluate("document.querySelector('.badge').innerText")
    tab.evaluate("{ window.mine = true; document.querySelector('.log').click(); }")
    append(root / "0001", 50, 0.25)
    tab.wait("data.charts.some(chart => chart.series.some(s => s.x.at(-1) === 501))")
    assert tab.evaluate("[window.mine, document.querySelector('.log').ariaPressed]") == [True, "true"]
    write(root / "0001", reason="completed", test={"test/accuracy": 0.75})
    tab.wait("document.querySelector('.badge').innerText.includes('completed')")
    tab.wait("document.querySelector('#metrics')?.innerText.includes('0.7500')")
    assert tab.evaluate("window.mine && document.querySelectorAll('[data-chart] svg').length === 2")
    tab.evaluate("document.querySelector('nav a').click()")
    tab.wait("location.pathname === '/' && document.querySelectorAll('#runs tbody tr').length === 2")


def test_unchanged_runs_are_not_sent_again(serve: Serve, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 3)
    files = {file: file.stat().st_atime_ns for file in root.rglob("*.csv")}
    url = serve("seed>0")
    for path in ("/data.json", "/0001/report.html"):
        first = httpx.get(url + path)
        assert first.status_code == 200
        tagged = {"If-None-Match": first.headers["ETag"]}
        assert httpx.get(url + path, headers=tagged).status_code == 304
        append(root / "0001", 60, 0.1)
        deadline = time.monotonic() + 30
        while httpx.get(url + path, headers=tagged).status_code == 304:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert httpx.get(url + "/data.json").json()["ids"] == ["0001", "0002"]
    assert {file.parent.name for file in files} == {"0000", "0001", "0002"}
    names = {file.name for run in root.iterdir() if run.name != ".boltcutter" for file in run.iterdir()}
    assert names == {"record.json", "metrics.csv"}  # nothing is written there
    for path in (
        "/0000/report.html",
        "/0001",
        "/0001/record.json",
        "/..%2f0001/report.html",
        "/0001/../../report.html",
    ):
        assert httpx.get(url + path).status_code == 404, path


def test_what_takes_long_is_read_less_often(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root, path = fill(tmp_path / "runs", write, 1), "0000/report.html"
    monkeypatch.setattr(live, "SHARE", 1e-9)  # of a core
    watch = live.Watch(str(root), query.parse(""))
    (tag, text), report = watch.data(), watch.report(path, "")
    assert report
    append(root / "0000", 60, 0.1)
    assert watch.data() == (tag, text)
    assert watch.report(path, report[0]) == (report[0], "")
    assert watch.report(path, "of a page that was opened later")[1]  # type: ignore[index]


def test_an_incomplete_row_is_no_value(serve: Serve, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 1)
    with (root / "0000" / "metrics.csv").open("a") as file:
        file.write("500,5,0.00")  # of 0.001
    url = serve()

    def last_step() -> float:
        curves = {curve["name"]: curve["runs"][0] for curve in httpx.get(f"{url}/data.json").json()["curves"]}
        return float(curves["val/accuracy"][0][-1])

    assert last_step() == 291  # steps of the optimizer; loggers count them from 0
    assert "500" not in re.search(r'id="data">(.*?)<', httpx.get(f"{url}/0000/report.html").text)[1]  # type: ignore[index]
    with (root / "0000" / "metrics.csv").open("a") as file:
        file.write("1,0.5\n")
    assert last_step() == 501


def test_files_of_somebody_else_neither_block_nor_reach_other_pages(serve: Serve, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 1)
    (root / "0000" / "metrics.csv").unlink()
    os.mkfifo(root / "0000" / "metrics.csv")
    (root / "search").mkdir()
    (root / "search" / "search.json").write_text("{}")
    (root / "search" / "report.html").write_bytes(b"\xff<script>fetch('/data.json')</script>")
    (tmp_path / "secret").write_text("a secret")
    (root / "linked").mkdir()
    (root / "linked" / "search.json").write_text("{}")
    (root / "linked" / "report.html").symlink_to(tmp_path / "secret")
    write(root / "javascript:alert(1)")
    os.mkfifo(write(root / "named") / "\x1b<img src=x>")
    (root / "large").mkdir()
    (root / "large" / "search.json").write_text("{}")
    (root / "large" / "report.html").touch()
    os.truncate(root / "large" / "report.html", 1 << 27)
    write(root / "typed", test="x", config={})
    url = serve()
    links = httpx.get(f"{url}/data.json").json()["links"]
    assert "javascript%3Aalert%281%29/report.html" in links
    assert [httpx.get(f"{url}/{link}").status_code for link in links] == [200] * 7
    assert "a secret" not in httpx.get(f"{url}/linked/report.html").text
    assert "metrics.csv is not a file of the folder" in httpx.get(f"{url}/0000/report.html", timeout=30).text
    named = httpx.get(f"{url}/named/report.html", timeout=30)
    assert "Content-Security-Policy" not in named.headers
    assert "&lt;img src=x&gt; is not a file of the folder" in named.text
    assert not {"<", "\x1b"} & {*named.text}
    stored = httpx.get(f"{url}/search/report.html")
    assert (stored.status_code, stored.headers["Content-Security-Policy"]) == (200, live.SANDBOX)
    assert "allow-same-origin" not in live.SANDBOX


def test_status_follows_the_lease(serve: Serve, tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "runs" / "one", reason="running")
    url = serve()

    def status() -> str:
        columns = httpx.get(f"{url}/data.json").json()["columns"]
        return str(next(column["texts"][0] for column in columns if column["name"] == "status"))

    assert status() == "killed"
    (folder / ".lease").write_text(json.dumps(asdict(Holder.here())))
    assert status() == "running"


def test_other_hosts_and_requests_without_the_token_are_refused(serve: Serve, tmp_path: Path, write: Write) -> None:
    fill(tmp_path / "runs", write, 1)
    local = serve()
    assert httpx.get(local).status_code == 200
    assert httpx.get(local, headers={"Host": "evil.example"}).status_code == 421
    assert httpx.post(local).status_code == 501
    assert httpx.request("GET", local, content=b"GET / HTTP/1.1\r\n\r\n").status_code == 400
    for header in ("Content-Length: 0\r\nContent-Length", "Content-Length ", "Transfer-Encoding "):  # read as none
        with socket.create_connection(("127.0.0.1", int(local.rpartition(":")[2]))) as connection:
            connection.sendall(
                f"GET / HTTP/1.1\r\nHost: localhost\r\n{header}: 40\r\n\r\nGET /2 HTTP/1.1\r\n\r\n".encode()
            )
            with connection.makefile("rb") as answers:
                assert re.findall(rb"HTTP/1\.1 ([0-9]+)", answers.read()) == [b"400"]
    url = serve(host="0.0.0.0", token=TOKEN)
    in_url = TOKEN.replace("+", "%2B")
    for path in ("/", "/data.json", "/0000/report.html", "/?token=wrong", f"/data.json?token={in_url}"):
        assert httpx.get(url + path).status_code == 401, path
    assert httpx.get(f"{url}/data.json", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    with httpx.Client(follow_redirects=True) as client:
        assert client.get(url, params={"token": TOKEN}).url.path == "/"
        assert client.get(f"{url}/data.json").status_code == 200


def test_ctrl_c_ends_it_at_once(start: Start, tmp_path: Path, write: Write) -> None:
    fill(tmp_path / "runs", write, 1)
    server = start()
    with httpx.Client() as client:  # whose connection stays open
        assert client.get(server.url.partition("?")[0]).status_code == 401  # of another user of this machine
        assert client.get(server.url, follow_redirects=True).status_code == 200
        niceness = os.getpriority(os.PRIO_PROCESS, server.process.pid)  # a training has priority
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + live.NICENESS)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        _, errors = server.process.communicate(timeout=30)
    assert (server.process.returncode, errors) == (0, "")
    assert time.monotonic() - began < 20  # of the 30 after which an idle connection ends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=taken"], "port=taken is not a port; try port=8010"),
        (["port=65536"], "port=65536 is not a port; try port=8010"),
        (["token_file=none"], "token_file=none: cannot be read"),
        (["host=0.0.0.0"], "host=0.0.0.0: other machines reach the server, so it needs a token"),
        (["seed>"], "seed>"),
        (["a=1", "b=2"], "--live a=1 b=2: one filter is expected"),
        (["runs=s3://bucket/runs"], "runs=s3://bucket/runs: only a folder can be followed"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        commands.main(["runs", "--live", f"runs={tmp_path}", *arguments])
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) <= 1 + (arguments == ["seed>"])
    assert message in err


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^host=127.0.0.1 port={port}: .*; choose another, or port=0$"):
            live.LiveServer(live.Watch(str(tmp_path), query.parse("")), "127.0.0.1", port, "")


def test_connections_without_a_request_keep_nobody_out(
    serve: Serve, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_CONNECTIONS", 4)
    write(tmp_path / "runs" / "a")
    url = httpx.URL(serve())
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection((url.host, url.port), 10)) for _ in range(8)]
        assert httpx.get(url.copy_with(path="/", query=None), timeout=10).status_code == 200
        assert held[0].recv(1) == b""  # the oldest was closed
