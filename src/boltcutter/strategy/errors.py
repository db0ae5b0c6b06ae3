"""Errors of strategies and precision plugins."""

from __future__ import annotations


class StrategyError(RuntimeError):
    """The strategy does not support the model or a setting, or a rank that it started has failed.

    Args:
        text: The message.
        original: Class of the error of that rank, which ``record.json`` names.
    """

    hide_traceback = True

    def __init__(self, text: str, original: str = "StrategyError") -> None:
        super().__init__(text)
        self.original = original
