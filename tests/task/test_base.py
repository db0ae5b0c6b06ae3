import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from conftest import RecordingLogger, Script, Synchronizations
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from sklearn.metrics import accuracy_score, f1_score, log_loss
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from boltcutter.callback.guard import Guard
from boltcutter.callback.throughput import ThroughputMonitor
from boltcutter.task.classification import Classification
from boltcutter.task.errors import CompilerError
from boltcutter.task.schedule import warmup_cosine

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in ("does not have many workers", "have no `val_dataloader`", "is smaller than the logging interval")
]
CLASSES = 3


def trainer(folder: Path, **options: Any) -> L.Trainer:
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
        **options,
    )


def metrics() -> dict[str, Metric]:
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro", validate_args=False),
        "f1": MulticlassF1Score(CLASSES, validate_args=False),
    }


def classes(length: int, seed: int = 0) -> TensorDataset:
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(length, 4), torch.randint(CLASSES, (length,)))


def loader(length: int, batch: int = 8, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(classes(length, seed), batch)


def task(model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> Classification:
    torch.manual_seed(0)
    options = {"optimizer": partial(SGD, lr=lr), "metrics": metrics()} | options
    return Classification(model or nn.Linear(4, CLASSES), **options)


def test_loss_and_metrics_are_exact_with_a_smaller_last_batch(tmp_path: Path) -> None:
    module, data = task(), loader(61, 8)  # 7 batches of 8 and one of 5
    (scores,) = trainer(tmp_path).test(module, data, verbose=False)
    inputs, labels = cast(TensorDataset, data.dataset).tensors
    probabilities, targets = module(inputs).detach().double().softmax(-1).numpy(), labels.numpy()
    guesses = probabilities.argmax(-1)
    assert scores["test/loss"] == pytest.approx(log_loss(targets, probabilities), rel=1e-6)
    assert scores["test/accuracy"] == pytest.approx(accuracy_score(targets, guesses), rel=1e-6)
    assert scores["test/f1"] == pytest.approx(f1_score(targets, guesses, average="macro"), rel=1e-6)


def test_logged_metrics_lists_everything_that_is_logged(tmp_path: Path) -> None:
    module, training = task(), trainer(tmp_path, log_every_n_steps=1)
    training.fit(module, loader(16), loader(16))
    logged = set(training.callback_metrics)
    training.test(module, loader(16), verbose=False)
    assert logged | set(training.callback_metrics) == module.logged_metrics


def test_epoch_means_are_reset_and_weight_samples_equally(tmp_path: Path) -> None:
    module, log = task(lr=0.0), RecordingLogger()
    training = trainer(tmp_path, max_epochs=2, logger=log)
    training.fit(module, loader(13, 5), loader(11, 4, seed=1))
    for name, (inputs, targets) in {
        "train/loss_epoch": classes(13).tensors,
        "val/loss": classes(11, 1).tensors,
    }.items():
        expected = nn.functional.cross_entropy(module(inputs), targets).item()
        assert list(log.values(name).values()) == pytest.approx([expected, expected], rel=1e-6)


def test_the_loss_of_a_step_is_logged_at_every_nth_step_only(tmp_path: Path) -> None:
    log = RecordingLogger()
    trainer(tmp_path, max_epochs=2, logger=log, log_every_n_steps=3).fit(task(), loader(40))
    assert list(log.values("train/loss")) == [2, 5, 8]  # steps are counted from 0
    log = RecordingLogger()
    trainer(tmp_path, max_epochs=2, logger=log, log_every_n_steps=3, accumulate_grad_batches=2).fit(task(), loader(48))
    assert list(log.values("train/loss")) == [2, 5]


def test_what_the_default_callbacks_log_in_a_step_bypasses_the_result_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, lightning = [], L.LightningModule.log

    def counted(self: L.LightningModule, *args: Any, **options: Any) -> None:
        hooks.append(self._current_fx_name)
        lightning(self, *args, **options)

    monkeypatch.setattr(L.LightningModule, "log", counted)
    log = RecordingLogger()
    callbacks: list[L.Callback] = [ThroughputMonitor(), Guard(tmp_path)]
    trainer(tmp_path, logger=log, callbacks=callbacks, log_every_n_steps=1).fit(task(), loader(40))
    assert log.values("train/loss").keys() == log.values("throughput/samples_per_second").keys() | {0}
    assert hooks
    assert not {"training_step", "on_train_batch_end"} & set(hooks)


def test_log_every_n_steps_of_0(tmp_path: Path) -> None:
    log = RecordingLogger()
    trainer(tmp_path, logger=log, log_every_n_steps=0).fit(task(), loader(16))
    assert not log.values("train/loss")
    assert log.values("train/loss_epoch")


def test_nan_loss_is_logged(tmp_path: Path) -> None:
    module, training = task(), trainer(tmp_path)
    inputs, targets = classes(20).tensors
    inputs[7] = torch.nan
    training.validate(module, DataLoader(TensorDataset(inputs, targets), 8), verbose=False)
    assert training.callback_metrics["val/loss"].isnan()


class ObserveSteps(Callback):
    """Observes all training steps but the first, in which torchmetrics computes compute groups."""

    def __init__(self, waits: Synchronizations) -> None:
        self.waits, self.steps = waits, 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        step = pl_module.training_step

        def watched(*args: Any) -> Any:
            self.steps += 1
            if self.steps == 1:
                return step(*args)
            with self.waits:
                return step(*args)

        pl_module.training_step = watched  # type: ignore[method-assign]


def test_training_steps_do_not_synchronize_with_the_device(tmp_path: Path) -> None:
    metrics: dict[str, Metric] = {"accuracy": MulticlassAccuracy(CLASSES, average="micro", validate_args=False)}
    waits = Synchronizations()
    with waits:
        assert torch.ones(1).item()
    assert waits.counted.pop("_local_scalar_dense") == 1
    module = task(metrics=metrics, l1=0.1, l2=0.1, label_smoothing=0.1, class_weights=[1.0, 2.0, 3.0])
    training = trainer(tmp_path, log_every_n_steps=1000, callbacks=[ObserveSteps(waits)], gradient_clip_val=1.0)
    training.fit(module, loader(80))
    assert training.global_step == 10
    assert not waits.counted


def test_the_norm_of_the_guard_is_used_for_clipping_in_mixed_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: pytest.fail("computed the norm again"))
    module, norms = task(), list[float]()

    class Clipped(Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norms.extend([float(nn.utils.get_total_norm(grads))] if grads else [])

    options = {"precision": "bf16-mixed", "gradient_clip_val": 1e-3, "callbacks": [Guard(tmp_path), Clipped()]}
    trainer(tmp_path, **options).fit(module, loader(24))
    assert norms == pytest.approx([1e-3] * len(norms), rel=1e-2)
    assert norms


def test_penalties_exclude_biases_and_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, CLASSES, 5))
    weights = [model[0].weight, model[3].weight]
    l1 = sum(w.abs().sum() for w in weights)
    l2 = sum(w.square().sum() for w in weights)
    torch.testing.assert_close(task(model, l1=0.3, l2=0.0).penalty(), 0.3 * l1)
    torch.testing.assert_close(task(model, l1=0.0, l2=0.7).penalty(), 0.7 * l2)
    penalty = task(model, l1=0.3, l2=0.7).penalty()
    torch.testing.assert_close(penalty, 0.3 * l1 + 0.7 * l2)
    cast(Tensor, penalty).backward()
    torch.testing.assert_close(weights[0].grad, 0.3 * weights[0].sign() + 1.4 * weights[0])
    assert model[0].bias.grad is None
    assert model[1].weight.grad is None


