from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from conftest import Script, Synchronizations
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltcutter.callback.guard import Guard, NonFiniteGradientError


class NonFiniteLoss(L.LightningModule):
    """A module whose loss is not finite at the given batches."""

    def __init__(self, bad: set[int], value: float = float("nan")) -> None:
        super().__init__()
        self.layer, self.free, self.bad, self.value = nn.Linear(2, 1), nn.Linear(2, 1), bad, value
        self.steps: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps.append(self.layer.weight.detach().clone())
        loss = self.layer(batch).mean()
        return loss * self.value if batch_idx in self.bad else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)


class DeferredGuard(Guard):
    """As on CUDA: the optimizer skips the step itself, and the guard learns of it at the next one."""

    def _can_defer(self, norm: Tensor, optimizer: torch.optim.Optimizer) -> bool:
        return True


def fit(module: L.LightningModule, guard: Guard, *others: L.Callback, **options: Any) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[guard, *others],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(list(torch.eye(2).repeat(6, 1)), batch_size=2))


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*smaller than the logging")


@pytest.mark.parametrize("kind", [Guard, DeferredGuard])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_stops_with_the_weights_of_the_previous_step(tmp_path: Path, kind: type[Guard], value: float) -> None:
    module = NonFiniteLoss({3}, value)
    with pytest.raises(NonFiniteGradientError) as error:
        fit(module, kind(tmp_path))
    assert torch.equal(module.layer.weight, module.steps[3])
    for part in ("layer.weight, layer.bias", "epoch 0, batch 3", "step 3", "nonfinite-rank-0.pt"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert torch.equal(torch.load(tmp_path / "nonfinite-rank-0.pt", weights_only=True), torch.eye(2))


def test_training_stops_when_a_gradient_scaler_cannot_help(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-15)  # the default is there after 31 overflows
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    fit(NonFiniteLoss({0}), Guard(tmp_path), plugins=[precision])  # overflows are expected
    scaler.update(2.0**-15)
    module = NonFiniteLoss({1, 2, 3, 4, 5})
    message = r"epoch 0, batch 3, although the loss is scaled by 8e-06; .*rank-0.pt: boltcutter why run=.*, or"
    with pytest.raises(NonFiniteGradientError, match=message):
        fit(module, Guard(tmp_path), plugins=[precision])
    assert module.layer.weight.isfinite().all()
    scaler.update(2.0**-30)
    fit(NonFiniteLoss(set()), Guard(tmp_path), plugins=[precision])  # a small scale alone is no reason


class OnDevice(NamedTuple):
    """A batch that is not on the CPU before ``to``."""

    tensor: Tensor

    def to(self, device: torch.device, **options: Any) -> Tensor:
        return self.tensor.to(device)


def test_the_offending_batch_is_saved_on_the_cpu(tmp_path: Path) -> None:
    class OnGPU(NonFiniteLoss):
        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
            return {"image": OnDevice(batch)}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["image"].tensor, batch_idx)

    with pytest.raises(NonFiniteGradientError):
        fit(OnGPU({3}), Guard(tmp_path))
    saved = torch.load(tmp_path / "nonfinite-rank-0.pt", weights_only=True)
    assert torch.equal(saved["image"], torch.eye(2))


@pytest.mark.parametrize("kind", [Guard, DeferredGuard])
def test_some_steps_are_skipped(tmp_path: Path, kind: type[Guard]) -> None:
    module = NonFiniteLoss({1, 2, 4})
    with pytest.warns(UserWarning, match="skipping step"):
        fit(module, kind(tmp_path, max_skipped_steps=2))
    assert torch.equal(module.steps[1], module.steps[2])
    assert torch.equal(module.steps[2], module.steps[3])
    assert not torch.equal(module.steps[3], module.steps[4])
    assert module.layer.weight.isfinite().all()


@pytest.mark.parametrize("kind", [Guard, DeferredGuard])
def test_no_more_consecutive_steps_are_skipped_than_allowed(tmp_path: Path, kind: type[Guard]) -> None:
    with pytest.warns(UserWarning, match="consecutive"), pytest.raises(NonFiniteGradientError, match="batch 3"):
        fit(NonFiniteLoss({1, 2, 3}), kind(tmp_path, max_skipped_steps=2, save_batch=False))
    assert not list(tmp_path.iterdir())


class RanksWithOtherWeights(SingleDeviceStrategy):
    """Reduces norms over two ranks, of which the other has a gradient that is not finite at step 3."""

    steps = 0

    def global_grad_norm(self, parameters: Sequence[Tensor], norms: Tensor) -> Tensor:
        self.steps += 1
        return torch.linalg.vector_norm(norms) + (float("inf") if self.steps == 4 else 0.0)

    def gather_names(self, names: list[str]) -> list[str]:
        return [*names, "other.weight"]


