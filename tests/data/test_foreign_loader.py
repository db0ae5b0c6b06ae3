import collections
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from conftest import ROOT, Script, max_difference
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from boltcutter.data.foreign_loader import RankBatches, asks_for_rank, shard_loader
from boltcutter.data.hooks import shard_loaders

QUIET = ["logger=null", "report=false", "model=linear", "data=digits", "scheduler=constant", "trainer.accelerator=cpu"]
QUIET += ["data._target_=loaders.NumbersDataModule", "data.shape=[4]", "data.num_classes=3"]


def sharded(loader: Any, *, epoch: int = 0, done: int = 0, **settings: Any) -> DataLoader[Any]:
    """One rank's batches after the ``done`` batches of an epoch."""
    found, sampler = shard_loader(loader, **settings)
    sampler.epoch, sampler.start = epoch, done
    return found


def parts(loader: Any, world_size: int, *, training: bool = True, **settings: Any) -> list[list[list[int]]]:
    """The batches of each rank."""
    common = {"seed": 3, "world_size": world_size, "training": training, **settings}
    return [[b.tolist() for b in sharded(loader, rank=rank, **common)] for rank in range(world_size)]


def samples(ranks: list[list[list[int]]]) -> list[int]:
    return sorted(index for rank in ranks for batch in rank for index in batch)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_together_yield_the_samples_of_one_process(shuffle: bool) -> None:
    loader: Any = DataLoader(range(45), batch_size=4, shuffle=shuffle)  # type: ignore[arg-type]
    ranks = parts(loader, 2)
    assert len(ranks[0]) == len(ranks[1]) == len(sharded(loader, seed=3, rank=1, world_size=2, training=True)) == 6
    counts = collections.Counter(samples(ranks))
    assert set(counts) == set(range(45))
    assert sorted(counts.values()) == [1] * 44 + [2]
    assert ranks == parts(loader, 2)
    assert (ranks == parts(loader, 2, epoch=1)) is not shuffle
    assert [b.tolist() for b in loader] != ranks[0]  # the loader itself is as it was


@pytest.mark.parametrize("length", [1, 2, 45])
def test_evaluation_counts_each_sample_once(length: int) -> None:
    ranks = parts(DataLoader(range(length), batch_size=4), 2, training=False)  # type: ignore[arg-type]
    assert all(ranks)
    assert samples(ranks) == ([0, 0] if length == 1 else list(range(length)))


def test_weighted_samples_are_drawn_once_for_all_ranks() -> None:
    sampler = WeightedRandomSampler([1.0 + index for index in range(45)], 40, replacement=False)
    ranks = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader: Any = DataLoader(range(45), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
        ranks.append([b.tolist() for b in sharded(loader, seed=3, rank=rank, world_size=2, training=True)])
    assert len(set(samples(ranks))) == 40


def test_batches_of_a_custom_batch_sampler_are_sharded() -> None:
    class Buckets(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[index, index + 10] for index in range(5)])

        def __len__(self) -> int:
            return 5

    loader: Any = DataLoader(range(20), batch_sampler=Buckets(SequentialSampler(range(20)), 2, False))  # type: ignore[arg-type]
    assert parts(loader, 2, training=False) == [[[0, 10], [2, 12], [4, 14]], [[1, 11], [3, 13]]]
    assert len(parts(loader, 2)[1]) == 3


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(7)])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.filterwarnings("ignore:.*fork"))])
def test_an_epoch_resumes_at_any_batch(generator: torch.Generator | None, workers: int) -> None:
    loader: Any = DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator, num_workers=workers)  # type: ignore[arg-type]
    common: dict[str, Any] = {"seed": 3, "rank": 1, "world_size": 2, "training": True, "epoch": 2}
    whole = [b.tolist() for b in sharded(loader, **common)]
    torch.rand(5)
    rest = sharded(loader, **common, done=4)
    assert len(rest) == 6
    assert [b.tolist() for b in rest] == whole[4:]
    _set_sampler_epoch(rest, 3)
    assert len(list(rest)) == 6


