"""Errors of tasks."""

from __future__ import annotations


class CompilerError(RuntimeError):
    """The compiler that ``task.compile`` selects is not available, or does not support the model or strategy."""

    hide_traceback = True


class TotalStepsError(ValueError):
    """A scheduler needs the number of training steps, which is unknown."""

    hide_traceback = True
