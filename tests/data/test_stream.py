import copy

from boltcutter.data.stream import Stream


def test_a_stream_can_be_copied() -> None:
    stream = Stream([1, 2], seed=0, rank=0, world_size=1, training=True)
    assert list(copy.copy(stream)) == [1, 2]
    assert len(stream) == 2
