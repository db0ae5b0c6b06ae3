import pytest
from conftest import ROOT

from boltcutter.cli.own_arguments import own_arguments, suggest_own_arguments
from boltcutter.config.errors import ConfigError
from boltcutter.extend import Command
from boltcutter.project import Project

PROJECT = Project(ROOT)
COMMAND = Command("", "Predict: boltcutter predict run=<folder> input=<files> [ckpt=best] model.depth=50")


def test_arguments_are_the_keys_of_the_usage_without_those_of_settings() -> None:
    assert own_arguments(COMMAND.usage) == {"run", "input", "ckpt"}


def test_a_misspelt_argument_takes_the_place_of_the_error_that_it_leads_to() -> None:
    with (
        pytest.raises(ConfigError, match=r"^inptu: no such argument; did you mean input\?$"),
        suggest_own_arguments((PROJECT, COMMAND, ["run=x", "inptu=y"])),
    ):
        raise ConfigError("inptu: no such key")


@pytest.mark.parametrize("argument", ["modle=mlp", "input=y", "trainer.inptu=1", "--inptu"])
def test_other_errors_stay(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"^as it was$"), suggest_own_arguments((PROJECT, COMMAND, [argument])):
        raise ConfigError("as it was")
