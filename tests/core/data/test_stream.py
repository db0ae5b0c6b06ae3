import copy

import pytest
import torch

from boltcutter.data.stream import Stream, hash_batch


def test_hashes_of_different_batches_differ() -> None:
    batch = {"x": torch.arange(6.0).view(2, 3), "name": ["a", "b"]}
    assert hash_batch(batch) == hash_batch(copy.deepcopy(batch))
    assert hash_batch(batch) != hash_batch(batch | {"x": torch.arange(6.0).view(3, 2)})
    with pytest.raises(ValueError, match="set is_sharded on the loader"):
        hash_batch(lambda: None)


def test_a_stream_can_be_copied() -> None:
    stream = Stream([1, 2], seed=0, rank=0, world_size=1, training=True)
    assert list(copy.copy(stream)) == [1, 2]
    assert len(stream) == 2
