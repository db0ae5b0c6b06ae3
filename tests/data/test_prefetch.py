import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import DEVICE, fake_gpu
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from boltcutter.data.augment import Augment
from boltcutter.data.digits import Digits
from boltcutter.data.loader import Pair
from boltcutter.data.module import BatchedTensorDataset
from boltcutter.data.prefetch import DeviceCopies, Prefetcher, can_read_ahead
from boltcutter.data.sampler import Batch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class Source:
    """Yields numbers as Lightning does, and counts those that were read; ``bad`` cannot be read."""

    def __init__(self, count: int = 6, bad: int = -1) -> None:
        self.count, self.bad, self.read = count, bad, 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.bad:
                self.fail(number)
            self.read += 1
            yield number, number, 0

    def fail(self, number: int) -> None:
        raise ValueError(f"sample {number}: damaged")


@pytest.mark.parametrize(("left", "expected"), [(None, 6), (4, 4), (0, 0)])
def test_no_more_is_read_ahead_than_the_bound(left: int | None, expected: int) -> None:
    source, seen = Source(), list[int]()
    prefetcher = Prefetcher(iter(source), depth=2, left=left)
    for number, _, _ in prefetcher:
        assert prefetcher.settle() == source.read - len(seen) - 1 <= 2
        seen.append(number)
    assert seen == list(range(expected))
    assert source.read == expected
    assert prefetcher.close() == 0
    assert threads() == []


def test_batches_that_were_read_and_not_taken_are_counted() -> None:
    prefetcher = Prefetcher(iter(source := Source()), depth=2)
    next(prefetcher)
    count = prefetcher.close()
    assert source.read == 1 + count
    assert threads() == []


def test_a_batch_is_read_while_a_step_is_computed() -> None:
    in_step, has_read = threading.Event(), threading.Event()

    def read() -> Iterator[Any]:
        yield 0, 0, 0
        assert in_step.wait(20)  # in the training's thread, this would wait for itself
        has_read.set()
        yield 1, 1, 0

    prefetcher = Prefetcher(read(), depth=1)
    assert next(prefetcher)[0] == 0
    in_step.set()
    assert has_read.wait(20)
    assert next(prefetcher)[0] == 1
    prefetcher.close()


def test_an_error_is_raised_with_its_place_when_the_batches_before_it_are_done() -> None:
    prefetcher, seen = Prefetcher(iter(Source(bad=3)), depth=2), list[int]()
    with pytest.raises(ValueError, match="sample 3: damaged") as error:
        seen.extend(number for number, _, _ in prefetcher)
    assert seen == [0, 1, 2]
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.tb)]
    prefetcher.close()
    assert threads() == []


def test_copies_are_made_in_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, fake_gpu(patch) as gpu:
        batches = (({"x": torch.full((2,), float(n))}, n, 0) for n in range(3))
        prefetcher = Prefetcher(batches, depth=2, copies=DeviceCopies(DEVICE))
        for number in range(3):
            batch, _, _ = next(prefetcher)
            prefetcher.settle()
            assert batch["x"].is_cuda
            total = batch["x"].sum()
            assert ("default", "waits for", "copies") in gpu.log
            gpu.log.remove(("default", "waits for", "copies"))
            assert ("recorded", "default") in gpu.log  # its memory is not used again before the step has read it
            if not number:  # the next one is copied before the kernels of this step are queued
                assert gpu.log.index(("default", "sum")) > 1 + gpu.log.index(("copies", "copy"))
                assert gpu.log.count(("copies", "copy")) == 3
            assert total.host == 2 * number
        assert not any(entry[:2] == ("copies", "waits for") for entry in gpu.log)
        assert gpu.waits == []
        prefetcher.close()


class Unknown:
    """Can be moved to a device; when its memory is used there, nobody knows."""

    def to(self, device: Any, **_: Any) -> Any:
        raise AssertionError("moved")


def test_what_cannot_be_kept_is_left_to_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, fake_gpu(patch):
        batch, copied = DeviceCopies(DEVICE).begin([unknown := Unknown(), torch.ones(1)])
        assert copied is None
        assert batch[0] is unknown
        assert not batch[1].is_cuda


class Drawn(BatchedTensorDataset):
    def __getitems__(self, batch: Batch) -> Pair:
        inputs, targets = super().__getitems__(batch)
        return inputs + torch.rand(1), targets


class Follows(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0

    def __len__(self) -> int:
        return 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_thread_reads_only_what_draws_nothing_in_this_process() -> None:
    numbers = torch.arange(8)
    assert BatchedTensorDataset(numbers, numbers).is_pure
    assert BatchedTensorDataset(numbers, numbers, Augment(flip=0.5)).is_pure
    assert not BatchedTensorDataset(numbers, numbers, lambda x, _: x + torch.rand(1)).is_pure
    assert not Drawn(numbers, numbers).is_pure
    assert can_read_ahead([Digits().train_dataloader()], "max_size_cycle", 2)
    samples = TensorDataset(numbers)
    cases = [
        (DataLoader(samples, 2), False),
        (DataLoader(samples, 2, num_workers=1), True),
        (DataLoader(samples, 2, num_workers=1, sampler=RandomSampler(samples)), True),
        (DataLoader(samples, 2, num_workers=1, sampler=Follows()), False),
        (DataLoader(samples, num_workers=1, batch_sampler=[[0], [1]]), False),
        ([1, 2, 3], False),
    ]
    for loader, expected in cases:
        assert can_read_ahead([loader], "max_size_cycle", 1) == expected
    one, other = DataLoader(samples, 2, num_workers=1), DataLoader(samples, 4, num_workers=1)
    assert can_read_ahead([one, one], "max_size_cycle", 1)
    assert not can_read_ahead([one, other], "max_size_cycle", 1)
    assert not can_read_ahead([one, one], "sequential", 1)
    assert CombinedLoader([one, one]).flattened == [one, one]
