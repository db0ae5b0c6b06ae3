import re
from pathlib import Path

import pytest

from boltcutter_planning import internals


@pytest.mark.parametrize(("name", "reason"), internals.USED.items())
def test_each_private_name_is_used_in_the_file_that_is_given_with_a_reason(name: str, reason: str) -> None:
    file, _, why = reason.partition(": ")
    assert re.search(rf"\b{name}\b", Path(internals.__file__).with_name(f"{file}.py").read_text())
    assert why
