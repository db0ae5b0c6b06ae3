import ast

import pytest

from boltcutter.diagnosis.unread import EFFECTIVE, _is_read, _kept_as

INIT = "def __init__(self, rate, weights):\n    {}"


@pytest.mark.parametrize(
    ("body", "rest", "is_read"),
    [
        ("self.net = layer(rate)", "", True),
        ("self.rate = rate", "", False),
        ("self.rate = rate", "x = self.rate", True),
        ("self.rate = float(rate)", "self.rate = 3", False),
        ("self.save_hyperparameters()", "", False),
        ("self.save_hyperparameters()", "x = self.hparams.rate", True),
        ("self.save_hyperparameters()", "x = self.hparams['rate']", True),
        ("self.save_hyperparameters()", "f(**self.hparams)", True),
        ("self.register_buffer('w', torch.tensor(rate))", "", False),
        ("self.register_buffer('w', torch.tensor(rate))", "x = self.w", True),
        ("pass", "", False),
    ],
)
def test_an_argument_is_read(body: str, rest: str, is_read: bool) -> None:
    text = INIT.format(body)
    tree = ast.parse(text).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert _is_read("rate", tree, f"{ast.unparse(tree)}\n{rest}") == is_read


def test_what_keeps_an_argument() -> None:
    tree = ast.parse(INIT.format("self.a = weights; self.register_buffer('b', weights); self.c = weights + 1")).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert _kept_as("weights", tree) == ({"a", "b"}, 2)


def test_names_that_are_meant_to_have_an_effect() -> None:
    names = (
        "lr",
        "head_lr",
        "learning_rate",
        "weight_decay",
        "dropout",
        "attn_dropout",
        "label_smoothing",
        "lambda_kl",
    )
    assert all(EFFECTIVE.match(name) for name in names)
    assert not any(EFFECTIVE.match(name) for name in ("num_classes", "hidden_size", "name", "weights_path"))
