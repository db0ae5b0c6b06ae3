"""Models cut over ranks: weights, gradients and optimizer state (FSDP2), and each matrix (tensor parallel)."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from lightning.pytorch import strategies
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD


class NotCut(RuntimeError):
    """The model cannot be cut so."""

    explains_itself = True  # needs no traceback


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """Has the model cut itself, by its method ``shard(mesh)``, over the ranks that Lightning lays out.

    Args:
        data_parallel_size: Ranks that share the batch, and the weights of each layer until it is needed; ``auto``:
            all that are left.
        tensor_parallel_size: Ranks that share each matrix, and see the same samples.
        module: Which part of the task is cut.
        options: As for Lightning's ``ModelParallelStrategy``; checkpoints are single files, whatever the number of
            ranks, so that a run goes on with another one.
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        *,
        module: str = "model",
        **options: Any,
    ) -> None:
        if options.setdefault("save_distributed_checkpoint", False):
            raise ValueError(
                "trainer.strategy.save_distributed_checkpoint=true: only a single file can be verified; leave it out"
            )
        if tensor_parallel_size < 1:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={tensor_parallel_size} is not a number of ranks; try 1"
            )
        super().__init__(data_parallel_size, tensor_parallel_size, **options)
        self.module = module

    def setup_environment(self) -> None:
        """Let ranks find one another, and have the model cut where Lightning asks the task to.

        Raises:
            NotCut: The ranks do not divide so.
        """
        ranks, each = self.num_nodes * self.num_processes, int(self._tensor_parallel_size)
        if self._data_parallel_size == "auto":
            self._data_parallel_size = max(1, ranks // each)
        if int(self._data_parallel_size) * each != ranks:
            raise NotCut(
                f"trainer.strategy.data_parallel_size={self._data_parallel_size}, tensor_parallel_size={each}: their "
                f"product is not {ranks}, the number of ranks; try data_parallel_size=auto"
            )
        super().setup_environment()
        task: Any = self.lightning_module
        task.configure_model = self._cut

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Make them; torch has no fused SGD for weights that are cut."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
                group["fused"] = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share matrices see the same samples."""
        if self._device_mesh is None:  # not yet laid out
            size = self._data_parallel_size
            ranks = self.num_nodes * self.num_processes // int(self._tensor_parallel_size) if size == "auto" else size
            return {"num_replicas": int(ranks), "rank": self.global_rank // int(self._tensor_parallel_size)}
        return super().distributed_sampler_kwargs

    def _cut(self) -> None:
        task: Any = self.lightning_module
        model: Any = getattr(task, self.module, None)
        if not isinstance(model, nn.Module) or not callable(getattr(model, "shard", None)):
            raise NotCut(
                f"trainer.strategy: {type(model).__name__} does not say how it is cut; give it a method shard(mesh), "
                "or take trainer=ddp"
            )
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):  # not cut yet
            try:
                shard: Any = model.shard
                shard(self.device_mesh)
            except ValueError as error:
                raise NotCut(str(error)) from error
