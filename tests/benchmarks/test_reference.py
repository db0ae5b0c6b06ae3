import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from benchmarks import reference
from torch import nn


def losses(folder: Path, loop: str, **changed: Any) -> list[float]:
    """The first losses of a loop over a linear layer."""
    torch.manual_seed(0)
    kept = {
        "inputs": torch.randn(40, 3),
        "targets": torch.randint(4, (40,)),
        "order": torch.randperm(40).view(10, 4),
        "weights": nn.Linear(3, 4).state_dict(),
        "total_steps": 10,
    }
    torch.save(kept, folder / "kept.pt")
    spec = {
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 4},
        "optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.1, "fused": True},
        "scheduler": None,
        "device": "cpu",
        "precision": "32-true",
        "clip": 0.5,
        "compile": False,
        "turns": {"address": str(folder / "turns"), "warm": 6, "lead": 0, "steps": 2},
        "seeds": list(range(5)),
        "keep": str(folder / "kept.pt"),
        "loop": loop,
        "without": [],
    } | changed
    RecordingTimer.losses = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "StepTimer", RecordingTimer)
        with pytest.raises(SystemExit):
            reference.main([json.dumps(spec)])
    return RecordingTimer.losses


class RecordingTimer:
    """Replaces ``StepTimer``: records the losses of five steps."""

    losses: ClassVar[list[float]]

    def __init__(self, **turns: Any) -> None:
        assert turns["warm"] == 6

    def end_step(self, loss: Any) -> None:
        """Record a step."""
        self.losses.append(float(loss))
        if len(self.losses) == 5:
            raise SystemExit


@pytest.mark.filterwarnings("ignore")  # Lightning's, of what plain Lightning does
def test_all_loops_compute_the_same_losses(tmp_path: Path) -> None:
    guide = losses(tmp_path, "guide")
    assert len(guide) == len(set(guide)) == 5
    assert losses(tmp_path, "best") == pytest.approx(guide, rel=1e-4)
    assert losses(tmp_path, "lightning") == pytest.approx(guide, rel=1e-4)
    everything = ["log", "metrics", "single samples", "unfused optimizer", "bar", "learning rate"]
    assert losses(tmp_path, "lightning", without=everything) == pytest.approx(guide, rel=1e-4)
    assert losses(tmp_path, "best", clip=None) != pytest.approx(guide, rel=1e-4)
    warmup = "boltcutter.task.schedule.warmup_cosine"
    schedule = {"_target_": warmup, "_partial_": True, "warmup_ratio": 0.5}
    assert losses(tmp_path, "guide", scheduler=schedule) == pytest.approx(
        losses(tmp_path, "best", scheduler=schedule), rel=1e-4
    )


def test_loss_is_the_mean_over_tokens() -> None:
    outputs, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    each = [nn.functional.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
    assert reference.loss_of(outputs, targets).item() == pytest.approx(torch.stack(each).mean().item())
