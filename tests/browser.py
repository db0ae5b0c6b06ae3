"""Pages rendered by a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

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
