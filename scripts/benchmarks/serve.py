"""A server under the load of concurrent clients, relative to the same model called in a loop.

32 clients send one sample at a time, each as soon as it has the answer to the last. The same process that served them
then calls the model in a loop, on full batches; on two cores, clients and server share what the loop has alone.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from benchmarks import harness
from benchmarks.harness import TRAIN, Process, Ratio, ratio
from boltcutter.environment.warnings import filter_warnings
from boltcutter.project import Project
from boltcutter.run import folder as run
from boltcutter.serving.app import NUMPY, Limits
from boltcutter.serving.server import LIMITS, VARIABLE, LimitedProtocol, create

LEAST, MOST = 0.8, 5.0  # targets of the throughput, and of the slowest hundredth over the median
SHAPES = {"convnet": [3, 32, 32], "resnet": [3, 32, 32]}


def main(project: Project, overrides: list[str]) -> None:
    """Measure; options: ``work=resnet,convnet clients=32 rounds=3 seconds=5 folder=runs/bench``.

    Raises:
        BenchmarkError: A process or a request failed.
    """
    known = {"work": "resnet,convnet", "clients": "32", "rounds": "3", "seconds": "5", "folder": "runs/bench"}
    chosen = harness.parse_options(overrides, known)
    filter_warnings()
    torch.set_num_threads(len(harness.cores()))
    ratios: list[Ratio] = []
    details: dict[str, Any] = {}
    for model in chosen["work"].split(","):
        with tempfile.TemporaryDirectory() as scratch:
            shape = SHAPES[model]
            train = [str(TRAIN), "data=synthetic", f"data.shape={shape}", f"model={model}", "logger=null"]
            folder = Path(scratch, "run")
            short = ["trainer.max_steps=2", "test=false", "report=false", f"folder={folder}"]
            Process([*train, *short], harness.cores()).wait()
            cfg, _ = run.load_evaluation_config(project, {"run": str(folder)}, [])
            found = measure(cfg, folder, int(chosen["clients"]), int(chosen["rounds"]), float(chosen["seconds"]))
            details[model] = found
        ratios.append(ratio(f"served samples, {model}", found["served"], "loop", found["loop"], LEAST, least=True))
        ratios.append(ratio(f"p99, {model}", found["p99"], "p50", found["p50"], MOST))
    harness.report("serve", Path(chosen["folder"]), ratios, details)


def measure(cfg: Any, folder: Path, clients: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples per second of server and loop, and latencies of the requests in seconds, by round."""
    settings = {"ckpt": "last", "export": None, **LIMITS}
    os.environ[VARIABLE] = json.dumps(settings)
    app = create(cfg, folder, settings)
    predictor = app.state.predictor
    sample = predictor.array(np.zeros((1, *predictor.shape), np.float32))
    request = write_request(folder / "request", sample)
    found: dict[str, list[float]] = {name: [] for name in ("served", "loop", "p50", "p99")}
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, http=LimitedProtocol, log_level="error", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            for _ in range(rounds):
                command = load_command(request, bound.getsockname()[1], clients, seconds)
                process = Process(command, harness.cores(), threads=1)
                process.wait()
                summary = json.loads(process.output.splitlines()[-1])
                for name, value in summary.items():
                    found[name].append(value)
                found["loop"].append(loop(predictor, np.repeat(sample, Limits().max_batch, 0), seconds))
                print({name: round(values[-1], 4) for name, values in found.items()}, flush=True)
        finally:
            server.should_exit = True
            thread.join()
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
    head = ["POST /predict HTTP/1.1", "Host: a", f"Content-Type: {NUMPY}", f"Content-Length: {len(file.getvalue())}"]
    path.write_bytes("\r\n".join([*head, "", ""]).encode() + file.getvalue())
    return path


def load_command(request: Path, port: int, clients: int, seconds: float) -> list[str]:
    """Arguments of Python for the process of the clients."""
    return [__file__, str(port), str(request), str(clients), str(seconds)]


async def load(port: int, request: bytes, clients: int, seconds: float) -> dict[str, float]:
    """Requests per second, and median and 99th percentile of their latency, of clients that keep their connection."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (began := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            latencies.append(time.perf_counter() - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    served, latencies = len(latencies) / (time.perf_counter() - began), sorted(latencies)
    return {"served": served, "p50": statistics.median(latencies), "p99": latencies[int(0.99 * len(latencies))]}


if __name__ == "__main__":
    port, file, count, limit = sys.argv[1:]
    print(json.dumps(asyncio.run(load(int(port), Path(file).read_bytes(), int(count), float(limit)))))