@pytest.mark.parametrize("kind", [Guard, DeferredGuard])
def test_training_stops_with_another_rank_without_waiting_for_the_device(tmp_path: Path, kind: type[Guard]) -> None:
    module, waits = NonFiniteLoss(set()), Synchronizations()
    guard = kind(tmp_path, save_batch=False)
    check = guard.check_gradients

    def watched(*args: Any) -> None:
        with waits if len(module.steps) < 4 else nullcontext():  # the report of the cause may wait
            check(*args)

    guard.check_gradients = watched  # type: ignore[method-assign]
    with pytest.raises(NonFiniteGradientError, match=r"gradient of other\.weight is not finite at epoch 0, batch 3"):
        fit(module, guard, strategy=RanksWithOtherWeights("cpu"))
    assert torch.equal(module.layer.weight, module.steps[3])
    assert waits.counted == ({} if kind is DeferredGuard else {"_local_scalar_dense": 3})


class Repairs(L.Callback):
    """Sets gradients that are not finite to zero."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        repair(module)


def repair(module: Any, *_: Any, **options: Any) -> None:
    for gradient in (parameter.grad for parameter in module.parameters() if parameter.grad is not None):
        gradient.nan_to_num_(0.0)


@pytest.mark.parametrize(
    "where",
    ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "of the instance", "callback"],
)
def test_gradients_are_checked_after_the_module_and_callbacks_may_have_repaired_them(
    tmp_path: Path, where: str
) -> None:
    module = NonFiniteLoss({3})
    others: list[L.Callback] = [Repairs()] if where == "callback" else []
    if where == "of the instance":
        module.on_before_optimizer_step = lambda optimizer: repair(module)  # type: ignore[method-assign]
    elif not others:
        module.__class__ = type("Repairing", (NonFiniteLoss,), {where: repair})
    fit(module, Guard(tmp_path), *others)
    assert len(module.steps) > 4
    assert ("on_before_optimizer_step" in vars(module)) == (where == "of the instance")


@pytest.mark.parametrize("kind", [Guard, DeferredGuard])
def test_a_skipped_first_step_leaves_no_uninitialized_momentum(
    tmp_path: Path, kind: type[Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_like = torch.empty_like  # whose memory may hold anything
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(1e6))

    class Momentum(NonFiniteLoss):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)

    module = Momentum({0, 3})
    with pytest.warns(UserWarning, match="skipping step"):
        fit(module, kind(tmp_path, max_skipped_steps=1))
    assert torch.equal(module.steps[0], module.steps[1])
    assert torch.equal(module.steps[3], module.steps[4])
    assert module.layer.weight.abs().max() < 10


def test_the_last_step_is_checked(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match="batch 5"):
        fit(NonFiniteLoss({5}), DeferredGuard(tmp_path))


def test_finite_gradients_pass(tmp_path: Path) -> None:
    fit(NonFiniteLoss(set()), Guard(tmp_path), gradient_clip_val=1.0, accumulate_grad_batches=2)


DIVERGING = """
from boltcutter.model.linear import Linear

class Diverging(Linear):
    batches = 0

    def forward(self, inputs):
        self.batches += self.training
        return super().forward(inputs) * (float("nan") if self.batches > 3 else 1)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stops_on_all_ranks_with_one_line_and_a_finite_checkpoint(
    script: Script, tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "diverging.py").write_text(DIVERGING)
    arguments = "input_shape: ${data.shape}\nnum_classes: ${data.num_classes}\n"
    (tmp_path / "diverging.yaml").write_text(f"_target_: diverging.Diverging\n{arguments}")
    words = ["trainer.accelerator=cpu", f"trainer.devices={ranks}", f"model={tmp_path}/diverging.yaml"]
    words += ["callback.last.every_n_train_steps=1", "callback.last.every_n_epochs=null", f"folder={tmp_path}/run"]
    done = script("train", "logger=null", *words, ranks=ranks, timeout=60, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "is not finite at epoch 0, batch 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.ckpt"]
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


RANKS = """
import os, lightning as L, torch
from boltcutter.callback.guard import Guard, UnevenBatchesError

class Task(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def training_step(self, batch, batch_idx):
        return self.weight.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[Guard("unused")],
)
try:
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.zeros(3 + int(os.environ["RANK"]), 1), 1))
except UnevenBatchesError as error:
    print(error)
"""


def test_ranks_with_different_numbers_of_batches_are_refused(two_ranks: Script) -> None:
    done = two_ranks(RANKS)
    assert done.stdout.count("(rank 0 has 3, rank 1 has 4); ") == 2


class Sparse(NonFiniteLoss):
    """An embedding with sparse gradients."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__(bad)
        self.layer = nn.Embedding(4, 1, sparse=True)  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.long(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.layer.parameters(), lr=0.1)


def test_sparse_gradients_are_checked_and_not_clipped(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"gradient_clip_val has no effect.*set it to null"):
        fit(module := Sparse(set()), Guard(tmp_path), gradient_clip_val=1.0)
    assert not torch.equal(module.layer.weight[:2], module.steps[0][:2])
    with pytest.raises(NonFiniteGradientError, match=r"layer\.weight"):
        fit(Sparse({3}), Guard(tmp_path))
