import pytest

from boltcutter.diagnosis.checks import CHECKS, Finding, check, some


def test_a_check_that_is_defined_again_replaces_the_first_one() -> None:
    try:
        for text in ("first", "second"):

            @check("again", "note", at="start")
            def decide(seen: object, text: str = text) -> object:
                yield text

        (only,) = CHECKS["again"]
        assert [*only.decide(None)] == ["second"]  # type: ignore[arg-type]
    finally:
        del CHECKS["again"]


@pytest.mark.parametrize(("count", "text"), [(1, "a0"), (3, "a0, a1, a2"), (5, "a0, a1, a2 and 2 more")])
def test_the_first_names_are_given(count: int, text: str) -> None:
    assert some([f"a{i}" for i in range(count)]) == text


def test_a_finding_is_one_line() -> None:
    assert str(Finding("dead-layer", "certain", "the output of net.2 is 0", 3)) == (
        "dead-layer (certain): the output of net.2 is 0"
    )
