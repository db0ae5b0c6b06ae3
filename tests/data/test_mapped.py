import copy
import random
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from boltcutter.data.mapped import BatchedMapDataset, fingerprint, hash_batch
from boltcutter.data.sampler import Batch


class Noise(Dataset[Any]):
    def __init__(self, length: int = 9) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.rand(2), "name": f"{index} {random.random()}"}


class Many(Noise):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("make", [Noise, lambda: Subset(Noise(), range(9))])
def test_random_transforms_depend_on_the_sample_only(make: Any) -> None:
    samples = BatchedMapDataset(make())
    together = samples.__getitems__(Batch(range(9), seed=1, epoch=2))
    alone = samples.__getitems__(Batch([4], seed=1, epoch=2))
    assert torch.equal(alone["noise"][0], together["noise"][4])
    assert alone["name"][0] == together["name"][4]
    assert not torch.equal(samples.__getitems__(Batch([4], seed=1, epoch=3))["noise"], alone["noise"])


def test_getitems_and_collate_are_used() -> None:
    samples = BatchedMapDataset(Many(), lambda found: [sample["index"] for sample in found])
    assert samples.__getitems__(Batch([3, 5])) == [3, 5]
    assert len(samples) == 9


def test_tensor_data_sets_are_fetched_as_torch_collates_them() -> None:
    samples = BatchedMapDataset(TensorDataset(torch.arange(5.0), torch.arange(5)))
    inputs, targets = samples.__getitems__(Batch([3, 1]))
    assert (inputs.tolist(), targets.tolist()) == ([3.0, 1.0], [3, 1])


def test_fingerprint_depends_on_length_and_samples() -> None:
    tensors = TensorDataset(torch.arange(50))
    changed = TensorDataset(torch.arange(50).index_fill(0, torch.tensor([17]), 0))
    named: Any = Noise()
    named.fingerprint = lambda: "abc"
    others = [Noise(), Noise(8), tensors, changed, Subset(tensors, [1]), Subset(tensors, [2]), named]
    others.append(ConcatDataset([Noise(), Noise()]))
    found = [fingerprint(other) for other in others]
    torch.rand(1)
    assert len(set(found)) == len(others)
    assert [fingerprint(other) for other in others] == found


def test_hashes_of_different_batches_differ() -> None:
    batch = {"x": torch.arange(6.0).view(2, 3), "name": ["a", "b"]}
    assert hash_batch(batch) == hash_batch(copy.deepcopy(batch))
    assert hash_batch(batch) != hash_batch(batch | {"x": torch.arange(6.0).view(3, 2)})
    with pytest.raises(ValueError, match="set is_sharded on the loader"):
        hash_batch(lambda: None)
