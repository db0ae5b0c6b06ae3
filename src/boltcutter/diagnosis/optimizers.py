"""Checks of which parameters the optimizers have, before the first step."""

from __future__ import annotations

from collections import defaultdict

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import SGD

from boltcutter.diagnosis.checks import Line, Lines, check, some
from boltcutter.diagnosis.evidence import Evidence, sampled
from boltcutter.diagnosis.graph import attributes
from boltcutter.internals import BatchNorm

BASES = frozenset(f"{name}weight" for name in ("", "base.", "base_layer.", "linear.", "original.", "layer.", "fc."))


def missing(seen: Evidence) -> list[str]:
    """Names of parameters that require a gradient, and are in no optimizer."""
    return [n for n, p in seen.parameters.items() if p.requires_grad and id(p) not in seen.owned]


@check("foreign-optimizer", "certain", at="start")
def foreign_optimizer(seen: Evidence) -> Lines:
    """An optimizer has tensors that are not in the module, and lacks parameters of it."""
    foreign = seen.owned - seen.names.keys() - attributes(seen.module).keys()  # such as a learned temperature
    lacking = missing(seen)
    if foreign and lacking and not seen.sharded:
        yield (
            f"the optimizer has {len(foreign)} tensors that are not in the module, but lacks {some(lacking)}, which is "
            "not trained; create it in configure_optimizers, after layers were replaced"
        )


@check("two-optimizers", "certain", at="start")
def two_optimizers(seen: Evidence) -> Lines:
    """A parameter is in two optimizers, while another is in none."""
    holders = defaultdict(set)
    for number, optimizer in enumerate(seen.optimizers):
        for group in optimizer.param_groups:
            for p in group["params"]:
                holders[id(p)].add(number)
    shared = [seen.names.get(key, "a tensor") for key, numbers in holders.items() if len(numbers) > 1]
    lacking = missing(seen)
    if shared and lacking and not seen.sharded:
        yield f"{some(shared)} is in two optimizers, while {some(lacking)} is in none; correct configure_optimizers"


@check("split-layer", "likely", at="start")
def split_layer(seen: Evidence) -> Lines:
    """A layer, or what is in it, is in an optimizer, but a parameter of its own is not, as fewer than half are not."""
    lacking = missing(seen)
    if seen.sharded or len(lacking) >= len(seen.parameters) - len(lacking):
        return  # training biases alone is meant
    trained = [n for n, p in seen.parameters.items() if id(p) in seen.owned]
    owners = {n: n.rpartition(".")[0] for n in lacking}
    split = [n for n, owner in owners.items() if any(t.startswith(f"{owner}." if owner else "") for t in trained)]
    if split:
        yield (
            f"{some(split)} is in no optimizer, although other parameters of the same layer are; check the filters of "
            "the parameter groups"
        )


@check("in-no-optimizer", "note", at="start")
def in_no_optimizer(seen: Evidence) -> Lines:
    """A layer that requires gradients is in no optimizer."""
    alone = missing(seen)
    if alone and seen.optimizers and not seen.sharded:
        yield f"{some(alone)} is in no optimizer; freeze it with requires_grad_(False), or add it"


@check("thawed", "likely", at="summary")
def thawed(seen: Evidence) -> Lines:
    """A parameter that was frozen when training began has got a gradient, and is in no optimizer."""
    owned = seen.optimized()
    names = [n for n in seen.frozen & seen.got_gradient if seen.parameters[n].requires_grad]
    late = sorted(n for n in names if id(seen.parameters[n]) not in owned)
    if late and any(isinstance(c, BaseFinetuning) for c in seen.trainer.callbacks):  # type: ignore[attr-defined]
        late = [n for n in late if not isinstance(seen.module.get_submodule(n.rpartition(".")[0]), BatchNorm)]  # meant
    if late:
        yield (
            f"{some(late)} was frozen when the optimizers were made, and is in none since it was thawed, so it is not "
            "trained; call optimizer.add_param_group, or give the optimizer all parameters"
        )


@check("shared-memory", "likely", at="start")
def shared_memory(seen: Evidence) -> Lines:
    """Two parameters of the optimizers have the same memory, so it is stepped twice."""
    if seen.sharded:
        return
    first: dict[tuple[int, torch.Size], str] = {}
    for name in seen.trained:
        p = seen.parameters[name]
        if p.numel() > 1 and p.data_ptr():
            other = first.setdefault((p.data_ptr(), p.shape), name)
            if other != name:
                yield Line(
                    f"{other} and {name} have the same memory, as after a.data = b.data, but are two parameters, each "
                    "with a gradient and a step of its own; assign the parameter itself: a.weight = b.weight",
                    subject=name,
                )


@check("decay", "likely", at="start")
def decay(seen: Evidence) -> Lines:
    """Learning rate times decoupled weight decay is 5% or more; a coupled weight decay is 1 or more."""
    for optimizer in seen.optimizers:
        for group in optimizer.param_groups:
            kind = type(optimizer).__name__
            coupled = "betas" in group and not (group.get("decoupled_weight_decay") or "W" in kind)
            rate, amount = float(group.get("lr", 0.0)), float(group.get("weight_decay") or 0.0)
            if not coupled and rate * amount >= 0.05:
                yield (
                    f"{kind} with lr={rate:g} and weight_decay={amount:g} takes {rate * amount:.0%} of the weights "
                    "away in each step, so they keep nothing of what was learned a few steps before; lower weight_decay"
                )


