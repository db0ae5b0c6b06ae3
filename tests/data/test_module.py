import io
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, TensorDataset, WeightedRandomSampler

from boltcutter.data.digits import Digits
from boltcutter.data.loader import Pair
from boltcutter.data.module import BatchedTensorDataset, DataModule, Splits
from boltcutter.data.sampler import Batch
from boltcutter.data.synthetic import Synthetic

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
WORKERS = [  # what Python and torch say about workers at all, or on one core
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Numbers(DataModule):
    """Samples that are their own index; ``bad`` cannot be read."""

    def __init__(
        self, num_samples: int = 23, *, batch_size: int = 4, seed: int = 0, num_workers: int = 0, bad: int = -1
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        self.num_samples, self.bad = num_samples, bad

    def load(self) -> Splits:
        self.statistics = {"target_mean": [1.5]}
        numbers = torch.arange(self.num_samples)
        return Splits(
            Fragile(numbers, numbers, self.bad),
            BatchedTensorDataset(numbers, numbers),
            BatchedTensorDataset(numbers, numbers),
        )

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        raise NotImplementedError


class Fragile(BatchedTensorDataset):
    def __init__(self, inputs: Tensor, targets: Tensor, bad: int) -> None:
        super().__init__(inputs, targets)
        self.bad = bad

    def __getitems__(self, batch: Batch) -> Pair:
        if self.bad in batch:
            raise ValueError(f"sample {self.bad}: damaged; replace it")
        return super().__getitems__(batch)


class Unnamed(Numbers):
    """Three classes without names."""

    num_classes = 3

    def __init__(self, classes: list[str] | None = None) -> None:
        DataModule.__init__(self, classes=classes)
        self.num_samples, self.bad = 23, -1


def seen(loader: Any, count: int | None = None) -> list[list[int]]:
    """The inputs of the next batches."""
    return [inputs.tolist() for inputs, _ in itertools.islice(loader, count)]


def saved(module: DataModule) -> dict[str, Any]:
    """A module's state after a checkpoint on disk that is read the safe way."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=WORKERS)])
def test_loaders_yield_each_sample_once(num_workers: int) -> None:
    data = Numbers(num_workers=num_workers)
    assert [i for batch in seen(data.val_dataloader()) for i in batch] == list(range(23))
    assert [i for batch in seen(data.test_dataloader()) for i in batch] == list(range(23))
    train = data.train_dataloader()
    first = seen(train)
    assert len(train) == len(first) == train.num_yielded == 5
    assert len({i for batch in first for i in batch}) == 20
    train.sampler.set_epoch(1)
    assert seen(train) != first
    train.sampler.set_epoch(0)
    assert seen(train) == first


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=WORKERS)])
def test_a_checkpoint_resumes_at_the_next_sample(num_workers: int) -> None:
    whole = seen(Numbers().train_dataloader())
    for done in range(5):
        before = Numbers(num_workers=num_workers)
        assert seen(before.train_dataloader(), done) == whole[:done]
        after = Numbers(num_workers=num_workers)
        after.load_state_dict(saved(before))
        assert after.state_dict() == before.state_dict()  # saved again before any training
        assert seen(after.train_dataloader()) == whole[done:]
        assert after.statistics == {"target_mean": [1.5]}


def test_data_with_other_classes_than_in_training_are_refused() -> None:
    before, same, other = Digits(), Digits(), Digits()
    other.classes = [*other.classes[1:], "0"]
    same.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match=r"^data: the classes are 1, 2, .* and were 0, 1, .* in training"):
        other.load_state_dict(before.state_dict())
    other.classes = []  # of data that are not set up, as in a prediction
    other.load_state_dict(before.state_dict())
    assert other.classes == before.classes


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda **names: Digits(**names), [*"0123456789"]),
        (lambda **names: Synthetic(num_classes=3, **names), [*"012"]),
        (lambda **names: Unnamed(**names), []),
    ],
)
def test_given_names_replace_those_of_the_classes(make: Any, own: list[str]) -> None:
    names = ["cat", "dog", *"abcdefgh"][: len(own) or 3]
    data = make(classes=names)
    data.setup("fit")
    assert data.classes == names
    data.splits = None  # as of a checkpoint with other statistics
    data.setup("fit")
    assert data.classes == names
    assert data.state_dict().get("classes", []) == own
    for given, expected in ((names, names), (None, own)):
        for state in (data.state_dict(), {"statistics": {}, "classes": given or own}):  # of a checkpoint, of an export
            after = make(classes=given)
            after.load_state_dict(state)
            assert after.classes == expected
            after.setup("test")
            assert after.classes == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": ["a", "b"]}, r"^data.classes=\[a,b\]: 2 names, but the data has 3 classes; give as many"),
        ({"classes": [*"abcdef"]}, r"^data.classes=\[a,b,c,d,e,…\]: 6 names, but the data has 3 classes"),
        ({"classes": []}, r"^data.classes=\[\]: 0 names, but the data has 3 classes"),
        ({"classes": ["a", "b", "a"]}, r"^data.classes: 'a' is the name of two classes"),
        ({"classes": [*"abc"], "kind": "regression"}, r"^data.classes=\[a,b,c\]: 3 names, but the data has no classes"),
    ],
)
def test_names_that_do_not_fit_the_classes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Synthetic(num_classes=3, **settings).setup("fit")


def test_position_counts_samples_so_that_ranks_and_batch_size_may_change() -> None:
    before = Numbers(24)
    whole = [i for batch in seen(before.train_dataloader()) for i in batch]
    seen(before.train_dataloader(), 4)
    state = saved(before)
    after = Numbers(24, batch_size=8)
    after.resume_exact = False
    after.load_state_dict(state)
    assert [i for batch in seen(after.train_dataloader()) for i in batch] == whole[16:]
    ranks = []
    for rank in range(2):
        part = Numbers(24)
        part.trainer = on_rank(rank, 2)
        part.load_state_dict(state)
        ranks.append(seen(part.train_dataloader()))
    assert [i for pair in zip(*ranks, strict=True) for half in pair for i in half] == whole[16:]


def test_a_finished_epoch_is_not_repeated() -> None:
    before = Numbers()
    whole = seen(before.train_dataloader())
    after = Numbers()
    seen(before.train_dataloader())
    after.load_state_dict(saved(before))
    assert seen(after.train_dataloader()) == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, r"data: seed=1, but the checkpoint was saved with 0; restore it, or set resume_exact=false"),
        ({"num_samples": 24}, r"data: num_samples=24, but the checkpoint was saved with 23"),
        ({"batch_size": 3}, r"data: batch_size=3, but the checkpoint was saved with 4"),
    ],
)
def test_another_order_is_an_error_if_resume_is_exact(settings: dict[str, int], message: str) -> None:
    before = Numbers()
    seen(before.train_dataloader(), 2)
    after = Numbers(**settings)
    after.load_state_dict(saved(before))
    with pytest.raises(ValueError, match=message):
        after.train_dataloader()
    after.resume_exact = False
    fresh = seen(Numbers(**settings).train_dataloader())
    assert seen(after.train_dataloader()) == fresh[8 // after.batch_size :]


class Recorder(L.LightningModule):
    """Keeps what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Linear(1, 1), list[list[int]]()

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return self.net(batch[0].float().reshape(-1, 1)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Saver(L.Callback):
    """Saves within training, after as many steps as the file says."""

    def __init__(self, files: list[Path]) -> None:
        self.files = {int(file.stem): file for file in files}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.files:
            trainer.save_checkpoint(self.files[trainer.global_step])


def fit(steps: int, folder: Path, resume: Path | None = None, data: Any = None, **settings: Any) -> list[list[int]]:
    """Batches of a training that saves after steps 3, 7 and 10, and when it is over."""
    model = Recorder()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    saver = Saver([folder / f"{step}.ckpt" for step in (3, 7, 10)])
    trainer = L.Trainer(accelerator="cpu", callbacks=[saver], **quiet, **({"max_steps": steps} | settings))
    trainer.fit(model, datamodule=data or Numbers(), ckpt_path=resume)
    trainer.save_checkpoint(folder / "end.ckpt")
    return model.seen


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")  # Lightning on cores, and torch
def test_lightning_resumes_at_the_next_sample(tmp_path: Path) -> None:
    whole = fit(15, tmp_path)
    assert whole[:5] != whole[5:10]
    for step in (3, 7, 10):
        (tmp_path / "again").mkdir(exist_ok=True)
        assert fit(15, tmp_path / "again", tmp_path / f"{step}.ckpt") == whole[step:]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")
def test_an_epoch_interrupted_by_max_steps_is_completed_later(tmp_path: Path) -> None:
    whole = fit(10, tmp_path)
    assert fit(7, tmp_path) == whole[:7]
    assert fit(10, tmp_path, tmp_path / "end.ckpt") == whole[7:]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.6},
        {"overfit_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
        {"limit_train_batches": 4, "reload_dataloaders_every_n_epochs": 2},
    ],
    ids=str,
)
def test_resume_is_exact_for_all_trainer_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    epochs = {"max_steps": -1, "max_epochs": 5}
    whole = fit(-1, tmp_path, **epochs, **settings)
    length = 5 if "limit_train_batches" not in settings and "overfit_batches" not in settings else len(whole) // 5
    assert len(whole) == 5 * length
    assert (whole[:length] == whole[length : 2 * length]) is ("overfit_batches" in settings)
    for step in (3, 7, 10):
        (tmp_path / "again").mkdir(exist_ok=True)
        assert fit(-1, tmp_path / "again", tmp_path / f"{step}.ckpt", **epochs, **settings) == whole[step:]


class Plain(Dataset[Tensor]):
    """Samples of random numbers beside their index."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.tensor([float(index), *torch.rand(2), random.random()]), float(np.random.rand())


class Streamed(IterableDataset[tuple[Tensor, float]]):
    """Samples in an order of each epoch; with ``state``, from where it stopped."""

    def __init__(self, *, state: bool, length: int = 23) -> None:
        self.place, self.read, self.length = 0, 0, length
        if state:
            self.state_dict = lambda: {"place": self.place}
            self.load_state_dict = self._load

    def _load(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[tuple[Tensor, float]]:
        for index in range(self.place, self.length):
            self.place, self.read = index + 1, self.read + 1
            yield torch.tensor([float(index), *torch.rand(2), random.random()]), float(np.random.rand())
        self.place = 0


class Ordinary(DataModule):
    """Splits that are datasets of torch."""

    def __init__(self, split: Any, *, weighted: bool = False, collate: Any = None, **settings: Any) -> None:
        super().__init__(**{"batch_size": 4, "seed": 0, "num_workers": 0, **settings})
        self.split, self.weighted, self.collate_fn = split, weighted, collate

    def load(self) -> Splits:
        return Splits(self.split, Plain())

    def sampler(self, dataset: Any) -> Sampler[int] | None:
        return WeightedRandomSampler([1.0 + index for index in range(23)], 40) if self.weighted else None

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        raise NotImplementedError


def stack(samples: list[Any]) -> tuple[Tensor, ...]:
    return torch.stack([inputs for inputs, _ in samples]), torch.tensor([target for _, target in samples])


TENSORS = TensorDataset(torch.arange(92.0).view(23, 4), torch.arange(23))
SPLITS = {
    "plain": lambda num_workers: Ordinary(Plain(), num_workers=num_workers),
    "collate": lambda num_workers: Ordinary(Plain(), num_workers=num_workers, collate=stack),
    "subset": lambda num_workers: Ordinary(Subset(Plain(), range(1, 22)), num_workers=num_workers),
    "weighted": lambda num_workers: Ordinary(Plain(), num_workers=num_workers, weighted=True),
    "tensors": lambda num_workers: Ordinary(TENSORS, num_workers=num_workers),
    "stream": lambda num_workers: Ordinary(Streamed(state=False), num_workers=num_workers),
    "stateful": lambda num_workers: Ordinary(Streamed(state=True), num_workers=num_workers),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=WORKERS)])
@pytest.mark.parametrize("kind", SPLITS)
def test_torch_data_sets_are_resumed_at_the_next_sample(kind: str, num_workers: int) -> None:
    torch.manual_seed(0)
    make = SPLITS[kind]
    first = make(0)
    whole = seen(first.train_dataloader())
    assert len(whole) == (10 if kind == "weighted" else 5)
    for done in (0, 2, 4):
        torch.manual_seed(0)
        before, after = make(num_workers), make(2 - num_workers)
        loader = iter(before.train_dataloader())
        assert [next(loader)[0].tolist() for _ in range(done)] == whole[:done]
        after.load_state_dict(saved(before))
        assert seen(after.train_dataloader()) == whole[done:]
    if kind not in ("stream", "stateful"):
        assert first.fingerprint() == after.fingerprint()


@pytest.mark.parametrize("done", [2, 10])
def test_weights_that_training_changes_are_resumed(done: int) -> None:
    first, after = (Ordinary(Plain(), weighted=True) for _ in range(2))
    loader = first.train_dataloader()
    sampler: Any = loader.epoch_sampler
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    sampler.index_sampler.weights = torch.eye(23)[7]  # for the next epoch
    state, rest = saved(first), [batch[0].tolist() for batch in batches]
    sampler.set_epoch(1)
    following = seen(loader)
    after.load_state_dict(state)
    resumed: Any = after.train_dataloader()
    if done < 10:
        assert seen(resumed) == rest
    resumed.epoch_sampler.set_epoch(1)
    assert seen(resumed) == following


@pytest.mark.parametrize("kind", ["plain", "weighted", "stream"])
def test_torch_data_sets_are_sharded_over_ranks(kind: str) -> None:
    whole = [seen(SPLITS[kind](0).train_dataloader()), seen(SPLITS[kind](0).val_dataloader())]
    parts = []
    for rank in range(2):
        data = SPLITS[kind](0)
        data.trainer = on_rank(rank, 2)
        parts.append([seen(data.train_dataloader()), seen(data.val_dataloader())])
    for split, batches in enumerate(whole):
        assert [a + b for a, b in zip(parts[0][split], parts[1][split], strict=True)] == batches


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("kind", ["weighted", "stream", "stateful"])
def test_lightning_resumes_torch_data_sets(tmp_path: Path, kind: str) -> None:
    make = SPLITS[kind]
    whole = fit(15, tmp_path, data=make(0))
    (tmp_path / "again").mkdir()
    for step in (3, 10):
        resumed = make(0)
        assert fit(15, tmp_path / "again", tmp_path / f"{step}.ckpt", resumed) == whole[step:]
    if kind == "stateful":
        assert resumed.split.read < 30  # not what was read before


def test_a_sharded_iterable_data_set_is_read_once() -> None:
    class Divided(Streamed):
        def shard(self, num_shards: int, index: int) -> "Divided":
            assert num_shards == 2
            return Divided(state=False, length=8 + index)

    parts = []
    for rank in range(2):
        data = Ordinary(Divided(state=False))
        data.trainer = on_rank(rank, 2)
        data.setup("fit")
        parts.append(list(data.loader("train")))
        with pytest.raises(TypeError):
            len(data.loader("train"))
    assert [len(part) for part in parts] == [4, 5]


def test_the_test_split_is_optional() -> None:
    data = Ordinary(Plain())
    data.setup("fit")
    assert data.empty_splits == {"test"}
    with pytest.raises(ValueError, match=r"^data: there is no test split; .+$"):
        data.test_dataloader()


def on_rank(rank: int, world: int) -> Any:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": world})
    return SimpleNamespace(strategy=strategy)


def test_rank_and_world_size_come_from_lightning() -> None:
    parts = []
    for rank in range(2):
        data = Numbers()
        data.trainer = on_rank(rank, 2)
        parts += [i for batch in seen(data.test_dataloader()) for i in batch]
    assert sorted(parts) == list(range(23))
    data.trainer = on_rank(0, 3)
    with pytest.raises(ValueError, match=r"^data.batch_size=4 does not divide over 3 ranks; try 6$"):
        data.train_dataloader()


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=WORKERS)])
def test_an_error_in_a_worker_is_one_line(num_workers: int) -> None:
    loader = Numbers(num_workers=num_workers, bad=7).train_dataloader()
    with pytest.raises(ValueError, match=r"^sample 7: damaged; replace it$"):
        seen(loader)
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # left to the garbage collector it takes 5 s


def test_fingerprint_depends_on_the_contents() -> None:
    same = {Numbers(seed=seed).fingerprint() for seed in (0, 0, 1)}
    assert len(same) == 1
    assert Numbers(24).fingerprint() not in same
    one, other = torch.zeros(3, 2), torch.zeros(2, 3)
    assert BatchedTensorDataset(one, one).fingerprint() != BatchedTensorDataset(other, other).fingerprint()


def test_invalid_settings_are_one_line_errors() -> None:
    with pytest.raises(ValueError, match=r"data.num_workers=-1"):
        Numbers(num_workers=-1)
    with pytest.raises(ValueError, match=r"data.num_workers=1000000000 is not in \[0, 1024\]; try 0"):
        Numbers(num_workers=1_000_000_000)  # processes, which would end the machine
    with pytest.raises(ValueError, match=r"data.batch_size=0"):
        Numbers(batch_size=0)
    with pytest.raises(ValueError, match="data: in the train split, 3 samples are too few for batch_size=4"):
        Numbers(3).train_dataloader()


WHOLE = [file for file in sorted(CONFIGS.glob("*.yaml")) if "defaults:" not in file.read_text()]


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_options_have_a_description_and_the_common_settings(file: Path) -> None:
    text, cfg = file.read_text(), OmegaConf.load(file)
    assert text.startswith("# ")
    assert "seed: ${seed}" in text
    assert {"_target_", "shape", "batch_size", "num_workers"} <= set(cfg)
    assert {"num_classes", "vocab_size"} & set(cfg)


@pytest.mark.parametrize(("accelerator", "pinned"), [(CPUAccelerator(), False), (CUDAAccelerator(), True)])
def test_memory_is_pinned_for_training_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, accelerator: Any, pinned: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = Numbers()
    data.trainer = SimpleNamespace(accelerator=accelerator, strategy=None)  # type: ignore[assignment]
    for loader in (data.loader("train", shuffle=True), data.loader("val")):
        assert loader.pin_memory is pinned


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_evaluation_is_the_same_in_each_epoch(split: Any) -> None:
    class Random(Dataset[Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(())

    class Data(DataModule):
        def load(self) -> Splits:
            return Splits(Random(), Random(), Random())

        def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
            raise NotImplementedError

    loader = Data(batch_size=4).loader(split)
    first = torch.cat(list(loader))
    loader.epoch_sampler.set_epoch(1)
    assert torch.equal(first, torch.cat(list(loader))) is (split != "train")


def test_reading_new_files_is_optional() -> None:
    class Data(DataModule):
        def load(self) -> Splits:
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"^input=a\.png: Data reads no files; define its method read$"):
        Data().read([Path("a.png")])


class Found(Numbers):
    """Finds its settings in the data."""

    def __init__(self, shape: Any = None, num_classes: int | None = None) -> None:
        super().__init__()
        self.shape, self.num_classes = shape, num_classes

    def load(self) -> Splits:
        self.shape, self.num_classes = [4], 3
        return super().load()


@pytest.mark.parametrize("settings", [{"shape": (5000,)}, {"num_classes": 5}, {"shape": (4,), "num_classes": 2}])
def test_a_setting_that_load_would_overwrite_is_refused(settings: dict[str, Any]) -> None:
    name = "num_classes" if "num_classes" in settings else "shape"
    with pytest.raises(ValueError, match=rf"^data\.{name}=.*: contradicts the data, which has .*{name}=null"):
        Found(**settings).setup("fit")


@pytest.mark.parametrize("settings", [{}, {"shape": (4,)}, {"shape": [4], "num_classes": 3}])
def test_equal_settings_are_accepted(settings: dict[str, Any]) -> None:
    Found(**settings).setup("fit")
