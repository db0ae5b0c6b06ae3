import pytest
import torch

from boltcutter.model.transformer import Block, apply_rope, rope_table, section_permutation


def test_rope_depends_on_relative_positions_only() -> None:
    rope = rope_table(16, 8)
    q, k = torch.randn(2, 1, 1, 1, 8)
    scores = [
        (apply_rope(q, rope[:, at + distance : at + distance + 1]) * apply_rope(k, rope[:, at : at + 1])).sum().item()
        for distance in (3, 1)
        for at in (0, 5, 12)
    ]
    assert scores == pytest.approx([scores[0]] * 3 + [scores[3]] * 3, rel=1e-4)
    assert scores[0] != pytest.approx(scores[3], rel=1e-2)


@pytest.mark.parametrize(("ranks", "name"), [(3, "num_heads"), (4, "num_kv_heads"), (2, "intermediate_size")])
def test_tensor_parallelism_needs_divisible_sizes(ranks: int, name: str) -> None:
    block = Block(
        32,
        33,
        num_heads=4,
        num_kv_heads=2,
        gated=True,
        norm="rmsnorm",
        bias=False,
        dropout=0.0,
        activation_checkpointing=False,
    )
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={ranks} does not divide model\.{name}="):
        block.make_row_permutations(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_even_chunks_have_a_part_of_each_section(ranks: int) -> None:
    order = section_permutation([8, 4, 4], ranks)
    assert sorted(order.tolist()) == list(range(16))
    for rank, chunk in enumerate(order.chunk(ranks)):
        for first, rows in ((0, 8), (8, 4), (12, 4)):
            rows_of_rank = [row for row in chunk.tolist() if first <= row < first + rows]
            assert rows_of_rank == list(range(first + rank * rows // ranks, first + (rank + 1) * rows // ranks))
