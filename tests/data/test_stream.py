import copy

from boltcutter.data.stream import Stream, until_any_exhausted


def test_a_stream_can_be_copied() -> None:
    stream = Stream([1, 2], seed=0, rank=0, world_size=1, training=True)
    assert list(copy.copy(stream)) == [1, 2]
    assert len(stream) == 2


def test_without_a_process_group_all_batches_are_read() -> None:
    assert list(until_any_exhausted(iter([1, 2]))) == [1, 2]
