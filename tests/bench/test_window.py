from pathlib import Path

import torch

from boltcutter.bench.harness import TRAIN, Process, cores
from boltcutter.bench.turns import Coordinator


def test_a_training_keeps_what_it_starts_from_and_takes_turns(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as table:
        told = f"address: {table.address}, warm: 3, lead: 1, steps: 2, keep: {tmp_path}/kept.pt, batches: 4"
        window = f"+callback.window={{_target_: boltcutter.bench.window.TimingWindow, {told}}}"
        words = ["model=mlp", "data.batch_size=50", "logger=null", "trainer.accelerator=cpu", f"runs={tmp_path}"]
        (ready,) = table.register("training", Process([str(TRAIN), *words, window], cores(1)))
        assert len(ready["losses"]) == 3
        (found,) = table.turn("training")
        assert len(found["each"]) == 2
        assert found["losses"][:3] == ready["losses"]
        assert found["least"] is None  # nobody knows what a processor can do
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert kept["order"].shape == (4, 50)
    assert len(kept["inputs"]) == len(kept["targets"]) == 200
    assert sorted(kept["order"].flatten().tolist()) == list(range(200))
    assert all(isinstance(weight, torch.Tensor) for weight in kept["weights"].values())
