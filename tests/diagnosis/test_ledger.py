import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from conftest import QUICK, Script
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from boltcutter.assembly.assemble import assemble, read_config
from boltcutter.callback.ema import EMA
from boltcutter.callback.guard import Guard
from boltcutter.diagnosis.ledger import StepLedger, as_integers, digest
from boltcutter.project import Project
from boltcutter.run.folder import read_record
from boltcutter.run.ledger import Ledger, first_difference, ledger_path, read_ledger

PROJECT = Project.find(__file__)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*smaller than the logging", "ignore:You.re resuming"
)


class Regression(L.LightningModule):
    def __init__(self, lr: float = 0.1, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lr = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), lr
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(batch[0]).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Numbers(IterableDataset[Tensor]):
    def __init__(self, first: float = 0.0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.arange(3) / 10 + self.first + number for number in range(12))


DATA = TensorDataset(torch.arange(72).view(24, 3) / 72)

PLAIN: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
PLAIN |= {"max_epochs": 3, "enable_checkpointing": False}


def fit(folder: Path, module: L.LightningModule | None = None, data: Any = DATA, **options: Any) -> Ledger:
    """Train three epochs of four batches, or less; returns the ledger."""
    ckpt = options.pop("ckpt_path", None)
    guard = [Guard(folder)] if options.pop("guard", True) else []
    callbacks = [*guard, StepLedger(folder, every_n_steps=options.pop("every", 5)), *options.pop("callbacks", [])]
    settings = {**PLAIN, **options}
    trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, **settings)
    trainer.fit(module or Regression(), DataLoader(data, batch_size=6), ckpt_path=ckpt)
    found = read_ledger(ledger_path(folder))
    assert found is not None
    return found


def test_each_step_has_a_row(tmp_path: Path) -> None:
    found = fit(tmp_path).rows
    assert found["step"].tolist() == [*range(1, 13)]
    assert found["epoch"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert np.isfinite(found["loss"]).all()
    assert (found["gradient_norm"] > 0).all()
    assert found["lr"][:5].tolist() == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])  # with which the step was done
    assert (found["samples"] != 0).all()
    assert len({*found["gradient"].tolist()}) == 12
    assert np.flatnonzero(found["weights"]).tolist() == [4, 9, 11] == np.flatnonzero(found["optimizer"]).tolist()


def test_losses_of_accumulated_batches_are_those_of_the_module(tmp_path: Path) -> None:
    class Noted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses.append(loss := super().training_step(batch, batch_idx))
            return loss

    losses = list[Tensor]()
    found = fit(tmp_path, Noted(), accumulate_grad_batches=4, max_epochs=1).rows["loss"]
    assert found.tolist() == pytest.approx([float(sum(losses).detach()) / 4])  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"guard": False}, {"accumulate_grad_batches": 2}, {"manual": True}])
def test_equal_trainings_do_not_differ_and_others_do_where_they_begin_to(
    options: dict[str, Any], tmp_path: Path
) -> None:
    manual = options.pop("manual", False)

    def train(name: str, lr: float = 0.1, data: Any = DATA) -> Ledger:
        (tmp_path / name).mkdir()
        return fit(tmp_path / name, Regression(lr, manual=manual), data, **options)

    one = train("one")
    assert len(one.rows) == (6 if options.get("accumulate_grad_batches") else 12)
    assert first_difference(one, train("same")) is None
    changed = first_difference(one, train("lr", lr=0.1 + 1e-9))
    assert changed is not None
    assert (changed.step, changed.columns) == (1, ("lr",))
    inputs = DATA.tensors[0].clone()
    inputs[13] += 1e-6  # of the third batch
    changed = first_difference(one, train("data", data=TensorDataset(inputs)))
    assert changed is not None
    assert changed.step == (2 if options.get("accumulate_grad_batches") else 3)


