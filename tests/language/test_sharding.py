import pytest

from boltcutter_language.sharding import section_permutation


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_even_chunks_have_a_part_of_each_section(ranks: int) -> None:
    order = section_permutation([8, 4, 4], ranks)
    assert sorted(order.tolist()) == list(range(16))
    for rank, chunk in enumerate(order.chunk(ranks)):
        for first, rows in ((0, 8), (8, 4), (12, 4)):
            rows_of_rank = [row for row in chunk.tolist() if first <= row < first + rows]
            assert rows_of_rank == list(range(first + rank * rows // ranks, first + (rank + 1) * rows // ranks))
