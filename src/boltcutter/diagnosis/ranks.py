"""What only several ranks show: weights, learning rates and batches that differ, or do not, where they must not.

Each rank leaves a few hashes in the store by which ranks have found each other, after steps 2, 8, 32, 128, …; rank 0
reads those that are there at a later look. Nothing waits for another rank, so nothing can hang. ``StepLedger``, which a
run has, too, compares weights exactly each 100 steps, and ends the training if they differ.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import torch.distributed as dist

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.data import batch_hash, overfits
from boltcutter.diagnosis.evidence import Evidence

STEPS = frozenset(1 << power for power in range(1, 40, 2))  # 2, 8, 32, …: at all of them, each rank looks
TRAININGS = count()  # of this process, whose facts must not be taken for those of a later one


def store_of(seen: Evidence) -> Any:
    """The store of the ranks, if they train the same weights: those of DDP; None for others."""
    strategy = seen.trainer.strategy
    ignored = getattr(seen.module, "_ddp_params_and_buffers_to_ignore", None)
    averages = getattr(strategy, "_model_averager", None)  # of local SGD, whose weights differ in between
    same = "DDP" in type(strategy).__name__ and not seen.sharded and not ignored and averages is None
    if not same or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    return prefixed(f"boltcutter-invariants-{next(TRAININGS)}", store)


def publish(seen: Evidence) -> None:
    """Leave what this rank has seen."""
    seen.store.set(f"{seen.step}/{dist.get_rank()}", json.dumps(facts(seen)))
    seen.pending.append(seen.step)


def collect(seen: Evidence) -> bool:
    """Read, on rank 0, the facts of all ranks at the next step; False if they are not there yet."""
    if dist.get_rank() or not seen.pending:
        return False
    keys = [f"{seen.pending[0]}/{rank}" for rank in range(dist.get_world_size())]
    if not seen.store.check(keys):
        return False
    seen.pending.pop(0)
    seen.facts = [json.loads(seen.store.get(key)) for key in keys]
    return True


def facts(seen: Evidence) -> dict[str, Any]:
    """Hashes of the weights and the first batches, and the learning rates."""
    trained = [seen.parameters[name] for name in seen.trained]
    return {
        "weights": batch_hash([p for p in trained if not p.is_sparse]),
        "rates": [float(group["lr"]) for o in seen.optimizers for group in o.param_groups if "lr" in group],
        "batches": seen.hashes if seen.has_data and not overfits(seen) else [],
    }


@check("ranks-differ", "certain", at="ranks")
def ranks_differ(seen: Evidence) -> Lines:
    """Trained weights of DDP differ between ranks after the same step."""
    if len({each["weights"] for each in seen.facts}) > 1:
        yield (
            "the ranks have different weights, so each trains a model of its own, of which only that of rank 0 is "
            "saved: gradients are not averaged, as without backward() or manual_backward(), or weights were changed "
            "on each rank after DDP had copied them"
        )


@check("ranks-rates", "certain", at="ranks")
def ranks_rates(seen: Evidence) -> Lines:
    """Learning rates differ between ranks after the same step."""
    found = [each["rates"] for each in seen.facts]
    if found and any(rates != found[0] for rates in found):
        yield (
            "the ranks have different learning rates, so their weights drift apart; a schedule follows a metric of "
            "one rank: log it with sync_dist=True"
        )


@check("ranks-same-data", "certain", at="ranks")
def ranks_same_data(seen: Evidence) -> Lines:
    """The first batches, at least two, are the same on all ranks."""
    found = [each["batches"] for each in seen.facts]
    if found and len(found[0]) > 1 and all(batches == found[0] for batches in found):
        yield (
            f"all {len(found)} ranks read the same batches, so each sample is trained {len(found)} times per epoch; "
            "divide the samples by rank, or remove use_distributed_sampler=False"
        )
