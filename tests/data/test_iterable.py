import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Script, max_difference
from torch.utils.data import IterableDataset, get_worker_info

from boltcutter.data.iterable import IterableLoader

WORKERS = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Numbers(IterableDataset[torch.Tensor]):
    """Skips what other workers yield, as torch's documentation shows."""

    def __init__(self, length: int, index: int = 0, step: int = 1) -> None:
        self.length, self.index, self.step, self.epoch = length, index, step, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        every = worker.num_workers if worker else 1
        for number in list(range(self.index, self.length, self.step))[worker.id if worker else 0 :: every]:
            yield torch.tensor(number + 100 * self.epoch)


class Divided(Numbers):
    def shard(self, num_shards: int, index: int) -> "Divided":
        return Divided(self.length, index, num_shards)


def batches(dataset: Any, rank: int = 0, world_size: int = 1, **settings: Any) -> list[list[int]]:
    loader = IterableLoader(dataset, 4, seed=0, rank=rank, world_size=world_size, **settings)
    loader.set_epoch(1)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, pytest.param(3, marks=WORKERS)])
def test_batches_do_not_depend_on_ranks_and_workers(num_workers: int) -> None:
    alone = batches(Numbers(23))
    assert alone == [[100 + number for number in range(begin, min(23, begin + 4))] for begin in range(0, 23, 4)]
    assert batches(Numbers(23), drop_last=True) == alone[:5]
    ranks = [batches(Numbers(23), rank, 2, num_workers=num_workers) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == alone


@pytest.mark.parametrize(
    ("length", "kind", "settings", "said"),
    [
        (
            23,
            Numbers,
            {},
            "data: 3 samples are left out at the end of Numbers in each epoch, as they fill no batch of 4",
        ),
        (23, Numbers, {"rank": 1, "world_size": 2}, ""),
        (23, Divided, {"world_size": 2}, ""),
        (
            22,
            Divided,
            {"world_size": 2},
            "data: 1 sample is left out at the end of the shards of rank 0 in each epoch",
        ),
        (24, Numbers, {}, ""),
        pytest.param(
            23, Divided, {"num_workers": 2}, "data: 3 samples are left out at the end of the shards", marks=WORKERS
        ),
    ],
)
def test_what_fills_no_batch_is_said_once(
    length: int, kind: Any, settings: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"rank": 0, "world_size": 1, **settings}
    loader = IterableLoader(kind(length), 4, seed=0, drop_last=True, **settings)
    for _ in range(2):
        rows = [batch.tolist() for batch in loader]
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert printed.count("\n") == bool(said)
    assert loader.num_yielded == len(rows)


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=WORKERS)])
def test_a_shardable_data_set_is_read_once(num_workers: int) -> None:
    ranks = [batches(Divided(23), rank, 2, num_workers=num_workers) for rank in range(2)]
    assert sorted(number for rank in ranks for batch in rank for number in batch) == list(range(100, 123))


@pytest.mark.parametrize("num_workers", [0, *(pytest.param(number, marks=WORKERS) for number in (2, 3))])
def test_an_epoch_of_shards_resumes_at_any_batch(num_workers: int) -> None:
    whole = batches(Divided(48), rank=1, world_size=2, num_workers=num_workers)
    for start in (1, 2, 3, 4):
        loader = IterableLoader(Divided(48), 4, seed=0, rank=1, world_size=2, num_workers=num_workers)
        loader.epoch, loader.start = 1, start
        assert [batch.tolist() for batch in loader] == whole[start:]


def test_the_length_is_known_if_the_data_set_has_one() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.length

    settings: dict[str, Any] = {"seed": 0, "rank": 0, "world_size": 1}
    assert len(IterableLoader(Sized(23), 4, **settings)) == 6
    assert len(IterableLoader(Sized(23), 4, drop_last=True, **settings)) == 5
    with pytest.raises(TypeError):
        len(IterableLoader(Numbers(23), 4, **settings))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=WORKERS)])
def test_an_error_in_a_worker_is_one_line(num_workers: int) -> None:
    class Damaged(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.zeros(())
            raise ValueError("sample 1: damaged; replace it")

    with pytest.raises(ValueError, match=r"^sample 1: damaged; replace it$"):
        batches(Damaged(3), num_workers=num_workers)


def test_copies_are_independent() -> None:
    loader = IterableLoader(Numbers(9), 4, seed=0, rank=0, world_size=1)
    assert [len(batch) for batch in copy.copy(loader)] == [4, 4, 1]
    assert loader.num_yielded == 0


@pytest.mark.slow
def test_two_ranks_stop_together_and_equal_one_rank(script: Script, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(ROOT / "tests" / "third_party")}
    words = ["data=synthetic", "data._target_=streams.Streams", "data.shape=[4]", "data.num_classes=3", "model=linear"]
    words += ["scheduler=constant", "logger=null", "report=false", "trainer.accelerator=cpu", "trainer.max_epochs=2"]
    words += ["data.batch_size=8"]
    two = ["trainer=ddp", "trainer.devices=2"]
    for name, more, ranks in (("one", [], 0), ("two", two, 2), ("divided", [*two, "+data.divided=true"], 2)):
        done = script("train", *more, *words, f"folder={tmp_path / name}", ranks=ranks, env=env)
        assert done.returncode == 0, done.stderr
        assert "train of unknown length" in done.stdout
    assert max_difference(tmp_path / "one", tmp_path / "two") < 1e-6
