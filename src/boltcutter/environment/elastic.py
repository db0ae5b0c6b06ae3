"""Restarts by ``torchrun --max-restarts``."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any


def isolate_attempts() -> None:
    """Give each torchrun restart its own key prefix in the agent's rendezvous store.

    torch expects a new store for each attempt, but since 2.13 the agent shares one between attempts, so restarted ranks
    would read the addresses of terminated ones. On several nodes the agents count attempts independently, so nothing is
    changed there, and torchrun needs ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in its environment.
    """
    env = os.environ
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("GROUP_WORLD_SIZE") != "1" or attempt == "0":
        return
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    rendezvous: Any = import_module("torch.distributed.rendezvous")  # a function hides it as an attribute
    create = rendezvous._create_c10d_store

    def create_for_attempt(*args: Any, **kwargs: Any) -> PrefixStore:
        return PrefixStore(f"attempt-{attempt}", create(*args, **kwargs))

    rendezvous._create_c10d_store = create_for_attempt
