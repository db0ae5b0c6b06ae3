"""Weights & Biases that neither stops nor delays a run."""

from __future__ import annotations

import netrc
import os
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import wandb
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

Mode = Literal["auto", "online", "offline", "disabled"]
SECONDS = 5.0  # to wait for the server to answer at all


class WandB(WandbLogger):
    """One W&B run for the whole run, over all of its attempts.

    Where the server cannot be reached it goes on offline, after ten seconds at most; ``wandb sync <folder>/wandb/*``
    brings such a run up later. What was logged is on disk within a second, also when the process is killed.

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
        if mode == "online" and not logged_in():
            raise ValueError(f"mode={mode}, but nobody is logged in; run `wandb login`, or choose auto or offline")
        super().__init__(name="/".join(folder.parts[-2:]), save_dir=folder, project=project, id=folder.name, **wandb)
        self.mode, self.best = mode, best or {}
        self._wandb_init.pop("anonymous", None)  # W&B warns of it, though it is not set

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; begun when first asked for."""
        if self._experiment is None:
            Path(self.save_dir or ".").mkdir(parents=True, exist_ok=True)
            self._begin(choose(self.mode))
            begun: Any = self._experiment
            for metric, summary in self.best.items():
                begun.define_metric(metric, summary=summary)
        return self._experiment

    def _begin(self, mode: str) -> None:
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
            WandbLogger.experiment.fget(self)  # type: ignore[attr-defined]
        except (wandb.errors.Error, TimeoutError) as error:
            if mode == "offline":
                raise
            rank_zero_warn(f"W&B: {type(error).__name__}: {str(error)[:120]}; going on offline, `wandb sync` later")
            wandb.teardown()
            self._begin("offline")

    @property
    def where(self) -> str:
        """Where a person finds the run."""
        run = self.experiment
        return f"offline; wandb sync {Path(run.dir).parent}" if run.offline else str(run.url)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        """End the W&B run, so that it shows how the process ended."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=exit_code)
            self._experiment = None


def choose(mode: Mode) -> str:
    """The mode to begin in: online only where somebody is logged in and the server answers."""
    wanted = os.environ.get("WANDB_MODE", "auto") if mode == "auto" else mode
    if wanted == "auto":
        wanted = "online" if logged_in() else "offline"
    if wanted == "online" and not answers(base_url()):
        rank_zero_warn(f"W&B: {base_url()} does not answer; going on offline, `wandb sync` later")
        return "offline"
    return wanted


def base_url() -> str:
    """Of the W&B server."""
    return os.environ.get("WANDB_BASE_URL") or str(wandb.Settings().base_url)


def logged_in() -> bool:
    """Whether there is a key in the environment, or the user's netrc file has one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(urlparse(base_url()).hostname or "") is not None
    return False


def answers(url: str) -> bool:
    """Whether a server answers at all within ``SECONDS``; in a thread, as looking up its name has no limit."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer, too
        except (OSError, ValueError):
            return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(SECONDS)
