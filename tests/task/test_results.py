"""What modules of users log without ``sync_dist`` is, on every rank, that of one process over the same samples."""

import json
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import run_forked
from fake_gpu import DEVICE, fake_gpu
from forkserver import ForkServer

from boltcutter.task.results import LoggedNamesError, NameChecks, NamedReduction, reduce_results

CODE = """
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

from boltcutter.environment.process import distributed_shutdown
from boltcutter.task.results import reduce_results

warnings.simplefilter("ignore")
warnings.filterwarnings("error", ".*sync_dist.*")
case, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
sizes = {1: [7], 2: [4, 3], 3: [3, 3, 1]}[ranks]  # samples of each rank, in batches of two


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.accuracy = BinaryAccuracy()
        self.options: dict[str, Any] = {}

    def training_step(self, batch, index):
        x = batch[0]
        self.log("train/x", x.mean(), on_step=True, on_epoch=True)
        self.log("train/step", x.mean())
        if case == "explicit":
            for name in ("sum", "min", "max"):
                self.log(f"train/{name}", x.sum(), reduce_fx=name, on_step=True, on_epoch=True, sync_dist=True)
        if case == "hooks" and (self.current_epoch or self.global_rank == 0):
            self.log("train/later", x.mean(), on_step=True, on_epoch=True)
        if case == "names":
            for name in sorted(("train/a", "train/b"), reverse=self.global_rank > 0):
                self.log(name, x.mean(), sync_dist=True)
        return self.net(x).mean() * 0

    def on_train_epoch_end(self):
        if case == "hooks":
            self.log("train/own", float(self.global_rank))
            if self.trainer.is_global_zero:  # would wait for the others if reading reduced anything
                self.trainer.callback_metrics

    def validation_step(self, batch, index, dataloader_idx=0):
        x = batch[0]
        self.log("val/x", x.mean(), **self.options)
        for name in ("sum", "min", "max"):
            self.log(f"val/{name}", x.sum() if name == "sum" else getattr(x, name)(), reduce_fx=name, **self.options)
        self.log("val/synced", x.mean(), sync_dist=True)
        self.log("val/float", float(x.mean()), batch_size=len(x))
        self.log("val/integer", int(2 * x.mean()))
        self.log_dict({"val/of_dict": x.mean()})
        self.accuracy(x[:, 0] / 20, (x[:, 0] > 4).long())
        self.log("val/accuracy", self.accuracy)
        if (x > 5).any():
            self.log("val/rare", x.mean())
        if case == "more" and self.global_rank == 0:
            self.log("val/more", x.mean(), sync_dist=True)
        if case == "metric" and self.global_rank == 0:
            self.log("val/again", self.accuracy)

    def on_validation_epoch_end(self):
        if case == "hooks":
            self.log("val/own", float(self.global_rank))
            self.log("val/same", 3.3)
            if self.trainer.is_global_zero:
                self.trainer.callback_metrics

    def test_step(self, batch, index):
        self.log("test/x", batch[0].mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        if case != "plateau":
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "set"}}


class Data(L.LightningDataModule):
    def loader(self):
        rank = self.trainer.global_rank
        first = sum(sizes[:rank])
        return DataLoader(TensorDataset(torch.arange(first, first + sizes[rank]).float()[:, None]), 2)

    def train_dataloader(self):
        rank = self.trainer.global_rank
        return DataLoader(TensorDataset(torch.arange(4 * rank, 4 * rank + 4).float()[:, None]), 2)

    def val_dataloader(self):
        return [self.loader(), self.loader()] if case == "loaders" else self.loader()

    test_dataloader = loader


class Sets(L.Callback):
    def on_validation_end(self, trainer, module):
        trainer.callback_metrics["set"] = torch.tensor(float(trainer.global_rank))


class Seen(L.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append(float(trainer.callback_metrics["train/step"]))


callbacks: dict[str, list[L.Callback]] = {
    "plateau": [Sets()],
    "steps": [ModelCheckpoint(folder, monitor="train/step", every_n_train_steps=1), Seen()],
    "hooks": [EarlyStopping("val/own", patience=5), ModelCheckpoint(folder, monitor="train/own")],
    "step": [ModelCheckpoint(folder, monitor="train/step")],
}
with distributed_shutdown():
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=callbacks.get(case, []), enable_checkpointing=case in callbacks and case != "plateau",
    )
    reduce_results(trainer)
    module, data = Module(), Data()
    if case == "explicit":
        module.options = {"sync_dist": True}
    trainer.fit(module, datamodule=data)
    found: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
    found["best"] = float(getattr(trainer.checkpoint_callback, "best_model_score", None) or -1)
    found["steps"] = getattr(next((c for c in trainer.callbacks if isinstance(c, Seen)), None), "steps", [])
    found |= trainer.test(module, datamodule=data, verbose=False)[0]
    (folder / f"{ranks}-{trainer.global_rank}.json").write_text(json.dumps(found))
"""


def run(forks: ForkServer, folder: Path, case: str, ranks: int) -> tuple[list[dict[str, Any]], str]:
    """What each rank has found, and what was printed to stderr."""
    (folder / "code.py").write_text(CODE)
    done = run_forked(forks, [str(folder / "code.py"), case, str(ranks), str(folder)], ranks=ranks if ranks > 1 else 0)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)], done.stderr


