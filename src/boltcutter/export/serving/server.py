"""Serve a run over HTTP: the command, its settings and the worker processes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import socket
import tempfile
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.config.values import split_overrides
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.export.serving.app import Limits, create_app
from boltcutter.export.serving.predictor import Predictor
from boltcutter.project import Project
from boltcutter.run.remote.access import bind, read_token
from boltcutter.strategy.precision import device_type

VARIABLE = "BOLTCUTTER_SERVE"  # JSON with the settings, for worker processes
SERVER: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, "workers": 1, "drain": 30, "token_file": ""}
LIMITS: dict[str, Any] = {field.name: field.default for field in fields(Limits)}
MAX_CONNECTIONS = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # of a worker
MAX_HEAD = 1 << 16  # bytes of a request that are not its body
LEAST = {"port": 0, "max_wait": 0, "drain": 0}  # others are at least 1, or above 0


def serve_command(project: Project, overrides: list[str]) -> None:
    """Serve a run until SIGTERM or SIGINT, after which requests that have begun are completed.

    Args:
        project: Project whose configuration is used.
        overrides: ``run=<folder>``, ``ckpt=best|last|<path>`` or ``export=<format or file>``; ``host``, ``port``,
            ``workers``, ``drain`` (seconds that requests have to complete at the end), ``token_file`` and the fields of
            ``Limits``; other overrides change the run's configuration.

    Raises:
        ConfigError: A setting is invalid, or the port is in use.
    """
    filter_warnings()
    special, rest = split_overrides(overrides, "run", "ckpt", "export", *SERVER, *LIMITS)
    settings = read_settings(special)
    cfg, folder = load_evaluation_config(project, special, rest)
    if "export" in special and "ckpt" in special:
        raise ConfigError(f"export={special['export']}: used in place of a checkpoint; remove ckpt={special['ckpt']}")
    settings |= {"root": str(project.root), "run": special["run"], "rest": rest}
    settings |= {"ckpt": special.get("ckpt", "best"), "export": special.get("export")}
    with bind(settings["host"], settings["port"]) as bound:
        bound.set_inheritable(True)  # which workers share
        serve(cfg, folder, settings, bound)


def serve(cfg: Settings, folder: Path, settings: dict[str, Any], bound: socket.socket) -> None:
    """Serve on an open socket, in this process or in several workers."""
    port = bound.getsockname()[1]
    os.environ[VARIABLE] = json.dumps(settings)
    options: dict[str, Any] = {"timeout_graceful_shutdown": settings["drain"]}
    options["http"] = partial(LimitedProtocol, timeout=settings["timeout"])
    options["backlog"] = MAX_CONNECTIONS // 4  # as many are accepted at once, before the oldest are closed
    options |= {
        "log_level": "warning",
        "access_log": False,
        "lifespan": "on",
        "ws": "none",
        "host": settings["host"],
        "port": port,
    }
    host = f"[{settings['host']}]" if ":" in settings["host"] else settings["host"]  # IPv6
    url = f"http://{host}:{port}"
    if settings["workers"] > 1:  # mistakes are reported only once; on the CPU, to leave the GPUs to the workers
        cfg = cfg.changed({"trainer": {"accelerator": "cpu", "devices": 1, "precision": "32-true"}})
    app = create(cfg, folder, settings)
    print(f"{url} (API: {url}/openapi.json)", flush=True)
    if settings["workers"] == 1:
        uvicorn.Server(uvicorn.Config(app, **options)).run([bound])
        return
    del app  # each worker loads its own
    with tempfile.TemporaryDirectory(prefix="boltcutter-metrics-") as metrics:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        workers = {"factory": True, "workers": settings["workers"], "timeout_worker_healthcheck": 60}
        config = uvicorn.Config("boltcutter.export.serving.server:worker", **workers, **options)
        Multiprocess(config, sockets=[bound]).run()


def worker() -> Starlette:
    """Create the application of a worker process from the settings in the environment."""
    filter_warnings()
    settings = json.loads(os.environ[VARIABLE])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings["workers"]))
    project = Project.find(settings["root"])
    project.activate()
    cfg, folder = load_evaluation_config(project, {"run": settings["run"]}, settings["rest"])
    if device_type(str(cfg.trainer.get("accelerator", "auto"))) == "cuda":
        given = cfg.trainer["devices"]
        devices = range(torch.cuda.device_count()) if isinstance(given, int | str) else list(given)
        cfg = cfg.changed({"trainer": {"devices": [devices[claim_number(settings["workers"]) % len(devices)]]}})
    return create(cfg, folder, settings)


def claim_number(workers: int) -> int:
    """Return the lowest number that no living worker has, which this process keeps until it ends."""
    for number in range(workers):
        file = os.open(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]) / f"worker-{number}.lock", os.O_CREAT | os.O_RDWR)
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number
        os.close(file)
    return 0


def create(cfg: Settings, folder: Path, settings: dict[str, Any]) -> Starlette:
    """Load the model and create the application."""
    return create_app(
        Predictor(cfg, folder, settings["ckpt"], settings["export"]),
        Limits(**{name: settings[name] for name in LIMITS}),
        host=settings["host"],
        token=read_token(settings["host"], settings["token_file"]),
    )


def read_settings(given: dict[str, str]) -> dict[str, Any]:
    """Convert the settings of the command line."""
    settings = SERVER | LIMITS
    for name, default in settings.items():
        if name not in given:
            continue
        kind, least = type(default), LEAST.get(name, 1 if isinstance(default, int) else 0)
        try:
            settings[name] = value = kind(given[name])
            valid = kind is str or (value >= least and (value > 0 or name in LEAST) and value < 2**31)
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"{name}={given[name]} is not a valid number; try {name}={default}")
    if settings["port"] > 65535:
        raise ConfigError(f"port={settings['port']} is not a port; try port={SERVER['port']}, or port=0 for a free one")
    read_token(settings["host"], settings["token_file"])  # before the model is loaded
    return settings


class LimitedProtocol(HttpToolsProtocol):
    """HTTP whose requests have to arrive within ``timeout`` seconds, and whose heads are limited in size."""

    _open: ClassVar[dict[LimitedProtocol, None]] = {}  # the one that has been without a request for longest first

    def __init__(self, *arguments: Any, timeout: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timeout = timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._received = 0  # bytes since the last piece of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first byte."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._timeout, self.transport.close)
        self._open[self] = None
        if len(self._open) > MAX_CONNECTIONS:  # else whoever opens many could keep others from being accepted
            oldest = next((one for one in self._open if one._is_waiting()), self)
            del self._open[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._open.pop(self, None)
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """Whether no request has arrived that is not answered yet."""
        return self._deadline is not None or self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Start the time limit with the first byte of each request."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._timeout, self.transport.close)
        self._received += len(data)
        super().data_received(data)
        if self._received > MAX_HEAD:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Receive a piece of the body."""
        self._received = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the limits of a request."""
        self._received = 0
        if self in self._open:
            self._open[self] = self._open.pop(self)
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None
        super().on_message_complete()
        if self.cycle.response_complete:  # refused before it was read, which has ended the time limit of uvicorn
            keep_alive = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(*keep_alive)
