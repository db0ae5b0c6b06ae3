"""CPU time that ``Invariants`` takes in a training, each in a fresh process.

python scripts/studies/diagnosis_cost.py [<steps> …]

The time of its own methods is summed, without that of the training steps that they surround. Beside it stands the time
per step between looks: that of an optimizer that does nothing, with its hook and without, in alternating turns. If
others use the machine, the share of this training says more than that of steps of 1 ms, as both sides are slower.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from time import thread_time
from typing import Any

STEPS = (1_000, 10_000)
PROCESSES = 5  # of which the fastest counts, as others use the machine
EPOCH = 1_000  # steps
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_end", "on_validation_start"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_end", "count", "teardown"),
)
SURROUND = ("around_training_step", "around_backward")


def train(steps: int) -> dict[str, Any]:
    """Train an MLP of 784-64-128-64-10 on batches of 64, and measure."""
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from boltcutter.diagnosis import Invariants, invariants

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = (784, 64, 128, 64, 10)
            layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
            self.net = nn.Sequential(nn.Flatten(), *layers[:-1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    own: dict[str, float] = {}

    def timed(owner: type, name: str, *, surrounds: bool = False) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            inner = 0.0
            if surrounds:
                step, *others = args

                def surrounded(*a: Any, **o: Any) -> Any:
                    nonlocal inner
                    began = thread_time()
                    try:
                        return step(*a, **o)
                    finally:
                        inner += thread_time() - began

                args = (surrounded, *others)
            began = thread_time()
            try:
                return method(self, *args, **options)
            finally:
                own[name] = own.get(name, 0.0) + thread_time() - began - inner

        setattr(owner, name, call)

    for name in HOOKS:
        timed(invariants.Invariants, name)
    for name in SURROUND:
        timed(invariants.Watch, name, surrounds=True)
    images, labels = torch.randn(EPOCH * 64 // 10, 1, 28, 28), torch.randint(0, 10, (EPOCH * 64 // 10,))
    data = TensorDataset(images, labels)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[Invariants()], enable_model_summary=False,
            default_root_dir=folder, check_val_every_n_epoch=10, **options,
        )  # fmt: skip
        began = thread_time()
        trainer.fit(Module(), DataLoader(data, 64), DataLoader(data, 64))
        whole = thread_time() - began
    assert trainer.global_step == steps
    return {"own": own, "whole": whole, "between": between()}


def between() -> float:
    """Microseconds that the hook takes in a step that is not looked at."""
    import torch

    from boltcutter.diagnosis.evidence import Steps
    from boltcutter.diagnosis.invariants import Invariants, StepHook

    class Nothing(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    watch, parameter = Invariants(), torch.nn.Parameter(torch.zeros(1))
    watch._next = sys.maxsize
    plain, hooked = Nothing([parameter], {}), Nothing([parameter], {})
    hooked.register_step_post_hook(StepHook(watch, Steps()))
    gaps = []
    for _ in range(200):
        times = []
        for optimizer in (plain, hooked):
            began = thread_time()
            for _ in range(200):
                optimizer.step()
            times.append((thread_time() - began) / 200 * 1e6)
        gaps.append(times[1] - times[0])
    return statistics.median(gaps)


def main() -> None:
    """Print a row for each length."""
    lengths = [int(each) for each in sys.argv[1:]] or STEPS
    print("| steps | CPU time of Invariants | of this training | of steps of 1 ms | per step between looks |")
    print("|---|---|---|---|---|")
    for steps in lengths:
        tries = []
        for _ in range(PROCESSES):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                tries.append(pool.apply(train, (steps,)))
            total = sum(tries[-1]["own"].values())
            print(f"  {total * 1e3:.1f} ms, {tries[-1]['between']:.2f} µs", file=sys.stderr, flush=True)
        found = min(tries, key=lambda each: sum(each["own"].values()))
        total = sum(found["own"].values())
        print(
            f"| {steps:,} | {total * 1e3:.1f} ms | {total / found['whole']:.2%} | {total / steps * 1e5:.2f}% "
            f"| {found['between']:.2f} µs |",
            flush=True,
        )
        parts = sorted(found["own"].items(), key=lambda item: -item[1])
        print("  " + ", ".join(f"{name} {value * 1e3:.1f}" for name, value in parts), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
