"""Estimate the memory of each strategy over a number of devices, and recommend one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from boltcutter.config.compose import DictConfig
from boltcutter_planning.estimate import EstimationError, Memory, estimate_step

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
USABLE = 0.9  # fraction of a device's memory to plan with; the rest is for the CUDA context and fragmentation
MAX_LIVE_PARAMETERS = 1_000_000_000  # gathered parameters that DeepSpeed keeps by default at stage 3
REDUCE_BUCKET = 200_000_000  # elements that DeepSpeed reduces at once, by Lightning's default


@dataclass(frozen=True)
class StrategyEstimate:
    """Memory of the strategy that some overrides select, or the reason why there is no estimate."""

    overrides: str
    memory: Memory | str

    @property
    def option(self) -> str:
        """The option of the config group ``trainer``."""
        return self.overrides.split()[0].partition("=")[2]


def estimate_strategies(cfg: DictConfig, like: Sequence[Tensor], devices: int) -> Iterator[StrategyEstimate]:
    """Estimate the memory of each strategy for a batch like ``like``, the simplest strategy first.

    Yields:
        An estimate for each strategy; the batch is rounded up to divide over its ranks.

    Source: Rajbhandari et al., ZeRO, 2020 (DeepSpeed's stages, which are computed from the other estimates).
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
    ddp = row(f"trainer=ddp {many}", devices, keep_gradients=True)
    yield ddp
    dp = row(f"trainer=dp {many}", chunks=devices, replicas=devices)
    if isinstance(dp.memory, Memory):  # the first device receives the gradients of each replica besides its own
        least = dp.memory.weights + dp.memory.optimizer + 2 * dp.memory.gradients
        dp = replace(dp, memory=replace(dp.memory, peak=max(dp.memory.peak, least)))
    yield dp
    yield row(f"trainer=fsdp2 {many}", devices, data_ranks=devices, tensor_ranks=1)
    tensor_parallel = f"trainer=fsdp2 {many} trainer.strategy.tensor_parallel_size="
    if devices % 2 == 0 and devices > 2:
        yield row(f"{tensor_parallel}2", devices // 2, data_ranks=devices // 2, tensor_ranks=2)
    yield row(f"{tensor_parallel}{devices}", 1, data_ranks=1, tensor_ranks=devices)
    microbatches = max(4, devices)
    option = f" trainer.strategy.num_microbatches={microbatches}" if microbatches > 4 else ""
    yield row(f"trainer=pipeline {many}{option}", chunks=microbatches, stages=devices)
    for stage in (1, 2, 3):
        overrides = ddp.overrides.replace("trainer=ddp", "trainer=deepspeed") + f" trainer.strategy.stage={stage}"
        memory = _deepspeed(ddp.memory, stage, devices, cfg) if isinstance(ddp.memory, Memory) else ddp.memory
        yield StrategyEstimate(overrides, memory)


def _deepspeed(one: Memory, stage: int, devices: int, cfg: DictConfig) -> Memory:
    """Shard the memory ``one`` of DDP as the ZeRO stage does; the optimizer also keeps float32 weights."""
    narrow = 2 if str(cfg.trainer.precision).endswith("-mixed") else 1  # DeepSpeed then keeps weights in 16 bits
    weights, gradients = one.weights // narrow, one.gradients // narrow
    element = 4 // narrow  # bytes
    optimizer = (one.optimizer + one.gradients) // devices
    rest = one.peak - one.weights - one.gradients - one.optimizer + min(gradients, REDUCE_BUCKET * element)
    if stage == 3:
        rest += min(weights, MAX_LIVE_PARAMETERS * element)
    weights = weights // devices if stage == 3 else weights
    gradients = gradients // devices if stage > 1 else gradients
    return Memory(weights, gradients, optimizer, one.activations, weights + gradients + optimizer + rest)


def recommend(found: Sequence[StrategyEstimate], memory: int) -> str:
    """Recommend the first strategy that fits into ``memory`` bytes of each device, without DP and DeepSpeed."""
    rows = [row for row in found if "trainer=dp " not in row.overrides and "deepspeed" not in row.overrides]
    known = [(row.overrides, row.memory) for row in rows if isinstance(row.memory, Memory)]
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
