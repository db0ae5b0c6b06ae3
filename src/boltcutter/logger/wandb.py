"""Weights & Biases that neither stops nor delays a run."""

from __future__ import annotations

import configparser
import http.client
import netrc
import os
import shutil
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
SECONDS = 5.0  # to wait for the server to answer at all
WANDB_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}  # names of W&B's own server; a login to one is to both
GIVE_UP = 2.0  # seconds for the end of a run whose server does not answer any more
RESTARTS = 3  # of W&B's own process, before a run goes on without it
ROOM = 2**23  # bytes that are enough to begin again


class WandbLogger(LightningWandbLogger):
    """One W&B run for the whole run, over all of its attempts.

    Where the server cannot be reached it goes on offline, after twenty seconds at most;
    ``boltcutter sync`` brings such a run up later. What was logged is on disk within a second,
    also when the process is killed.

    Args:
        folder: The run's; its last two parts name the W&B run, the last one is its id.
        project: Where it is shown.
        mode: ``auto`` goes online when somebody is logged in. ``WANDB_MODE`` in the environment beats ``auto``.
        best: Metrics whose summary is their ``min`` or ``max``, not the last value.
        wandb: Any other argument of ``wandb.init``.

    Raises:
        ValueError: ``online``, and nobody is logged in.
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
        # Other ranks never ask W&B anything, and may run where nobody is logged in.
        if wanted == "online" and getattr(rank_zero_only, "rank", 0) == 0 and not logged_in():
            told = "WANDB_MODE" if mode == "auto" else "mode"
            raise ValueError(f"{told}=online, but nobody is logged in; run `wandb login`, or choose auto or offline")
        super().__init__(name="/".join(folder.parts[-2:]), save_dir=folder, project=project, id=folder.name, **wandb)
        self.mode, self.best = mode, best or {}
        self._restarts = 0
        self._looked, self._size, self._stuck = 0.0, -1, False  # at W&B's file
        self._wandb_init.pop("anonymous", None)  # W&B warns of it, though it is not set

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process begins the run there. Lightning would begin it here, and have both end it: of these
        # one waits forever for what the other has been told.
        return {**vars(self), "_experiment": None}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; begun when first asked for."""
        if self._experiment is None:
            Path(self.save_dir or ".").mkdir(parents=True, exist_ok=True)
            self._begin(resolve_mode(self.mode))
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send metrics of a step."""
        self._surely(super().log_metrics, metrics, step)
        if time.monotonic() - self._looked > SECONDS and not self.experiment.disabled:
            self._look_at_file()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Send what the run was configured with."""
        self._surely(super().log_hyperparams, params)

    def _surely(self, call: Callable[..., Any], *args: Any) -> None:
        """Call, and once more in a new process of W&B if the old one is gone."""
        try:
            call(*args)
        except ConnectionError as error:
            self._begin_again(f"its process has died ({error})")
            call(*args)

    def _look_at_file(self) -> None:
        """W&B writes nothing more after its disk was full, and does not say so."""
        file = Path(self.experiment.settings.sync_file)
        size = file.stat().st_size if file.is_file() else 0
        # What was logged at the last look is written within a second.
        stuck, self._size, self._looked = size == self._size, size, time.monotonic()
        if stuck and not self._stuck:
            rank_zero_warn(f"W&B: {file} does not grow; is its disk full? What is logged meanwhile is not in it")
        self._stuck = self._stuck or stuck
        if stuck and self.experiment.offline and shutil.disk_usage(file.parent).free > ROOM:
            self._begin_again("there is room on its disk")

    def _begin_again(self, why: str) -> None:
        self._restarts += 1
        mode = "offline" if self._restarts <= RESTARTS else "disabled"
        rank_zero_warn(f"W&B: {why}; going on {mode}")
        self._tear_down()
        self._stuck, self._size = False, -1
        self._begin(mode)

    def _tear_down(self) -> None:
        with suppress(ConnectionError):
            wandb.teardown()
        wandb.run = None
        self._experiment = None

    def _begin(self, mode: str) -> None:
        # Reports of W&B's errors to W&B hold up the end of the process by 20 s where its server is silent.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb_init["mode"] = mode
        self._wandb_init["settings"] = wandb.Settings(
            init_timeout=10,
            finish_timeout=20,
            finish_timeout_raises=False,
            x_graphql_timeout_seconds=SECONDS,
            x_graphql_retry_max=1,
            x_transaction_log_flush_interval=1.0,
            silent=True,  # the tables before and after training tell where the run is
        )
        try:
            LightningWandbLogger.experiment.fget(self)  # type: ignore[attr-defined]
        except (wandb.errors.Error, OSError) as error:  # ConnectionError and TimeoutError are OSErrors
            if mode == "disabled":
                raise
            reason = " ".join(str(error).split())[:120]
            instead = "disabled" if mode == "offline" else "offline, `boltcutter sync` later"
            rank_zero_warn(f"W&B: {type(error).__name__}: {reason}; going on {instead}")
            self._tear_down()
            self._begin(instead.partition(",")[0])
            return
        begun: Any = self._experiment
        for metric, summary in self.best.items():
            begun.define_metric(metric, summary=summary, step_metric="trainer/global_step")

    @property
    def location(self) -> str:
        """Where a person finds the run."""
        run = self.experiment
        if run.disabled:
            return "disabled"
        return f"offline; boltcutter sync run={self.save_dir}" if run.offline else str(run.url)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        """End the W&B run, so that it shows how the process ended; above 128, by a signal, and to go on later."""
        if self._experiment is None:
            return
        run = self._experiment
        silent = not run.offline and not run.disabled and not is_reachable(base_url())
        giving_up = threading.Timer(GIVE_UP, _end_service, [run])
        giving_up.daemon = True
        if silent:
            giving_up.start()
        try:
            if exit_code > 128:
                run.mark_preempting()
            run.finish(exit_code=exit_code)
        except (ConnectionError, HandleAbandonedError) as error:
            why = f"{base_url()} does not answer any more" if silent else f"its process has died ({error})"
            rank_zero_warn(f"W&B: {why}; the end of the run is not there; `boltcutter sync` later")
            self._tear_down()
        finally:
            giving_up.cancel()
        self._experiment = None


