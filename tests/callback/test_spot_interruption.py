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

from boltcutter.callback.spot_interruption import Cloud, SpotInterruption, announced


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as the three clouds do, and checks what each asks for."""

    taken = False

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.answer(200 if self.path == "/latest/api/token" and ttl else 400, "TOKEN")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/latest/meta-data/spot/instance-action":
            if self.headers.get("X-aws-ec2-metadata-token") != "TOKEN":
                return self.answer(401, "")
            return self.answer(*((200, '{"action": "terminate"}') if self.taken else (404, "")))
        if path == "/computeMetadata/v1/instance/preempted" and self.headers.get("Metadata-Flavor") == "Google":
            return self.answer(200, "TRUE" if self.taken else "FALSE")
        if self.headers.get("Metadata") != "true":
            return self.answer(400, "")
        if path == "/metadata/instance/compute/name":
            return self.answer(200, "vm_1")
        other = {"EventType": "Preempt", "Resources": ["vm_2"]}
        own = {"EventType": "Preempt", "Resources": ["vm_1"]}
        return self.answer(200, json.dumps({"Events": [other, *([own] if self.taken else [])]}))

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Metadata.taken = False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("cloud", ["ec2", "gce", "azure"])
def test_each_cloud_is_asked_as_it_wants(server: str, cloud: Cloud) -> None:
    assert not announced(cloud, server)
    Metadata.taken = True
    assert announced(cloud, server)


def test_a_notice_saves_and_leaves_as_a_signal_does(script: Script, server: str, tmp_path: Path) -> None:
    def take_away() -> None:
        while not list(tmp_path.glob("run/checkpoints/last.ckpt")):
            time.sleep(0.05)
        Metadata.taken = True

    threading.Thread(target=take_away, daemon=True).start()
    words = [
        "callback=[default,spot_interruption]",
        "callback.spot_interruption.cloud=gce",
        f"callback.spot_interruption.metadata_url={server}",
    ]
    words += ["callback.spot_interruption.poll_interval=0.05", f"folder={tmp_path}/run"]
    done = script("train", *QUICK[:2], "trainer.max_epochs=300", *words, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last-preempted.ckpt", weights_only=True)
    assert 0 < saved["global_step"] < 300 * 19
    (attempt,) = json.loads((tmp_path / "run" / "record.json").read_text())["attempts"]
    assert attempt["reason"].startswith("preempted by SIGTERM, saved ")


def test_a_machine_of_another_kind_is_told_once_and_trains_on(script: Script, tmp_path: Path) -> None:
    words = [
        "callback=[default,spot_interruption]",
        "callback.spot_interruption.metadata_url=http://127.0.0.1:9",
        "callback.spot_interruption.poll_interval=0.01",
    ]
    done = script("train", *QUICK, *words, f"folder={tmp_path}/run", timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("does not answer as ec2 does") == 1


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"callback.spot_interruption.poll_interval=0"):
        SpotInterruption("ec2", poll_interval=0)
