"""The page that follows runs, in a real browser while they are written, and who may ask for it."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import pytest
from browser import Tab

from boltcutter.environment.lease import Holder
from boltcutter_runs.live import SANDBOX

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
    tab.wait("data.charts.some(chart => chart.series.some(s => s.x.at(-1) === 500))")
    assert tab.evaluate("[window.mine, document.querySelector('.log').ariaPressed]") == [True, "true"]
    write(root / "0001", reason="completed", test={"test/accuracy": 0.75})
    tab.wait("document.querySelector('.badge').innerText.includes('completed')")
    tab.wait("document.querySelector('#metrics')?.innerText.includes('0.7500')")
    assert tab.evaluate("window.mine && document.querySelectorAll('[data-chart] svg').length === 2")
    tab.evaluate("document.querySelector('nav a').click()")
    tab.wait("location.pathname === '/' && document.querySelectorAll('#runs tbody tr').length === 2")


def test_unchanged_runs_are_not_sent_again(start: Start, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 3)
    files = {file: file.stat().st_atime_ns for file in root.rglob("*.csv")}
    url = start("seed>0").url
    for path in ("/data.json", "/0001/report.html"):
        first = httpx.get(url + path)
        assert first.status_code == 200
        tagged = {"If-None-Match": first.headers["ETag"]}
        assert httpx.get(url + path, headers=tagged).status_code == 304
        append(root / "0001", 60, 0.1)
        time.sleep(0.6)
        assert httpx.get(url + path, headers=tagged).status_code == 200
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


def test_an_incomplete_row_is_no_value(start: Start, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 1)
    with (root / "0000" / "metrics.csv").open("a") as file:
        file.write("500,5,0.00")  # of 0.001
    url = start().url
    curves = {curve["name"]: curve["runs"][0] for curve in httpx.get(f"{url}/data.json").json()["curves"]}
    assert curves["val/accuracy"][0][-1] == 290
    assert "500" not in re.search(r'id="data">(.*?)<', httpx.get(f"{url}/0000/report.html").text)[1]  # type: ignore[index]


def test_files_of_somebody_else_neither_block_nor_reach_other_pages(start: Start, tmp_path: Path, write: Write) -> None:
    root = fill(tmp_path / "runs", write, 1)
    (root / "0000" / "metrics.csv").unlink()
    os.mkfifo(root / "0000" / "metrics.csv")
    (root / "search").mkdir()
    (root / "search" / "search.json").write_text("{}")
    (root / "search" / "report.html").write_text("<script>fetch('/data.json')</script>")
    (tmp_path / "secret").write_text("a secret")
    (root / "linked").mkdir()
    (root / "linked" / "search.json").write_text("{}")
    (root / "linked" / "report.html").symlink_to(tmp_path / "secret")
    url = start().url
    assert "a secret" not in httpx.get(f"{url}/linked/report.html").text
    assert "metrics.csv is not a file of the folder" in httpx.get(f"{url}/0000/report.html", timeout=30).text
    stored = httpx.get(f"{url}/search/report.html")
    assert (stored.status_code, stored.headers["Content-Security-Policy"]) == (200, SANDBOX)
    assert "allow-same-origin" not in SANDBOX


def test_status_follows_the_lease(start: Start, tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "runs" / "one", reason="running")
    url = start().url

    def status() -> str:
        columns = httpx.get(f"{url}/data.json").json()["columns"]
        return str(next(column["texts"][0] for column in columns if column["name"] == "status"))

    assert status() == "killed"
    (folder / ".lease").write_text(json.dumps(asdict(Holder.here())))
    time.sleep(0.6)
    assert status() == "running"


def test_other_hosts_and_requests_without_the_token_are_refused(start: Start, tmp_path: Path, write: Write) -> None:
    fill(tmp_path / "runs", write, 1)
    local = start().url
    assert httpx.get(local, headers={"Host": "evil.example"}).status_code == 421
    assert httpx.post(local).status_code == 501
    (tmp_path / "token").write_text(TOKEN)
    url = start("host=0.0.0.0", f"token_file={tmp_path / 'token'}").url.replace("0.0.0.0", "127.0.0.1")
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
        client.get(server.url)
        assert os.getpriority(os.PRIO_PROCESS, server.process.pid) >= 10  # a training has priority
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        _, errors = server.process.communicate(timeout=30)
    assert (server.process.returncode, errors) == (0, "")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=taken"], "port=taken is not a port; try port=8010"),
        (["host=0.0.0.0"], "host=0.0.0.0: other machines reach the server, so it needs a token"),
        (["seed>"], "seed>"),
        (["a=1", "b=2"], "--live a=1 b=2: one filter is expected"),
        (["runs=s3://bucket/runs"], "runs=s3://bucket/runs: only a folder can be followed"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    given = [f"runs={tmp_path}", *arguments]
    done = subprocess.run([*COMMAND, *given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 1 + (arguments == ["seed>"])
    assert message in done.stderr


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, f"runs={tmp_path}", f"port={port}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: host=127.0.0.1 port={port}: .*; choose another, or port=0\n", done.stderr)
