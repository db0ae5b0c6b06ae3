import pytest
import torch

from boltcutter_language.transformer import Block, apply_rope, rope_table


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
