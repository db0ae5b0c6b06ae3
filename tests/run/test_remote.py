import json
import signal
import time
from pathlib import Path

import fsspec
import pytest
from conftest import QUICK, Script, assert_same, assert_same_history, environment
from forkserver import Forked, ForkServer

from boltcutter.run.transfer import fetch

SETTINGS = [*QUICK, "report=true", "model=mlp", "trainer.max_epochs=4"]


def wait_for_checkpoint(process: Forked, url: str) -> None:
    """Wait for the first checkpoint of a run at a URL."""
    store, place = fsspec.url_to_fs(f"{url}/checkpoints/last.ckpt")
    end = time.monotonic() + 90
    while not store.exists(place):
        store.invalidate_cache()
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def untouched(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a folder."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    done = script("train", *SETTINGS, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_resumes_on_another_machine(
    forks: ForkServer, script: Script, bucket: str, tmp_path: Path, untouched: Path, number: signal.Signals
) -> None:
    url = f"{bucket}/runs/name/1"
    first = environment(BOLTCUTTER_SCRATCH=str(tmp_path / "first"))
    with forks.start(["scripts/train.py", *SETTINGS, f"folder={url}"], first, 2, 2) as process:
        wait_for_checkpoint(process, url)
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    second = {"BOLTCUTTER_SCRATCH": str(tmp_path / "second")}
    resumed = script("train", f"resume={url}", env=second)
    assert resumed.returncode == 0, resumed.stderr
    copy = tmp_path / "copy"
    assert "report.html" in fetch(url, copy)
    assert_same(untouched, copy)
    assert_same_history(untouched, copy)
    record = json.loads((copy / "record.json").read_text())
    assert [attempt["reason"] for attempt in record["attempts"]][1:] == ["completed"]
    assert (record["config"]["folder"], record["config"]["checkpoints"]) == (url, "${folder}/checkpoints")
    assert not any(str(tmp_path) in path.read_text() for path in (copy / "config.yaml", copy / "record.json"))
    compared = script("compare", f"run={url}", f"with={untouched}", env=second)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "bitwise identical" in compared.stdout