@check("decay", "likely", at="start")
def coupled_decay(seen: Evidence) -> Lines:
    """Learning rate times decoupled weight decay is 5% or more; a coupled weight decay is 1 or more."""
    for optimizer in seen.optimizers:
        for group in optimizer.param_groups:
            amount = float(group.get("weight_decay") or 0.0)
            if (
                "betas" in group
                and amount >= 1
                and not (group.get("decoupled_weight_decay") or "W" in type(optimizer).__name__)
            ):
                yield (
                    f"weight_decay={amount:g} of {type(optimizer).__name__} is added to the gradient, where it is "
                    "larger than the gradient of the loss, so weights only shrink; try 1e-4, or AdamW"
                )


@check("decay-of-biases", "likely", at="start")
def decay_of_biases(seen: Evidence) -> Lines:
    """An optimizer decays vectors only, such as biases and scales of norms, and all of its matrices in no group."""
    for optimizer in seen.optimizers:
        decayed, others = (
            [p for g in optimizer.param_groups for p in g["params"] if bool(g.get("weight_decay")) is decays]
            for decays in (True, False)
        )
        names = [seen.names[id(p)] for p in decayed if id(p) in seen.names]
        is_reversed = all(p.ndim < 2 for p in decayed) and all(p.ndim > 1 for p in others)
        is_bias = any(name.endswith("bias") for name in names)
        if len(decayed) > 1 and len(others) > 1 and is_reversed and is_bias and not seen.sharded:
            yield (
                f"weight_decay of {type(optimizer).__name__} is that of {some(names)}, and that of all matrices is 0; "
                "exchange the two groups"
            )


@check("adapter-base", "likely", at="start")
def adapter_base(seen: Evidence) -> Lines:
    """The matrix beside the factors of a low-rank adapter (lora_…) is trained, too."""
    owners = {n[: n.index("lora_")] for n in seen.parameters if "lora_" in n}
    trained = [n for n in seen.trained if "lora_" not in n and seen.parameters[n].ndim > 1]
    bases = [n for n in trained if any(n.startswith(owner) and n[len(owner) :] in BASES for owner in owners)]
    if bases and not seen.sharded:
        yield (
            f"{some(bases)} is trained together with its low-rank adapter, so nothing is saved by it; freeze it with "
            "requires_grad_(False)"
        )


@check("momentum", "likely", at="start")
def momentum(seen: Evidence) -> Lines:
    """The momentum of an optimizer is 1 or more, so it never forgets a gradient."""
    for optimizer in seen.optimizers:
        found = {float(group["momentum"]) for group in optimizer.param_groups if group.get("momentum")}
        for amount in sorted(found):
            if amount >= 1:
                yield (
                    f"{type(optimizer).__name__} with momentum={amount:g} adds up all gradients, none of which fades, "
                    "so steps grow without end; write momentum=0.9"
                )


@check("betas", "likely", at="start")
def betas(seen: Evidence) -> Lines:
    """The mean of gradients reaches further back than that of their squares: the two betas are exchanged."""
    for optimizer in seen.optimizers:
        pairs = {
            tuple(map(float, pair)) for group in optimizer.param_groups if len(pair := group.get("betas", ())) == 2
        }
        for first, second in sorted(pairs):
            if first > second:
                yield (
                    f"{type(optimizer).__name__} with betas=({first:g}, {second:g}) averages gradients over more steps "
                    f"than their squares, so steps do not follow the gradient; write betas=({second:g}, {first:g})"
                )


@check("group-without-rate", "likely", at="summary")
def group_without_rate(seen: Evidence) -> Lines:
    """A schedule has kept the rate of a parameter group, but not of another one, at 0 for 16 or more steps."""
    if not seen.ended or seen.step < 16 or seen.sharded:  # a group may begin later than the steps of a trial
        return
    for optimizer in seen.optimizers:
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
            names = [seen.names[id(p)] for p in group["params"] if p.requires_grad and id(p) in seen.names]
            known = [name for name in names if name in seen.start]
            if rate or not group.get("initial_lr") or not any(rates) or not known:  # a rate that is given as 0 is meant
                continue
            if all(torch.equal(seen.start[name], sampled(seen.parameters[name])) for name in known):
                yield (
                    f"parameter group {number} of {type(optimizer).__name__} ({some(names)}) was not trained, as "
                    "its schedule kept the learning rate at 0; correct the schedule, or freeze the group"
                )


@check("optimizer-state-lost", "likely", at="start")
def optimizer_state_lost(seen: Evidence) -> Lines:
    """Training is resumed, but an optimizer that keeps a state has none."""
    for optimizer in seen.optimizers:
        keeps = not isinstance(optimizer, SGD) or any(group.get("momentum") for group in optimizer.param_groups)
        if seen.trainer.global_step > 0 and keeps and not optimizer.state:
            yield (
                f"{type(optimizer).__name__} has no state at step {seen.trainer.global_step}, so the resumed run "
                "forgets momentum and step sizes; keep optimizer_states of the checkpoint"
            )
