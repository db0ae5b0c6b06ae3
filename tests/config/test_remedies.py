"""What is told of an argument that is refused: its setting, value and remedy as parts."""

import pytest

from boltcutter.assembly.assemble import read_config
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

PROJECT = Project.find(__file__)


@pytest.mark.parametrize(
    ("override", "kind", "setting", "value", "remedy"),
    [
        ("model", "invalid_override", "model", None, "write group=option, key=value, +key=value or ~key"),
        ("my.yaml", "invalid_override", "my.yaml", None, "write experiment=my.yaml"),
        ("callback.bst.monitor=x", "unknown_key", "callback.bst.monitor", None, "did you mean callback.best.monitor?"),
        ("optimizer.foo=did you mean x?", "unknown_key", "optimizer.foo", None, "--describe optimizer lists them"),
        ("~zzz", "unknown_key", "zzz", None, "--print shows all"),
        ("model=unheard; use model=mlp", "unknown_option", "model", "unheard; use model=mlp", None),
        ("choices.model=mlp", "invalid_value", "choices.model", "mlp", "write model=mlp"),
    ],
)
def test_a_refused_override_knows_its_parts(
    override: str, kind: str, setting: str, value: str | None, remedy: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(PROJECT, [override])
    mistake = caught.value.mistakes[0]
    assert mistake.kind == kind
    assert mistake.parts is not None
    assert (mistake.parts.setting, mistake.parts.value, mistake.parts.remedy) == (setting, value, remedy)
