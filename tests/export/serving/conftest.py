"""Servers of trained runs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from conftest import QUICK, ROOT, Script, environment


@dataclass
class Served:
    """A server process."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def post(self, path: str, body: object, kind: str = "application/json") -> httpx.Response:
        """Send JSON, or bytes of another media type."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, headers={"content-type": kind}, timeout=60, **content)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


Serve = Callable[..., Served]


@contextmanager
def server(folder: Path, log: Path, *overrides: str) -> Iterator[Served]:
    command = [sys.executable, "scripts/serve.py", f"run={folder}", "port=0", *overrides]
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=out, stderr=out, text=True, start_new_session=True
        )
    try:
        end = time.monotonic() + 90
        while not (text := log.read_text()).startswith("http"):
            assert process.poll() is None, text
            assert time.monotonic() < end, text
            time.sleep(0.05)
        found = Served(process, text.split()[0], log)
        while True:  # workers may not have started
            try:
                assert httpx.get(found.url + "/health", timeout=60).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
        yield found
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait(20)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start servers that end with the tests of the module."""
    with ExitStack() as stack:

        def start(folder: Path, *overrides: str) -> Served:
            log = tmp_path_factory.mktemp("serve") / "log"
            return stack.enter_context(server(folder, log, *overrides))

        yield start


@pytest.fixture(scope="session")
def diabetes_run(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on rows of a table."""
    folder = tmp_path_factory.mktemp("serve") / "diabetes"
    done = script("train", *QUICK[:2], "experiment=diabetes", "trainer.max_epochs=30", f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def text_run(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a language model on bytes."""
    place = tmp_path_factory.mktemp("text")
    for number in range(20):  # documents
        (place / f"{number}.txt").write_text(f"Grüße an Jürgen. {number}\n" * 40)
    overrides = ["model=gpt", "task=language", f"data.path={place}", f"data.cache_dir={place}/cache", "data=text"]
    overrides += [
        "data.shape=[32]",
        "data.split=[0.6,0.2,0.2]",
        "model.num_layers=1",
        "trainer.max_steps=2",
        "test=false",
    ]
    done = script("train", *QUICK[:2], *overrides, f"folder={place}/run")
    assert done.returncode == 0, done.stderr
    return place / "run"
