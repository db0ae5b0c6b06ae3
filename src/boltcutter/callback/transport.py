"""One line on the network by which NCCL communicates between nodes, which is slow if it is TCP in a container."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch

from boltcutter.config.settings import Settings
from boltcutter.environment.process import in_slurm_step, is_rank_zero

NETWORK = re.compile(r"NCCL INFO (?:Using network (?P<name>[\w .-]+)|NET/(?P<old>\w+) : Using)")
TCP = "Socket"


def callbacks(cfg: Settings) -> list[L.Callback]:
    """The callback, if NCCL will connect several nodes and its log is not already wanted elsewhere.

    NCCL names the network only in its log, so this process writes one, to a temporary file.
    """
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    has_nodes = int(os.environ.get("SLURM_NNODES", 1)) > 1 if in_slurm_step() else ranks > here
    if not (has_nodes and is_rank_zero() and torch.cuda.is_available()) or "NCCL_DEBUG" in os.environ:
        return []
    file = Path(tempfile.gettempdir(), f"boltcutter-nccl-{os.getpid()}.log")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}
    return [Transport(file)]


class Transport(L.Callback):
    """Prints the network that NCCL has chosen, when the ranks are connected.

    Args:
        file: Its log, which is deleted.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line; ranks have met at a barrier before."""
        try:
            found = NETWORK.search(self.file.read_text(errors="replace"))
            self.file.unlink()
        except OSError:  # there is no log, as with another backend
            return
        name = (found["name"] or found["old"]).strip() if found else ""
        if name == TCP:
            print(
                "warning: NCCL communicates between nodes by TCP; if they have InfiniBand or EFA, use an image with "
                "its libraries, built with NETWORK=infiniband or NETWORK=efa",
                file=sys.stderr,
            )
        elif name:
            print(f"network        {name}, by NCCL between nodes")
