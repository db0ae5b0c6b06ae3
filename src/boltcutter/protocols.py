"""What the core expects of models, tasks, data modules and callbacks beyond the hooks of Lightning."""

from __future__ import annotations

from typing import Any

# Attributes that the library's data modules have besides Lightning's hooks.
NATIVE_DATA = ("empty_splits", "infer_settings", "fingerprint", "loader", "read")


def is_native_data(data: Any) -> bool:
    """Whether a data module has all attributes of the library's own; others may use some of these names."""
    return all(hasattr(type(data), name) for name in NATIVE_DATA)


def is_native_task(task: Any) -> bool:
    """Whether a task is one of the library's own, which list the metrics that they log."""
    return isinstance(getattr(task, "logged_metrics", None), set)
