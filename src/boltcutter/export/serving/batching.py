"""Combine concurrent requests into batches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

GATHERING = 0.002  # seconds for the next samples, if fewer wait than the last batch had

Array = npt.NDArray[Any]
Samples = Array | list[Any]


def begin() -> None:
    """Let the threads of torch sleep while they wait, as they share the cores with HTTP; call it before the import."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def join(inputs: Sequence[Samples]) -> Samples:
    """Join the samples of requests: arrays of one shape and type, or lists, which are collated later."""
    return np.concatenate(inputs) if isinstance(inputs[0], np.ndarray) else [one for some in inputs for one in some]


def describe(inputs: Samples) -> Any:
    """What samples must have in common to be joined."""
    return (inputs.shape[1:], inputs.dtype) if isinstance(inputs, np.ndarray) else list


class OverloadedError(RuntimeError):
    """More samples wait than the limit allows."""


@dataclass(eq=False)
class Waiting:
    """Samples of a request, at most as many as a batch has, that wait for one."""

    inputs: Samples
    result: asyncio.Future[Array] = field(repr=False)


class Batcher:
    """Call a function on batches of samples from concurrent requests, one batch at a time.

    While one batch is computed, the samples that arrive wait for the next one, so that batches grow with the load.

    Args:
        function: Computes outputs (N, …) from inputs (N, …); called in a thread.
        max_batch: Largest number of samples in a batch.
        max_wait: Seconds to wait for further samples before a batch that is not full.
        max_waiting: Largest number of samples that wait; further ones are refused.
    """

    def __init__(self, function: Callable[[Any], Array], *, max_batch: int, max_wait: float, max_waiting: int) -> None:
        self.function, self.max_batch, self.max_wait, self.max_waiting = function, max_batch, max_wait, max_waiting
        self.waiting: list[Waiting] = []
        self._count = 0  # samples of the requests that wait
        self._latest = 0  # samples of the last batch
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "batch")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to compute batches in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop after the current batch; no request may wait any more."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    async def __call__(self, inputs: Samples) -> Array:
        """Compute the outputs of one request, in several batches if it has more samples than ``max_batch``.

        Args:
            inputs: Samples (N, …), or a list of N samples.

        Raises:
            OverloadedError: Too many samples wait.
        """
        if self._count + len(inputs) > self.max_waiting:
            raise OverloadedError(f"more than {self.max_waiting} samples wait")
        loop = asyncio.get_running_loop()
        starts = range(0, len(inputs), self.max_batch)
        parts = [Waiting(inputs[start : start + self.max_batch], loop.create_future()) for start in starts]
        self.waiting += parts
        self._count += len(inputs)
        self._arrived.set()
        found = [await part.result for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            wait = self.max_wait if self._count < self.max_batch else 0.0
            if self._count < self._latest:  # the clients of the last batch are about to send again
                wait = max(wait, GATHERING)
            if wait:
                await asyncio.sleep(wait)
            batch = self._take()
            self._latest = sum(len(request.inputs) for request in batch)
            if not batch:
                continue
            await self._compute(batch)

    async def _compute(self, batch: list[Waiting]) -> None:
        """Compute requests together, or each alone if that fails, so that one does not make others fail."""
        try:
            inputs = join([request.inputs for request in batch])
            outputs = await asyncio.get_running_loop().run_in_executor(self._thread, self.function, inputs)
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    await self._compute([request])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + len(request.inputs)
            if not request.result.done():  # the client may have gone
                request.result.set_result(outputs[start:end])
            start = end

    def _take(self) -> list[Waiting]:
        """Take the requests of the next batch, all with samples of one shape and type."""
        batch, rest, size = list[Waiting](), list[Waiting](), 0
        for request in self.waiting:
            if request.result.done():  # the client has gone
                continue
            first = batch[0].inputs if batch else request.inputs
            same = describe(request.inputs) == describe(first)
            if same and size + len(request.inputs) <= self.max_batch:
                batch.append(request)
                size += len(request.inputs)
            else:
                rest.append(request)
        self.waiting, self._count = rest, sum(len(request.inputs) for request in rest)
        if not rest:
            self._arrived.clear()
        return batch
