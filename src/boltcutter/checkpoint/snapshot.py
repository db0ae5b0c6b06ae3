"""Copies of checkpoints in host memory, which are written while training changes the original."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, UntypedStorage


class HostSnapshot:
    """Copies a checkpoint to host memory, which the next copy reuses: allocating takes longer than copying.

    Memory for tensors of a GPU is pinned, so that the copies run at the speed of the bus, one after the other without
    waiting. Tensors that share memory share it in the copy, too.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[UntypedStorage, bool]] = []  # and whether it is pinned

    def copy(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a copy with all tensors on the CPU, which is valid until the next call."""
        free: dict[tuple[int, bool], list[UntypedStorage]] = {}
        for buffer, pinned in self._buffers:
            free.setdefault((buffer.nbytes(), pinned), []).append(buffer)
        buffers: dict[tuple[torch.device, int, int], UntypedStorage] = {}
        memo: dict[int, Any] = {}  # of deepcopy: what replaces an object

        def copy_tensor(tensor: Tensor) -> Tensor:
            if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
                memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
                return tensor
            plain = tensor.detach().resolve_conj().resolve_neg()
            storage = plain.untyped_storage()
            size, pinned = storage.nbytes(), storage.device.type == "cuda"
            place = storage.device, storage.data_ptr(), size
            if place not in buffers:
                same = free.get((size, pinned))
                buffers[place] = same.pop() if same else _allocate(size, pinned=pinned)
                buffers[place].copy_(storage, non_blocking=pinned)
            host = torch.empty(0, dtype=plain.dtype)
            memo[id(tensor)] = host.set_(buffers[place], plain.storage_offset(), plain.size(), plain.stride())
            return tensor

        apply_to_collection(checkpoint, Tensor, copy_tensor)
        copied = deepcopy(checkpoint, memo)
        self._buffers = [(buffer, device.type == "cuda") for (device, *_), buffer in buffers.items()]
        for device in {device for device, *_ in buffers if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return copied


def _allocate(size: int, *, pinned: bool) -> UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
