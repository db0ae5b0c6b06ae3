import math
from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.model.gpt import GPT, Cache, _rotate

SMALL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32}
FORMS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "position": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "tied": False},
]


def made(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT((16,), 50, **SMALL | settings).eval()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_place_knows_what_came_before_and_nothing_else(form: dict[str, Any]) -> None:
    model, tokens = made(**form), torch.randint(50, (3, 16), dtype=torch.uint8)
    logits = model(tokens)
    assert logits.shape == (3, 16, 50)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    after = model(changed)
    assert torch.equal(logits[:, :10], after[:, :10])
    assert not torch.isclose(logits[:, 10:], after[:, 10:]).all(dim=-1).any()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_cache_changes_nothing(form: dict[str, Any]) -> None:
    model, tokens, cache = made(**form), torch.randint(50, (2, 16)), Cache()
    parts = [model(tokens[:, begin:end], cache) for begin, end in ((0, 7), (7, 11), (11, 12), (12, 16))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_rotary_positions_are_relative() -> None:
    rotations: Any = made().rotations
    q, k = torch.randn(2, 1, 1, 1, 8)
    scores = [
        (_rotate(q, rotations[:, at + apart : at + apart + 1]) * _rotate(k, rotations[:, at : at + 1])).sum().item()
        for apart in (3, 1)
        for at in (0, 5, 12)
    ]
    assert scores == pytest.approx([scores[0]] * 3 + [scores[3]] * 3, rel=1e-4)
    assert scores[0] != pytest.approx(scores[3], rel=1e-2)


def test_gpt2_small_has_its_size() -> None:
    with torch.device("meta"):
        model = GPT((1024,), 50304, layers=12, heads=12, width=768)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)


def test_weights_begin_as_in_gpt2() -> None:
    model = made(width=128, layers=8, tied=False)
    ends = [m for n, m in model.named_modules() if n.endswith(("attended", "narrow"))]
    others = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) and m not in ends]
    assert len(ends) == 16
    for modules, std in ((ends, 0.02 / math.sqrt(16)), (others, 0.02)):
        assert all(m.weight.std().item() == pytest.approx(std, rel=0.05) for m in modules)  # type: ignore[union-attr]
    tokens = torch.randint(50, (8, 16))
    first = nn.functional.cross_entropy(made()(tokens).flatten(0, 1), torch.randint(50, (128,)))
    assert first.item() == pytest.approx(math.log(50), rel=0.02)  # of no opinion


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_matrices_decay_and_all_else_does_not(form: dict[str, Any]) -> None:
    model = made(**form)
    decayed, kept = model.parameter_groups()
    names = {id(p): n for n, p in model.named_parameters()}
    assert {id(p) for group in (decayed, kept) for p in group["params"]} == set(names)
    assert kept["weight_decay"] == 0.0
    assert "weight_decay" not in decayed  # that of the optimizer
    for p in decayed["params"]:
        assert names[id(p)].endswith(("qkv.weight", "attended.weight", "widen.weight", "narrow.weight", "head.weight"))


def test_dropout_is_for_training_alone() -> None:
    model, tokens = made(dropout=0.5), torch.randint(50, (2, 16))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30}, r"model.width=30 does not divide into 4 heads of an even width; try 32"),
        ({"width": 30, "position": "learned"}, r"model.width=30 does not divide into 4 heads; try 32"),
        ({"kv_heads": 3}, r"model.kv_heads=3 does not divide 4 heads; try 2"),
        ({"layers": 0}, r"model.layers=0 is not a number of anything; try 4"),
        ({"dropout": 1.0}, r"model.dropout=1.0 is not a share in \[0, 1\); try 0.1"),
    ],
)
def test_sizes_that_do_not_go_together_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**settings)


def test_other_inputs_and_longer_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.inputs=\[1, 8, 8\]: one number of tokens is needed; take data of tok"):
        GPT((1, 8, 8), 10)
    with pytest.raises(ValueError, match=r"model.inputs=\[16\], but 17 tokens came; give a longer context"):
        made()(torch.zeros(1, 17, dtype=torch.long))


def test_blocks_that_are_computed_again_keep_less_and_find_the_same_gradient() -> None:
    tokens, found, kept = torch.randint(50, (3, 16)), [], []
    for recompute in (False, True):
        model, sizes = made(recompute=recompute, dropout=0.1).train(), dict[int, int]()
        torch.manual_seed(1)

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens).square().mean()
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        kept.append(sum(sizes.values()))
    assert found[0].keys() == found[1].keys()
    torch.testing.assert_close(found[0], found[1])
    assert kept[1] < kept[0] / 2
