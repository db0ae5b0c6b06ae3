import http.server
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICK, Script

from boltcutter.callback.spot_interruption import Cloud, SpotInterruption, is_interruption_announced


class Metadata(http.server.BaseHTTPRequestHandler):
    """Responds like the metadata servers of the three clouds, and checks the request headers."""

    interrupted = False

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.respond(200 if self.path == "/latest/api/token" and ttl else 400, "TOKEN")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/latest/meta-data/spot/instance-action":
            if self.headers.get("X-aws-ec2-metadata-token") != "TOKEN":
                return self.respond(401, "")
            return self.respond(*((200, '{"action": "terminate"}') if self.interrupted else (404, "")))
        if path == "/computeMetadata/v1/instance/preempted" and self.headers.get("Metadata-Flavor") == "Google":
            return self.respond(200, "TRUE" if self.interrupted else "FALSE")
        if self.headers.get("Metadata") != "true":
            return self.respond(400, "")
        if path == "/metadata/instance/compute/name":
            return self.respond(200, "vm_1")
        other = {"EventType": "Preempt", "Resources": ["vm_2"]}
        own = {"EventType": "Preempt", "Resources": ["vm_1"]}
        return self.respond(200, json.dumps({"Events": [other, *([own] if self.interrupted else [])]}))

    def respond(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Metadata.interrupted = False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("cloud", ["ec2", "gce", "azure"])
def test_interruptions_of_each_cloud_are_detected(server: str, cloud: Cloud) -> None:
    assert not is_interruption_announced(cloud, server)
    Metadata.interrupted = True
    assert is_interruption_announced(cloud, server)


def test_an_interruption_notice_saves_and_exits_like_a_signal(script: Script, server: str, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not list(tmp_path.glob("run/checkpoints/last.ckpt")):
            time.sleep(0.05)
        Metadata.interrupted = True

    threading.Thread(target=interrupt, daemon=True).start()
    overrides = [
        "callback=[default,spot_interruption]",
        "callback.spot_interruption.cloud=gce",
        f"callback.spot_interruption.metadata_url={server}",
    ]
    overrides += ["callback.spot_interruption.poll_interval=0.05", f"folder={tmp_path}/run"]
    done = script("train", *QUICK[:2], "trainer.max_epochs=300", *overrides, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last-preempted.ckpt", weights_only=True)
    assert 0 < saved["global_step"] < 300 * 19
    (attempt,) = json.loads((tmp_path / "run" / "record.json").read_text())["attempts"]
    assert attempt["reason"].startswith("preempted by SIGTERM, saved ")


def test_an_unreachable_metadata_server_warns_once(script: Script, tmp_path: Path) -> None:
    overrides = [
        "callback=[default,spot_interruption]",
        "callback.spot_interruption.metadata_url=http://127.0.0.1:9",
        "callback.spot_interruption.poll_interval=0.01",
    ]
    done = script("train", *QUICK, *overrides, f"folder={tmp_path}/run", timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("callback.spot_interruption.cloud") == 1


def test_a_poll_interval_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"callback.spot_interruption.poll_interval=0"):
        SpotInterruption("ec2", poll_interval=0)
