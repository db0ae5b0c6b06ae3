"""A cloud's notice that it will take the machine away: heeded as a signal is."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from boltcutter.environment import signals

Cloud = Literal["ec2", "gce", "azure"]
METADATA_URLS = {
    "ec2": "http://169.254.169.254",
    "gce": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
SECONDS = 2.0  # that the machine's own server may take to answer
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows the machine's own address
TAKES = {"Preempt", "Terminate", "Redeploy"}  # of Azure's events


class SpotInterruption(Callback):
    """Ask the machine's metadata server, on each node and beside the training, whether the machine will be taken away.

    If so, it is as if SIGTERM had come: ranks agree, save, and leave. EC2 tells two minutes before, GCE and Azure half
    a minute.

    Args:
        cloud: Whose machine this is.
        poll_interval: Seconds between two questions.
        metadata_url: Other than the cloud's own address.

    Raises:
        ValueError: ``poll_interval`` is not positive.

    Source: Amazon EC2, Spot Instance interruption notices; Google Compute Engine, Detect preemption; Microsoft Azure,
    Scheduled Events for Linux VMs.
    """

    def __init__(self, cloud: Cloud, *, poll_interval: float = 5.0, metadata_url: str | None = None) -> None:
        if poll_interval <= 0:
            raise ValueError(
                f"callback.spot_interruption.poll_interval={poll_interval} is not a number of seconds; try 5"
            )
        self.cloud, self.poll_interval = cloud, poll_interval
        self.metadata_url = metadata_url or METADATA_URLS[cloud]
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin to ask, in one process of each node."""
        if stage == "fit" and trainer.local_rank == 0 and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, daemon=True, name="notice")
            self._thread.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Ask no more."""
        self._over.set()
        self._thread = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ask no more."""
        self.teardown(trainer, pl_module, "")

    def _watch(self) -> None:
        told = False
        while True:
            try:
                if announced(self.cloud, self.metadata_url):
                    signals.handle_signal(signal.SIGTERM)
                    return
            except (OSError, ValueError, KeyError) as error:
                if not told:
                    told = True
                    rank_zero_warn(
                        f"callback.spot_interruption: {self.metadata_url} does not answer as {self.cloud} does ({error})"
                    )
            if self._over.wait(self.poll_interval):
                return


def announced(cloud: Cloud, server: str) -> bool:
    """Whether the machine will be taken away.

    Raises:
        OSError: Nobody answers, or not so.
        ValueError: The answer is no answer.
    """
    if cloud == "ec2":
        token = _ask(f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        try:
            return bool(_ask(f"{server}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:  # no notice yet
                    return False
            raise
    if cloud == "gce":
        asked = _ask(f"{server}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return asked.strip() == "TRUE"
    events: Any = json.loads(_ask(f"{server}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
    own = _ask(f"{server}/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"})
    return any(event["EventType"] in TAKES and own in event["Resources"] for event in events["Events"])


def _ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    with DIRECT.open(request, timeout=SECONDS) as answer:
        return str(answer.read().decode())
