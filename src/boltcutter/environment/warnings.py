"""Silence for what is no news."""

from __future__ import annotations

import logging
import warnings


def filter_warnings() -> None:
    """Keep libraries from telling at each start what is no news."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # their tables come this way
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # norms go over two meshes
    for text in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*LeafSpec.*",
        r".*use of fork\(\) may lead to deadlocks.*",  # said of every loader with workers, from Python 3.12 on
        ".*your dataloader is not resumable.*",  # the data module is, which Lightning does not look for
        ".*when using `ckpt_path`, callbacks used to create the checkpoint.*",
        ".*The `srun` command is available on your system but is not used.*",  # wherever SLURM is installed
        ".*FSDP2-wrapped module .* returned a view tensor.*",  # which nobody changes in place
        ".*sync_dist=True.*when logging on epoch level.*",  # tasks log what torchmetrics has reduced
    ):
        warnings.filterwarnings("ignore", text)
