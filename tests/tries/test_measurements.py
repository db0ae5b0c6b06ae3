from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from boltcutter.tries import measurements
from boltcutter.tries.measurements import OtherLoad, describe_load, gpu_share, measure

EPOCHS = "step,throughput/{}_per_second_epoch,throughput/memory_gib\n9,50,\n9,,1.5\n19,100,\n19,,2.5\n29,200,\n"


def test_the_time_of_a_step_and_the_peak_of_memory(tmp_path: Path) -> None:
    settings = {"data.batch_size": 30, "trainer.accumulate_grad_batches": 2}
    (tmp_path / "metrics.csv").write_text(EPOCHS.format("samples"))
    assert measure(tmp_path, settings, "time/step") == pytest.approx(60 / 150)
    assert measure(tmp_path, settings, "memory/peak") == 2.5
    assert measure(tmp_path, {}, "time/step") is None  # of how many samples is unknown
    (tmp_path / "metrics.csv").write_text(EPOCHS.format("batches"))
    assert measure(tmp_path, {}, "time/step") == pytest.approx(1 / 150)
    (tmp_path / "metrics.csv").unlink()
    assert measure(tmp_path, settings, "time/step") is measure(tmp_path, settings, "memory/peak") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_load_of_other_processes_is_that_of_no_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/stat": "cpu  100 0 100 999 999 0 0 0 0 0\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    monkeypatch.setattr(measurements.time, "monotonic", lambda: clock)
    monkeypatch.setattr(measurements.os, "times", lambda: own)
    clock, own = 0.0, (1.0, 0.0, 0.0, 0.0, 0.0)
    load = OtherLoad()
    ticks = os.sysconf("SC_CLK_TCK")
    clock, own = 10.0, (1.0, 0.0, 9.0, 1.0, 0.0)  # of children that have ended
    files["/proc/stat"] = f"cpu  {100 + 25 * ticks} 0 100 9999 9999 0 0 {10 * ticks} 0 0\n"
    assert load.end()[0] == pytest.approx(2.5)
    assert describe_load(2.5 * (os.cpu_count() or 1), 0.0).startswith("other processes used")
    assert not describe_load(0.01, 0.0)


def test_a_gpu_that_others_use_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements.time, "sleep", lambda _: None)
    monkeypatch.setattr(measurements.shutil, "which", lambda _: "nvidia-smi")
    answers = iter(["3\n40\n", "2\n30\n"])
    monkeypatch.setattr(
        measurements.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, next(answers), "")
    )
    assert gpu_share() == 30
    assert "30% of a GPU" in describe_load(0.0, 30)
