"""Data parallel with gradients that Horovod averages, which Lightning 2 has no more."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from lightning.pytorch import strategies
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, nn
from torch.optim import Optimizer


class HorovodStrategy(strategies.DDPStrategy):
    """A process for each device; gradients are averaged in one piece, between the backward pass and clipping.

    With accumulated batches they are sent once, with the last. Whatever else ranks tell one another (weights at the
    start, metrics, flags) goes through torch's own process group.

    Args:
        compress: Send gradients in two bytes a number; averages are rounded to what these can tell.

    Raises:
        ValueError: Horovod is not installed.

    Source: Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018.
    """

    def __init__(self, compress: Literal["fp16"] | None = None) -> None:
        if find_spec("horovod") is None:
            raise ValueError("trainer=horovod: Horovod is not installed; build it: bash scripts/build_horovod.sh")
        super().__init__()
        self.compress = compress
        self._server: Any = None  # at which Horovod's processes meet

    def setup_distributed(self) -> None:
        """Let ranks find one another, then Horovod's; it waits half a minute for them and no longer."""
        import horovod.torch as hvd

        super().setup_distributed()
        assert self._timeout
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(int(self._timeout.total_seconds())))
        if "HOROVOD_RANK" not in os.environ and self.world_size > 1:
            self._meet()
        self.barrier()
        hvd.init()
        assert hvd.size() == self.world_size

    def _meet(self) -> None:
        """Stand in for horovodrun where another launcher started the processes."""
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        port, nodes, each = 0, self.num_nodes, self.num_processes
        if self.global_rank == 0:
            self._server = RendezvousServer()
            port = self._server.start()
            hosts = ",".join(f"node{node}:{each}" for node in range(nodes))
            self._server.init(get_host_assignments(parse_hosts(hosts), self.world_size))
        assert self.cluster_environment
        told = {
            "RANK": self.global_rank,
            "SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_SIZE": each,
            "CROSS_RANK": self.node_rank,
            "CROSS_SIZE": nodes,
            "HOSTNAME": f"node{self.node_rank}",
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "GLOO_RENDEZVOUS_ADDR": self.cluster_environment.main_address,
            "GLOO_RENDEZVOUS_PORT": self.broadcast(port),
            "GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if nodes == 1 else ""),
        }
        for name, value in told.items():
            os.environ.setdefault(f"HOROVOD_{name}", str(value))

    def configure_ddp(self) -> None:
        """Give all ranks the weights of the first; nothing is wrapped."""
        assert self.model is not None
        _sync_module_states(self.model)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Average the gradients once they are there; clipping and all that looks at them comes after."""

        def averaged() -> Any:
            result = closure()
            self._average([p for group in optimizer.param_groups for p in group["params"] if p.requires_grad])
            return result

        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients over ranks, those of one kind of number in one piece.

        One that no rank has stays away, as in one process: what has none is left alone by the optimizer.

        Raises:
            RuntimeError: Another rank has left, or is late.
        """
        import horovod.torch as hvd
        from horovod.common.exceptions import HorovodInternalError

        for kind in {p.dtype: None for p in parameters} if self.world_size > 1 else ():
            some = [p for p in parameters if p.dtype == kind]
            there = [p.grad is not None for p in some]
            each = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in some]
            piece = torch.cat([*each, torch.tensor(there, dtype=kind, device=some[0].device)]).div_(self.world_size)
            if self.compress or kind == torch.bfloat16:  # which Horovod does not know
                piece = piece.to(torch.float16 if self.compress else torch.float32)
            try:
                hvd.allreduce_(piece, op=hvd.Sum, name=f"gradients.{kind}")
            except HorovodInternalError as error:
                raise RuntimeError(f"Horovod: Connection closed by peer: {error}") from error
            *averages, found = torch.split(piece, [*map(Tensor.numel, each), len(some)])
            if not all(there):  # only then has the host to wait for the device
                for p, anywhere in zip(some, found.tolist(), strict=True):
                    if p.grad is None and anywhere:
                        p.grad = torch.empty_like(p)
            pairs = [(p.grad, a.view_as(p)) for p, a in zip(some, averages, strict=True) if p.grad is not None]
            if pairs:
                torch._foreach_copy_([gradient for gradient, _ in pairs], [average for _, average in pairs])
