"""Check of a training that trains nothing at all, which would otherwise end as completed."""

from __future__ import annotations

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer

from boltcutter.diagnosis.checks import Lines, check
from boltcutter.diagnosis.evidence import Evidence, sampled
from boltcutter.diagnosis.schedules import rates_of, schedules

NAME = "nothing-trained"  # recorded as the warning of a run, too


@check(NAME, "certain", at="start")
def no_optimizer(seen: Evidence) -> Lines:
    """There is no optimizer, no step, no loss or no gradient, or all gradients or learning rates are 0."""
    is_mock = all(isinstance(optimizer, _MockOptimizer) for optimizer in seen.trainer.optimizers)
    if seen.module.automatic_optimization and is_mock:
        yield "configure_optimizers returned None; return an optimizer"


@check(NAME, "certain", at="summary")
def no_update(seen: Evidence) -> Lines:
    """There is no optimizer, no step, no loss or no gradient, or all gradients or learning rates are 0."""
    steps = [seen.steps[id(optimizer)] for optimizer in seen.optimizers]
    names = ", ".join(sorted({type(optimizer).__name__ for optimizer in seen.optimizers}))
    if not steps or seen.sharded:  # of sharded parameters, a rank may have none
        return
    if not seen.module.automatic_optimization:
        if not any(each.count for each in steps) and not has_changed(seen):
            yield f"{names} has made no step, and no parameter has changed; call step() in training_step"
        return
    if seen.forward_passes and seen.without_loss == seen.forward_passes:
        if not has_changed(seen):  # by steps of its own
            yield f"training_step returned None for all {seen.forward_passes} batches looked at; return the loss"
        return
    count, enough = max(each.count for each in steps), seen.ended or seen.step >= 3
    if enough and not any(each.rated for each in steps) and (seen.ended or not seen.trainer.lr_scheduler_configs):
        # A trial may be shorter than the first epoch of a schedule that begins at 0.
        begins = seen.probe is not None and any(any(rates_of(seen, s, n)) for s, _, n in schedules(seen))
        if count and not begins:
            yield f"all learning rates were 0 in {count} steps; raise the rate, or correct the schedule"
        elif not seen.trainer.global_step:  # a resumed training may have had to validate only
            yield f"{names} has made no step; let on_train_batch_start skip none, and optimizer_step call step()"
    elif enough and count and not seen.got_gradient & {*seen.trained} and not has_changed(seen):
        yield (
            f"no parameter of {names} gets a gradient: the loss of {type(seen.module).__name__}.training_step depends "
            "on none of them; compute it from the model's outputs, and pass its parameters to the optimizer"
        )
    elif seen.step >= 3 and seen.ended and not seen.got_nonzero and not any(each.emptied for each in steps):
        yield (
            f"all gradients were exactly 0 at all {seen.looks} steps that were looked at: the loss does not depend on "
            "the weights; compute it from the model's outputs"
        )


def has_changed(seen: Evidence) -> bool:
    """Whether a parameter differs from the start, or was changed in place."""
    return any(
        p._version != seen.versions.get(n) or (n in seen.start and not torch.equal(sampled(p), seen.start[n]))
        for n, p in seen.parameters.items()
    )
