"""What the settings of other templates are called here, if a part offers that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from boltcutter import extend


class NoTemplate:
    """Knows no other template; the functions are documented where they are implemented."""

    OPTIONS: Mapping[str, str] = {}
    COMMANDS: Mapping[str, str] = {}
    REMOVED = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def foreign() -> Any:
    """The offer ``other_templates``, or else one that knows nothing."""
    return extend.find("other_templates") or NoTemplate()