def test_no_penalty_without_factors_or_trainable_weights() -> None:
    assert task().penalty() == 0
    assert task(nn.Linear(4, CLASSES).requires_grad_(False), l1=0.1, l2=0.1).penalty() == 0


def test_penalties_are_part_of_the_training_loss_only(tmp_path: Path) -> None:
    log, plain = RecordingLogger(), RecordingLogger()
    for l2, logger in ((0.5, log), (0.0, plain)):
        trainer(tmp_path, logger=logger, log_every_n_steps=1).fit(task(l2=l2, lr=0.0), loader(8), loader(8))
    penalty = 0.5 * task().model.weight.square().sum().item()  # type: ignore[union-attr, operator]
    assert log.values("train/loss")[0] == pytest.approx(plain.values("train/loss")[0] + penalty)
    for name in ("train/loss_epoch", "val/loss"):
        assert log.values(name) == plain.values(name)


@pytest.mark.parametrize("name", ["l1", "l2"])
def test_a_negative_factor_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^task\.{name}=-1 would reward large weights; try 0$"):
        task(**{name: -1})


def test_frozen_parameters_are_not_trained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, CLASSES))
    model[0].requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    module, training = task(model), trainer(tmp_path)
    training.fit(module, loader(16))
    held = {id(p) for group in training.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in model[1].parameters()}
    same = [torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True)]
    assert same == [True, True, False, False]


