import math
from typing import Any

import pytest
import torch
from torch import nn

from boltcutter.model.gpt import GPT, Cache

SMALL: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "hidden_size": 32}
FORMS: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 2},
    {
        "num_kv_heads": 1,
        "position": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "tie_embeddings": False,
    },
]


def make_gpt(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT((16,), 50, **SMALL | settings).eval()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_is_causal(form: dict[str, Any]) -> None:
    model, tokens = make_gpt(**form), torch.randint(50, (3, 16), dtype=torch.uint8)
    logits = model(tokens)
    assert logits.shape == (3, 16, 50)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    after = model(changed)
    assert torch.equal(logits[:, :10], after[:, :10])
    assert not torch.isclose(logits[:, 10:], after[:, 10:]).all(dim=-1).any()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_with_a_cache_are_the_same(form: dict[str, Any]) -> None:
    model, tokens, cache = make_gpt(**form), torch.randint(50, (2, 16)), Cache()
    parts = [model(tokens[:, begin:end], cache) for begin, end in ((0, 7), (7, 11), (11, 12), (12, 16))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_parameter_count_of_gpt2_small() -> None:
    with torch.device("meta"):
        model = GPT((1024,), 50304, num_layers=12, num_heads=12, hidden_size=768)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)


def test_weights_are_initialized_as_in_gpt2() -> None:
    model = make_gpt(hidden_size=128, num_layers=8, tie_embeddings=False)
    ends = [m for n, m in model.named_modules() if n.endswith(("out_proj", "down_proj"))]
    others = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) and m not in ends]
    assert len(ends) == 16
    for modules, std in ((ends, 0.02 / math.sqrt(16)), (others, 0.02)):
        assert all(m.weight.std().item() == pytest.approx(std, rel=0.05) for m in modules)  # type: ignore[union-attr]
    tokens = torch.randint(50, (8, 16))
    first = nn.functional.cross_entropy(make_gpt()(tokens).flatten(0, 1), torch.randint(50, (128,)))
    assert first.item() == pytest.approx(math.log(50), rel=0.02)  # a uniform distribution


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weight_decay_of_matrices_only(form: dict[str, Any]) -> None:
    model = make_gpt(**form)
    decayed, others = model.parameter_groups()
    names = {id(p): n for n, p in model.named_parameters()}
    assert {id(p) for group in (decayed, others) for p in group["params"]} == set(names)
    assert others["weight_decay"] == 0.0
    assert "weight_decay" not in decayed  # the optimizer's default
    for p in decayed["params"]:
        assert names[id(p)].endswith(
            ("qkv_proj.weight", "out_proj.weight", "up_proj.weight", "down_proj.weight", "head.weight")
        )


def test_dropout_only_while_training() -> None:
    model, tokens = make_gpt(dropout=0.5), torch.randint(50, (2, 16))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_size": 30},
            r"model.hidden_size=30 does not divide into model.num_heads=4 heads of even size; try 32",
        ),
        (
            {"hidden_size": 30, "position": "learned"},
            r"model.hidden_size=30 does not divide into model.num_heads=4 heads; try 32",
        ),
        ({"num_kv_heads": 3}, r"model.num_kv_heads=3 does not divide model.num_heads=4; try 2"),
        ({"num_layers": 0}, r"model.num_layers=0 is not positive; try 4"),
        ({"dropout": 1.0}, r"model.dropout=1.0 is not in \[0, 1\); try 0.1"),
    ],
)
def test_incompatible_sizes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gpt(**settings)


def test_other_shapes_and_longer_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.input_shape=\[1, 8, 8\] .*data=text"):
        GPT((1, 8, 8), 10)
    with pytest.raises(ValueError, match=r"model.input_shape=\[16\] is shorter than the sequence of 17 tokens"):
        make_gpt()(torch.zeros(1, 17, dtype=torch.long))


def test_activation_checkpointing_stores_less_and_gives_the_same_gradients() -> None:
    tokens, found, kept = torch.randint(50, (3, 16)), [], []
    for recompute in (False, True):
        model, sizes = make_gpt(activation_checkpointing=recompute, dropout=0.1).train(), dict[int, int]()
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
