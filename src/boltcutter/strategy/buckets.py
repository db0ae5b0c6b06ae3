"""DDP whose gradients are in the same buckets at every step, so that a resumed run rounds their sums alike."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from boltcutter.internals import NormWithStatistics


class FixedBucketsDDP(DistributedDataParallel):
    """DDP that never changes the order of gradients in its buckets.

    After the first step, of a resumed run too, torch sorts parameters by the time at which their gradients were ready.
    How gloo and NCCL round a sum over more than two ranks depends on its position in the bucket, so the first step of a
    resumed run would differ. Here the order is that of the parameters: in reverse where gradients are sent during the
    backward pass, which computes the last ones first, or else as it is, so that the first bucket is complete last.

    Args:
        module: The module to train.
        overlaps: Whether gradients are sent during the backward pass.
        options: Arguments of torch's class.
    """

    def __init__(self, module: nn.Module, *, overlaps: bool, **options: Any) -> None:
        # If it looks for unused parameters, torch keeps its first buckets, which are in reverse order already.
        is_sorted = options.get("static_graph") or not options.get("find_unused_parameters")
        vars(self)["is_reversed"] = overlaps and is_sorted
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], expect_sparse[::-1]) if self.is_reversed else (parameters, expect_sparse)


def unsynchronized_buffers(model: nn.Module) -> list[str]:
    """Names of buffers that rank 0 need not broadcast at each step.

    These are the running statistics of BatchNorm, which training does not read, and non-persistent buffers, which are
    constant.
    """
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if isinstance(module, NormWithStatistics) or name in module._non_persistent_buffers_set
    ]
