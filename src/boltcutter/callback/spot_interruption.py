"""Interruption notices of spot and preemptible instances, handled like a signal."""

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

from boltcutter.environment import stop_signals as signals

Cloud = Literal["ec2", "gce", "azure"]
METADATA_URLS = {
    "ec2": "http://169.254.169.254",
    "gce": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
TIMEOUT = 2.0  # seconds for a request to the metadata server
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach the link-local address
INTERRUPTIONS = {"Preempt", "Terminate", "Redeploy"}  # types of Azure's scheduled events that stop the instance


class SpotInterruption(Callback):
    """Poll the instance's metadata server on each node, and save and exit when an interruption is announced.

    The notice is handled like SIGTERM: ranks agree on a step, save and exit. EC2 sends it two minutes ahead, GCE and
    Azure 30 seconds.

    Args:
        cloud: Cloud provider.
        poll_interval: Seconds between two requests.
        metadata_url: Base URL of the metadata server; None for the provider's own.

    Raises:
        ValueError: ``poll_interval`` is not positive.

    Source: Amazon EC2, Spot Instance interruption notices; Google Compute Engine, Detect preemption; Microsoft Azure,
    Scheduled Events for Linux VMs.
    """

    def __init__(self, cloud: Cloud, *, poll_interval: float = 5.0, metadata_url: str | None = None) -> None:
        if poll_interval <= 0:
            raise ValueError(f"callback.spot_interruption.poll_interval={poll_interval} must be positive; try 5")
        self.cloud, self.poll_interval = cloud, poll_interval
        self.metadata_url = metadata_url or METADATA_URLS[cloud]
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start polling, in one process per node."""
        if stage == "fit" and trainer.local_rank == 0 and self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._watch, daemon=True, name="spot-interruption")
            self._thread.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop polling."""
        self._stopped.set()
        self._thread = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop polling."""
        self.teardown(trainer, pl_module, "")

    def _watch(self) -> None:
        warned = False
        while True:
            try:
                if is_interruption_announced(self.cloud, self.metadata_url):
                    signals.handle_signal(signal.SIGTERM)
                    return
            except (OSError, ValueError, KeyError) as error:
                if not warned:
                    warned = True
                    rank_zero_warn(
                        f"callback.spot_interruption: {self.metadata_url} is not a metadata server of {self.cloud} "
                        f"({error}); set callback.spot_interruption.cloud"
                    )
            if self._stopped.wait(self.poll_interval):
                return


def is_interruption_announced(cloud: Cloud, url: str) -> bool:
    """Whether the metadata server announces an interruption of this instance.

    Raises:
        OSError: The server does not respond, or with an error.
        ValueError: The response is not valid JSON.
    """
    if cloud == "ec2":
        token = _request(f"{url}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        try:
            return bool(_request(f"{url}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:  # no notice yet
                    return False
            raise
    if cloud == "gce":
        preempted = _request(f"{url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return preempted.strip() == "TRUE"
    events: Any = json.loads(_request(f"{url}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
    instance = _request(
        f"{url}/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}
    )
    return any(event["EventType"] in INTERRUPTIONS and instance in event["Resources"] for event in events["Events"])


def _request(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - the metadata server of the cloud
    with DIRECT.open(request, timeout=TIMEOUT) as response:
        return str(response.read().decode())