@pytest.mark.filterwarnings("ignore:.*not resumable", "ignore:.*does not have many workers", "ignore:The dirpath has")
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
def test_a_shorter_loader_resumes_where_it_was(tmp_path: Path, mode: str) -> None:
    def loaders() -> CombinedLoader:
        long, short = (DataLoader(range(n), 4, shuffle=True) for n in (24, 10))  # type: ignore[arg-type,var-annotated]
        return CombinedLoader({"long": long, "short": short}, mode)

    class Recording(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), list[Any]()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            self.seen.append({name: None if part is None else part.tolist() for name, part in batch.items()})
            return self.layer(torch.ones(1)).sum()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(folder: Path, resume: Path | None = None) -> list[Any]:
        common: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=saving, **common)
        shard_loaders(trainer, 0)
        module = Recording()
        trainer.fit(module, loaders(), ckpt_path=resume, weights_only=True)
        return module.seen

    whole = fit(tmp_path / "whole")
    assert len({str(batch["short"]) for batch in whole}) == 3 + (mode == "max_size")
    for step in (2, 4, 5):
        assert fit(tmp_path / str(step), tmp_path / "whole" / f"step={step}.ckpt") == whole[step:]


def test_a_loader_with_a_positional_batch_size_is_predicted(tmp_path: Path) -> None:
    class Module(L.LightningModule):
        def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
            return batch

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    shard_loaders(trainer, 0)
    found: Any = trainer.predict(Module(), DataLoader(torch.arange(6.0), 4))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5]]


class Noisy:
    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(1))


def test_a_stateful_loader_is_saved_after_training() -> None:
    from types import SimpleNamespace

    from boltcutter.data.foreign_loader import StatefulLoader

    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {"position": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    progress = SimpleNamespace(current=SimpleNamespace(processed=3))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress), _data_fetcher=None)
    loader = StatefulLoader.__new__(StatefulLoader)
    loader.loader, loader.trainer = Loader(), SimpleNamespace(fit_loop=loop)  # type: ignore[assignment]
    assert loader.state_dict() == {"position": 3}


def test_an_infinite_sampler_is_not_exhausted() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            yield from iter(int, 1)

    sampler = RankBatches(Endless(), seed=0, rank=0, world_size=2, training=True)
    assert next(iter(sampler)) == 0


def test_a_sampler_keeps_its_own_generator() -> None:
    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    orders = set()
    for epoch in (0, 0, 1):
        sampler = RankBatches(RandomSampler(range(9), generator=generator), seed=0, rank=0, world_size=1, training=True)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 2
    assert torch.equal(generator.get_state(), before)


def test_a_sampler_is_told_the_epoch_as_often_as_by_lightning() -> None:
    class Told(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    epochs, place = list[int](), {"seed": 0, "rank": 0, "world_size": 1, "training": True}
    loader = sharded(DataLoader(range(8), 4, sampler=Told(range(8))), **place)  # type: ignore[arg-type]
    for epoch in range(2):
        _set_sampler_epoch(loader, epoch)
        list(loader)
    assert epochs == [0, 1]
    list(sharded(DataLoader(range(8), 4, sampler=Told(range(8))), epoch=5, **place))  # type: ignore[arg-type]
    assert epochs == [0, 1, 5]  # which no one else has told it


@pytest.mark.filterwarnings("ignore")  # of Lightning, about the small loader
def test_each_trial_of_a_batch_size_begins_with_the_first_batch(tmp_path: Path) -> None:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.weight = 2, torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            trained.append(batch.tolist())
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(range(8), self.batch_size)  # type: ignore[arg-type]

    trained: list[list[int]] = []
    finder = BatchSizeFinder(max_trials=3, steps_per_trial=1)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[finder], default_root_dir=tmp_path, **options)
    shard_loaders(trainer, 0)
    trainer.fit(Module())
    assert trained == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]


def changing(kind: str) -> tuple[Any, list[Any]]:
    """A sampler, and what training sets after each epoch."""
    later = [list(range(first, 24, 2)) * 2 for first in (0, 1)]
    if kind == "indices":
        return SubsetRandomSampler(range(24)), later
    weights = [torch.zeros(24).index_fill_(0, torch.tensor(chosen), 1.0) for chosen in later]
    return WeightedRandomSampler([1.0] * 24, 24), weights


