"""Refused arguments: each mistake has its setting, value and remedy as parts."""

import pytest

from boltcutter.config.instantiate import build, find_mistakes
from boltcutter.config.refusals import name_setting
from boltcutter.config.settings import Settings


def hammer(weight: int, kind: str = "claw", path: str = "") -> None:
    if kind not in ("claw", "sledge"):
        raise ValueError(f"{kind!r} is not a valid kind")


def box(tool: object) -> None: ...


HAMMER = f"{__name__}.hammer"


@pytest.mark.parametrize(
    ("given", "setting", "value", "remedy"),
    [
        ({"weight": "heavy; use x=1"}, "tool.weight", "heavy; use x=1", None),
        ({"weight": 1, "knd": "claw"}, "tool.knd", None, "did you mean kind?"),
        ({}, "tool.weight", None, "hammer needs it (int)"),
        ({"weight": "???"}, "tool.weight", None, "give tool.weight=…"),
    ],
)
def test_a_mistake_knows_its_parts(
    given: dict[str, object], setting: str, value: str | None, remedy: str | None
) -> None:
    (mistake,) = find_mistakes(Settings({"tool": {"_target_": HAMMER, **given}}), box)
    assert mistake.parts is not None
    assert (mistake.parts.setting, mistake.parts.value, mistake.parts.remedy) == (setting, value, remedy)
    assert mistake == str(mistake.parts)


def test_a_value_that_an_error_quotes_is_the_setting() -> None:
    arguments = {"weight": "5", "kind": "axe", "path": "p/q"}
    text = "'axe' is not a valid kind"
    assert name_setting("box", hammer, arguments, text) == f"box.kind=axe: {text}; correct it, or remove it"
    for text in ("axes are not a valid thing", "invalid: axe, or a 5"):  # no value of a setting, and two of them
        assert name_setting("box", hammer, arguments, text) == f"box: {text}; --describe box lists its arguments"


def test_a_call_that_fails_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="axe"):
        hammer(1, "axe")
    with pytest.raises(Exception, match=r"^tool\.kind=axe: 'axe' is not a valid kind( \(ValueError at .*:12\))?; c"):
        build({"_target_": HAMMER, "weight": 1, "kind": "axe"}, "tool")
