import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from conftest import QUICK, Script, assert_same, max_difference, saved_weights
from lightning.pytorch.plugins import MixedPrecision, Precision
from third_party import gallery
from torch.distributed.fsdp import MixedPrecisionPolicy

from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.strategy import model_parallel

# Adam's first steps depend on the sign of the gradient only, which amplifies rounding errors.
OVERRIDES = [*QUICK, "model=mlp", "optimizer=sgd", "scheduler=constant", "trainer.accelerator=cpu"]
FSDP2 = ["trainer=fsdp2", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def half(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch on two ranks with sharded weights, and a full checkpoint."""
    folder = tmp_path_factory.mktemp("half") / "run"
    overrides = [*OVERRIDES, *FSDP2, "trainer.devices=2", "trainer.max_epochs=1", "test=false"]
    done = script("train", *overrides, f"folder={folder}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel"), [(2, 1), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_sharded_ranks_train_and_test_as_one_process(
    script: Script, reference: Path, tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    overrides = [
        *OVERRIDES,
        *FSDP2,
        f"trainer.devices={ranks}",
        f"trainer.strategy.tensor_parallel_size={tensor_parallel}",
    ]
    done = script("train", *overrides, f"folder={tmp_path}", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert_same(reference, tmp_path)


ODD = ["model.num_kv_heads=2", "model.bias=true", "model.norm=layernorm", "model.position=learned"]
GELU = ["model.mlp=gelu", "model.tie_embeddings=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "tensor_parallel"),
    [
        ([], 2, 1),
        ([*ODD, "model.activation_checkpointing=true"], 2, 2),
        pytest.param([], 4, 2, marks=pytest.mark.slow),
        pytest.param(GELU, 2, 2, marks=pytest.mark.slow),
        pytest.param(ODD, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_language_model_trains_as_one_process(
    script: Script, text: list[str], tmp_path: Path, model: list[str], ranks: int, tensor_parallel: int
) -> None:
    sharded = [*FSDP2, f"trainer.devices={ranks}", f"trainer.strategy.tensor_parallel_size={tensor_parallel}"]
    for name, more in (("one", []), ("sharded", sharded)):
        done = script(
            "train", *OVERRIDES, *text, *model, *more, f"folder={tmp_path}/{name}", ranks=ranks if more else 0
        )
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "one", tmp_path / "sharded") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_sharded", "then", "ranks"),
    [
        (True, ["trainer=default", "trainer.accelerator=cpu"], 0),
        pytest.param(False, ["trainer=default", "trainer.accelerator=cpu"], 0, marks=pytest.mark.slow),
        pytest.param(True, ["trainer.strategy.tensor_parallel_size=1"], 2, marks=pytest.mark.slow),
        pytest.param(True, ["trainer.devices=4"], 4, marks=pytest.mark.slow),
        pytest.param(False, ["trainer.devices=4"], 4, marks=pytest.mark.slow),
    ],
)
def test_fused_matrices_are_resharded_on_resume(
    script: Script, text: list[str], tmp_path: Path, save_sharded: bool, then: list[str], ranks: int
) -> None:
    sharded = [*FSDP2, "trainer.devices=2", "trainer.strategy.tensor_parallel_size=2"]
    for name, more in (
        ("one", []),
        ("sharded", [*sharded, f"trainer.strategy.save_distributed_checkpoint={save_sharded}".lower()]),
    ):
        overrides = [*OVERRIDES, *text, *more, f"folder={tmp_path}/{name}", "trainer.max_steps=2"]
        done = script("train", *overrides, ranks=2 if more else 0)
        assert done.returncode == 0, done.stderr
    for name, more in (("one", []), ("sharded", then)):
        overrides = [f"resume={tmp_path}/{name}", "trainer.max_steps=4", *more]
        done = script("train", *overrides, ranks=ranks if more else 0)
        assert done.returncode == 0, done.stderr
    ours, theirs = load_checkpoint(tmp_path / "sharded" / "checkpoints" / "last.ckpt"), saved_weights(tmp_path / "one")
    torch.testing.assert_close(dict(ours["state_dict"]), theirs, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def shards(script: Script, half: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second epoch of ``half`` on four ranks, with a sharded checkpoint."""
    folder = tmp_path_factory.mktemp("shards") / "run"
    shutil.copytree(half, folder)
    overrides = [f"resume={folder}", "trainer.max_epochs=2", "trainer.devices=4"]
    done = script("train", *overrides, "trainer.strategy.save_distributed_checkpoint=true", ranks=4)
    assert done.returncode == 0, done.stderr
    assert len(list((folder / "checkpoints").glob("last.ckpt.shards-*/__?_0.distcp"))) == 4
    return folder


def test_a_sharded_checkpoint_equals_that_of_one_process(reference: Path, shards: Path) -> None:
    ours, theirs = (load_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in (shards, reference))
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(dict(ours["state_dict"]), dict(theirs["state_dict"]), rtol=0, atol=1e-6)
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["param_groups"][0]["params"] == other["param_groups"][0]["params"]
    torch.testing.assert_close(mine["state"], other["state"], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "then", "ranks"),
    [
        ("full", ["trainer=default", "trainer.accelerator=cpu"], 0),
        ("sharded", ["trainer=default", "trainer.accelerator=cpu"], 0),
        ("sharded", ["trainer.devices=2", "trainer.strategy.save_distributed_checkpoint=false"], 2),
        pytest.param("full", ["trainer.devices=1"], 1, marks=pytest.mark.slow),
        pytest.param("sharded", ["trainer.devices=4"], 4, marks=pytest.mark.slow),
        pytest.param("sharded", ["trainer.strategy.tensor_parallel_size=2"], 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_another_number_of_ranks(
    script: Script, reference: Path, half: Path, shards: Path, tmp_path: Path, written: str, then: list[str], ranks: int
) -> None:
    expected, folder = tmp_path / "expected", tmp_path / "run"
    shutil.copytree(reference, expected)
    shutil.copytree(half if written == "full" else shards, folder)
    epochs = f"trainer.max_epochs={2 if written == 'full' else 3}"
    for overrides, count in (([f"resume={folder}", *then], ranks), ([f"resume={expected}", "test=false"], 0)):
        if overrides[0] == f"resume={folder}" or written == "sharded":
            done = script("train", *overrides, epochs, ranks=count)
            assert done.returncode == 0, done.stderr
    ours, theirs = (load_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (folder, expected))
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=1e-6)
    files = [path.name for path in sorted((folder / "checkpoints").glob("last*"))]
    assert len(files) == 1 + (written == "sharded" and ranks == 4)  # older shards are removed


def test_one_process_evaluates_a_sharded_checkpoint_and_loads_its_weights(
    script: Script, reference: Path, shards: Path, tmp_path: Path
) -> None:
    done = script("evaluate", f"run={shards}", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    expected = json.loads((reference / "record.json").read_text())["test"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == pytest.approx(expected, abs=1e-5)
    overrides = [
        *OVERRIDES,
        f"init_from={shards}/checkpoints/best.ckpt",
        f"folder={tmp_path}/run",
        "trainer.max_steps=1",
    ]
    done = script("train", *overrides, "test=false")
    assert done.returncode == 0, done.stderr
    assert "init_from: " not in done.stdout  # all weights were loaded


SYNCHRONIZED = """
import sys
sys.path.insert(0, "tests")
from conftest import Synchronizations
from lightning.pytorch.callbacks import Callback
from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.callback.guard import Guard
from boltcutter.callback.preemption import Preemption
from boltcutter.project import Project

class Watch(Callback):
    def __init__(self, waits, begins):
        self.waits, self.begins = waits, begins

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.begins and index >= 2:
            self.waits.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if not self.begins and index >= 2:
            self.waits.__exit__(None, None, None)

# As on a GPU; signals are compared on the host.
Guard._can_defer = lambda guard, norm, optimizer: all(group["fused"] for group in optimizer.param_groups)
Preemption._agree = lambda preemption, is_due=False: (0, 0)
waits = Synchronizations()
components = assemble(read_config(Project.find("scripts/train.py"), sys.argv[1:]))
components.trainer.callbacks[:] = [Watch(waits, True), *components.trainer.callbacks, Watch(waits, False)]
components.trainer.fit(components.task, datamodule=components.data)
assert components.trainer.global_step == 6
print(f"waited {dict(waits.counted)} times")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "optimizer"), [("fsdp2", "adam"), ("fsdp2", "sgd"), ("pipeline", "adam")])
def test_no_step_of_sharded_weights_waits_for_the_device(
    two_ranks: Script, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    overrides = [*QUICK, f"trainer={strategy}", "trainer.accelerator=cpu", "trainer.devices=2", "model=mlp"]
    overrides += [
        f"optimizer={optimizer}",
        "trainer.max_steps=6",
        "callback.invariants=null",
    ]  # which looks at the first steps
    overrides += ["trainer.gradient_clip_val=null", "trainer.log_every_n_steps=1000", "callback=[default,ema]"]
    done = two_ranks(SYNCHRONIZED, *overrides, f"folder={tmp_path}", f"checkpoints={tmp_path}")
    assert done.stdout.count("waited {} times") == 2, done.stdout


@pytest.mark.parametrize("is_mixed", [True, False])
def test_weights_are_gathered_in_bfloat16_and_gradients_reduced_in_float32(
    monkeypatch: pytest.MonkeyPatch, is_mixed: bool
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(model_parallel, "fully_shard_units", lambda root, mesh, **options: given.append(options))
    strategy: Any = model_parallel.ModelParallelStrategy()
    strategy._device_mesh = {"data_parallel": None, "tensor_parallel": SimpleNamespace(size=lambda: 1)}
    strategy._lightning_module = L.LightningModule()
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cuda") if is_mixed else Precision()
    strategy._shard()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    assert given == [{"mp_policy": policy} if is_mixed else {}]


SYNCHRONIZED_NORMS = """
import sys
from boltcutter.project import Project
from boltcutter.training.train import train_command
from boltcutter.checks import combination as checks

checks.check_sync_batchnorm = lambda *arguments: None  # torch synchronizes them on GPUs only
train_command(Project.find("scripts/train.py"), sys.argv[1:])
"""


def test_batch_norms_are_synchronized(two_ranks: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *FSDP2, "trainer.devices=2", "model.norm=batchnorm", "+trainer.sync_batchnorm=true"]
    with pytest.raises(AssertionError, match="SyncBatchNorm expected input tensor to be on"):
        two_ranks(SYNCHRONIZED_NORMS, *overrides, f"folder={tmp_path}/run")


PLAIN = ["model=linear", "callback.throughput.peak_tflops=1", "task.l2=0.01"]  # has no method shard


@pytest.mark.slow
def test_a_model_without_a_method_shard_trains_resumes_and_is_evaluated(script: Script, tmp_path: Path) -> None:
    one, sharded = tmp_path / "one", tmp_path / "sharded"
    for folder, more in ((one, []), (sharded, [*FSDP2, "trainer.devices=2"])):
        for arguments in (
            [*OVERRIDES, *PLAIN, *more, f"folder={folder}", "trainer.max_epochs=1"],
            [f"resume={folder}"],
        ):
            epochs = ["trainer.max_epochs=2"] if arguments[0].startswith("resume") else []
            done = script("train", *arguments, *epochs, ranks=2 if more else 0)
            assert done.returncode == 0, done.stderr
    assert_same(one, sharded)
    done = script("evaluate", f"run={sharded}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder", pytest.param("gan", marks=pytest.mark.slow)])
def test_a_foreign_module_is_sharded_as_a_whole_and_trains_as_with_ddp(
    script: Script, tmp_path: Path, name: str
) -> None:
    quick = ["logger=null", "trainer.max_epochs=2", "test=false", "trainer.accelerator=cpu", "trainer.devices=2"]
    for strategy in ("fsdp2", "ddp"):
        arguments = [*gallery.overrides(name), *quick, f"trainer={strategy}", f"folder={tmp_path}/{strategy}"]
        done = script("train", *arguments, ranks=2, env={"PYTHONPATH": "tests"})
        assert done.returncode == 0, done.stderr
    assert all(isinstance(value, torch.Tensor) for value in saved_weights(tmp_path / "fsdp2").values())
    assert max_difference(tmp_path / "fsdp2", tmp_path / "ddp") < 1e-5


@pytest.mark.slow
def test_a_non_finite_gradient_stops_all_ranks(script: Script, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, *FSDP2, "trainer.devices=2", "optimizer.lr=1e38", "trainer.gradient_clip_val=null"]
    done = script("train", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert ": the gradient of model.hidden.0.weight" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.strategy.save_distributed_checkpoint=true", "checkpoint_io.asynchronous=true"],
            "; set checkpoint_io.asynchronous=false",
        ),
        (["trainer.strategy.cpu_offload=true"], "; set it to false"),
        (
            [
                "+callback.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging",
                "+callback.swa.swa_lrs=0.1",
            ],
            "; use callback=[default,ema]",
        ),
        (["trainer=fsdp"], "trainer.strategy=fsdp, trainer.accelerator=cpu: "),
        (["trainer=deepspeed"], "trainer"),
        (["model=convnet", "trainer.strategy.tensor_parallel_size=2"], "ConvNet has no method shard(mesh)"),
        (["model.norm=batchnorm", "trainer.strategy.tensor_parallel_size=2"], "does not support BatchNorm1d"),
        (
            ["trainer.strategy.data_parallel_size=3", "data.batch_size=66"],
            "their product is not 2, the number of ranks",
        ),
    ],
)
def test_unsupported_settings_are_refused(script: Script, tmp_path: Path, overrides: list[str], message: str) -> None:
    done = script("train", *OVERRIDES, *FSDP2, "trainer.devices=2", *overrides, f"folder={tmp_path}", ranks=2)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert message in done.stderr
