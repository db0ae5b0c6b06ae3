import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import SequentialSampler

from boltcutter.data.loader import BatchedDataset, Loader
from boltcutter.data.mapped import BatchedMapDataset
from boltcutter.data.module import BatchedTensorDataset
from boltcutter.data.sampler import BatchSampler


@pytest.mark.parametrize("shuffle", [False, True])
def test_lightning_sets_the_epoch(shuffle: bool) -> None:
    numbers = torch.arange(8)
    loader = Loader(BatchedTensorDataset(numbers, numbers), BatchSampler(8, 4, shuffle=shuffle))
    _set_sampler_epoch(loader, 3)
    assert loader.epoch_sampler.epoch == 3
    assert isinstance(loader.sampler, SequentialSampler) is not shuffle
    assert not loader.started
    assert [len(inputs) for inputs, _ in loader] == [4, 4]
    assert (loader.num_yielded, loader.started) == (2, True)


def test_batched_data_sets_are_distinguished_from_others() -> None:
    numbers = torch.arange(8)
    assert isinstance(BatchedTensorDataset(numbers, numbers), BatchedDataset)
    assert not isinstance(torch.utils.data.TensorDataset(numbers), BatchedDataset)
    assert isinstance(BatchedMapDataset(torch.utils.data.TensorDataset(numbers)), BatchedDataset)
