import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import loader


@pytest.mark.parametrize("name", [name for name in loader.WORKS if "64 x 64" not in name])  # as the others, and large
def test_loader_and_reference_read_the_same_samples(tmp_path: Path, name: str) -> None:
    data, places, read = loader.WORKS[name](tmp_path, 30 if "tokens" in name else 3)
    batches = data.train_dataloader()
    for batch, (inputs, targets) in zip(batches.sampler, batches, strict=True):
        found: Any = read(batch.indices if places is None else places[batch.indices])
        assert np.array_equal(inputs.numpy().reshape(len(batch), -1), np.asarray(found[0]).reshape(len(batch), -1))
        assert torch.equal(targets.long(), torch.from_numpy(np.asarray(found[1], np.int64)))


def test_loader_and_reference_are_timed_alternately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(loader, "time_of", lambda batches: taken.append(len(list(batches))) or 2.0)
    monkeypatch.setattr(loader, "WORKS", dict(list(loader.WORKS.items())[:1]))
    loader.main(Path(), ["rounds=2", "turns=3", "batches=4", f"folder={tmp_path}"])
    assert taken == [4] * 12
    assert json.loads((tmp_path / "loader.json").read_text())["ratios"][0]["value"] == 1.0
    monkeypatch.undo()
    assert loader.time_of(iter([1])) > 0
