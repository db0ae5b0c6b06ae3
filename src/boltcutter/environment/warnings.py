"""Filters for warnings and log messages that do not apply to this library."""

from __future__ import annotations

import logging
import warnings

LOGGERS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "pytorch_lightning": logging.WARNING,
    "lightning_fabric": logging.WARNING,
    "lightning.pytorch.profilers": logging.INFO,  # profilers print their tables by it
    # Gradient norms are redistributed over two mesh dimensions, which torch reports as inefficient.
    "torch.distributed.tensor._redistribute": logging.ERROR,
    "azure.identity": logging.ERROR,  # logs each credential that it looks for and does not find
    "gcsfs": logging.CRITICAL,  # logs exceptions that it raises
    "torchao": logging.ERROR,  # logs each of its libraries for other machines that it does not load
    "torch.utils._pytree": logging.ERROR,  # logs classes of torchao that no longer need registration
}


def filter_warnings() -> None:
    """Suppress warnings and log messages of Lightning and torch that are expected and need no action."""
    for name, level in LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    for text in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*The number of training batches .* is smaller than the logging interval.*",
        ".*LeafSpec.*",
        r".*use of fork\(\) may lead to deadlocks.*",  # for every DataLoader with workers, since Python 3.12
        ".*your dataloader is not resumable.*",  # the data module is, which Lightning does not check
        ".*when using `ckpt_path`, callbacks used to create the checkpoint.*",
        ".*The `srun` command is available on your system but is not used.*",  # on every machine with SLURM
        "You are using a (non-supported )?Python version",  # by Google's libraries, from some date on
        ".*Sending a large body directly with raw bytes.*",  # by adlfs
        ".*FSDP2-wrapped module .* returned a view tensor.*",  # the view is not modified in place
        "Warning: Profiler clears events at the end of each cycle",  # of a schedule, as it should
        "(TensorFloat32 tensor cores .*|GPU) available but not (enabl|us)ed",  # said in the words of our settings
    ):
        warnings.filterwarnings("ignore", text)
