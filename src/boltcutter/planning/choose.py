"""Estimate the memory of each strategy over a number of devices, and recommend one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from boltcutter.config.settings import Settings
from boltcutter.planning.estimate import EstimationError, Memory, estimate_step

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
USABLE = 0.9  # fraction of a device's memory to plan with; the rest is for the CUDA context and fragmentation


@dataclass(frozen=True)
class StrategyEstimate:
    """Memory of the strategy that some overrides select, or the reason why there is no estimate."""

    overrides: str
    memory: Memory | str

    @property
    def option(self) -> str:
        """The option of the config group ``trainer``."""
        return self.overrides.split()[0].partition("=")[2]


def estimate_strategies(cfg: Settings, like: Any, devices: int) -> Iterator[StrategyEstimate]:
    """Estimate the memory of each strategy for a batch like ``like``, the simplest strategy first.

    Yields:
        An estimate for each strategy; the batch is rounded up to divide over its ranks.
    """
    batch = int(cfg.data.get("batch_size", 1))

    def row(overrides: str, ranks: int = 1, chunks: int = 1, **options: Any) -> StrategyEstimate:
        rounded = batch + -batch % max(ranks, chunks)
        overrides += f" data.batch_size={rounded}" if rounded != batch else ""
        try:
            return StrategyEstimate(overrides, estimate_step(cfg, like, rounded // ranks, **options))
        except EstimationError as error:
            return StrategyEstimate(overrides, str(error))

    yield row("trainer=default trainer.devices=1")
    if devices == 1:
        return
    many = f"trainer.devices={devices}"
    yield row(f"trainer=ddp {many}", devices, keep_gradients=True)
    yield row(f"trainer=fsdp2 {many}", devices, data_ranks=devices, tensor_ranks=1)
    tensor_parallel = f"trainer=fsdp2 {many} trainer.strategy.tensor_parallel_size="
    if devices % 2 == 0 and devices > 2:
        yield row(f"{tensor_parallel}2", devices // 2, data_ranks=devices // 2, tensor_ranks=2)
    yield row(f"{tensor_parallel}{devices}", 1, data_ranks=1, tensor_ranks=devices)
    microbatches = max(4, devices)
    option = f" trainer.strategy.num_microbatches={microbatches}" if microbatches > 4 else ""
    yield row(f"trainer=pipeline {many}{option}", chunks=microbatches, stages=devices)


def recommend(found: Sequence[StrategyEstimate], memory: int) -> str:
    """Recommend the first strategy that fits into ``memory`` bytes of each device."""
    known = [(row.overrides, row.memory) for row in found if isinstance(row.memory, Memory)]
    parallel = [(overrides, need) for overrides, need in known if "trainer.devices=1" not in overrides.split()] or known
    if not parallel:
        return "no estimate for this model; `boltcutter find-batch-size` measures it"
    fitting = next((overrides for overrides, need in parallel if fits_in_memory(need, memory)), None)
    if fitting:
        return fitting
    overrides, least = min(parallel, key=lambda row: row[1].peak)
    state = least.weights + least.gradients + least.optimizer
    free = int(USABLE * memory) - state
    text = f"nothing fits; {overrides} needs least, {format_bytes(least.peak)}"
    if free <= 0:
        return (
            f"{text}, of which {format_bytes(state)} do not depend on the batch; use more devices, or "
            "trainer=fsdp2 trainer.strategy.cpu_offload=true, which keeps the float32 weights in host memory"
        )
    steps = -(-(least.peak - state) // free)
    return f"{text}; try trainer.accumulate_grad_batches={steps}, with a data.batch_size {steps} times smaller"


def fits_in_memory(need: Memory, memory: int) -> bool:
    """Whether the peak fits into the usable fraction of a device's memory."""
    return need.peak <= USABLE * memory


def format_bytes(number: int) -> str:
    """Format bytes in the largest binary unit that gives at least 1."""
    unit = max((unit for unit, bytes in UNITS.items() if number >= bytes), key=lambda unit: UNITS[unit], default="")
    return f"{number / UNITS[unit]:.1f} {unit}iB" if unit else f"{number} B"