@pytest.mark.parametrize("kind", ["weights", "indices"])
@pytest.mark.parametrize("done", [5, 0])
def test_what_training_changes_of_a_sampler_is_resumed(kind: str, done: int) -> None:
    sampler, later = changing(kind)
    whole = RankBatches(sampler, seed=0, rank=0, world_size=1, training=True)
    assert whole.state_dict()["changes"] is None
    list(whole)
    assert whole.state_dict()["changes"] is None
    setattr(sampler, kind, later[0])
    whole.set_epoch(1)
    batches = iter(whole)
    for _ in range(done or 24):
        next(batches)
    setattr(sampler, kind, later[1])  # of the next epoch
    saved, rest = whole.state_dict(), list(batches)
    whole.set_epoch(2)
    following = list(whole)
    assert set(following) <= set(range(1, 24, 2))

    fresh, _ = changing(kind)
    resumed = RankBatches(fresh, seed=0, rank=0, world_size=1, training=True)
    resumed.epoch, resumed.start = 1 if done else 2, done
    resumed.restore([torch.load(as_file(saved), weights_only=True)])
    if done:
        assert list(resumed) == rest
        assert resumed.state_dict()["changes"] is not None
        resumed.set_epoch(2)
    assert list(resumed) == following


def as_file(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def notes(folder: Path, rank: int, stage: str) -> list[list[str]]:
    lines = (line.split() for line in (folder / str(rank)).read_text().splitlines())
    return [line[1:] for line in lines if line[0] == stage]


def indices(lines: list[list[str]], epoch: int | None = None) -> list[int]:
    return [int(index) for line in lines if epoch is None or int(line[0]) == epoch for index in line[1:-1]]


def train(script: Script, folder: Path, *words: str, ranks: int = 0, ends: int = 0) -> Any:
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    settings = [f"folder={folder}", "trainer.max_epochs=2", f"+data.log_dir={folder}/notes", *QUIET, *words]
    devices = [f"trainer.devices={ranks}", "trainer=ddp"] if ranks else []
    env = {"PYTHONPATH": str(ROOT / "tests" / "third_party")}
    if ends:
        env["STOP_AT"] = "15"  # the second epoch's fourth batch, or its tenth
    done = script("train", *devices, *settings, ranks=ranks, env=env)
    assert done.returncode == ends, done.stderr
    return done


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("shuffled", "buckets", "unbatched", "distributed")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weighted", "stream", "sharded", *SLOW])
def test_two_ranks_train_different_samples(script: Script, tmp_path: Path, kind: str) -> None:
    done = train(script, tmp_path, f"+data.kind={kind}", ranks=2)
    for epoch in (0, 1):
        first, second = (indices(notes(tmp_path / "notes", rank, "train"), epoch) for rank in (0, 1))
        assert abs(len(first) - len(second)) < 4  # equally many batches
        assert len(set(first) & set(second)) <= (4 if kind in ("buckets", "unbatched") else 1)
        assert len({*first, *second}) >= (28 if kind == "sharded" else 40)
    tested = [indices(notes(tmp_path / "notes", rank, "test")) for rank in (0, 1)]
    assert sorted(tested[0] + tested[1]) == list(range(9 if kind == "stream" else 45))
    assert done.stdout.count("has no random access") == (kind in ("stream", "sharded"))


@pytest.mark.parametrize(
    ("kind", "ranks", "workers"),
    [
        pytest.param("weighted", 2, 0, marks=pytest.mark.slow),
        ("stream", 0, 0),
        pytest.param("stream", 2, 0, marks=pytest.mark.slow),
        pytest.param("generator", 0, 2, marks=pytest.mark.slow),
        pytest.param("buckets", 0, 0, marks=pytest.mark.slow),
        pytest.param("unbatched", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_a_third_party_loader_is_resumed_in_mid_epoch(
    script: Script, tmp_path: Path, kind: str, ranks: int, workers: int
) -> None:
    settings = [f"+data.kind={kind}", f"data.num_workers={workers}", "trainer.max_epochs=3", "test=false"]
    if kind != "stream":
        settings += ["scheduler=onecycle"]  # asks for the loader before the checkpoint's position is restored
    train(script, tmp_path / "whole", *settings, ranks=ranks)
    train(script, tmp_path / "cut", *settings, ranks=ranks, ends=143)
    env = {"PYTHONPATH": str(ROOT / "tests" / "third_party")}
    done = script("train", f"resume={tmp_path / 'cut'}", ranks=ranks, env=env)
    assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "whole", tmp_path / "cut") == 0


class ByRank(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        import torch.distributed as dist

        return iter(range(dist.get_rank(), 8, dist.get_world_size()))


class ByVariable(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), 8, 2))


class Plain(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])


def test_samplers_that_may_shard_themselves_are_found_by_their_code() -> None:
    assert asks_for_rank(ByRank())
    assert asks_for_rank(ByVariable([1]))
    for sampler in (Plain([1]), RandomSampler([1]), BatchSampler(RandomSampler([1]), 1, drop_last=False), None):
        assert not asks_for_rank(sampler)
