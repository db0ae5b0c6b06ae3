from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler, random_split

from boltcutter.data.hooks import has_no_batch, run_hooks_early, seed_hooks
from boltcutter.data.tabular import Tabular


class Split(L.LightningDataModule):
    """Asks for the module and the number of ranks, and does not expect to be set up twice."""

    def __init__(self, length: int = 20) -> None:
        super().__init__()
        self.length, self.calls = length, list[str]()

    def setup(self, stage: str) -> None:
        assert isinstance(self.trainer, L.Trainer)
        self.calls.append(f"{type(self.trainer.lightning_module).__name__} {self.trainer.world_size} {stage}")
        self.train, self.rest = random_split(range(self.length), [self.length - 5, 5])  # type: ignore[arg-type,var-annotated]

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, drop_last=True)


def trainer(**options: Any) -> L.Trainer:
    plain = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", **plain, **options)


def test_a_random_split_is_the_same_in_each_process_and_drawn_once(  # of which only one sets data up early
) -> None:
    early, late = Split(), Split()
    for data in (early, late):
        seed_hooks(data, 3)
        data.trainer = trainer()
    assert is_overridden("setup", early)
    assert not is_overridden("prepare_data", early)
    run_hooks_early(trainer(), L.LightningModule(), early)
    torch.rand(3)
    early.setup("fit")
    late.setup("fit")
    assert early.rest.indices == late.rest.indices
    assert early.calls == [f"LightningModule 1 {TrainerFn.FITTING}"]  # as Lightning calls it
    early.setup("test")
    assert len(early.calls) == 2


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_each_rank_sets_up_data_once_on_several_devices(strategy: str) -> None:
    data, several = Split(), trainer(devices=2, strategy=strategy)
    seed_hooks(data, 3)
    run_hooks_early(several, L.LightningModule(), data)
    assert not data.calls  # a copy was set up
    assert not hasattr(data, "train")
    data.setup("fit")
    assert data.calls == ["LightningModule 2 fit"]
    with pytest.raises(ValueError, match=r"train split.*data\.batch_size"):
        run_hooks_early(several, L.LightningModule(), Split(8))
    data = Split(8)
    data.file = open(__file__)  # type: ignore[attr-defined]  # noqa: SIM115
    run_hooks_early(several, L.LightningModule(), data)  # it cannot be copied, so only ranks set it up
    data.file.close()  # type: ignore[attr-defined]
    assert not data.calls


class OfRank(Split):
    """A sampler that asks for the rank, as of many examples."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, sampler=DistributedSampler(self.train))


def test_data_that_needs_the_process_group_is_loaded_by_ranks_only() -> None:
    run_hooks_early(trainer(devices=2, strategy="ddp"), L.LightningModule(), OfRank())
    with pytest.raises((ValueError, RuntimeError), match="init_process_group"):
        run_hooks_early(trainer(), L.LightningModule(), OfRank())


def test_data_is_loaded_again_for_the_statistics_of_a_checkpoint() -> None:
    before, after = (Tabular(num_folds=2, fold=fold) for fold in range(2))
    before.setup("fit")
    seed_hooks(after, 0)
    run_hooks_early(trainer(), L.LightningModule(), after)
    after.load_state_dict(before.state_dict())
    assert len(list(after.train_dataloader())) == 2
    assert after.statistics == before.statistics
    assert after.fingerprint() != before.fingerprint()


def test_a_split_without_a_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"train split.*data\.batch_size"):
        run_hooks_early(trainer(), L.LightningModule(), Split(8))


class OfFile(L.LightningDataModule):
    def __init__(self, folder: str, name: str = "") -> None:
        super().__init__()
        self.folder, self.name = folder, name

    def setup(self, stage: str) -> None:
        open(f"{self.folder}/{self.name}" if self.name else self.folder)  # noqa: SIM115


@pytest.mark.parametrize("name", ["", "a.csv"])
def test_a_missing_file_is_named_by_its_setting(name: str) -> None:
    place = f"none/{name}: " if name else ""
    with pytest.raises(ValueError, match=f"^data.folder=none: {place}no such file or directory; correct it$"):
        run_hooks_early(trainer(), L.LightningModule(), OfFile("none", name))


def test_empty_loaders_are_found_in_any_structure() -> None:
    none, some = DataLoader([]), DataLoader([1, 2])  # type: ignore[arg-type,var-annotated]
    assert has_no_batch([none, none])
    assert has_no_batch(CombinedLoader({"a": none}))
    assert not has_no_batch({"a": none, "b": some})
    assert not has_no_batch(CombinedLoader([some]))
    assert not has_no_batch([])


def test_hooks_of_one_object_are_seeded_once_for_several_trainings() -> None:
    class Drawing(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.drawn = torch.rand(1).item()

    data, drawn = Drawing(), []
    for seed in (0, 1, 0):
        seed_hooks(data, seed)
        assert is_overridden("setup", data)
        assert not is_overridden("prepare_data", data)
        data.setup("fit")
        drawn.append(data.drawn)
    assert drawn[0] == drawn[2] != drawn[1]


def test_hooks_that_are_no_methods_are_called_too() -> None:
    class Own(L.LightningModule):
        pass

    task, calls = Own(), list[Any]()
    vars(task).update(prepare_data=partial(calls.append, "prepared"), setup=lambda stage: calls.append(stage))
    seed_hooks(task, 0)
    task.prepare_data()
    task.setup("fit")
    assert calls == ["prepared", "fit"]
