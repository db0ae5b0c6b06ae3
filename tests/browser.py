"""Pages rendered by a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import websocket

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
]


@dataclass(frozen=True)
class Page:
    """DOM and console messages of a page rendered by a browser."""

    dom: str
    console: list[str]

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.dom))


Browse = Callable[..., Page]


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        from conftest import require  # which imports this module

        require("chromium", install="apt-get install chromium")
    return str(found)


@pytest.fixture
def browse(chromium: str, tmp_path: Path) -> Iterator[Browse]:
    """Open a page; ``script`` runs in it once it is drawn."""

    def open_page(page: Path, *flags: str, script: str = "", dump: bool = True) -> Page:
        if script:
            text = page.read_text().replace("</body>", f"<script>{script}</script></body>")
            page = tmp_path / "scripted.html"
            page.write_text(text)
        command = [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, *(["--dump-dom"] * dump)]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=90, check=True)
        return Page(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])

    yield open_page
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)


class References(HTMLParser):
    """URLs that a page loads or links to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loading = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        self.found += [value or "" for name, value in attrs if name in loading]


class Tab:
    """A page of a server in a running browser, which a test uses like a person."""

    def __init__(self, send: Callable[..., dict[str, Any]]) -> None:
        self.send = send

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < end, self.evaluate("document.body.innerText")
            time.sleep(0.1)
        return found

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the mouse at the first point, move it over the others, and release it."""
        for number, (x, y) in enumerate([*points, points[-1]]):
            kind = "mousePressed" if not number else "mouseMoved" if number < len(points) else "mouseReleased"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


@pytest.fixture
def open_tab(chromium: str, tmp_path: Path) -> Iterator[Callable[[str], Tab]]:
    """Open URLs in a browser that is controlled by the Chrome DevTools Protocol."""
    profile = tmp_path / "profile"
    flags = [flag for flag in FLAGS if "virtual-time" not in flag and "logging" not in flag]
    command = [chromium, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, profile, ignore_errors=True)
        stack.callback(process.wait, 20)
        stack.callback(os.killpg, process.pid, signal.SIGKILL)
        active, end = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (active.is_file() and active.read_text().count("\n")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        address = f"127.0.0.1:{active.read_text().split()[0]}"

        def open_url(url: str) -> Tab:
            tab = httpx.put(f"http://{address}/json/new?{url}", timeout=30).json()
            socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=30, suppress_origin=True)
            stack.callback(socket.close)
            numbers = count(1)

            def send(method: str, **parameters: Any) -> dict[str, Any]:
                number = next(numbers)
                socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
                while (answer := json.loads(socket.recv())).get("id") != number:
                    pass
                assert "error" not in answer, answer
                return dict(answer["result"])

            return Tab(send)

        yield open_url
