import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from boltcutter.data.module import DataModule, Pair, Splits, TensorSamples, cut, split_indices
from boltcutter.data.sampler import Batch

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
WORKERS = [  # what Python and torch say about workers at all, or on one core
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Numbers(DataModule):
    """Samples that are their own index; ``bad`` cannot be read."""

    def __init__(
        self, length: int = 23, *, batch_size: int = 4, seed: int = 0, workers: int = 0, bad: int = -1
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed, workers=workers)
        self.length, self.bad = length, bad

    def load(self) -> Splits:
        self.statistics = {"target_mean": [1.5]}
        numbers = torch.arange(self.length)
        return Splits(
            Fragile(numbers, numbers, self.bad), TensorSamples(numbers, numbers), TensorSamples(numbers, numbers)
        )

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        raise NotImplementedError


class Fragile(TensorSamples):
    def __init__(self, inputs: Tensor, targets: Tensor, bad: int) -> None:
        super().__init__(inputs, targets)
        self.bad = bad

    def __getitems__(self, batch: Batch) -> Pair:
        if self.bad in batch:
            raise ValueError(f"sample {self.bad}: damaged; replace it")
        return super().__getitems__(batch)


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


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=WORKERS)])
def test_loaders_give_each_sample_once(workers: int) -> None:
    data = Numbers(workers=workers)
    assert [i for batch in seen(data.val_dataloader()) for i in batch] == list(range(23))
    assert [i for batch in seen(data.test_dataloader()) for i in batch] == list(range(23))
    train = data.train_dataloader()
    first = seen(train)
    assert len(train) == len(first) == train.done == 5
    assert len({i for batch in first for i in batch}) == 20
    train.sampler.set_epoch(1)
    assert seen(train) != first
    train.sampler.set_epoch(0)
    assert seen(train) == first


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=WORKERS)])
def test_a_checkpoint_goes_on_at_the_very_next_sample(workers: int) -> None:
    whole = seen(Numbers().train_dataloader())
    for done in range(5):
        before = Numbers(workers=workers)
        assert seen(before.train_dataloader(), done) == whole[:done]
        after = Numbers(workers=workers)
        after.load_state_dict(saved(before))
        assert after.state_dict() == before.state_dict()  # saved again before any training
        assert seen(after.train_dataloader()) == whole[done:]
        assert after.statistics == {"target_mean": [1.5]}


def test_position_counts_samples_so_that_ranks_and_batch_size_may_change() -> None:
    before = Numbers(24)
    whole = [i for batch in seen(before.train_dataloader()) for i in batch]
    seen(before.train_dataloader(), 4)
    state = saved(before)
    after = Numbers(24, batch_size=8)
    after.exact = False
    after.load_state_dict(state)
    assert [i for batch in seen(after.train_dataloader()) for i in batch] == whole[16:]
    ranks = []
    for rank in range(2):
        part = Numbers(24)
        part.trainer = on_rank(rank, 2)
        part.load_state_dict(state)
        ranks.append(seen(part.train_dataloader()))
    assert [i for pair in zip(*ranks, strict=True) for half in pair for i in half] == whole[16:]


