"""Errors of strategies and precision plugins."""

from __future__ import annotations


class StrategyError(RuntimeError):
    """The strategy does not support the model or a setting, or a rank that it started has failed."""

    hide_traceback = True
