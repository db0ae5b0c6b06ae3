"""Filters for warnings and log messages that do not apply to this library."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

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


# Each with the reason why no user needs it. None is about what a run computes: such a warning stays.
EXPECTED = (
    ".*does not have many workers.*",  # about speed; the progress bar and the report show the share of waiting for data
    ".*Checkpoint directory .* exists and is not empty.*",  # of a run that is resumed
    # It counts the batches of one epoch; steps are counted over epochs, and means of epochs are always logged.
    ".*The number of training batches .* is smaller than the logging interval.*",
    ".*LeafSpec.*",  # Lightning's own use of torch, at each batch
    r".*use of fork\(\) may lead to deadlocks.*",  # for every DataLoader with workers, since Python 3.12
    ".*your dataloader is not resumable.*",  # the data module is, or ``ResumeState`` says so
    ".*The `srun` command is available on your system but is not used.*",  # on every machine with SLURM
    "You are using a (non-supported )?Python version",  # by Google's libraries, from some date on
    ".*Sending a large body directly with raw bytes.*",  # by adlfs, about memory
    ".*FSDP2-wrapped module .* returned a view tensor.*",  # the view is not modified in place
    "Warning: Profiler clears events at the end of each cycle",  # of a schedule, as it should
    "(TensorFloat32 tensor cores .*|GPU) available but not (enabl|us)ed",  # said in the words of our settings
)
# Evaluation and prediction need no callback; a training that is resumed without one of them is told so.
CALLBACKS = ".*when using `ckpt_path`, callbacks used to create the checkpoint.*"


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """One line: of this library the text alone, of others their place as well, without the source code there."""
    if Path(filename).is_relative_to(PACKAGE):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def filter_warnings(*, trains: bool = True) -> None:
    """Suppress warnings and log messages of Lightning and torch that are expected and need no action.

    Args:
        trains: Whether this process may resume a training.
    """
    for name, level in LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    warnings.formatwarning = _format_warning
    for text in (*EXPECTED, *(() if trains else (CALLBACKS,))):
        warnings.filterwarnings("ignore", text)