def test_gradient_accumulation_equals_a_large_batch(tmp_path: Path) -> None:
    small, large = task(), task()
    trainer(tmp_path, accumulate_grad_batches=4).fit(small, loader(32, 8))
    trainer(tmp_path).fit(large, loader(32, 32))
    torch.testing.assert_close(small.state_dict(), large.state_dict())


def test_gradients_are_clipped(tmp_path: Path) -> None:
    module = task(lr=1.0)
    before = nn.utils.parameters_to_vector(module.parameters()).clone()
    trainer(tmp_path, gradient_clip_val=0.01).fit(module, loader(8))
    moved = nn.utils.parameters_to_vector(module.parameters()) - before
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


class Rates(Callback):
    """Records the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def rates(
    folder: Path, scheduler: Callable[..., LRScheduler] | None, options: dict[str, Any] | None = None, **changes: Any
) -> list[float]:
    watch = Rates()
    training = trainer(folder, callbacks=[watch], **({"max_epochs": 4} | changes))
    training.fit(task(scheduler=scheduler, **(options or {})), loader(40), loader(8))
    return watch.seen


def test_constant_learning_rate_without_a_schedule(tmp_path: Path) -> None:
    assert rates(tmp_path, None) == [0.1] * 20
    assert rates(tmp_path, partial(ConstantLR, factor=1.0)) == [0.1] * 20


def test_schedules_span_the_whole_training(tmp_path: Path) -> None:
    seen = rates(tmp_path, partial(warmup_cosine, warmup_ratio=0.25))
    assert len(seen) == 20
    assert seen[4] == seen[5] == 0.1 == max(seen)
    assert seen[-1] == pytest.approx(0.05 * (1 + math.cos(math.pi * 14 / 15)))
    cycle = rates(tmp_path, partial(OneCycleLR, max_lr=0.1, cycle_momentum=False))
    assert max(cycle) == pytest.approx(0.1, rel=0.01)
    assert cycle[-1] < 1e-4 < cycle[-3]


def test_schedules_count_optimizer_steps(tmp_path: Path) -> None:
    seen = rates(tmp_path, partial(warmup_cosine, warmup_ratio=0.0), accumulate_grad_batches=2)
    assert len(seen[::2]) == 6  # 3 steps of 5 batches, in each of 4 epochs
    assert seen[-1] == pytest.approx(0.05 * (1 + math.cos(math.pi * 11 / 12)))
    assert (
        rates(tmp_path, warmup_cosine, max_steps=7)[-1]
        == rates(tmp_path, warmup_cosine, max_epochs=-1, max_steps=7)[-1]
    )


def test_schedules_can_count_epochs(tmp_path: Path) -> None:
    expected = [0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4) for _ in range(5)]
    options = {"interval": "epoch"}
    assert rates(tmp_path, partial(warmup_cosine, warmup_ratio=0.0), options) == pytest.approx(expected)
    assert rates(
        tmp_path, partial(warmup_cosine, warmup_ratio=0.0), options, max_epochs=-1, max_steps=20
    ) == pytest.approx(expected)


def test_explicit_total_steps(tmp_path: Path) -> None:
    assert rates(tmp_path, partial(warmup_cosine, warmup_ratio=0.0, total_steps=10))[10:] == [0.0] * 10


def test_reduce_lr_on_plateau(tmp_path: Path) -> None:
    plateau = partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
    seen = rates(tmp_path, plateau, {"interval": "epoch"})
    assert seen[::5] == [0.1, 0.1, 0.05, 0.025]
    assert rates(tmp_path, plateau, {"interval": "epoch", "monitor": "train/loss_epoch"}) == seen
    with pytest.raises(ValueError, match=r"^task\.interval=step .* ReduceLROnPlateau.* val/loss .*; set task"):
        task(scheduler=plateau)


def test_schedules_need_a_finite_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^scheduler: .*; set trainer\.max_st"):
        trainer(tmp_path, max_epochs=-1).fit(task(scheduler=warmup_cosine), loader(8))
    trainer(tmp_path, max_epochs=-1, max_time={"seconds": 0}).fit(
        task(scheduler=partial(ConstantLR, factor=1)), loader(8)
    )


@pytest.mark.parametrize("scheduler", [partial(OneCycleLR, max_lr=0.1), warmup_cosine])
def test_schedules_are_extended_when_training_resumes_for_longer(
    tmp_path: Path, scheduler: Callable[..., LRScheduler]
) -> None:
    optimizer = partial(SGD, lr=0.1, momentum=0.9)
    first = trainer(tmp_path, max_epochs=2)
    first.fit(task(scheduler=scheduler, optimizer=optimizer), loader(40))
    first.save_checkpoint(tmp_path / "a.ckpt")
    watch = Rates()
    second = trainer(tmp_path, max_epochs=4, callbacks=[watch])
    second.fit(
        task(scheduler=scheduler, optimizer=optimizer), loader(40), ckpt_path=tmp_path / "a.ckpt", weights_only=True
    )
    assert len(watch.seen) == 10
    assert watch.seen[1] > watch.seen[-1] < 0.005


def test_predictions_with_and_without_targets(tmp_path: Path) -> None:
    module, data = task(), classes(10)
    inputs = data.tensors[0]
    pairs = trainer(tmp_path).predict(module, DataLoader(data, 4))
    inputs_only = trainer(tmp_path).predict(module, DataLoader(inputs, 4))  # type: ignore[arg-type]
    expected = module.predictions(module(inputs))
    torch.testing.assert_close(torch.cat(cast(list[Tensor], pairs)), expected)
    torch.testing.assert_close(torch.cat(cast(list[Tensor], inputs_only)), expected)


RANKS = """
import sys
from functools import partial
import lightning as L, torch
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from boltcutter.callback.guard import Guard
from boltcutter.callback.throughput import ThroughputMonitor
from boltcutter.task.classification import Classification
torch.set_num_threads(1)
torch.manual_seed(0)
accuracy = MulticlassAccuracy(3, average="micro", validate_args=False)
task = Classification(torch.nn.Linear(4, 3), optimizer=partial(SGD, lr=0.0), metrics={"accuracy": accuracy})
inputs, targets = torch.randn(13, 4), torch.randint(3, (13,))
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=1,
    num_sanity_val_steps=0, default_root_dir=sys.argv[1],
)
mine = slice(0, 9) if trainer.global_rank == 0 else slice(9, None)  # batches of 3, 3, 3 and of 3, 1
part = DataLoader(TensorDataset(inputs[mine], targets[mine]), 3)
even = DataLoader(TensorDataset(*(t[trainer.global_rank::2][:6] for t in (inputs, targets))), 6)
trainer.fit(task, even, part)
found = dict(trainer.callback_metrics)
losses = torch.nn.functional.cross_entropy(task(inputs), targets, reduction="none")
torch.testing.assert_close(found["val/loss"], losses.mean())
torch.testing.assert_close(found["val/accuracy"], (task(inputs).argmax(-1) == targets).float().mean())
torch.testing.assert_close(found["train/loss"], losses[:12].mean())
torch.testing.assert_close(found["train/loss_epoch"], losses[:12].mean())
print("exact")
"""


def test_metrics_are_exact_with_uneven_ranks(two_ranks: Script, tmp_path: Path) -> None:
    done = two_ranks(RANKS, str(tmp_path))
    assert done.stdout.count("exact") == 2


def test_metrics_do_not_depend_on_max_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at_once in (1, 60, 1 << 30):
        monkeypatch.setattr("boltcutter.task.base.MAX_PENDING", at_once)
        training = trainer(tmp_path)
        training.fit(task(), loader(61), loader(45, seed=1))
        found.append({name: float(value) for name, value in training.callback_metrics.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(found[2], rel=1e-6)


def test_small_batches_are_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boltcutter.task.base.MAX_PENDING", 100)
    module = task()
    outputs = torch.randn(8, CLASSES)
    for waiting in (1, 2, 3, 4, 0, 1):
        module._accumulate("train", (torch.rand(8), outputs, torch.zeros(8, dtype=torch.long)))
        assert len(module._pending["train"]) == waiting
    assert module.means["train_"].update_count == 1


def test_gradients_are_clipped_by_a_known_norm(tmp_path: Path) -> None:
    class SetGradientNorm(Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Optimizer) -> None:
            gradients = [p.grad for p in pl_module.parameters()]
            pl_module.gradient_norm = torch.nn.utils.get_total_norm(gradients)

    weights = []
    for callbacks in ([], [SetGradientNorm()]):
        for largest in (0.01, 100.0):
            module = task()
            trainer(tmp_path, gradient_clip_val=largest, callbacks=callbacks).fit(module, loader(40))
            weights.append(module.model.weight.detach().clone())
    assert torch.allclose(weights[0], weights[2], rtol=1e-5, atol=0)
    assert torch.equal(weights[1], weights[3])
    assert not torch.allclose(weights[0], weights[1], rtol=1e-3)


def test_fused_optimizer_with_gradient_scaler_and_clipping(tmp_path: Path) -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module = task(optimizer=partial(AdamW, lr=0.1, fused=True))
    training = trainer(tmp_path, plugins=[precision], gradient_clip_val=1.0)
    training.fit(module, loader(40))
    assert training.global_step == 5
    assert module.model.weight.isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch's compiler
def test_compiled_training_is_the_same(tmp_path: Path) -> None:
    class Layers(nn.Sequential):  # nn.Sequential itself would not be compiled
        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self:
                inputs = layer(inputs)
            return inputs

    model = Layers(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for compile in (False, True):
        model.load_state_dict(state)
        module = task(model, compile=compile)
        training = trainer(tmp_path)
        training.fit(module, loader(24), loader(13, 5))
        assert [name for name in module.state_dict() if name.startswith("model.")] == [
            f"model.{name}" for name in state
        ]
        found.append({name: float(value) for name, value in training.callback_metrics.items()})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_missing_compiler_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    module = task(compile=True)  # evaluation does not compile
    module.setup("test")
    with pytest.raises(CompilerError, match=r"^task.compile=true .* install g\+\+"):
        module.setup("fit")


def test_channels_last(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.LazyLinear(CLASSES))
    images = torch.randn(2, 3, 6, 6)
    plain = task(model)(images)
    module = task(model, channels_last=True)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(module(images), plain, atol=1e-5)
