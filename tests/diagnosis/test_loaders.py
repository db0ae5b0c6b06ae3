import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from boltcutter.data.module import BatchedTensorDataset
from boltcutter.diagnosis.loaders import Splits, digest, digests


def test_samples_are_read_one_by_one_or_in_batches() -> None:
    x, y = torch.rand(300, 4), torch.arange(300)
    for data in (TensorDataset(x, y), BatchedTensorDataset(x, y)):
        loader = DataLoader(data, 10) if isinstance(data, TensorDataset) else type("Loader", (), {"dataset": data})()
        inputs, targets = Splits({"train": loader}).table("train") or (x, x)
        assert torch.equal(inputs, x.double())
        assert torch.equal(targets, y)
    assert Splits({"train": DataLoader(TensorDataset(y, y), 10)}).table("train") is None  # tokens


def test_equal_samples_have_equal_hashes() -> None:
    assert digest((torch.ones(2), 1)) == digest((torch.ones(2), 1)) != digest((torch.ones(2), 2))
    assert digest(np.ones(2)) != digest(np.zeros(2))
    assert digests(None, 2) is None
