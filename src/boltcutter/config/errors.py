"""The errors of a configuration: what the user wrote, why it is wrong and how to correct it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig as DictConfig  # re-exported for annotations


class ConfigError(Exception):
    """A mistake in what the user wrote, reported in one line."""


def hint(word: str, known: Iterable[Any]) -> str:
    """``; did you mean …?`` where something known is near ``word``, else nothing."""
    near = difflib.get_close_matches(word, map(str, known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def one_line(error: object) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())
