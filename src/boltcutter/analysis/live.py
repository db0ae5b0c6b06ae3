"""``boltcutter runs --live``: serves the page of the runs and their reports, which follow the runs as they are written.

Files of runs are only read, and only where they have changed; trainings are neither asked nor locked.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from boltcutter import run_files
from boltcutter.analysis import index, page
from boltcutter.analysis.facts import Stamp, file_stamp, scan, stamp_of
from boltcutter.analysis.query import Query
from boltcutter.analysis.record import Run, as_runs
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.environment.output import Terminal
from boltcutter.formatting import parse_count, to_json
from boltcutter.report import page as html
from boltcutter.run import trust
from boltcutter.run.metrics import MetricsReader
from boltcutter.run.remote.access import COOKIE, Access, bind, read_token

SETTINGS = {"host": "127.0.0.1", "port": "8010", "token_file": ""}
NICENESS = 10  # added to that of the process, so that a training on the same cores has priority
MAX_CONNECTIONS = 256  # each of which has a thread
INTERVAL = 0.5  # seconds between two looks at the files, however many pages ask
SHARE = 0.02  # of a core that this takes at most, and as much for a report: long runs are read less often
REPORT = run_files.REPORT
# Scripts of a stored report reach neither the other pages of the server nor other hosts.
SANDBOX = "sandbox allow-scripts; default-src data: 'unsafe-inline'"
SIZES = ("content-length", "transfer-encoding")  # headers of a request that has a body
TESTED = "evaluation/test/metrics.json"


def serve(root: str, query: Query, given: Mapping[str, str]) -> None:
    """Serve until Ctrl-C; ``given`` are ``host``, ``port`` and ``token_file``, as of ``boltcutter serve``."""
    host, port, file = (given.get(name, default) for name, default in SETTINGS.items())
    if (number := parse_count(port)) is None or number > 65535:
        raise ConfigError(f"port={port} is not a port; try port={SETTINGS['port']}, or port=0 for a free one")
    made = not (token := read_token(host, file))  # other users of this machine reach the port as well
    token = Terminal.shown = token or secrets.token_urlsafe(24)
    os.nice(NICENESS)
    with LiveServer(Watch(root, query), host, number, token) as server:
        shown = f"[{host}]" if ":" in host else host
        once = f"/?token={token}" if made else " (in a browser, open /?token=<token> once)"
        print(f"http://{shown}:{server.server_port}{once}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


class Watch:
    """The runs below a folder, of which those whose files have changed are read again."""

    def __init__(self, root: str, query: Query) -> None:
        self.root, self.query = root.rstrip("/"), query
        self._known = {place.folder: facts for place, facts in index.read_indexed(self.root)}
        self._curves: dict[str, tuple[Stamp, MetricsReader, page.Curves]] = {}
        self._lock, self._due, self._tag, self._text = threading.Lock(), 0.0, "", ""
        self._runs: dict[str, Run] = {}  # by the URL of the report
        self._reports: dict[str, tuple[str, float]] = {}  # by the same: tag, and when to render it again
        self.data()

    def data(self) -> tuple[str, str]:
        """What the page shows as JSON, after a text that changes with it."""
        with self._lock:
            if time.monotonic() >= self._due:
                began = time.thread_time()
                self._look()
                self._due = time.monotonic() + max(INTERVAL, (time.thread_time() - began) / SHARE)
            return self._tag, self._text

    def _look(self) -> None:
        found, _ = index.refresh(scan(self.root), self._known)
        self._known = {place.folder: facts for place, facts in found}
        runs = [run for run in as_runs(found) if self.query(run)]
        tag = _digest([[run.folder, run.status, self._known[run.folder]["stamp"]] for run in runs])
        if tag == self._tag:
            return
        links = [self._link(run) for run in runs]
        self._runs = dict(zip(map(unquote, links), runs, strict=True))
        text = to_json(page.collect(runs, links, [self._read_curves(run.folder) for run in runs]))
        self._tag, self._text = tag, text.encode(errors="replace").decode()

    def _link(self, run: Run) -> str:
        """As on disk, so that links between reports work; folders elsewhere are below that of all runs."""
        return quote(os.fsencode(f"{run.folder.removeprefix(self.root + '/').strip('/')}/{REPORT}"))

    def _read_curves(self, folder: str) -> page.Curves:
        stamp = [file_stamp(f"{folder}/{run_files.METRICS}")]
        known = self._curves.get(folder)
        if known is None or known[0] != stamp:
            reader = known[1] if known else MetricsReader(Path(folder, run_files.METRICS))
            known = self._curves[folder] = stamp, reader, page.read_curves(reader)
        return known[2]

    def is_stored(self, path: str) -> bool:
        """Whether the report is a file of the folder, whose scripts may be somebody else's."""
        return path in self._runs and self._runs[path].kind == "search"

    def report(self, path: str, tag: str) -> tuple[str, str] | None:
        """The tag of a run's report, and its HTML, empty if ``tag`` is current; None if there is no such run."""
        run = self._runs.get(path)
        if run is None:
            return None
        folder = run.folder
        files = [TESTED, *(file for _, file, _ in html.added_sections())]
        now = _digest([stamp_of(folder), *(file_stamp(f"{folder}/{file}") for file in files)])
        if now == tag or (tag == (known := self._reports.get(path, ("", 0.0)))[0] and time.monotonic() < known[1]):
            return tag, ""
        began = time.thread_time()
        try:
            text = _read_report(run)
        except Exception as error:  # files of somebody else may hold anything
            text = escape(printable(one_line(error)))
        self._reports[path] = now, time.monotonic() + (time.thread_time() - began) / SHARE
        return now, text


