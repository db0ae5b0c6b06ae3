"""Restarts by ``torchrun --max-restarts``."""

from __future__ import annotations

import os


def isolate_attempts() -> None:
    """Give each torchrun restart its own key prefix in the agent's rendezvous store.

    On several nodes the agents count attempts independently, so nothing is changed there, and torchrun needs
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in its environment.
    """
    env = os.environ
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("GROUP_WORLD_SIZE") != "1" or attempt == "0":
        return
    from boltcutter.internals import prefix_rendezvous  # imports torch

    prefix_rendezvous(f"attempt-{attempt}")
