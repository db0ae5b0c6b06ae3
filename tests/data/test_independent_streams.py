"""What datasets, samplers and steps of a training draw, end to end, with loaders of the user."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, random_split

from boltcutter.callback.reseed import EvaluationSeeds, Reseed
from boltcutter.data.hooks import shard_loaders
from boltcutter.data.module import DataModule, Splits

IGNORED = ("does not have many workers", "fork", "is smaller than the logging interval", "will create")
IGNORED += ("You have overridden", "shuffling enabled")
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{text}") for text in IGNORED]


class Drawing(Dataset[Any]):
    """Samples of their index and what each global generator draws."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand((), dtype=torch.float64), random.random(), np.random.rand()])


class Recording(L.LightningModule):
    """Records what it gets and what it draws in each step, as a denoiser does."""

    def __init__(self, loaders: Callable[[str], Any]) -> None:
        super().__init__()
        self.layer, self.loaders, self.seen = torch.nn.Linear(1, 1), loaders, dict[str, list[Any]]()
        self.note("start")

    def note(self, stage: str, batch: Any = None) -> None:
        drawn = [torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()]
        self.seen.setdefault(stage, []).append((batch, drawn))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("transfer")
        return batch

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.note("train", batch)
        return self.layer(torch.ones(1)).sum()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.note("val", batch)

    def train_dataloader(self) -> Any:
        return self.loaders("train")

    def val_dataloader(self) -> Any:
        return self.loaders("val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def make_trainer(**options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "callbacks": []}
    return L.Trainer(**quiet | options)


def fit(loaders: Callable[[str], Any], epochs: int = 2, **options: Any) -> dict[str, list[Any]]:
    L.seed_everything(0, verbose=False)
    trainer = make_trainer(max_epochs=epochs, callbacks=[EvaluationSeeds(0), Reseed(0)], **options)
    shard_loaders(trainer, 0)
    module = Recording(loaders)
    trainer.fit(module)
    return module.seen


def numbers(seen: dict[str, list[Any]]) -> list[float]:
    """All that was drawn: by steps, at transfer, and for samples."""
    found: list[float] = []
    for notes in seen.values():
        for batch, drawn in notes:
            parts = batch.values() if isinstance(batch, dict) else [] if batch is None else [batch]
            found += drawn + [value for part in parts for value in part[:, 1:].flatten().tolist()]
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_and_steps_of_all_stages_draw_different_numbers(workers: int) -> None:
    seen = fit(lambda stage: DataLoader(Drawing(), 4, num_workers=workers), num_sanity_val_steps=0)
    found = numbers(seen)
    validations = [value for batch, drawn in seen["val"][6:] for value in (*drawn, *batch[:, 1:].flatten().tolist())]
    # Each validation draws the same numbers, and so does what follows the last transfer before it.
    assert len(set(found)) >= len(found) - len(validations) - 3 * 6
    trained = [value for batch, drawn in seen["train"] for value in (*drawn, *batch[:, 1:].flatten().tolist())]
    assert len(set(trained)) == len(trained) == 2 * 6 * 3 * 5
    assert not set(trained) & {value for batch, _ in seen["val"] for value in batch[:, 1:].flatten().tolist()}
    assert not set(trained) & {value for _, drawn in seen["val"] + seen["start"] + seen["transfer"] for value in drawn}


@pytest.mark.parametrize("shuffle", ["shuffle", "weighted"])
def test_two_loaders_draw_different_orders_and_samples(shuffle: str) -> None:
    def loaders(stage: str) -> Any:
        sampler = WeightedRandomSampler([1.0] * 24, 24) if shuffle == "weighted" else None
        made = [DataLoader(Drawing(), 4, shuffle=sampler is None, sampler=sampler) for _ in range(2)]
        return dict(zip("ab", made, strict=True)) if stage == "train" else made

    seen = fit(loaders, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1)["train"]
    pairs = [torch.cat([batch[name] for batch, _ in seen]) for name in "ab"]
    assert (pairs[0][:, 0] == pairs[1][:, 0]).float().mean() < 0.3
    assert not torch.equal(pairs[0][:24, 0], pairs[0][24:, 0])
    assert len(torch.cat(pairs)[:, 1:].unique()) == 2 * 2 * 24 * 3


def test_loaders_that_a_data_module_makes_twice_draw_different_orders() -> None:
    class Twice(DataModule):
        shape, num_classes = (4,), 2

        def load(self) -> Splits:
            return Splits(Drawing(), Drawing())

        def train_dataloader(self) -> Any:
            return {name: self.loader("train", shuffle=True) for name in "ab"}

    data = Twice(batch_size=4)
    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    shard_loaders(trainer, 0)
    module = Recording(lambda stage: None)
    trainer.fit(module, datamodule=data)
    pairs = [torch.cat([batch[name] for batch, _ in module.seen["train"]]) for name in "ab"]
    assert (pairs[0][:, 0] == pairs[1][:, 0]).float().mean() < 0.5
    assert len(torch.cat(pairs)[:, 1].unique()) == 48


def prepared(loader: Any, mode: RunningStage = RunningStage.TRAINING, rank: int = 0, world_size: int = 1) -> Any:
    trainer = make_trainer()
    shard_loaders(trainer, 3)
    kwargs = {"rank": rank, "num_replicas": world_size}
    fake: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs, is_global_zero=not rank)
    trainer._accelerator_connector.strategy = fake
    return trainer._data_connector._prepare_dataloader(loader, shuffle=False, mode=mode)


