"""Errors of training that are reported with a remedy: out of memory, a lost rank, unused parameters."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback

from boltcutter.callback.checkpoint import MetricNotLoggedError
from boltcutter.checks.first_batch import DEVICE_ASSERT, OUT_OF_RANGE, FirstBatchError, first_batch_message
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.protocols import data_parallel

NO_MEMORY = re.compile(
    r"out of memory|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|can't allocate memory|not enough memory", re.I
)
NO_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Wait timeout|"
    r"Socket closed|failed to pass monitoredBarrier|NCCL error|ncclRemoteError|Timed out after",
    re.I,
)
REMOVED_HOOK = re.compile(r"Support for `\w+` has been removed in v")  # in Lightning 2; the error names the remedy
NO_VALIDATION = re.compile(r"`val_check_interval` \((.+?)\) must be less than or equal .*?\((.+?)\)")
NOT_LOGGED = re.compile(r"conditioned on metric|could not find the monitored key")
NO_STEPS_LEFT = re.compile(r"Tried to step [0-9]+ times. The specified number of total steps is ([0-9]+)")
INVALID_LOADER = re.compile(r"An invalid dataloader was returned from `(\w+)\.(\w+)\(\)`. Found (.{1,80})")
CLIPPED_TWICE = re.compile(r"passed `clip_gradients\((?:gradient_clip_\w+=.+?)\)`|does not allow for gradient clipping")
IN_EVALUATION = re.compile(r"[Ii]nference tensors?\b|Inplace update to inference tensor")
NO_GRADIENT = re.compile(r"element 0 of tensors does not require grad")
UNUSED = re.compile(r"parameters that were not used in producing", re.I)
NO_ATTRIBUTE = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
HOOK_OF_EPOCH = "on_train_epoch_start"
LAUNCH_BLOCKING = "CUDA_LAUNCH_BLOCKING"
FIND_PLACE = "trainer.accelerator=cpu names the place, as does `boltcutter check --batch` with your overrides"
RESPONSE_SECONDS = 3.0  # in which living ranks must set their key in the store


class OutOfMemoryError(RuntimeError):
    """A batch does not fit into the memory of the device."""

    hide_traceback = True  # needs no traceback


class RankLostError(RuntimeError):
    """Another rank ended or does not respond."""

    hide_traceback = True
    is_reported = True  # by the context that raises it


class IndexOutOfRangeError(RuntimeError):
    """An index on a GPU is out of range; this process cannot use the GPU any more."""

    hide_traceback = True


class NoGradientError(RuntimeError):
    """The loss depends on no parameter, or gradients are needed where they are disabled."""

    hide_traceback = True


class UnusedParametersError(RuntimeError):
    """DDP waits for gradients of parameters that the loss does not depend on."""

    hide_traceback = True


@contextmanager
def explain_errors(trainer: L.Trainer) -> Iterator[None]:
    """Replace known errors by exceptions whose message has the cause and a remedy.

    Raises:
        ConfigError: Lightning refuses a setting, or how the task or the data is written.
        OutOfMemoryError: An allocator ran out of memory.
        RankLostError: A collective lost its connection or timed out; it is printed at once.
        IndexOutOfRangeError: A kernel of a GPU found an index that is out of range.
        NoGradientError: The loss depends on no parameter.
        UnusedParametersError: DDP found parameters without a gradient.
        MetricNotLoggedError: Lightning did not find a monitored metric.
        FirstBatchError: Task, model or data failed at the first batch, or before it.
    """
    try:
        yield
    except (ConfigError, RankLostError):
        raise
    except Exception as error:
        LostRankReport().on_exception(trainer, None, error)  # of an error outside Lightning's loops
        if explained := _explain(trainer, error):
            raise explained from error
        raise


def _explain(trainer: L.Trainer, error: Exception) -> Exception | None:
    if getattr(error, "hide_traceback", False):
        return None
    while isinstance(first := error.__context__, torch.AcceleratorError):
        error = first  # whatever uses the GPU afterwards, such as the end of the trainer, fails in the same way
    text = str(error)
    if NOT_LOGGED.search(text):
        return MetricNotLoggedError(one_line(error))
    if message := unset_attribute_message(trainer, error):
        return ConfigError(message)
    if interval := NO_VALIDATION.search(text):
        return ConfigError(
            f"trainer.val_check_interval={interval[1]}: an epoch has only {interval[2]} batches; lower it, or set "
            "trainer.check_val_every_n_epoch=null to count batches over epochs"
        )
    if steps := NO_STEPS_LEFT.search(text):
        return ConfigError(
            f"scheduler.total_steps={steps[1]}: training has more steps; remove it to use their number, or, if it "
            "counts epochs, set task.interval=epoch"
        )
    if CLIPPED_TWICE.search(text):
        value, name = trainer.gradient_clip_val, type(trainer.lightning_module).__name__
        return ConfigError(
            f"trainer.gradient_clip_val={value}: {name} or its optimizer clips gradients in another way "
            f"({one_line(error, 120)}); set trainer.gradient_clip_val=null"
        )
    if isinstance(error, MisconfigurationException) or REMOVED_HOOK.search(text):
        return ConfigError(one_line(error))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY.search(text):
        return OutOfMemoryError(out_of_memory_message(trainer))
    if isinstance(error, torch.AcceleratorError):  # unlike one without memory, this GPU cannot be used any more
        atexit.register(_end_without_finalization)
    if DEVICE_ASSERT.search(text) and os.environ.get(LAUNCH_BLOCKING) != "1":  # raised where it did not happen
        return IndexOutOfRangeError(f"{trainer.strategy.root_device}: {OUT_OF_RANGE}; {FIND_PLACE}")
    if invalid := INVALID_LOADER.search(text):
        where = f"{invalid[1]}.{invalid[2]} returns {invalid[3].rstrip('.')}"
        return ConfigError(f"{where}; return a DataLoader, or remove it if there is no such split")
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    in_evaluation = any(place.endswith("evaluation_loop.py") for place in places)
    if IN_EVALUATION.search(text) or (in_evaluation and NO_GRADIENT.search(text)):
        return NoGradientError(
            f"{type(trainer.lightning_module).__name__} needs gradients in evaluation, which Lightning runs without "
            f"({one_line(error, 100)}); compute them within `with torch.enable_grad():`, and set "
            "+trainer.inference_mode=false"
        )
    if NO_GRADIENT.search(text):
        name = type(trainer.lightning_module).__name__
        return NoGradientError(
            f"the loss of {name}.training_step depends on no parameter; compute it from the model's outputs"
        )
    if UNUSED.search(text):
        return UnusedParametersError(unused_parameters_message(trainer.lightning_module))
    message = first_batch_message(trainer, error)
    return FirstBatchError(message) if message else None


def _end_without_finalization() -> None:
    """End the process after the other exit handlers: to free memory of a failed GPU, torch would abort it."""
    atexit.unregister(_end_without_finalization)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


class LostRankReport(Callback):
    """Reports a lost rank before anything waits for the device, whose queue may hold a collective that never ends.

    Lightning would first copy optimizer and module to the CPU, behind that collective; the exception prevents this.
    """

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule | None, exception: BaseException) -> None:
        """Print which rank is lost, close loggers, and finish writing checkpoints.

        Raises:
            RankLostError: The error is that of a collective which lost its connection or timed out.
        """
        text, initialized = str(exception), dist.is_available() and dist.is_initialized()
        if NO_MEMORY.search(text):
            return
        in_rendezvous = dist.is_available() and isinstance(exception, dist.DistNetworkError | dist.DistStoreError)
        if not initialized and in_rendezvous:
            lost = RankLostError(rendezvous_message(trainer.world_size, text))
        elif initialized and isinstance(exception, RuntimeError) and NO_PEER.search(text):
            reason = one_line(text.split("] ")[-1])[:120].rstrip(".")
            lost = RankLostError(f"{missing_ranks_message(trainer.world_size)} ({reason})")
        else:
            return
        rank = f" on rank {dist.get_rank()}" if initialized else ""
        print(f"error{rank}: {lost}", file=sys.stderr, flush=True)
        for logger in trainer.loggers:
            logger.finalize("failed")
        trainer.strategy.checkpoint_io.teardown()
        raise lost from exception


def unused_parameters_message(module: L.LightningModule) -> str:
    """List the parameters without a gradient, with a remedy for DDP."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    listed = f" ({', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})" if names else ""
    return (
        f"the loss of {type(module).__name__}.training_step does not use all parameters{listed}, and DDP waits for the "
        "gradient of each; set +trainer.strategy.find_unused_parameters=true, or set requires_grad=False for them"
    )


def unset_attribute_message(trainer: L.Trainer, error: Exception) -> str | None:
    """Explain an attribute that a hook sets at the start of an epoch, within which the run has resumed."""
    name = NO_ATTRIBUTE.search(str(error)) if isinstance(error, AttributeError) else None
    if not name or not trainer.ckpt_path:
        return None
    for owner in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        code = getattr(getattr(type(owner), HOOK_OF_EPOCH), "__code__", None)
        if type(owner).__name__ == name[1] and code and name[2] in code.co_names:
            return (
                f"resume: {name[1]}.{name[2]} is not set, as the run resumes within an epoch, where Lightning does not "
                f"call {HOOK_OF_EPOCH}; set it in __init__, and save and restore it in on_save_checkpoint and "
                "on_load_checkpoint"
            )
    return None


def out_of_memory_message(trainer: L.Trainer) -> str:
    """Report the size of the batch, with a smaller one to try instead."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    size = getattr(data, "batch_size", None)
    device = trainer.strategy.root_device
    if not size:
        return f"{device} is out of memory: reduce the batch size of the data module"
    ranks = data_parallel(trainer.strategy).size
    steps = trainer.accumulate_grad_batches
    half = f"data.batch_size={max(1, size // 2 // ranks) * ranks} trainer.accumulate_grad_batches={2 * steps}"
    per_rank = f" ({size // ranks} on each of {ranks} ranks)" if ranks > 1 else ""
    return (
        f"{device} is out of memory with data.batch_size={size}{per_rank}: try {half} for the same effective "
        "batch size, or `boltcutter find-batch-size` with your overrides for the largest batch that fits"
    )


def rendezvous_message(world_size: int, text: str) -> str:
    """Report the address of a rendezvous that timed out."""
    address = ", ".join(f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    reason = text.splitlines()[0].rstrip(".")[:160]
    return f"{address}: rendezvous of {world_size} ranks failed ({reason}); start all ranks, or correct the address"


def missing_ranks_message(world_size: int) -> str:
    """Report which ranks do not respond: each living rank sets a key in the default store and reads those of others."""
    store: Any = dist.distributed_c10d._get_default_store()  # which still works after a collective has failed
    try:
        store.set_timeout(timedelta(seconds=5))
        with suppress_native_stderr():
            store.set(f"alive/{dist.get_rank()}", "1")
            time.sleep(RESPONSE_SECONDS)
            missing = [rank for rank in range(world_size) if not store.check([f"alive/{rank}"])]
    except RuntimeError:
        missing = [0]  # rank 0 hosts the store
    if not missing:
        return f"rank {dist.get_rank()} lost its connection to another rank"
    named = "rank " + str(missing[0]) if len(missing) == 1 else "ranks " + ", ".join(map(str, missing))
    return f"{named} of {world_size} ended or does not respond; its error message, if any, is in logs/"


@contextmanager
def suppress_native_stderr() -> Iterator[None]:
    """Discard what torch's C++ code writes to stderr: stack traces of exceptions that are handled here."""
    sys.stderr.flush()
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)
