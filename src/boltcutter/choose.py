"""The ways to spread a training over devices, what memory each takes, and which of them to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from boltcutter.config import DictConfig
from boltcutter.estimate import EstimationError, Memory, SampleSpec, estimate_step

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
FULL = 0.9  # of a device's memory that may be planned with; the rest goes to CUDA itself and to gaps
LIVE = 1_000_000_000  # numbers of gathered weights that DeepSpeed keeps by default at stage 3
BUCKET = 200_000_000  # numbers that it reduces at once, by Lightning's default


@dataclass(frozen=True)
class StrategyEstimate:
    """One way to train.

    Args:
        words: That choose it.
        memory: What it takes, or why that cannot be told.
    """

    words: str
    memory: Memory | str

    @property
    def option(self) -> str:
        """Of the group ``trainer``."""
        return self.words.split()[0].partition("=")[2]


def estimate_strategies(cfg: DictConfig, sample: SampleSpec, devices: int) -> Iterator[StrategyEstimate]:
    """Each strategy over ``devices``, with a batch that divides over its ranks.

    Source: Rajbhandari et al., ZeRO, 2020 (DeepSpeed's stages, which are computed from the others and not run).
    """
    batch = int(cfg.data.get("batch_size", 1))

    def row(words: str, ranks: int = 1, parts: int = 1, **options: Any) -> StrategyEstimate:
        whole = batch + -batch % max(ranks, parts)
        words += f" data.batch_size={whole}" if whole != batch else ""
        try:
            return StrategyEstimate(words, estimate_step(cfg, sample, whole // ranks, **options))
        except EstimationError as error:
            return StrategyEstimate(words, str(error))

    yield row("trainer=default trainer.devices=1")
    if devices == 1:
        return
    many = f"trainer.devices={devices}"
    held = row(f"trainer=ddp {many}", devices, held=True)
    yield held
    one = row(f"trainer=dp {many}", parts=devices, spread=devices)
    if isinstance(one.memory, Memory):  # gradients of all copies come together where those of the first one are
        least = one.memory.weights + one.memory.optimizer + 2 * one.memory.gradients
        one = replace(one, memory=replace(one.memory, peak=max(one.memory.peak, least)))
    yield one
    yield row(f"trainer=fsdp2 {many}", devices, data_ranks=devices, tensor_ranks=1)
    cut = f"trainer=fsdp2 {many} trainer.strategy.tensor_parallel_size="
    if devices % 2 == 0 and devices > 2:
        yield row(f"{cut}2", devices // 2, data_ranks=devices // 2, tensor_ranks=2)
    yield row(f"{cut}{devices}", 1, data_ranks=1, tensor_ranks=devices)
    parts = max(4, devices)
    several = f" trainer.strategy.num_microbatches={parts}" if parts > 4 else ""
    yield row(f"trainer=pipeline {many}{several}", parts=parts, stages=devices)
    for stage in (1, 2, 3):
        words = held.words.replace("trainer=ddp", "trainer=deepspeed") + f" trainer.strategy.stage={stage}"
        memory = _deepspeed(held.memory, stage, devices, cfg) if isinstance(held.memory, Memory) else held.memory
        yield StrategyEstimate(words, memory)


def _deepspeed(one: Memory, stage: int, devices: int, cfg: DictConfig) -> Memory:
    """What ``one`` device takes, cut as the stage says; the optimizer also keeps weights in 32 bits."""
    narrow = 2 if str(cfg.trainer.precision).endswith("-mixed") else 1  # its weights have 16 bits then
    weights, gradients = one.weights // narrow, one.gradients // narrow
    number = 4 // narrow  # bytes
    optimizer = (one.optimizer + one.gradients) // devices
    rest = one.peak - one.weights - one.gradients - one.optimizer + min(gradients, BUCKET * number)
    if stage == 3:
        rest += min(weights, LIVE * number)
    weights = weights // devices if stage == 3 else weights
    gradients = gradients // devices if stage > 1 else gradients
    return Memory(weights, gradients, optimizer, one.activations, weights + gradients + optimizer + rest)


def recommend(found: Sequence[StrategyEstimate], memory: int) -> str:
    """The simplest and fastest that fits: copies before cuts, cuts between layers before cuts within.

    Args:
        found: Of all strategies, the simplest first.
        memory: Of each device, in bytes.
    """
    own = [(row.words, row.memory) for row in found if "trainer=dp " not in row.words and "deepspeed" not in row.words]
    known = [(words, kept) for words, kept in own if isinstance(kept, Memory)]
    spread = [(words, kept) for words, kept in known if "trainer.devices=1" not in words.split()] or known
    if not spread:
        return "cannot be told for this model; python scripts/bench.py batch tries it out"
    fitting = next((words for words, kept in spread if fits_in_memory(kept, memory)), None)
    if fitting:
        return fitting
    words, least = min(spread, key=lambda row: row[1].peak)
    held = least.weights + least.gradients + least.optimizer
    room, told = int(FULL * memory) - held, f"nothing fits; {words} needs least, {format_bytes(least.peak)}"
    if room <= 0:
        return (
            f"{told}, {format_bytes(held)} of it without any sample: take more devices, or trainer.precision=bf16-true"
        )
    parts = -(-(least.peak - held) // room)
    return f"{told}: try trainer.accumulate_grad_batches={parts}, with a data.batch_size {parts} times smaller"


def fits_in_memory(kept: Memory, memory: int) -> bool:
    """Whether a device has room for it, and for what nobody counts."""
    return kept.peak <= FULL * memory


def format_bytes(number: int) -> str:
    """Bytes in the largest unit that leaves a whole number."""
    unit = max((unit for unit, bytes in UNITS.items() if number >= bytes), key=lambda unit: UNITS[unit], default="")
    return f"{number / UNITS[unit]:.1f} {unit}iB" if unit else f"{number} B"
