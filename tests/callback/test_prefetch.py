import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import Script
from fake_gpu import DEVICE, FakeStrategy, fake_gpu
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from boltcutter.callback.prefetch import Prefetch
from boltcutter.callback.reseed import Reseed
from boltcutter.callback.throughput import data_wait_seconds
from boltcutter.data.digits import Digits
from boltcutter.data.hooks import shard_loaders
from boltcutter.data.prefetch import Prefetcher
from boltcutter.model.mlp import MLP
from boltcutter.task.classification import Classification

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{text}")
    for text in (
        "does not have many workers",
        "is smaller than the logging interval",
        "have no `val_dataloader`",
        "This DataLoader will create",
        "Your `IterableDataset` has `__len__`",
        "fork",
        "You're resuming from a checkpoint that ended before",
        "You requested to overfit",
    )
]
SLOW = pytest.mark.slow
ERRORS = (ValueError, KeyboardInterrupt, SystemExit)
WORKERS = {"num_workers": 1, "multiprocessing_context": "fork"}


class Module(Classification):
    """Remembers what it was trained and validated with, and how many batches were read."""

    def __init__(self) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(MLP((1, 8, 8), 10, hidden_sizes=[8], dropout=0.5), optimizer=torch.optim.SGD)
        self.seen: list[Any] = []
        self.ahead: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        iterator = self.trainer.fit_loop._data_fetcher.iterator  # type: ignore[union-attr]
        self.ahead.append(iterator.settle() if isinstance(iterator, Prefetcher) else 0)
        self.seen.append(batch)
        return super().training_step(batch if isinstance(batch[1], Tensor) else batch[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch)
        super().validation_step(batch, batch_idx)


class Stops(Callback):
    """Saves within an epoch, and ends training: as it is told, by an error, or by a signal of the user."""

    def __init__(self, path: Path, at: int, error: type[BaseException] | None = None) -> None:
        self.path, self.at, self.error = path, at, error

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.at:
            self.ahead = pl_module.ahead[-1]  # type: ignore[operator]
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
            if self.error:
                raise self.error("stopped")


def fit(
    *callbacks: Callback, data: Any = None, loaders: Any = None, ckpt: Path | None = None, **options: Any
) -> tuple[L.Trainer, Module]:
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"max_epochs": 2, "enable_model_summary": False, "num_sanity_val_steps": 0, **silent, **options}
    options = {"strategy": FakeStrategy()} | options if DEVICE in options.pop("on", ()) else options
    trainer = L.Trainer(accelerator="cpu", callbacks=[Reseed(), *callbacks], **options)
    shard_loaders(trainer, 0)
    module = Module()
    given: dict[str, Any] = {"datamodule": data or Digits(batch_size=200)} if loaders is None else loaders
    trainer.fit(module, ckpt_path=ckpt, weights_only=True, **given)
    return trainer, module


def weights(module: L.LightningModule) -> list[Tensor]:
    return [value.cpu() for value in module.state_dict().values()]


def assert_equal(one: Module, other: Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def assert_no_thread() -> None:
    assert [t.name for t in threading.enumerate() if t.name.startswith("prefetch")] == []


def samples(count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % 10)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


def foreign() -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(samples(), 4, shuffle=True, **WORKERS),  # type: ignore[arg-type]
        "val_dataloaders": DataLoader(samples(), 4, **WORKERS),  # type: ignore[arg-type]
    }


LOADERS = {
    "workers": foreign,
    "none": lambda: {"train_dataloaders": DataLoader(samples(), 4, shuffle=True)},
    "stream": lambda: {"train_dataloaders": DataLoader(Stream(), 4, **WORKERS)},
    "several": lambda: {
        "train_dataloaders": CombinedLoader([foreign()["train_dataloaders"] for _ in range(2)], "min_size")
    },
    "own": lambda: {"datamodule": Digits(batch_size=200)},
}


@pytest.mark.parametrize("name", ["own", *(pytest.param(name, marks=SLOW) for name in LOADERS if name != "own")])
@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, pytest.param({}, marks=SLOW)], ids=["limit", "all"])
def test_batches_order_and_weights_are_those_without_it(name: str, options: dict[str, Any]) -> None:
    _, plain = fit(loaders=LOADERS[name](), **options)
    trainer, ahead = fit(Prefetch(2), loaders=LOADERS[name](), **options)
    assert_equal(plain, ahead)
    assert len(plain.seen) == len(ahead.seen)
    assert max(ahead.ahead) == (0 if name == "none" else 2)
    assert ahead.ahead[0 if name == "none" else -1] == 0  # nothing behind the last batch, or a limit
    assert trainer.global_step == len(plain.ahead)
    assert_no_thread()