def test_two_ranks_draw_different_numbers_for_samples() -> None:
    found = [torch.cat(list(prepared(DataLoader(Drawing(), 4), rank=rank, world_size=2))) for rank in (0, 1)]
    assert len(torch.cat(found)[:, 1:].unique()) == 24 * 3


class Holding(Dataset[Any]):
    """Draws from a generator that its transform holds."""

    def __init__(self, kind: str) -> None:
        of_numpy, of_torch = np.random.default_rng(0), torch.Generator()
        kinds: dict[str, Callable[[], float]] = {
            "method": of_numpy.random,
            "numpy": lambda: of_numpy.random(),
            "legacy": np.random.RandomState(0).random_sample,
            "python": random.Random(0).random,
            "torch": lambda: torch.rand((), generator=of_torch).item(),
        }
        self.transform = SimpleNamespace(transforms=[SimpleNamespace(draw=kinds[kind])])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.transform.transforms[0].draw()], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["method", "numpy", "legacy", "python", "torch"])
@pytest.mark.parametrize("split", [False, True])
def test_generators_of_a_dataset_repeat_in_no_worker_and_epoch(kind: str, split: bool) -> None:
    found = []
    for workers in (0, 2):
        whole = Holding(kind)
        dataset = random_split(whole, [8, 0])[0] if split else whole
        loader = prepared(DataLoader(dataset, 2, num_workers=workers, shuffle=False))
        drawn = []
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            drawn += [value for batch in loader for value in batch[:, 1].tolist()]
        assert len(set(drawn)) == 16
        found.append(drawn)
    assert split or found[0] == found[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_of_a_native_dataset_repeat_in_no_worker_and_epoch(workers: int) -> None:
    class Native(DataModule):
        shape, num_classes = (2,), 2

        def load(self) -> Splits:
            return Splits(Holding("method"), Holding("method"))

    data = Native(batch_size=2, num_workers=workers)
    drawn = []
    for epoch in range(2):
        loader: Any = data.loader("train", shuffle=True)
        loader.epoch_sampler.set_epoch(epoch)
        drawn += [value for batch in loader for value in batch[:, 1].tolist()]
    drawn += [value for batch in data.loader("val") for value in batch[:, 1].tolist()]
    assert len(set(drawn)) == 24


def test_a_generator_that_cannot_be_seeded_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    dataset: Any = Drawing()
    dataset.generator = random.SystemRandom()
    prepared(DataLoader(dataset, 4))
    assert "SystemRandom cannot be seeded" in capsys.readouterr().out


class Stream(IterableDataset[Any]):
    """Samples of their number and what they draw; ``kind`` says who divides them over workers."""

    def __init__(self, kind: str = "", length: int = 16) -> None:
        self.kind, self.length, self.generator = kind, length, np.random.default_rng(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.length).tolist() if "shuffled" in self.kind else list(range(self.length))
        if "own" in self.kind:
            order = self.generator.permutation(self.length).tolist()
        if "divided" in self.kind and (info := torch.utils.data.get_worker_info()):
            order = order[info.id :: info.num_workers]
        for index in order:
            yield torch.tensor([index, torch.rand((), dtype=torch.float64), self.generator.random()])


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


def divide(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.length //= info.num_workers


@pytest.mark.parametrize(
    ("cls", "kind", "workers"),
    [
        (Sized, "shuffled", 3),
        (Stream, "own divided", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Sized, "shuffled", 0),
                (Stream, "", 2),
                (Sized, "divided", 2),
                (Stream, "shuffled divided", 2),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_stream_gives_each_sample_once(cls: Any, kind: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in (RunningStage.TRAINING, RunningStage.TESTING):
        loader = prepared(DataLoader(cls(kind), 2, num_workers=workers), mode)
        orders = []
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            found = torch.cat(list(loader))
            assert sorted(found[:, 0].tolist()) == list(range(16))
            # No two workers or batches draw the same, but the first samples where an order is drawn with them.
            assert len(found[:, 1:].unique()) >= 32 - 2 * (workers - 1) * (kind in ("shuffled divided", "own divided"))
            orders.append(found[:, 0].tolist())
        assert (orders[0] != orders[1]) == (mode == RunningStage.TRAINING and kind not in ("", "divided"))
    repeats = workers > 0 and "divided" not in kind
    assert (
        capsys.readouterr().out.count(f"all {workers} workers read the same samples of {cls.__name__}") == 2 * repeats
    )


def test_a_stream_that_workers_read_alike_yields_what_one_process_does() -> None:
    found = [
        torch.cat(list(prepared(DataLoader(Stream("shuffled"), 3, num_workers=n, drop_last=True)))) for n in (0, 1, 2)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    unbatched = [torch.stack(list(prepared(DataLoader(Stream(), None, num_workers=n)))) for n in (0, 2)]
    assert torch.equal(*unbatched)


def test_a_stream_that_the_initialization_of_workers_divides_is_left_as_it_is() -> None:
    """It begins alike in all workers, which only ``is_sharded`` can say."""

    class Ranges(Stream):
        begin = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from (torch.tensor([float(self.begin + index)]) for index in range(self.length))

    def shift(worker: int) -> None:
        divide(worker)
        info: Any = torch.utils.data.get_worker_info()
        info.dataset.begin = worker * info.dataset.length

    for declared in (False, True):
        dataset: Any = Ranges()
        dataset.is_sharded = declared
        loader = prepared(DataLoader(dataset, 2, num_workers=2, worker_init_fn=shift))
        assert sorted(torch.cat(list(loader)).flatten().tolist()) == list(range(16))
    assert loader.dataset is dataset


def test_a_loader_with_a_state_whose_workers_read_alike_is_refused() -> None:
    class Stateful(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    for mode in (RunningStage.TRAINING, RunningStage.VALIDATING):
        with pytest.raises(ValueError, match="all 2 workers read the same samples of Stream"):
            prepared(Stateful(Stream(), 2, num_workers=2), mode)
        prepared(Stateful(Stream("divided"), 2, num_workers=2), mode)


class Endless(Sampler[int]):
    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(24).tolist()


def test_a_sampler_that_never_ends_trains_as_many_batches_as_its_length_says() -> None:
    seen = fit(lambda stage: DataLoader(Drawing(), 4, sampler=Endless()), limit_val_batches=0)
    assert len(seen["train"]) == 12
    epochs = [torch.cat([batch[:, 0] for batch, _ in seen["train"][i : i + 6]]).tolist() for i in (0, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]


def test_a_native_sampler_that_never_ends_draws_as_many_samples_as_its_length_says() -> None:
    class Native(DataModule):
        shape, num_classes = (4,), 2

        def load(self) -> Splits:
            return Splits(Drawing(), Drawing())

        def sampler(self, dataset: Any) -> Any:
            return Endless()

    found = torch.cat(list(Native(batch_size=4).train_dataloader()))
    assert sorted(found[:, 0].tolist()) == list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
def test_repeated_draws_of_a_sample_are_augmented_differently(workers: int) -> None:
    class Weighted(DataModule):
        shape, num_classes = (4,), 2

        def load(self) -> Splits:
            return Splits(Drawing(64), Drawing())

        def sampler(self, dataset: Any) -> Any:
            return WeightedRandomSampler([1.0] * 4 + [0.0] * 60, 64)

    def draw(rank: int, world_size: int, done: int = 0) -> list[Any]:
        data = Weighted(batch_size=16, num_workers=workers)
        kwargs = {"rank": rank, "num_replicas": world_size}
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs=kwargs))  # type: ignore[assignment]
        loader = data.train_dataloader()
        loader.epoch_sampler.start = done
        return [batch.tolist() for batch in loader]

    whole = draw(0, 1)
    samples = [tuple(sample) for batch in whole for sample in batch]
    assert len({index for index, *_ in samples}) == 4
    assert len({value for _, *drawn in samples for value in drawn}) == 64 * 3
    assert draw(0, 1, done=2) == whole[2:]
    ranks = [draw(rank, 2) for rank in (0, 1)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole


class Following(Sampler[int]):
    """Draws the sample that training wants next."""

    def __init__(self) -> None:
        self.wanted = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield self.wanted


class Feedback(Recording):
    """Tells its sampler what to draw next, and saves that."""

    def __init__(self, workers: int) -> None:
        self.sampler = Following()
        super().__init__(lambda stage: DataLoader(Drawing(), 2, sampler=self.sampler, num_workers=workers))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.sampler.wanted = (self.sampler.wanted + 5) % 24
        return super().training_step(batch, index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["wanted"] = self.sampler.wanted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.sampler.wanted = checkpoint["wanted"]


def fit_and_save(module: Recording, folder: Path, resume: Path | None = None) -> list[Any]:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks: list[Any] = [EvaluationSeeds(0), Reseed(0), saving]
    trainer = make_trainer(max_epochs=2, callbacks=callbacks, limit_val_batches=0, enable_checkpointing=True)
    shard_loaders(trainer, 0)
    trainer.fit(module, ckpt_path=resume, weights_only=True)
    return [(batch.tolist(), drawn) for batch, drawn in module.seen["train"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*not resumable", "ignore:The dirpath has")
def test_a_sampler_that_follows_training_resumes_with_what_it_has_drawn(workers: int, tmp_path: Path) -> None:
    whole = fit_and_save(Feedback(workers), tmp_path)
    if not workers:
        assert [batch[0][0] for batch, _ in whole] == [5 * number % 24 for number in range(12)]
    for step in (2, 7):
        assert fit_and_save(Feedback(workers), tmp_path / f"rest{step}", tmp_path / f"step={step}.ckpt") == whole[step:]


class Transferred(Recording):
    """Augments batches on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + torch.rand(batch.shape)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*not resumable", "ignore:The dirpath has")
def test_augmentation_on_the_device_resumes_exactly(workers: int, tmp_path: Path) -> None:
    def module() -> Recording:
        return Transferred(lambda stage: DataLoader(Drawing(), 4, shuffle=True, num_workers=workers))

    whole = fit_and_save(module(), tmp_path)
    assert len({value for batch, _ in whole for sample in batch for value in sample}) == 2 * 24 * 4
    for step in (3, 6):
        assert fit_and_save(module(), tmp_path / f"rest{step}", tmp_path / f"step={step}.ckpt") == whole[step:]


@pytest.mark.filterwarnings("ignore:.*not resumable", "ignore:The dirpath has")
def test_a_batch_size_that_changes_counts_from_the_next_epoch(tmp_path: Path) -> None:
    class Growing(Recording):
        def __init__(self) -> None:
            self.loader: Any = DataLoader(Drawing(), 2)
            super().__init__(lambda stage: self.loader)

        def on_train_epoch_start(self) -> None:
            self.loader.batch_sampler.batch_size = 2 * (1 + self.current_epoch)

    whole = fit_and_save(Growing(), tmp_path)
    assert [len(batch) for batch, _ in whole] == [2] * 12 + [4] * 6
    assert fit_and_save(Growing(), tmp_path / "rest", tmp_path / "step=14.ckpt") == whole[14:]


def test_validation_samplers_are_told_the_epoch() -> None:
    told = []

    class Telling(Endless):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(24))

    def loaders(stage: str) -> Any:
        return DataLoader(Drawing(), 4, sampler=Telling() if stage == "val" else None)

    fit(loaders, num_sanity_val_steps=0)
    assert sorted(set(told)) == [0, 1]


def test_attributes_of_a_loader_are_those_of_the_user() -> None:
    class Own:
        """A loader with a position."""

        def __init__(self) -> None:
            self.dataset, self.position = Drawing(), 0

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Any]:
            for self.position in range(6):
                yield torch.stack([self.dataset[4 * self.position + index] for index in range(4)])

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    for make in (Own, lambda: DataLoader(Drawing(), 4, sampler=Endless()), lambda: DataLoader(Stream(length=24), 4)):
        trainer = make_trainer(max_epochs=1, limit_val_batches=0, limit_train_batches=2)
        shard_loaders(trainer, 0)
        trainer.fit(Recording(lambda stage, make=make: make()))  # type: ignore[misc]
        loader: Any = trainer.train_dataloader
        assert getattr(loader.dataset, "length", 0) == 24
        assert make is Own or isinstance(loader.sampler, Endless) or not isinstance(loader, DataLoader)