def _end_service(run: Any) -> None:
    """End W&B's own process, which tries for longer than anybody waits; what it was sent is on the disk."""
    with suppress(AttributeError):  # of a version that names it differently, and is waited for
        run._wl.assert_service()._proc._process.kill()


def resolve_mode(mode: Mode) -> str:
    """The mode to begin in: online only where somebody is logged in and the server answers."""
    wanted = os.environ.get("WANDB_MODE") or "auto" if mode == "auto" else mode
    if wanted == "auto":
        wanted = "online" if logged_in() else "offline"
    if wanted == "online" and not is_reachable(base_url()):
        rank_zero_warn(f"W&B: {base_url()} does not answer; going on offline, `boltcutter sync` later")
        return "offline"
    return wanted


def base_url() -> str:
    """Of the W&B server: from the environment, from ``wandb login --host``, or W&B's own."""
    file = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings"
    stored = configparser.ConfigParser(interpolation=None)
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        stored.read(file)
    found = os.environ.get("WANDB_BASE_URL") or stored.get("default", "base_url", fallback=None)
    return found or str(wandb.Settings().base_url)


def logged_in() -> bool:
    """Whether the environment has a key or the file of one, or the user's netrc file has one for the server."""
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
    """Whether a server answers at all within ``SECONDS``; in a thread, as looking up its name has no limit."""
    found: list[bool] = []
    known = threading.Event()

    def ask() -> None:
        found.append(_ask(url))
        known.set()

    threading.Thread(target=ask, daemon=True).start()
    return known.wait(SECONDS) and found[0]


def _ask(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()  # an answer, too
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # W&B may know the certificate that Python does not
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