def test_a_finished_epoch_is_not_begun_again_at_its_end() -> None:
    before = Numbers()
    whole = seen(before.train_dataloader())
    after = Numbers()
    seen(before.train_dataloader())
    after.load_state_dict(saved(before))
    assert seen(after.train_dataloader()) == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, r"data: seed=1, but the checkpoint was made with 0; set it back, or say resume_exact=false"),
        ({"length": 24}, r"data: length=24, but the checkpoint was made with 23"),
        ({"batch_size": 3}, r"data: batch_size=3, but the checkpoint was made with 4"),
    ],
)
def test_another_order_is_refused_unless_it_need_not_be_exact(settings: dict[str, int], message: str) -> None:
    before = Numbers()
    seen(before.train_dataloader(), 2)
    after = Numbers(**settings)
    after.load_state_dict(saved(before))
    with pytest.raises(ValueError, match=message):
        after.train_dataloader()
    after.exact = False
    fresh = seen(Numbers(**settings).train_dataloader())
    assert seen(after.train_dataloader()) == fresh[8 // after.batch_size :]


class Recorder(L.LightningModule):
    """Keeps what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Linear(1, 1), list[list[int]]()

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return self.net(batch[0][:, None].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Saver(L.Callback):
    """Saves within training, after as many steps as the file says."""

    def __init__(self, files: list[Path]) -> None:
        self.files = {int(file.stem): file for file in files}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.files:
            trainer.save_checkpoint(self.files[trainer.global_step])


def fit(steps: int, folder: Path, resume: Path | None = None) -> list[list[int]]:
    """Batches of a training that saves after steps 3, 7 and 10, and when it is over."""
    model = Recorder()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    saver = Saver([folder / f"{step}.ckpt" for step in (3, 7, 10)])
    trainer = L.Trainer(accelerator="cpu", max_steps=steps, use_distributed_sampler=False, callbacks=[saver], **quiet)
    trainer.fit(model, datamodule=Numbers(), ckpt_path=resume)
    trainer.save_checkpoint(folder / "end.ckpt")
    return model.seen


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")  # Lightning on cores, and torch
def test_lightning_resumes_at_the_very_next_sample(tmp_path: Path) -> None:
    whole = fit(15, tmp_path)
    assert whole[:5] != whole[5:10]
    for step in (3, 7, 10):
        (tmp_path / "again").mkdir(exist_ok=True)
        assert fit(15, tmp_path / "again", tmp_path / f"{step}.ckpt") == whole[step:]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")
def test_an_epoch_that_max_steps_cut_short_is_gone_through_later(tmp_path: Path) -> None:
    whole = fit(10, tmp_path)
    assert fit(7, tmp_path) == whole[:7]
    assert fit(10, tmp_path, tmp_path / "end.ckpt") == whole[7:]


def on_rank(rank: int, world: int) -> Any:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": world})
    return SimpleNamespace(strategy=strategy)


def test_ranks_come_from_lightning() -> None:
    parts = []
    for rank in range(2):
        data = Numbers()
        data.trainer = on_rank(rank, 2)
        parts += [i for batch in seen(data.test_dataloader()) for i in batch]
    assert sorted(parts) == list(range(23))
    data.trainer = on_rank(0, 3)
    with pytest.raises(ValueError, match=r"train split, data.batch_size=4 does not divide over 3 ranks; try 6"):
        data.train_dataloader()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=WORKERS)])
def test_an_error_is_one_line_also_from_a_worker(workers: int) -> None:
    loader = Numbers(workers=workers, bad=7).train_dataloader()
    with pytest.raises(ValueError, match=r"^sample 7: damaged; replace it$"):
        seen(loader)
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # left to the garbage collector it takes 5 s


def test_fingerprint_follows_the_contents() -> None:
    same = {Numbers(seed=seed).fingerprint() for seed in (0, 0, 1)}
    assert len(same) == 1
    assert Numbers(24).fingerprint() not in same
    one, other = torch.zeros(3, 2), torch.zeros(2, 3)
    assert TensorSamples(one, one).fingerprint() != TensorSamples(other, other).fingerprint()


def test_splits_are_disjoint_complete_and_stratified() -> None:
    labels = np.repeat(np.arange(4), [400, 200, 100, 100])
    parts = split_indices(800, (0.7, 0.1, 0.2), 3, labels)
    assert sorted(np.concatenate(parts)) == list(range(800))
    assert [len(part) for part in parts] == [560, 80, 160]
    for part in parts:
        assert np.array_equal(np.bincount(labels[part]) * 8 / len(part), [4, 2, 1, 1])
        assert np.array_equal(part, np.sort(part))
    again = split_indices(800, (0.7, 0.1, 0.2), 3, labels)
    assert all(map(np.array_equal, parts, again))
    assert not np.array_equal(parts[2], split_indices(800, (0.7, 0.1, 0.2), 4, labels)[2])


def test_cut_takes_from_the_given_samples_only() -> None:
    kept, taken = cut(np.arange(0, 100, 2), 0.1, 0)
    assert len(taken) == 5
    assert sorted([*kept, *taken]) == list(range(0, 100, 2))


def test_mistakes_are_told_on_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"^data.split=\[0.5, 0.5, 0.5\]: three shares that add up to 1 are needed; try"
    ):
        split_indices(10, (0.5, 0.5, 0.5), 0)
    with pytest.raises(ValueError, match=r"^data: no 0.15 of 2 samples can be split off: .+$"):
        split_indices(2, (0.7, 0.15, 0.15), 0, np.array([0, 1]))
    with pytest.raises(ValueError, match=r"data.workers=-1"):
        Numbers(workers=-1)
    with pytest.raises(ValueError, match=r"data.batch_size=0"):
        Numbers(batch_size=0)
    with pytest.raises(ValueError, match="data: in the train split, 3 samples are too few for batch_size=4"):
        Numbers(3).train_dataloader()


WHOLE = [file for file in sorted(CONFIGS.glob("*.yaml")) if "defaults:" not in file.read_text()]


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_options_tell_what_they_are_and_what_they_give(file: Path) -> None:
    text, cfg = file.read_text(), OmegaConf.load(file)
    assert text.startswith("# ")
    assert "seed: ${seed}" in text
    assert {"_target_", "shape", "outputs", "batch_size", "workers"} <= set(cfg)
