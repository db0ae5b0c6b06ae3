import ast

import pytest

from boltcutter.diagnosis.arguments import crossed, given, meanings


@pytest.mark.parametrize(
    ("call", "names", "found"),
    [
        ("f(anchor, negative, positive)", ["anchor", "positive", "negative"], ("positive", "negative")),
        ("f(anchor, self.pos, batch['neg'])", ["anchor", "positive", "negative"], None),
        ("f(a, z_neg, z_pos)", ["anchor", "positive", "negative"], ("positive", "negative")),
        ("Adam(p, lr=self.wd, weight_decay=self.lr)", [], ("lr", "weight_decay")),
        ("Normalize(mean=STD, std=MEAN)", [], ("mean", "std")),
        ("f(x2, x1)", ["x1", "x2"], None),  # a turn
        ("f(b, a)", ["a", "b"], None),
        ("f(source, source)", ["source", "target"], None),
        ("f(*pair)", ["source", "target"], None),
    ],
)
def test_crossed_names(call: str, names: list[str], found: tuple[str, str] | None) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert crossed(given(node, names)) == found


def test_words_of_a_name() -> None:
    assert meanings("z_neg") == {"z_neg", "negative"}
    assert meanings("learning_rate") >= {"lr"}
