"""Values of a device that are copied to the host while it computes, and read later."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """A copy on the host, and when it is there."""

    values: Tensor
    ready: torch.cuda.Event | None  # None: already

    def is_ready(self) -> bool:
        """Whether nothing has to wait for it."""
        event: Any = self.ready
        return event is None or bool(event.query())

    def wait(self) -> Tensor:
        """Return the values; a step later, they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values


def copy_to_host(values: Tensor) -> HostCopy:
    """Begin to copy a tensor; a CUDA device does so after what is queued on it, for which nothing waits."""
    if not values.is_cuda:
        return HostCopy(values.to("cpu"), None)
    copied, ready = values.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return HostCopy(copied, ready)


class Shown:
    """A number that is shown now and then: the latest one that has arrived on the host, for which nothing waits.

    Attributes:
        value: It; None as long as there is none.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._source: Any = None  # what was copied last
        self._copy: HostCopy | None = None

    def update(self, source: Any, *, waits: bool = False) -> None:
        """Take what has arrived, and begin to copy a newer value.

        Args:
            source: A number or a tensor of one; None: there is no newer value.
            waits: Whether to wait for it, as at the end of an epoch.
        """
        if self._copy is not None and self._copy.is_ready():
            self.value, self._copy = float(self._copy.values), None
        if source is None or (source is self._source and not waits):
            return
        if waits or not isinstance(source, Tensor) or not source.is_cuda:
            self.value, self._source, self._copy = float(source), source, None
        elif self._copy is None:
            self._source, self._copy = source, copy_to_host(source.detach())