@pytest.mark.parametrize("case", ["plain", "explicit", "loaders"])
def test_results_of_ranks_with_uneven_batches_are_those_of_one_process(
    forks: ForkServer, tmp_path: Path, case: str
) -> None:
    (one,), _ = run(forks, tmp_path, case, 1)
    for ranks in (2, 3):
        found, printed = run(forks, tmp_path, case, ranks)
        for each in found:
            of_validation = {name: value for name, value in one.items() if name.startswith(("val/", "test/"))}
            assert {name: each.get(name) for name in of_validation} == pytest.approx(of_validation)
            assert each["train/x_epoch"] == pytest.approx((4 * ranks - 1) / 2)
            if case == "explicit":  # of the last batch
                steps = [each[f"train/{name}_step"] for name in ("sum", "min", "max")]
                assert steps == [4 * ranks**2 + ranks, 5, 8 * ranks - 3]
        assert "val/rare" in printed  # no batch of rank 0 has logged it
        assert printed.count("warning") == 1 if case != "loaders" else 2


def test_values_that_each_rank_computes_from_its_samples_are_averaged_and_reported(
    forks: ForkServer, tmp_path: Path
) -> None:
    found, printed = run(forks, tmp_path, "hooks", 3)
    assert [(each["val/own"], each["train/own"], each["best"]) for each in found] == [(1.0, 1.0, 1.0)] * 3
    assert found[0]["val/same"] == found[2]["val/same"]
    assert [each["train/later_epoch"] for each in found] == [5.5] * 3  # in the first epoch only rank 0 has logged it
    assert printed.count("val/own: ") == printed.count("train/own: ") == 1
    assert "val/same" not in printed  # equal on all ranks


def test_what_a_callback_sets_is_the_same_for_schedulers_of_all_ranks(forks: ForkServer, tmp_path: Path) -> None:
    found, printed = run(forks, tmp_path, "plateau", 2)
    assert found[0]["lr"] == found[1]["lr"]
    assert printed.count("set is monitored") == 1


@pytest.mark.parametrize("case", ["step", "steps"])
def test_monitored_values_of_steps_are_means_over_ranks(forks: ForkServer, tmp_path: Path, case: str) -> None:
    found, _ = run(forks, tmp_path, case, 2)
    assert found[0]["best"] == found[1]["best"] == (4.5 if case == "step" else 2.5)
    if case == "steps":
        assert found[0]["steps"] == found[1]["steps"] == [2.5, 4.5] * 2


@pytest.mark.parametrize(("case", "name"), [("more", "val/more"), ("metric", "val/again")])
def test_a_synchronized_name_that_ranks_lack_is_an_error_at_once(
    forks: ForkServer, tmp_path: Path, case: str, name: str
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    done = run_forked(forks, [str(tmp_path / "code.py"), case, "2", str(tmp_path)], ranks=2, timeout=60)
    assert f"{name}: logged by rank 0, but not by rank 1" in done.stderr
    assert done.returncode


def test_names_that_ranks_log_in_another_order_are_an_error_at_once(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    done = run_forked(forks, [str(tmp_path / "code.py"), "names", "2", str(tmp_path)], ranks=2, timeout=60)
    assert "train/a: logged in training_step" in done.stderr
    assert done.returncode


class Labelled(torch.Tensor):
    """A tensor with metadata, as libraries of medical images have."""


@pytest.mark.filterwarnings("ignore:.*many workers", "ignore:.*isinstance.treespec")
def test_logged_values_are_plain_tensors(tmp_path: Path) -> None:
    class Module(L.LightningModule):
        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val/x", batch.mean().as_subclass(Labelled))
            self.trainer.callback_metrics["set"] = torch.ones(()).as_subclass(Labelled)

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    reduce_results(trainer)
    trainer.validate(Module(), torch.utils.data.DataLoader(torch.ones(2, 2)), verbose=False)  # type: ignore[arg-type]
    assert {name: type(value) for name, value in trainer.callback_metrics.items()} == dict.fromkeys(
        ["val/x", "set"], torch.Tensor
    )


def test_a_synchronized_value_of_a_step_is_reduced_without_a_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = [0, 0, 5000]  # of another name in the third step

    def all_reduce(found: torch.Tensor, op: Any, group: Any) -> None:
        other = torch.stack((found[0] + 2, found[1] + (mark := marks.pop(0)), found[2] - mark))
        found += other

    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        for name, value in {"all_reduce": all_reduce, "get_world_size": lambda _: 2, "get_rank": lambda: 0}.items():
            patch.setattr(torch.distributed, name, value)
        reduction = NamedReduction(lambda *_, **__: None, "training_step", "a", checks := NameChecks())
        reduced = [reduction(torch.ones(()).to(DEVICE), reduce_op=how) for how in ("mean", "sum", "mean")]
        assert gpu.waits == []
        assert [float(each) for each in reduced[:2]] == [2.0, 4.0]
        assert not pickle.loads(pickle.dumps(checks)).read()
        gpu.step = 1
        with pytest.raises(LoggedNamesError, match="a: logged in training_step"):
            checks.read(waits=False)
