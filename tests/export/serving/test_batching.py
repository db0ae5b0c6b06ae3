import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from boltcutter.export.serving import batching
from boltcutter.export.serving.batching import Array, Batcher, OverloadedError

Test = Callable[[Batcher], Awaitable[None]]


class Model:
    """Doubles samples, and holds the first batch until it is released."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, inputs: Array) -> Array:
        self.sizes.append(len(inputs))
        self.begun.set()
        assert self.released.wait(20)
        if (inputs < 0).any():
            raise ValueError("negative")
        return inputs * 2


def run(model: Model, test: Test, *, max_wait: float = 0, max_waiting: int = 100) -> None:
    async def main() -> None:
        batcher = Batcher(model, max_batch=4, max_wait=max_wait, max_waiting=max_waiting)
        batcher.start()
        try:
            await asyncio.wait_for(test(batcher), 20)
        finally:
            model.released.set()
            await batcher.stop()

    asyncio.run(main())


async def begin(model: Model, batcher: Batcher, values: list[float]) -> asyncio.Task[Array]:
    task = asyncio.ensure_future(batcher(np.array(values)))
    await asyncio.to_thread(model.begun.wait, 20)
    return task


def test_samples_that_arrive_during_a_batch_are_computed_together() -> None:
    model = Model()

    async def test(batcher: Batcher) -> None:
        first = await begin(model, batcher, [1])
        others = [asyncio.ensure_future(batcher(np.array(values))) for values in ([2.0], [3.0, 4.0], [5.0, 6.0], [7.0])]
        await asyncio.sleep(0.05)
        model.released.set()
        assert [list(found) for found in await asyncio.gather(first, *others)] == [[2], [4], [6, 8], [10, 12], [14]]
        assert model.sizes == [1, 4, 2]  # at most four, and a request is not split

    run(model, test)


def test_a_batch_waits_for_further_samples() -> None:
    model = Model()
    model.released.set()

    async def test(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher(np.array([1.0])))
        await asyncio.sleep(0.05)
        await asyncio.gather(first, batcher(np.array([2.0])))
        assert model.sizes == [2]

    run(model, test, max_wait=0.5)


def test_samples_of_other_shapes_are_computed_apart() -> None:
    model = Model()

    async def test(batcher: Batcher) -> None:
        first = await begin(model, batcher, [1])
        others = [asyncio.ensure_future(batcher(np.ones(shape))) for shape in ((1, 2), (1, 3), (1, 2))]
        await asyncio.sleep(0.05)
        model.released.set()
        assert [found.shape for found in await asyncio.gather(first, *others)] == [(1,), (1, 2), (1, 3), (1, 2)]
        assert model.sizes == [1, 2, 1]

    run(model, test)


def test_too_many_waiting_samples_are_refused() -> None:
    model = Model()

    async def test(batcher: Batcher) -> None:
        first = await begin(model, batcher, [1])
        second = asyncio.ensure_future(batcher(np.array([2.0, 3.0])))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match="more than 3 samples wait"):
            await batcher(np.array([4.0, 5.0]))
        second.cancel()  # a client that has gone is not computed
        model.released.set()
        await first
        await batcher(np.array([6.0]))
        assert model.sizes == [1, 1]

    run(model, test, max_waiting=3)


def test_a_large_request_is_computed_in_several_batches_or_refused_as_a_whole() -> None:
    model = Model()
    model.released.set()

    async def test(batcher: Batcher) -> None:
        assert list(await batcher(np.arange(9.0))) == [2 * value for value in range(9)]
        with pytest.raises(OverloadedError):
            await batcher(np.arange(11.0))
        assert model.sizes == [4, 4, 1]

    run(model, test, max_waiting=10)


def test_an_error_reaches_its_request_only() -> None:
    model = Model()

    async def test(batcher: Batcher) -> None:
        first = await begin(model, batcher, [1])
        bad, good = (asyncio.ensure_future(batcher(np.array([value]))) for value in (-1.0, 2.0))
        await asyncio.sleep(0.05)
        model.released.set()
        assert list(await first) == [2]
        with pytest.raises(ValueError, match="negative"):
            await bad
        assert list(await good) == [4]  # which was in the same batch
        assert model.sizes == [1, 2, 1, 1]
        assert list(await batcher(np.array([3.0]))) == [6]

    run(model, test)


def test_threads_sleep_while_they_wait() -> None:
    code = "import os, sys; from boltcutter.export.serving.batching import begin; begin()\n"
    code += "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE' and 'torch' not in sys.modules"  # which reads it
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_after_a_batch_of_several_a_sample_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "GATHERING", 0.5)
    model = Model()

    async def test(batcher: Batcher) -> None:
        first = await begin(model, batcher, [1])
        others = [asyncio.ensure_future(batcher(np.array([value]))) for value in (2.0, 3.0)]
        await asyncio.sleep(0.05)
        model.released.set()
        await asyncio.gather(first, *others)
        again = asyncio.ensure_future(batcher(np.array([4.0])))
        await asyncio.sleep(0.05)
        await asyncio.gather(again, batcher(np.array([5.0])))
        assert model.sizes == [1, 2, 2]

    run(model, test)
