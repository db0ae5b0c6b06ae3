"""Weights & Biases logger that neither stops nor delays a run."""

from __future__ import annotations

import configparser
import http.client
import math
import netrc
import os
import shlex
import ssl
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import wandb
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from wandb.sdk.mailbox import HandleAbandonedError

Mode = Literal["auto", "online", "offline", "disabled"]
TIMEOUT = 5.0  # seconds to wait for a response of the server
WANDB_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}  # of the public W&B server; a login to one is valid for both
FINISH_TIMEOUT = 2.0  # seconds to finish a run whose server is unreachable


class WandbLogger(LightningWandbLogger):
    """Log to one W&B run over all attempts of a run.

    If the server is unreachable, logging continues offline after at most twenty seconds; ``boltcutter sync`` uploads
    such a run later. Metrics are on disk within a second, also if the process is killed.

    Args:
        folder: Run folder; its last two components are the name of the W&B run if ``name`` is not given, the last one
            is its id.
        project: W&B project.
        mode: ``auto`` logs online if a login is found. The environment variable ``WANDB_MODE`` overrides ``auto``.
        best: Metrics whose summary is their ``min`` or ``max`` instead of the last value.
        wandb: Other arguments of ``wandb.init``.

    Raises:
        ValueError: The mode is ``online``, but no login was found; another folder is given as ``save_dir``.
    """

    def __init__(
        self,
        *,
        folder: Path,
        project: str,
        mode: Mode = "auto",
        best: dict[str, Literal["min", "max"]] | None = None,
        **wandb: Any,
    ) -> None:
        folder = Path(folder)
        wanted = os.environ.get("WANDB_MODE") if mode == "auto" else mode
        # Other ranks do not use W&B, and may run on hosts without a login.
        if wanted == "online" and getattr(rank_zero_only, "rank", 0) == 0 and not logged_in():
            setting = "WANDB_MODE" if mode == "auto" else "mode"
            raise ValueError(f"{setting}=online, but no login was found; run `wandb login`, or set auto or offline")
        if taken := {"save_dir", "dir"} & wandb.keys():
            raise ValueError(f"{min(taken)}: set by folder, where boltcutter sync looks for its files; leave it out")
        own = {"name": "/".join(folder.parts[-2:]), "id": folder.name}
        super().__init__(save_dir=folder, project=project, **{**own, **wandb})
        self.mode, self.best = mode, best or {}
        self._checked_at, self._size = 0.0, -1  # of the transaction log
        self._wandb_init.pop("anonymous", None)  # W&B warns about it even if it is not set

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process starts the run there. With Lightning's it would be started here and finished in both
        # processes, one of which would wait forever.
        return {**vars(self), "_experiment": None}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, started on first access."""
        if self._experiment is None:
            Path(self.save_dir or ".").mkdir(parents=True, exist_ok=True)
            self._start(resolve_mode(self.mode))
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics of a step."""
        self._call(super().log_metrics, metrics, step)
        if time.monotonic() - self._checked_at > TIMEOUT and not self.experiment.disabled:
            self._watch_file()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Log the configuration."""
        self._call(super().log_hyperparams, params)

    def _call(self, call: Callable[..., Any], *args: Any) -> None:
        """Call; if the service process has died, continue without it."""
        try:
            call(*args)
        except ConnectionError as error:
            rank_zero_warn(f"W&B: its process has died ({error}); continuing disabled, run boltcutter sync later")
            self._tear_down()
            self._start("disabled")

    def _watch_file(self) -> None:
        """Warn once if W&B has stopped writing, which it does silently after its disk was full."""
        file = Path(self.experiment.settings.sync_file)
        size = file.stat().st_size if file.is_file() else 0
        self._checked_at = time.monotonic()
        if size == self._size:  # metrics logged before the last check are written within a second
            rank_zero_warn(f"W&B: {file} does not grow, as on a full disk; run boltcutter sync later")
            self._checked_at = math.inf
        self._size = size

    def _tear_down(self) -> None:
        with suppress(ConnectionError):
            wandb.teardown()
        wandb.run = None
        self._experiment = None

    def _start(self, mode: str) -> None:
        # Error reports to W&B delay the end of the process by 20 s if the server does not respond.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb_init["mode"] = mode
        self._wandb_init["settings"] = wandb.Settings(
            init_timeout=10,
            finish_timeout=20,
            finish_timeout_raises=False,
            x_graphql_timeout_seconds=TIMEOUT,
            x_graphql_retry_max=1,
            x_transaction_log_flush_interval=1.0,
            silent=True,  # the summaries before and after training show the URL
        )
        try:
            LightningWandbLogger.experiment.fget(self)  # type: ignore[attr-defined]
        except (wandb.errors.Error, OSError) as error:  # ConnectionError and TimeoutError are OSErrors
            if mode == "disabled":
                raise
            reason = " ".join(str(error).split())[:120]
            fallback = "disabled" if mode == "offline" else "offline; upload it later with boltcutter sync"
            rank_zero_warn(f"W&B: {type(error).__name__}: {reason}; continuing {fallback}")
            self._tear_down()
            self._start(fallback.partition(";")[0])
            return
        run: Any = self._experiment
        for metric, summary in self.best.items():
            run.define_metric(metric, summary=summary, step_metric="trainer/global_step")

    @property
    def location(self) -> str:
        """URL of the run, or how to upload it."""
        run = self.experiment
        if run.disabled:
            return "disabled"
        return f"offline; boltcutter sync {shlex.quote(f'run={self.save_dir}')}" if run.offline else str(run.url)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        """Finish the W&B run with an exit code; above 128 it is marked as preempted."""
        if self._experiment is None:
            return
        run = self._experiment
        unreachable = not run.offline and not run.disabled and not is_reachable(base_url())
        timer = threading.Timer(FINISH_TIMEOUT, _kill_service, [run])
        timer.daemon = True
        if unreachable:
            timer.start()
        try:
            if exit_code > 128:
                run.mark_preempting()
            run.finish(exit_code=exit_code)
        except (ConnectionError, HandleAbandonedError) as error:
            why = f"{base_url()} is unreachable" if unreachable else f"its process has died ({error})"
            rank_zero_warn(f"W&B: {why}; the end of the run is not uploaded; run boltcutter sync later")
            self._tear_down()
        finally:
            timer.cancel()
        self._experiment = None


def _kill_service(run: Any) -> None:
    """Kill the W&B service process, which would retry for long; its data is already on disk."""
    with suppress(AttributeError):  # other versions name it differently; their timeout applies
        run._wl.assert_service()._proc._process.kill()


def resolve_mode(mode: Mode) -> str:
    """Mode to start in: online only if a login is found and the server is reachable."""
    wanted = os.environ.get("WANDB_MODE") or "auto" if mode == "auto" else mode
    if wanted == "auto":
        wanted = "online" if logged_in() else "offline"
    if wanted == "online" and not is_reachable(base_url()):
        rank_zero_warn(f"W&B: {base_url()} is unreachable; logging offline, upload the run later with boltcutter sync")
        return "offline"
    return wanted


def base_url() -> str:
    """URL of the W&B server from the environment, from ``wandb login --host``, or the default."""
    file = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings"
    stored = configparser.ConfigParser(interpolation=None)
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        stored.read(file)
    found = os.environ.get("WANDB_BASE_URL") or stored.get("default", "base_url", fallback=None)
    return found or str(wandb.Settings().base_url)


def logged_in() -> bool:
    """Whether the environment has an API key or identity token file, or the netrc file has a key for the server."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlparse(base_url()).netloc
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in files:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            known = netrc.netrc(os.path.expanduser(file))
            return any(known.authenticators(host) for host in (WANDB_HOSTS if server in WANDB_HOSTS else {server}))
    return False


def is_reachable(url: str) -> bool:
    """Whether a server responds within ``TIMEOUT``; in a thread, because DNS lookups have no time limit."""
    reachable = threading.Event()

    def request() -> None:
        try:
            urllib.request.urlopen(url, timeout=TIMEOUT).close()  # noqa: S310 - the server of W&B
        except urllib.error.HTTPError as error:
            error.close()  # an error response is a response
        except (OSError, ValueError, http.client.HTTPException) as error:
            # W&B may accept a certificate that Python rejects.
            if not isinstance(getattr(error, "reason", None), ssl.SSLError):
                return
        reachable.set()

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return reachable.is_set()
