import os
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
import torch._inductor.config as inductor
from conftest import QUICK, Script
from lightning.pytorch.strategies import ModelParallelStrategy

from boltcutter.assembly.precision import placeholder_precision, set_numerics, set_precision
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.run.lineage import is_deterministic

OVERRIDES = [*QUICK, "model=mlp", "trainer.accelerator=cpu"]
NARROW = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    ["bf16-mixed", "16-true", *(pytest.param(p, marks=pytest.mark.slow) for p in ("64-true", "bf16-true", "16-mixed"))],
)
def test_each_precision_trains_and_resumes(script: Script, tmp_path: Path, precision: str) -> None:
    overrides = [*OVERRIDES, f"trainer.precision={precision}", "+optimizer.eps=1e-4", f"folder={tmp_path}"]
    done = script("train", *overrides)
    assert done.returncode == 0, done.stderr
    assert f", {precision}\n" in done.stdout
    assert "bfloat16 Automatic" not in done.stderr
    accuracy = float(next(line for line in done.stdout.splitlines() if line.startswith("test/accuracy")).split()[1])
    assert accuracy > 0.7
    kept = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["state_dict"]["model.head.weight"].dtype == NARROW.get(precision, torch.float32)
    assert ("MixedPrecision" in kept) == (precision == "16-mixed")  # the scaler's state
    done = script("train", f"resume={tmp_path}", "trainer.max_epochs=3")
    assert done.returncode == 0, done.stderr


def test_fp8_is_set_on_the_trainer() -> None:
    assert (placeholder_precision("float8", "cuda"), placeholder_precision("bf16-mixed", "cuda")) == ("32-true", None)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    set_precision(trainer, "float8")
    assert (type(trainer.precision_plugin).__name__, trainer.precision) == ("Float8Precision", "float8")
    with pytest.raises(ConfigError, match=r"float8: .*; try bf16-true"):
        set_precision(L.Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy()), "float8")


def test_fp8_is_a_valid_precision(script: Script) -> None:
    done = script("train", *OVERRIDES, "trainer.precision=float8", "--check")
    assert done.returncode == 2
    assert "error: trainer.precision=float8: " in done.stderr


def test_invalid_matmul_precision_is_refused(script: Script) -> None:
    done = script("train", "matmul_precision=low", "--check")
    assert done.returncode == 2
    assert "matmul_precision=low: expected 'highest' | 'high' | 'medium'" in done.stderr


@pytest.fixture
def unchanged_numerics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's settings after the test; as if they were those of a new process on a GPU before."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    monkeypatch.setattr(inductor, "deterministic", False)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before[1], False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("precision", "allowed"), [("highest", False), ("high", True), ("medium", True)])
def test_one_setting_allows_tf32_in_products_and_convolutions(
    unchanged_numerics: None, precision: str, allowed: bool
) -> None:
    set_numerics(Settings({"matmul_precision": precision, "trainer": {}}))
    backends = torch.backends
    assert [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32] == [allowed] * 2
    assert [backends.cudnn.conv.fp32_precision == "tf32", backends.cudnn.rnn.fp32_precision == "tf32"] == [allowed] * 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_algorithms_cover_all_libraries(unchanged_numerics: None, deterministic: bool) -> None:
    set_numerics(Settings({"trainer": {"deterministic": deterministic}}))
    L.Trainer(accelerator="cpu", deterministic=deterministic, logger=False)
    assert is_deterministic("cuda") is deterministic
    assert torch.backends.cudnn.deterministic is inductor.deterministic is deterministic
    assert not torch.backends.cudnn.benchmark
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is deterministic
    assert (os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1") is deterministic
    assert is_deterministic("cpu")


DETERMINISTIC = """
import os, lightning as L, torch
from lightning.pytorch.callbacks import Callback

class Probe(Callback):
    def setup(self, trainer, pl_module, stage):
        words = [os.environ[name] for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC")]
        words += [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32]
        with open(f"{trainer.default_root_dir}/probe-{trainer.global_rank}.txt", "w") as file:
            print(*words, file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_ranks_are_deterministic_however_they_are_started(script: Script, tmp_path: Path, start_method: str) -> None:
    (tmp_path / "probe.py").write_text(DETERMINISTIC)
    overrides = [*OVERRIDES, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=1"]
    overrides += [f"+trainer.strategy.start_method={start_method}", "trainer.deterministic=true", "test=false"]
    probe = {"PYTHONPATH": str(tmp_path)}
    done = script("train", *overrides, "+callback.probe._target_=probe.Probe", f"folder={tmp_path}/run", env=probe)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / "run" / f"probe-{rank}.txt").read_text() == ":4096:8 1 True False\n"
