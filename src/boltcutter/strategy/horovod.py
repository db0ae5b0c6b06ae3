"""Data parallel with gradients averaged by Horovod, which Lightning 2 no longer supports."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import strategies
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, nn
from torch.optim import Optimizer

from boltcutter.internals import get_timeout
from boltcutter.strategy.errors import StrategyError

BUILD_SCRIPT = Path(__file__).with_name("build_horovod.sh")


class HorovodStrategy(strategies.DDPStrategy):
    """One process per device; gradients are averaged in a single bucket, between the backward pass and clipping.

    With gradient accumulation they are sent once per optimizer step. All other communication (initial weights, metrics,
    flags) uses torch's process group. Horovod is imported only by this strategy. Each step waits for the device, as
    Horovod's allreduce does.

    Args:
        compress: Data type in which gradients are sent; averages are rounded to its precision.

    Raises:
        ValueError: Horovod is not installed.

    Source: Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018.
    """

    def __init__(self, compress: Literal["fp16"] | None = None) -> None:
        if find_spec("horovod") is None:
            build = f"bash {shlex.quote(str(BUILD_SCRIPT))}"
            raise ValueError(f"trainer=horovod: Horovod is not installed; build it: {build}")
        super().__init__()
        self.compress = compress

    def setup_distributed(self) -> None:
        """Initialize torch's process group and then Horovod, whose own rendezvous times out after only 30 s.

        Raises:
            StrategyError: horovodrun did not start the processes.
        """
        if "HOROVOD_RANK" not in os.environ and self.world_size > 1:
            raise StrategyError(
                f"trainer=horovod: start its processes by horovodrun -np {self.world_size} python …, or use trainer=ddp"
            )
        import horovod.torch as hvd

        super().setup_distributed()
        timeout = get_timeout(self)
        assert timeout
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(int(timeout.total_seconds())))
        self.barrier()
        hvd.init()
        assert hvd.size() == self.world_size

    def configure_ddp(self) -> None:
        """Broadcast the weights of rank 0; the model is not wrapped."""
        assert self.model is not None
        _sync_module_states(self.model)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Average the gradients after the backward pass, before clipping and before callbacks see them."""

        def averaged() -> Any:
            result = closure()
            self._average([p for group in optimizer.param_groups for p in group["params"] if p.requires_grad])
            return result

        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients over ranks, in one bucket per data type.

        A gradient that is None on all ranks remains None, so that the optimizer skips its parameter; one that is None
        on some ranks counts as zero there.
        """
        import horovod.torch as hvd
        from horovod.common.exceptions import HorovodInternalError

        for dtype in {p.dtype: None for p in parameters} if self.world_size > 1 else ():
            group = [p for p in parameters if p.dtype == dtype]
            present = [p.grad is not None for p in group]
            flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in group]
            bucket = torch.cat([*flat, torch.tensor(present, dtype=dtype, device=group[0].device)])
            bucket = bucket.div_(self.world_size)
            if self.compress or dtype == torch.bfloat16:  # Horovod does not support bfloat16
                bucket = bucket.to(torch.float16 if self.compress else torch.float32)
            try:
                hvd.allreduce_(bucket, op=hvd.Sum, name=f"gradients.{dtype}")
            except HorovodInternalError as error:
                raise RuntimeError(f"Horovod: Connection closed by peer: {error}") from error
            *averages, found = torch.split(bucket, [*map(Tensor.numel, flat), len(group)])
            if not all(present):  # avoids a device synchronization otherwise
                for p, anywhere in zip(group, found.tolist(), strict=True):
                    if p.grad is None and anywhere:
                        p.grad = torch.empty_like(p)
            pairs = [(p.grad, a.view_as(p)) for p, a in zip(group, averages, strict=True) if p.grad is not None]
            if pairs:
                torch._foreach_copy_([gradient for gradient, _ in pairs], [average for _, average in pairs])
