import copy

import pytest

from boltcutter.data.stream import Stream, until_any_exhausted


def test_a_stream_can_be_copied() -> None:
    stream = Stream([1, 2], seed=0, rank=0, world_size=1, training=True)
    assert list(copy.copy(stream)) == [1, 2]
    assert len(stream) == 2


def test_without_a_process_group_all_batches_are_read() -> None:
    assert list(until_any_exhausted(iter([1, 2]))) == [1, 2]


@pytest.mark.parametrize(("batches", "left_out"), [(5, "the last 1 of 5 batches"), (4, ""), (0, "")])
def test_batches_that_do_not_divide_over_ranks_are_named_once(
    batches: int, left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [Stream([], seed=0, rank=rank, world_size=2, training=True) for rank in (0, 1)]
    for _ in range(2):
        found = [list(rank._of_rank(iter(range(batches)), differ=False)) for rank in ranks]
        assert found == [list(range(batches))[rank : batches // 2 * 2 : 2] for rank in (0, 1)]
    out = capsys.readouterr().out
    assert (left_out in out, out.count("left out")) == (True, bool(left_out))
    ranks[1]._says_left_out = False
    ranks[1]._say_left_out()
    assert "rank 1 has more batches of the stream than another, which are left out" in capsys.readouterr().out
    evaluated = Stream([], seed=0, rank=0, world_size=2, training=False)
    assert list(evaluated._of_rank(iter(range(batches)), differ=False)) == list(range(0, batches, 2))
    assert not capsys.readouterr().out
