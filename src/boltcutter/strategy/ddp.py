"""Lightning's DDP with gradient compression, and with what parts offer: shared memory, forked or spawned ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import lightning as L
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import strategies
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from boltcutter.internals import ignore_in_ddp
from boltcutter.strategy.buckets import FixedBucketsDDP, unsynchronized_buffers
from boltcutter.strategy.errors import raise_refusals
from boltcutter.strategy.process_launcher import MultiProcessingLauncher
from boltcutter.strategy.shared_memory import SharedMemory
from boltcutter.strategy.unused_parameters import UnusedParameters
from boltcutter.topology import PlannedTraining

COMPRESSION_HOOKS: dict[str, Callable[..., Any]] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
EXIT_TIMEOUT = 15.0  # seconds that a process has to report which other one failed, before it is terminated
SINGLE_BUCKET = 1 << 16  # MiB; larger than the gradients of any model that fits

SPAWNING = re.compile(r"ddp_(spawn|fork|notebook)(?:_find_unused_parameters_(true|false))?")


class DDPStrategy(strategies.DDPStrategy):
    """One process per device; gradients are averaged in buckets, on GPUs during the backward pass.

    With gradient accumulation they are sent once per optimizer step.

    Args:
        compress: Data type in which gradients are sent; averages are rounded to its precision.
        shared_memory: If all ranks run on one host and a part offers it, average gradients of CPU training in shared
            memory, and agree on signals there. Gradients on a GPU are always averaged by the process group.
        start_method: ``popen`` runs the script again for each device. ``fork`` and ``spawn`` start processes from this
            one, as a notebook requires; ``fork`` works only before CUDA is initialized.
        options: Arguments of Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``.
            ``process_group_backend=mpi4py`` uses MPI for all communication; it is imported only then.
    """

    def __init__(
        self,
        compress: Literal["bf16", "fp16"] | None = None,
        *,
        shared_memory: bool = True,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        self.compress, self.shared_memory = compress, shared_memory
        self._memory: Any = None
        self._unused: Any = None
        _register_backends(options.get("process_group_backend") or "")
        super().__init__(start_method=start_method, **options)

    def refuses_training(self, planned: PlannedTraining) -> Iterator[str]:
        """NCCL on CPUs, and a static graph with gradient accumulation, which torch does not support."""
        if planned.device == "cpu" and self._process_group_backend == "nccl":
            yield "trainer.strategy.process_group_backend=nccl: it needs CUDA devices, and these are CPUs; try gloo"
        accumulated = planned.accumulated
        if accumulated > 1 and self._ddp_kwargs.get("static_graph"):
            yield (
                f"trainer.strategy.static_graph=true, trainer.accumulate_grad_batches={accumulated}: torch does not "
                "support both; remove static_graph"
            )

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap the model."""
        raise_refusals(self, trainer, self.lightning_module)
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ignore_in_ddp(model, unsynchronized_buffers(model))
        if self.shared_memory and self.root_device.type == "cpu" and self.num_nodes == 1:
            # On CPUs communication does not overlap with computation, so a single bucket needs one wait, not several.
            self._ddp_kwargs.setdefault("bucket_cap_mb", SINGLE_BUCKET)
        # On the stream of training: on one of its own, as in Lightning, torch would synchronize the two at each step.
        devices, overlaps = self.determine_ddp_device_ids(), self.root_device.type != "cpu"
        wrapped = FixedBucketsDDP(model, overlaps=overlaps, device_ids=devices, **self._ddp_kwargs)
        self._unused = UnusedParameters(
            wrapped, lambda found: self.reduce_boolean_decision(found, all=False), self._register_ddp_hooks
        )
        return wrapped

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, and average them also if the loss does not use all parameters."""
        self.pre_backward(closure_loss)
        plugin, module, unused = self.precision_plugin, self.lightning_module, self._unused
        assert module is not None
        closure_loss = plugin.pre_backward(closure_loss, module)
        if unused:
            unused.before_backward(closure_loss)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if unused:
            unused.after_backward()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        if self.compress:
            compression_hook, model = COMPRESSION_HOOKS[self.compress], cast(Any, self.model)
            # In a lambda, since torch rejects these hooks by name without NCCL, although they work with gloo.
            model.register_comm_hook(None, lambda group, bucket: compression_hook(group, bucket))
        if self.shared_memory and self.world_size > 1 and self._timeout and dist.get_backend() in ("gloo", "nccl"):
            if not self._memory:
                self._memory = SharedMemory.create(self.global_rank, self.world_size, self._timeout)
            on_cpu = self.root_device.type == "cpu"  # averaging GPU gradients there would copy them to the host
            if self._memory and on_cpu and not self.compress and self._memory.supports(self.model):
                model = cast(Any, self.model)
                model.register_comm_hook(self._memory, lambda memory, bucket: memory.average_bucket(bucket))

    def all_reduce_max(self, number: int) -> int | None:
        """The maximum of a number over all ranks, through shared memory; None if it is not available.

        Args:
            number: Signed 64-bit integer.

        Raises:
            RuntimeError: Another rank has failed, has timed out, or calls another operation.
        """
        found: int | None = self._memory.all_reduce_max(number) if self._memory else None
        return found

    def teardown(self) -> None:
        """Release the shared memory."""
        if self._memory:
            self._memory.close()
            self._memory = None
        super().teardown()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = MultiProcessingLauncher(self, self._start_method)


def _register_backends(text: str) -> None:
    """Check that torch has the backends, given as ``gloo`` or ``cpu:gloo,cuda:nccl``; register mpi4py if it is used.

    Raises:
        ValueError: A backend is not available.
    """
    for name in [part.rpartition(":")[2] for part in text.split(",") if part]:
        if name == "mpi4py":
            from boltcutter.strategy import mpi  # needs mpi4py

            mpi.register()
        elif name not in dist.Backend.backend_list or (name == "mpi" and not dist.is_mpi_available()):
            raise ValueError(
                f"trainer.strategy.process_group_backend={text}: torch has no {name} here; try gloo, nccl or mpi4py"
            )


class ScriptLauncher(_SubprocessScriptLauncher):
    """Run the script again for each device but the first, and terminate all processes when one has failed.

    Lightning's launcher terminates them immediately, before this process can report which one failed.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, and run ``function`` in this process."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            ChildProcessObserver(os.getpid(), self.procs).start()
        return function(*args, **kwargs)


class ChildProcessObserver(_ChildProcessObserver):
    """Give processes time to detect by themselves that another one has failed."""

    def _terminate_all(self) -> None:
        time.sleep(EXIT_TIMEOUT)
        super()._terminate_all()


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
