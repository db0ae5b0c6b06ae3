"""DDP whose ranks are processes that this one spawns or forks, by Lightning's names of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from boltcutter.strategy.ddp import DDPStrategy

SPAWNING = re.compile(r"ddp_(spawn|fork|notebook)(?:_find_unused_parameters_(true|false))?")


def spawning_strategy(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Build the strategy behind Lightning's names ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``; empty for others.

    Lightning's own launcher forwards no signals, and loses the progress of training. ``trainer`` has the settings.
    """
    name = SPAWNING.fullmatch(str(trainer.get("strategy")))
    if not name:
        return {}
    options: dict[str, Any] = {"find_unused_parameters": name[2] == "true"} if name[2] else {}
    if name[1] == "spawn":
        return {"strategy": DDPStrategy(start_method="spawn", **options)}
    return {"strategy": DDPStrategy(start_method="fork", **options)}  # in notebooks, too