def test_rounding_shows_at_the_step_where_it_begins(tmp_path: Path) -> None:
    class Rounded(Regression):
        def on_after_backward(self) -> None:
            if self.global_step == 6:
                weight = self.model[0].weight
                weight.grad[0, 0] = torch.nextafter(weight.grad[0, 0], torch.tensor(9.0))

    (tmp_path / "other").mkdir()
    found = first_difference(fit(tmp_path), fit(tmp_path / "other", Rounded()))
    assert found is not None
    assert found.step == 7
    assert found.columns[0] in ("gradient_norm", "gradient")


class Alternating(Regression):
    """Two optimizers with different numbers of parameters, of which each step uses another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        loss = self.model(batch[0]).square().mean()
        optimizers[batch_idx % 2].zero_grad()
        self.manual_backward(loss)
        optimizers[batch_idx % 2].step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model[0].parameters(), 0.1), torch.optim.SGD([self.model[2].bias], 0.1)


@pytest.mark.parametrize("guard", [True, False])
def test_steps_of_several_optimizers_have_digests(guard: bool, tmp_path: Path) -> None:
    found = []
    for name in ("one", "same"):
        (tmp_path / name).mkdir()
        found.append(fit(tmp_path / name, Alternating(manual=True), guard=guard))
    assert first_difference(*found) is None
    assert len({*found[0].rows["gradient"].tolist()} - {0}) == 12
    assert np.isfinite(found[0].rows["gradient_norm"]).all()


@pytest.mark.parametrize("at", [5, 8])
def test_a_resumed_training_continues_the_rows(at: int, tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == at:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    (tmp_path / "run").mkdir()
    whole = fit(tmp_path / "run", callbacks=[Save()])
    with open(ledger_path(tmp_path / "run"), "ab") as file:
        file.write(b"\x01" * 33)  # a row that was being written
    again = fit(tmp_path / "run", ckpt_path=tmp_path / "saved.ckpt")
    assert again.rows["step"].tolist() == whole.rows["step"].tolist()
    assert again.rows["loss"].all()
    if at == 8:  # plain Lightning repeats the order of an epoch only from its beginning
        assert first_difference(whole, again) is None


def test_rows_are_on_disk_after_an_error_and_at_each_checkpoint(tmp_path: Path) -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 6:
                self.trainer.save_checkpoint(tmp_path / "saved.ckpt")
                saved = read_ledger(ledger_path(tmp_path))
                assert saved is not None
                assert saved.last == 6
                assert saved.rows["weights"][-1]
            if self.global_step == 9:
                raise RuntimeError("stop")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, Fails())
    found = read_ledger(ledger_path(tmp_path))
    assert found is not None
    assert found.last == 9


class Normalized(Regression):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.model.insert(1, nn.BatchNorm1d(4, momentum=momentum))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Normalized(0.1), Normalized(0.2)),
        ([WeightAveraging(avg_fn=lambda a, b, n: a * 0.9 + b * 0.1)], [WeightAveraging()]),
        ([EMA(0.1)], [EMA(0.2)]),
    ],
)
def test_averages_that_change_no_step_differ(one: Any, other: Any, tmp_path: Path) -> None:
    found = []
    for number, each in enumerate((one, one, other)):
        folder = tmp_path / str(number)
        folder.mkdir()
        given: dict[str, Any] = {"callbacks": each} if isinstance(each, list) else {"module": copy.deepcopy(each)}
        callbacks = [copy.deepcopy(callback) for callback in given.pop("callbacks", [])]
        trainer = L.Trainer(accelerator="cpu", callbacks=[*callbacks, StepLedger(folder, every_n_steps=3)], **PLAIN)
        trainer.fit(given.get("module") or Regression(), DataLoader(DATA, batch_size=6))
        found.append(read_ledger(ledger_path(folder)))
    first, same, different = found
    assert first
    assert same
    assert different
    assert first_difference(first, same) is None
    difference = first_difference(first, different)
    assert difference
    assert (difference.step, difference.columns) == (3, ("buffers",))


def test_batches_of_a_stream_are_hashed(tmp_path: Path) -> None:
    found = []
    for name, first in (("one", 0.0), ("same", 0.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        found.append(fit(tmp_path / name, data=Numbers(first)))
    assert first_difference(found[0], found[1]) is None
    difference = first_difference(found[0], found[2])
    assert difference is not None
    assert difference.columns[0] == "samples"


def test_the_record_has_digests_of_the_content_of_some_batches(tmp_path: Path) -> None:
    found = {}
    for name, data in (("one", DATA), ("again", DATA), ("other", TensorDataset(DATA.tensors[0] * 2))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "record.json").write_text("{}")
        fit(folder, data=data)
        found[name] = read_record(folder)["batches"]
    assert list(found["one"]) == ["1", "2", "3"], "of the first epoch, which has four"
    assert found["one"] == found["again"]
    assert not set(found["one"].values()) & set(found["other"].values())


def test_samples_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    found = []
    for workers in (0, 1):
        folder = tmp_path / str(workers)
        folder.mkdir()
        cfg = read_config(PROJECT, [*QUICK, "model=linear", f"data.num_workers={workers}", f"folder={folder}"])
        components = assemble(cfg)
        components.trainer.fit(components.task, components.data)
        found.append(read_ledger(ledger_path(folder)))
    assert found[0] is not None
    assert found[1] is not None
    assert (found[0].rows["samples"] != 0).all()
    assert first_difference(found[0], found[1]) is None


def test_a_digest_depends_on_each_bit_and_on_the_order() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    changed = tensor.clone()
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(0.0))
    same = [tensor, tensor.clone(), tensor.t().contiguous().t()]
    assert len({digest([each]) for each in same}) == 1
    others = [tensor.t(), changed, tensor.bfloat16(), tensor.to_sparse(), tensor.flip(0), nn.Parameter(tensor + 1)]
    assert len({digest([each]) for each in [tensor, *others]}) == 7
    assert digest([tensor, changed]) != digest([changed, tensor])
    assert digest([TwoTensor(tensor, changed)]) == digest([tensor, changed])  # type: ignore[no-untyped-call]
    assert {as_integers(tensor.to(kind)).dtype for kind in (torch.float64, torch.bfloat16, torch.bool)} == {
        torch.int32,
        torch.int16,
        torch.uint8,
    }


def test_a_copy_writes_nothing(tmp_path: Path) -> None:
    copied = pickle.loads(pickle.dumps(StepLedger(tmp_path, every_n_steps=7)))
    assert copied.every_n_steps == 7
    assert copied.folder == tmp_path
    with pytest.raises(ValueError, match="every_n_steps=0"):
        StepLedger(tmp_path, every_n_steps=0)


MODULE = """
import torch
from boltcutter.task.classification import Classification

class OneRank(Classification):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        if self.global_step == 3 and self.global_rank == 1:
            with torch.no_grad():
                next(self.parameters()).add_(1)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ranks_whose_weights_differ_end_the_training(script: Script, tmp_path: Path) -> None:
    (tmp_path / "one_rank.py").write_text(MODULE)
    own, other = "boltcutter.task.classification.Classification", "one_rank.OneRank"
    (tmp_path / "task.yaml").write_text(
        (PROJECT.root / "configs/task/classification.yaml").read_text().replace(own, other)
    )
    command = [*QUICK, "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "callback.ledger.every_n_steps=5"]
    changes = [f"task={tmp_path}/task.yaml", f"folder={tmp_path}/run"]
    done = script("train", *command, *changes, env={"PYTHONPATH": str(tmp_path)})
    lines = [line for line in done.stderr.splitlines() if "replicas" in line]
    assert len(lines) == 1, done.stderr
    assert "after step 5 " in lines[0]
    assert "rank 1 " in lines[0]
    assert "model." in lines[0]
    equal = script("train", *command, f"folder={tmp_path}/equal")
    assert equal.returncode == 0, equal.stderr
    assert ledger_path(tmp_path / "equal", 1).is_file()
