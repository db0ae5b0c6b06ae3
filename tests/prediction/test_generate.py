from typing import Any, cast

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.prediction.generate import generate


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [("tokens", "0", "try tokens=200"), ("temperature", "-1", "try temperature=0.8"), ("seed", "x", "try seed=0")],
)
def test_an_invalid_number_is_refused_before_anything_is_loaded(setting: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}={value} is not a number of at least .*{remedy}"):
        generate(cast(Any, None), "last.ckpt", {"input": "a text", setting: value})
