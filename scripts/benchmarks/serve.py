"""A server under the load of concurrent clients, relative to the same model called in a loop.

32 clients send one sample at a time, each as soon as it has the answer to the last. The same process that served them
then calls the model in a loop, on full batches; on two cores, clients and server share what the loop has alone. The
target is for models that take at least 2 ms per sample: HTTP limits the requests per second of faster ones.
"""

from __future__ import annotations

import io
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from benchmarks import harness
from benchmarks.harness import TRAIN, Process, Ratio, ratio
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.export.serving.app import NUMPY, Limits
from boltcutter.export.serving.batching import begin
from boltcutter.export.serving.server import LimitedProtocol, create, read_settings
from boltcutter.project import Project
from boltcutter.run.remote.access import bind

LEAST, MOST = 0.8, 5.0  # targets of the throughput, and of the slowest hundredth over the median
SLOW = 0.002  # seconds per sample from which the target of the throughput applies
SHAPES = {"convnet": [3, 32, 32], "resnet": [3, 32, 32]}


def main(project: Project, overrides: list[str]) -> None:
    """Measure; options: ``work=resnet,convnet clients=32 rounds=3 seconds=5 folder=runs/bench``.

    Raises:
        BenchmarkError: A process or a request failed.
    """
    known = {"work": "resnet,convnet", "clients": "32", "rounds": "3", "seconds": "5", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    begin()
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    for model in chosen["work"].split(","):
        with tempfile.TemporaryDirectory() as scratch:
            shape = SHAPES[model]
            train = [str(TRAIN), "data=synthetic", f"data.shape={shape}", f"model={model}", "logger=null"]
            folder = Path(scratch, "run")
            short = ["trainer.max_steps=2", "test=false", "report=false", f"folder={folder}"]
            Process([*train, *short], harness.cores()).wait()
            options = [chosen[name] for name in ("clients", "rounds", "seconds")]
            measured = Process([__file__, str(folder), *options], harness.cores())
            measured.wait()
            found = details[model] = json.loads(measured.output.splitlines()[-1])
        served, alone = (statistics.median(found[name]) for name in ("served", "loop"))
        print(f"{model}: {served:.0f} requests per second, {alone:.0f} samples per second in the loop", flush=True)
        target = LEAST if alone <= 1 / SLOW else None
        ratios.append(ratio(f"served samples, {model}", found["served"], "loop", found["loop"], target, least=True))
        ratios.append(ratio(f"p99, {model}", found["p99"], "p50", found["p50"], MOST))
    harness.report("serve", Path(chosen["folder"]), ratios, details)


def measure(folder: Path, clients: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples per second of server and loop, and latencies of the requests in seconds, by round."""
    filter_warnings()
    project = Project.find(harness.ROOT)
    project.activate()
    cfg, _ = load_evaluation_config(project, {"run": str(folder)}, [])
    app = create(cfg, folder, read_settings({}) | {"ckpt": "last", "export": None})
    predictor = app.state.predictor
    sample = predictor.array(np.zeros((1, *predictor.shape), np.float32))
    request = write_request(folder / "request", sample)
    found: dict[str, list[float]] = {name: [] for name in ("served", "loop", "p50", "p99")}
    with bind("127.0.0.1", 0) as bound:
        http: Any = partial(LimitedProtocol, timeout=Limits().timeout)
        server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            send(request, bound, clients, 1)  # the first batch of each size is slow
            for _ in range(rounds):
                for name, value in send(request, bound, clients, seconds).items():
                    found[name].append(value)
                found["loop"].append(loop(predictor, np.repeat(sample, Limits().max_batch, 0), seconds))
        finally:
            server.should_exit = True
            thread.join()
    return found


def send(request: Path, server: socket.socket, clients: int, seconds: float) -> dict[str, float]:
    """Send requests from another process."""
    command = [str(Path(__file__).with_name("clients.py")), str(server.getsockname()[1]), str(request)]
    process = Process([*command, str(clients), str(seconds)], harness.cores(), threads=1)
    process.wait()
    found: dict[str, float] = json.loads(process.output.splitlines()[-1])
    return found


def loop(predictor: Any, batch: Any, seconds: float) -> float:
    """Samples per second of calls with a full batch."""
    count, end = 0, (began := time.perf_counter()) + seconds
    while time.perf_counter() < end:
        predictor.predict(batch)
        count += len(batch)
    return count / (time.perf_counter() - began)


def write_request(path: Path, sample: Any) -> Path:
    """Write a whole request with one sample."""
    file = io.BytesIO()
    np.save(file, sample)
    head = [
        "POST /predict HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {NUMPY}",
        f"Content-Length: {len(file.getvalue())}",
    ]
    path.write_bytes("\r\n".join([*head, "", ""]).encode() + file.getvalue())
    return path


if __name__ == "__main__":
    place, clients, rounds, limit = sys.argv[1:]
    print(json.dumps(measure(Path(place), int(clients), int(rounds), float(limit))))