@pytest.mark.parametrize("name", ["own", pytest.param("workers", marks=SLOW)])
@pytest.mark.parametrize("error", [None, *(pytest.param(e, marks=SLOW) for e in ERRORS)])
def test_a_run_resumes_at_the_batch_that_was_trained_not_at_that_which_was_read(
    name: str, error: type[BaseException] | None, tmp_path: Path
) -> None:
    _, whole = fit(loaders=LOADERS[name]())
    stops = Stops(path := tmp_path / "mid.ckpt", 3, error)
    # Lightning ends the process after an interrupt.
    with pytest.raises((error, SystemExit)) if error else nullcontext():
        fit(Prefetch(2), stops, loaders=LOADERS[name]())
    assert stops.ahead == 2
    assert_no_thread()
    trainer, resumed = fit(Prefetch(2), loaders=LOADERS[name](), ckpt=path)
    assert_equal(whole, resumed)
    if name == "own":
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        state = torch.load(tmp_path / "end.ckpt", weights_only=True)["Digits"]
        assert state["position"]["samples_seen"] == 1200


@pytest.mark.slow
def test_a_loader_that_fails_fails_at_the_same_step() -> None:
    class Damaged(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise ValueError("sample 17: damaged")
            return super().__getitem__(index)

    def loaders() -> Any:
        return {"train_dataloaders": DataLoader(Damaged(*samples().tensors), 4, **WORKERS)}

    class Steps(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.last = trainer.global_step

    for callbacks in ((), (Prefetch(2),)):
        steps = Steps()
        with pytest.raises(ValueError, match="sample 17: damaged"):
            fit(steps, *callbacks, loaders=loaders())
        assert steps.last == 4  # of four samples each
        assert_no_thread()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"reload_dataloaders_every_n_epochs": 1},
        {"overfit_batches": 2},
        {"max_steps": 4, "max_epochs": -1},
        {"max_time": {"seconds": 0}},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 4},
    ],
    ids=str,
)
def test_other_ends_and_loaders(options: dict[str, Any]) -> None:
    _, plain = fit(loaders=foreign(), **options)
    _, ahead = fit(Prefetch(2), loaders=foreign(), **options)
    assert_equal(plain, ahead)
    assert len(plain.seen) == len(ahead.seen)
    assert_no_thread()


def test_on_a_gpu_batches_are_copied_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = fit(max_epochs=1)
    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        _, module = fit(Prefetch(), max_epochs=1, on=[DEVICE])
        copied = gpu.log.count(("copies", "copy"))
        assert copied == 2 * (5 + 1)  # inputs and targets of all but the first batches of training and validation
        assert gpu.log.count(("default", "waits for", "copies")) == 5 + 1
        assert max(module.ahead) == 2
        assert all(part.is_cuda for batch in module.seen for part in batch)
        assert not [place for _, place in gpu.waits if "prefetch" in place]
    for expected, found in zip(plain.seen, module.seen, strict=True):
        assert all(torch.equal(a, b.host) for a, b in zip(expected, found, strict=True))
    assert_no_thread()


def test_hooks_of_the_user_are_called_by_the_training_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Own(Digits):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append((threading.current_thread() is threading.main_thread(), batch[0].is_cuda))
            return batch

    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        _, module = fit(Prefetch(), data=Own(batch_size=200), max_epochs=1, on=[DEVICE])
        assert ("copies", "copy") not in gpu.log
    assert calls
    assert set(calls) == {(True, False)}
    assert max(module.ahead) == 2
    assert "Own has its own on_before_batch_transfer" in capsys.readouterr().out


def test_waiting_is_measured_where_the_step_waits() -> None:
    waited: list[float] = []

    class Slow(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            waited.append(data_wait_seconds(trainer) or 0.0)

    fit(Prefetch(2), Slow(), max_epochs=1)
    assert waited == sorted(waited)
    assert waited[-1] > 0


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"callback\.prefetch\.batches=-1"):
        Prefetch(-1)


@pytest.mark.slow
def test_two_ranks_with_workers_train_as_without_it(script: Script, tmp_path: Path) -> None:
    common = ["model=mlp", "data.num_workers=1", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
    common += ["trainer.max_epochs=2", "logger=null", "report=false", "test=false"]
    for batches in (0, 2):
        folder = f"folder={tmp_path / str(batches)}"
        done = script("train", *common, folder, f"callback.prefetch.batches={batches}", ranks=2)
        assert done.returncode == 0, done.stderr
    one, other = (
        torch.load(tmp_path / str(n) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for n in (0, 2)
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
