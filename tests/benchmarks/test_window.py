from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.harness import TRAIN, Process, cores
from benchmarks.turns import Coordinator
from benchmarks.window import TimingWindow
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from boltcutter.callback.throughput import ThroughputMonitor


def test_the_share_of_the_peak_is_that_of_the_throughput_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = ThroughputMonitor()
    monitor.min_seconds = 0.25  # per sample, as on a GPU whose peak is known
    trainer: Any = SimpleNamespace(callbacks=[Callback(), monitor])
    window, ended = TimingWindow("", warm=0, lead=0, steps=1), []
    monkeypatch.setattr(window._turns, "end_step", lambda loss, least: ended.append((loss, least)))
    window.on_train_start(trainer, LightningModule())
    window.on_train_batch_end(trainer, LightningModule(), {"loss": 2.0}, [torch.zeros(8, 1)], 0)
    assert ended == [(2.0, 2.0)]


@pytest.mark.slow
def test_a_training_saves_its_initial_state_and_runs_in_turns(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator:
        message = f"address: {coordinator.address}, warm: 3, lead: 1, steps: 2, keep: {tmp_path}/kept.pt, batches: 4"
        window = f"+callback.window={{_target_: benchmarks.window.TimingWindow, {message}}}"
        overrides = ["model=mlp", "data.batch_size=50", "logger=null", "trainer.accelerator=cpu", f"runs={tmp_path}"]
        (ready,) = coordinator.register("training", Process([str(TRAIN), *overrides, window], cores(1)))
        assert len(ready["losses"]) == 3
        (found,) = coordinator.turn("training")
        assert len(found["each"]) == 2
        assert found["losses"][:3] == ready["losses"]
        assert found["least"] is None  # the peak performance of a CPU is unknown
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert kept["order"].shape == (4, 50)
    assert len(kept["inputs"]) == len(kept["targets"]) == 200
    assert sorted(kept["order"].flatten().tolist()) == list(range(200))
    assert all(isinstance(weight, torch.Tensor) for weight in kept["weights"].values())
