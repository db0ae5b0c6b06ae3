"""Arguments of commands themselves, such as ``run=``, beside overrides of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, hint
from boltcutter.extend import Command
from boltcutter.project import Project


def own_arguments(usage: str) -> frozenset[str]:
    """Keys of overrides in the usage of a command, such as ``run``."""
    return frozenset(re.findall(r"(?<![\w.-])(\w+)=", usage)) - {"group", "key"}


@contextmanager
def suggest_own_arguments(called: tuple[Project, Command, Sequence[str]]) -> Iterator[None]:
    """Report a misspelt argument of the command itself in place of the error that it leads to."""
    project, command, arguments = called
    try:
        yield
    except ConfigError as error:
        own, misspelt = own_arguments(command.usage), list[str]()
        given = [argument.partition("=")[0] for argument in arguments if re.match(r"\w+=", argument)]
        keys = [key for key in given if key not in own]
        with suppress(ConfigError):
            known = own | {*project.groups(), *map(str, compose(project) if keys else ())}
            misspelt = [key for key in keys if key not in known and hint(key, own) == hint(key, known) != ""]
        if misspelt:
            raise ConfigError(f"{misspelt[0]}: no such argument{hint(misspelt[0], own)}", kind="unknown_key") from error
        raise