def _read_report(run: Run) -> str:
    """The report of a run as HTML, or of a search as it is stored."""
    folder = Path(run.folder)
    if run.kind == "search":  # whose report the search writes after each trial
        found = folder / REPORT
        if not found.is_file() or found.is_symlink():  # somebody else's link may lead to any file
            return "The search has not written its report yet."
        return trust.read_bytes(found).decode(errors="replace")
    trust.check_record({}, f"run={folder}", folder, walks=True)  # links of its owner as well, as others see the page
    return html.render_page(folder, "/")


def _digest(values: list[Any]) -> str:
    return f'"{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]}"'


class LiveServer(ThreadingHTTPServer):
    """Answers requests for the page, its data and the reports, with a token those of other machines too."""

    def __init__(self, watch: Watch, host: str, port: int, token: str) -> None:
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self._open = dict[Any, None]()  # connections, the oldest first
        self.socket.close()
        self.socket = bind(host, port)
        self.server_address, self.server_port = self.socket.getsockname(), self.socket.getsockname()[1]
        self.server_activate()
        self.watch, self.access = watch, Access(host, token)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close the oldest connection if there are many, as others could not be accepted."""
        self._open[request] = None
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            self._open.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what went wrong in one line; nothing if the client has gone."""
        error = sys.exc_info()[1]
        if error and not isinstance(error, ConnectionError | TimeoutError):
            print(f"warning: runs --live: {one_line(error)}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds for a request, after which its thread ends

    def do_GET(self) -> None:
        sizes = [value for name, value in self.headers.items() if name.lower() in SIZES]
        if self.headers.defects or sizes not in ([], ["0"]):  # also of two, or of one with a space before the colon
            self.close_connection = True  # else the body would be read as another request
            self._send(400, "a request for a page has no body", {"Connection": "close"})
        else:
            self._reply()

    def _reply(self) -> None:
        url, access, host = urlsplit(self.path), self.server.access, self.headers.get("Host", "")
        pairs = [part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";")]
        offered = parse_qs(url.query).get("token", [""])[0]
        if not access.is_for_us(host):
            self._send(421, f"host {host[:100]}: expected localhost")
        elif access.token and url.path == "/" and access.is_token(offered):
            cookie = f"{COOKIE}={quote(offered)}; HttpOnly; SameSite=strict; Path=/"
            self._send(303, "", {"Location": "/", "Set-Cookie": cookie})
        elif not access.has_token(self.headers.get("Authorization", ""), {n: v for n, _, v in pairs}.get(COOKIE, "")):
            self._send(401, "no valid token; open /?token=<token> once", {"WWW-Authenticate": "Bearer"})
        else:
            self._answer(unquote(url.path), self.headers.get("If-None-Match", ""))

    def _answer(self, path: str, known: str) -> None:
        watch, kind = self.server.watch, "application/json" if path == "/data.json" else "text/html; charset=utf-8"
        tag, text = watch.data()
        if path == "/":
            tag, text = "", page.render_table(watch.root, json.loads(text), "/")
        elif path != "/data.json":
            tag, text = watch.report(path.lstrip("/"), known) or ("", "no such page; the runs are at /")
        status = 304 if tag and tag == known else 200 if tag or path == "/" else 404
        policy = {"Content-Security-Policy": SANDBOX} if watch.is_stored(path.lstrip("/")) else {}
        self._send(status, text, policy | {"ETag": tag, "Content-Type": kind})

    def _send(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        body = b"" if status == 304 else text.encode(errors="replace")
        self.send_response(status)
        always = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        always |= {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in (always | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page asks each second."""
