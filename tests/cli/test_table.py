from boltcutter.cli.table import COMMANDS
from boltcutter.extend import load_object


def test_the_table_names_functions_and_usages_that_are_there() -> None:
    for name, command in COMMANDS.items():
        paths = [command.target, command.flags, command.begin, command.config, *command.by_flag.values()]
        assert all(load_object(path) for path in paths if path), name
        assert f": boltcutter {name}" in command.usage
