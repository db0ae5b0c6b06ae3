import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks import harness, step
from benchmarks.harness import BenchmarkError
from conftest import Script


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_is_measured_against_loops_that_compute_the_same(script: Script, tmp_path: Path) -> None:
    overrides = ["work=mlp", "threads=1", "rounds=1", "turns=2", "steps=3", f"folder={tmp_path}"]
    done = script("bench", "step", *overrides, timeout=170)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-4:]
    names = [line.split("/")[0].strip() for line in lines]
    assert names == ["mlp, 1 thread: boltcutter"] * 2 + ["mlp, 1 thread: plain Lightning"] * 2
    assert "/ guides' loop " in lines[0]
    assert "≤ 1.00" in lines[0]
    assert "/ fastest by hand (best" in lines[1]
    assert "≤ 1.35" in lines[1]
    measured = json.loads((tmp_path / "step.json").read_text())["details"]["mlp, 1 thread"]
    first = measured[step.OURS][0][0]["losses"]
    assert len(first) == 5
    for (turns,) in measured.values():
        assert len(turns) == 2
        for found in turns:
            assert found["losses"] == pytest.approx(first, rel=step.TOLERANCE)
            assert len(found["each"]) == 3
            assert found["wall"] > 0
            assert math.isfinite(found["mib"])
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_different_losses_are_an_error() -> None:
    step.check_losses([1.0, 2.0], [1.0, 2.001], "a and b")
    with pytest.raises(BenchmarkError, match="a and b do not compute the same"):
        step.check_losses([1.0, 2.0], [1.0, 2.1], "a and b")


def test_comparison_with_the_fastest_hand_written_loop() -> None:
    seconds = {step.OURS: 3.0, step.GUIDE: 4.0, step.BEST: 2.0, step.BEST_COMPILED: 2.5}
    measured = {loop: [[{"wall": value, "cpu": value}]] for loop, value in seconds.items()}
    guide, fastest = step.compare(step.WORKS["mlp"], measured, "mlp")
    assert (guide.value, guide.met) == (0.75, True)
    assert (fastest.value, fastest.met) == (1.5, False)
    assert fastest.over.endswith("(best)")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="work=mpl: unknown; choose from: mlp, convnet, resnet, gpt"):
        step.main(Path(), ["work=mpl"])
    with pytest.raises(BenchmarkError, match="device=gpu: unknown; choose from: cpu, cuda"):
        step.main(Path(), ["device=gpu"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_reported() -> None:
    with pytest.raises(BenchmarkError, match="device=cuda: torch finds no GPU; use device=cpu"):
        step.main(Path(), ["device=cuda"])


@pytest.mark.slow
@pytest.mark.parametrize("name", step.ON_CUDA)
def test_configurations_for_gpus_are_valid(name: str) -> None:
    overrides = [override for override in step.ON_CUDA[name].overrides if override != step.CUDA]
    cfg = harness.resolved([*overrides, *step.AS_SHIPPED, step.CPU])
    assert cfg["data"]["num_samples"] >= 10_000 if "num_samples" in cfg["data"] else cfg["data"]["vocab_size"] == 50304
