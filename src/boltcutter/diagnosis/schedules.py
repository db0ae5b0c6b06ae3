"""Checks of learning-rate schedules and monitored metrics: both are known before the first step."""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import math
import re
import warnings
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, NoneType, SimpleNamespace
from typing import Any

import lightning as L
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence, overrides
from boltcutter.diagnosis.source import codes_of_users, says, tree_of

MAX_CALLS = 20_000  # of a schedule, which are computed ahead
MIN_CALLS = 3  # fewer epochs may be a trial
FAR, FAR_CALLS = 20, 100  # times as many calls, and at least so many
GONE = 1e-4  # of the peak
CONSTANTS = (int, float, str, NoneType, ModuleType, type)  # what a function may refer to and cannot change
CHANGING = {"current_epoch", "global_step", "trainer", "_trainer", "training", "callback_metrics"}  # while it trains
SCHEDULERS = {"lr_schedulers", "lr_scheduler_configs"}  # by which code reaches schedules
BEFORE, AFTER = r"(^|[/_\-. ])(", r")($|[/_\-. 0-9@])"
HIGHER = re.compile(
    f"{BEFORE}acc|accuracy|f1|auc|auroc|iou|miou|dice|bleu|rouge|r2|map|ap|recall|precision|psnr|ssim|return|reward"
    "|ndcg|mrr|hits?|hit_rate|auprc|aupr|kappa|mcc|pearson|spearman|exact_match|success|success_rate|win_rate|meteor"
    f"{AFTER}",
    re.IGNORECASE,
)
LOWER = re.compile(
    f"{BEFORE}loss|error|err|mse|mae|rmse|nll|perplexity|ppl|wer|cer|fid|distance|mape|smape|crps|brier"
    f"|lpips|eer|bpd|bpc{AFTER}",
    re.IGNORECASE,
)
# What turns the meaning of a name, as of a gap between two accuracies.
TURNED = re.compile(
    f"{BEFORE}gap|diff|difference|drop|std|var|variance|spread|neg|negative|gain|reduction|improvement|change|delta"
    f"|skill|regret|deviation|disparity{AFTER}",
    re.IGNORECASE,
)
CYCLES = re.compile("snapshot|cyclic|(^|_)swa(_|$)", re.IGNORECASE)
STEPS = re.compile(r"total|steps|iters|t_max", re.IGNORECASE)


def schedules(seen: Evidence) -> Iterator[tuple[Any, bool, int]]:
    """Each schedule, whether it is called per step, and how often in the training, if that is known and long enough."""
    trainer, is_called = seen.trainer, not seen.module.automatic_optimization  # by the module
    if is_called and seen.step < MIN_CALLS:
        return
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not math.isfinite(batches) or not batches or epochs is None or epochs < 2:
        return
    steps = seen.total_steps
    if not math.isfinite(steps) or steps < 4 * epochs:
        return
    for config in trainer.lr_scheduler_configs:
        if not isinstance(config.scheduler, ReduceLROnPlateau):
            per_step = config.interval == "step"
            if is_called:  # by what it did so far
                done = getattr(config.scheduler, "last_epoch", 0) - seen.calls_of_schedules.get(id(config.scheduler), 0)
                per_step = done >= seen.step
                if not per_step:
                    continue
            yield config.scheduler, per_step, int((steps if per_step else epochs) // max(1, config.frequency))


@check("schedule-unit", "certain", at="trial")
@check("schedule-unit", "certain", at="start")
def schedule_unit(seen: Evidence) -> Lines:
    """A schedule is made for all steps or batches of training (to 5%), but called per epoch or step; or the reverse."""
    several = seen.trainer.accumulate_grad_batches
    for scheduler, per_step, calls in schedules(seen):
        name = type(scheduler).__name__
        for length in _lengths(scheduler):
            if not per_step and length >= 4 * calls and 0.95 <= length / seen.total_steps <= 1.05:
                yield (
                    f"{name} is made for {length} steps, but is called once per epoch, {calls} times, so the rate "
                    'hardly changes; return {"scheduler": …, "interval": "step"}'
                )
            if per_step and 10 * length <= calls and length == seen.trainer.max_epochs:
                yield (
                    f"{name} is made for {length} epochs, but is called at each of {calls} steps; return "
                    '{"scheduler": …, "interval": "epoch"}'
                )
            if per_step and several > 1 and 0.95 <= length / (several * calls) <= 1.05:
                yield (
                    f"{name} is made for {length} batches, but is called at each of {calls} optimizer steps, as those "
                    f"of {several} batches are one; use self.trainer.estimated_stepping_batches"
                )


@check("schedule-dead", "likely", at="trial")
@check("schedule-dead", "likely", at="start")
def schedule_dead(seen: Evidence) -> Lines:
    """On a copy, the rate soon stays below 1/10,000 of its peak, or falls only in as many steps as there are epochs."""
    for scheduler, per_step, calls in schedules(seen):
        done = min(int(getattr(scheduler, "last_epoch", 0) or 0), calls)  # of a run that is resumed
        rates = rates_of(seen, scheduler, calls - done) if calls <= MAX_CALLS else []
        peak = max([*rates, *map(float, getattr(scheduler, "base_lrs", []) if done else [])], default=0.0)
        last = max((i for i, rate in enumerate(rates) if rate >= GONE * peak), default=0) + 1 + done
        if rates and max(rates) > 0 and last < 0.5 * calls:
            unit = "step" if per_step else "epoch"
            yield (
                f"{type(scheduler).__name__} lowers the learning rate to below 1/10,000 of its peak after "
                f"{last / calls:.0%} of the training ({last} {unit}s), for good; is it meant per "
                f"{'epoch' if per_step else 'step'}?"
            )
            continue
        last = max(_changes(rates), default=0) + done
        epochs = int(seen.trainer.max_epochs or 0)
        if per_step and FAR * last <= calls and last <= epochs and rates and 2 * rates[-1] < rates[0]:
            yield (
                f"{type(scheduler).__name__} lowers the learning rate for the last time after {last} of {calls} "
                f"steps, to {rates[-1] / rates[0]:.2g} of the first; is it meant per epoch?"
            )


@check("schedule-unit", "likely", at="trial")
@check("schedule-unit", "likely", at="start")
def schedule_of_batches(seen: Evidence) -> Lines:
    """A schedule per step would fall below 1/1,000 of its peak after all batches, several of which make a step."""
    several = seen.trainer.accumulate_grad_batches
    for scheduler, per_step, calls in schedules(seen) if several > 1 else ():
        batches = several * calls
        if not per_step or batches > MAX_CALLS or any(_lengths(scheduler)):
            continue
        rates = rates_of(seen, scheduler, int(1.05 * batches) + 1)
        peak = rates.index(max(rates)) if rates else 0
        end = next((i for i in range(peak, len(rates)) if rates[i] < 1e-3 * rates[peak]), 0)
        if end >= 0.93 * batches and rates[calls - 1] > 0.1 * rates[peak]:
            yield (
                f"{type(scheduler).__name__} would end after {end} calls, as many as there are batches, but is called "
                f"at each of {calls} optimizer steps, as those of {several} batches are one; use "
                "self.trainer.estimated_stepping_batches"
            )


@check("schedule-unit", "likely", at="start")
def schedule_begun(seen: Evidence) -> Lines:
    """Called per epoch, a schedule reaches less than half of its rate in as many steps, or would first change later."""
    for scheduler, per_step, calls in schedules(seen):
        if per_step or seen.total_steps > MAX_CALLS or any(_lengths(scheduler)):
            continue
        rates = rates_of(seen, scheduler, int(seen.total_steps))
        first = rates[:calls]
        if rates and calls >= MIN_CALLS and first == sorted(first) and 0 < 2 * max(first) < max(rates):
            yield (
                f"{type(scheduler).__name__} is called once per epoch, {calls} times, and reaches {max(first):.2g}, "
                f"where it would reach {max(rates):.2g} in {len(rates)} steps, as if its warm-up were one of steps; "
                'return {"scheduler": …, "interval": "step"}'
            )
        changes = _changes(rates)
        if (
            calls >= MIN_CALLS
            and changes
            and changes[0] >= max(FAR_CALLS, FAR * calls)
            and max(milestones_of(scheduler), default=0) <= seen.total_steps  # else of more epochs than are trained now
            and rates[-1] >= GONE * rates[0]
        ):
            yield (
                f"{type(scheduler).__name__} is called once per epoch, {calls} times, but first changes the rate after "
                f"{changes[0]} calls, so it stays {rates[0]:.2g}, where it would reach {rates[-1]:.2g} in {len(rates)} "
                'steps; return {"scheduler": …, "interval": "step"}'
            )


@check("schedule-unit", "likely", at="trial")
def schedule_of_samples(seen: Evidence) -> Lines:
    """A schedule that is called per step is made for as many steps as there are samples in all epochs (to 5%)."""
    dataset = seen.splits.dataset("train") if seen.splits else None
    samples = len(dataset) * (seen.trainer.max_epochs or 0) if isinstance(dataset, Sized) else 0
    given = {**dict(getattr(seen.module, "hparams", {})), **vars(seen.module)}
    for scheduler, per_step, calls in schedules(seen):
        codes = [getattr(f, "__func__", f) for f in _functions(scheduler)]
        names = {n for f in codes if inspect.isfunction(f) for n in f.__code__.co_names if STEPS.search(n)}
        lengths = [*_lengths(scheduler), *(v for n, v in given.items() if n in names and isinstance(v, int | float))]
        wrong = [n for n in lengths if per_step and samples >= 4 * calls and 0.95 <= n / samples <= 1.05]
        text = " ".join(ast.unparse(tree) for f in codes if (tree := tree_of(f)) is not None)
        if wrong and not re.search("batch|sample|image", text):  # which the function may count
            yield (
                f"{type(scheduler).__name__} is made for {wrong[0]:.0f} steps, which are samples of all epochs, but is "
                f"called {calls} times, once for each batch; use self.trainer.estimated_stepping_batches"
            )


@check("schedule-absolute", "likely", at="probe")
@check("schedule-absolute", "likely", at="start")
def schedule_absolute(seen: Evidence) -> Lines:
    """The largest factor of LambdaLR in the whole training is the learning rate itself (to 5%)."""
    for scheduler, _, calls in schedules(seen):
        if type(scheduler) is not LambdaLR or calls > MAX_CALLS:
            continue
        rates, base = rates_of(seen, scheduler, calls), max(scheduler.base_lrs)
        share = max(rates) / base**2 if rates and base else 0.0
        if (base < 0.05 and 0.95 < share < 1.05) or (base < 0.5 and math.isclose(share, 1) and _names_rates(scheduler)):
            yield (
                f"the function of LambdaLR returns up to {max(rates) / base:.2g}, which is the learning rate, and "
                f"is multiplied by it, so the rate is never above {max(rates):.2g}; return a factor of up to 1"
            )


def _names_rates(scheduler: Any) -> bool:
    """Whether a function of LambdaLR speaks of a learning rate."""
    codes = [code for f in _functions(scheduler) if (code := getattr(f, "__code__", None)) is not None]
    texts = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    return any(re.search(r"(^|_)(lr|rate)($|_)", name) for name in texts)


@check("schedule-restarts", "likely", at="trial")
@check("schedule-restarts", "likely", at="start")
def schedule_restarts(seen: Evidence) -> Lines:
    """CosineAnnealingLR is shorter than the training, so that the rate is again over half of its peak at the end."""
    for scheduler, per_step, calls in schedules(seen):
        if type(scheduler) is not CosineAnnealingLR or scheduler.T_max >= calls or calls > MAX_CALLS:
            continue
        if says(seen.module, CYCLES):
            continue
        rates = rates_of(seen, scheduler, calls)
        lowest = rates.index(min(rates)) if rates else 0
        if rates and min(rates) < 0.1 * max(rates) and max(rates[lowest:]) > 0.5 * max(rates):
            unit = "step" if per_step else "epoch"
            yield (
                f"CosineAnnealingLR has T_max={scheduler.T_max}, but is called for {calls} {unit}s, so the learning "
                f"rate rises again to {max(rates[lowest:]):.2g}; set T_max={calls}, or use CosineAnnealingWarmRestarts"
            )


@check("schedule-dropped", "likely", at="start")
def schedule_dropped(seen: Evidence) -> Lines:
    """A schedule was made for an optimizer, but configure_optimizers does not return it, and no code calls it."""
    module = seen.module
    known = {id(getattr(config.scheduler, "optimizer", None)) for config in seen.trainer.lr_scheduler_configs}
    if seen.trainer.global_step or any("step" in code.co_names for code in codes_of_users(module, seen.trainer)):
        return
    for optimizer in seen.optimizers:
        is_wrapped = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if is_wrapped and id(optimizer) not in known and all("initial_lr" in g for g in optimizer.param_groups):
            yield (
                f"a schedule of {type(optimizer).__name__} was created, but configure_optimizers does not return it, "
                "so the rate never changes; return [optimizer], [scheduler]"
            )


@check("schedule-unused", "likely", at="summary")
def schedule_unused(seen: Evidence) -> Lines:
    """With manual optimization, where Lightning calls no schedule, neither does the module nor a callback."""
    module = seen.module
    if (
        module.automatic_optimization
        or not seen.ended
        or any(SCHEDULERS & {*code.co_names} for code in codes_of_users(module, seen.trainer))
    ):
        return
    for config in seen.trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if scheduler.last_epoch <= 0 and not any(v is scheduler for v in vars(module).values()):
            yield (
                f"{type(scheduler).__name__} is never called: with manual optimization, call "
                "self.lr_schedulers().step() in training_step or on_train_epoch_end"
            )


@check("schedule-called-twice", "likely", at="summary")
def schedule_called_twice(seen: Evidence) -> Lines:
    """Schedules that Lightning calls were called over 1.5 times as often as there were steps, or epochs."""
    if not seen.module.automatic_optimization or overrides(seen.module, "lr_scheduler_step"):
        return
    epochs = seen.trainer.current_epoch - seen.first_epoch + (not seen.ended)
    for config in seen.trainer.lr_scheduler_configs:
        scheduler, per_step = config.scheduler, config.interval == "step"
        before, now = seen.calls_of_schedules.get(id(scheduler)), getattr(scheduler, "last_epoch", None)
        if before is None or not isinstance(now, int):
            continue
        called, most = now - before, seen.step if per_step else epochs
        if called > most + max(1, most // 2):
            yield Line(
                f"{type(scheduler).__name__} was called {called} times in {most} {'step' if per_step else 'epoch'}s: "
                "Lightning calls it, and the module does, too; remove the call of step() from the module, or choose "
                'when it is called by "interval" in configure_optimizers',
                subject=str(seen.trainer.lr_scheduler_configs.index(config)),
            )


@check("monitor-mode", "certain", at="start")
def monitor_mode(seen: Evidence) -> Lines:
    """The name of a monitored metric says the opposite of its mode."""
    owners = [c for c in seen.trainer.callbacks if getattr(c, "monitor", None)]  # type: ignore[attr-defined]
    monitored = [(type(c).__name__, str(c.monitor), getattr(c, "mode", None)) for c in owners]
    for config in seen.trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor:
            monitored.append(("ReduceLROnPlateau", config.monitor, config.scheduler.mode))
    for owner, monitor, mode in monitored:
        higher, lower = bool(HIGHER.search(monitor)), bool(LOWER.search(monitor))
        if TURNED.search(monitor):
            continue
        if higher != lower and mode == ("min" if higher else "max"):
            yield Line(
                f"{owner} takes the {'lowest' if mode == 'min' else 'highest'} {monitor} for the best; set "
                f"mode={'max' if higher else 'min'}",
                subject=owner,
            )


def milestones_of(scheduler: Any) -> list[int]:
    """After which calls a schedule changes, if it says so."""
    return [int(number) for number in vars(scheduler).get("milestones", ())]


def _lengths(scheduler: Any) -> list[int]:
    """Numbers of calls for which a schedule is made."""
    own = vars(scheduler)
    rises = own.get("start_factor", 1) < own.get("end_factor", 1)  # a warm-up says nothing of the whole
    found = [own.get(name) for name in ("T_max", "total_steps", *(() if rises else ("total_iters",)))]
    for function in vars(scheduler).get("lr_lambdas") or []:  # of transformers: partial(…, num_training_steps=…)
        named = getattr(function, "keywords", None) or {}
        found += [value for name, value in named.items() if "training_steps" in name or "total" in name]
    parts, bounds = own.get("_schedulers") or [], own.get("_milestones") or []
    for inner in parts[1:] if bounds else parts:
        found += _lengths(inner)
    found += [int(bounds[-1]) + length for length in _lengths(parts[-1])] if bounds else []
    return [int(v) for v in found if isinstance(v, int | float) and math.isfinite(v) and v > 1]


def rates_of(seen: Evidence, scheduler: Any, calls: int) -> list[float]:
    """The rate after each call of a copy without weights, from now on; empty if it cannot be computed."""
    functions = [*_functions(scheduler)]
    unchanged: AbstractContextManager[None] = nullcontext()
    if not all(map(_is_pure, functions)):
        if seen.probe is None or not all(_is_restored(function, seen.module) for function in functions):
            return []
        from boltcutter.diagnosis.probe import kept  # which no training imports

        unchanged = kept(seen.module)
    try:
        with unchanged, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has made no step
            twin = _twin(seen, scheduler)
            rates = [max(float(group["lr"]) for group in twin.optimizer.param_groups)]
            for _ in range(calls - 1):
                twin.step()
                rates.append(max(float(group["lr"]) for group in twin.optimizer.param_groups))
            return rates
    except Exception:  # of somebody else's scheduler, which may need anything
        return []


def _is_restored(function: Any, module: L.LightningModule) -> bool:
    """Whether all that a function may change is an attribute of the module, which a trial restores."""
    owner, code = getattr(function, "__self__", module), getattr(function, "__func__", function)
    if not inspect.isfunction(code) or not any(owner is part for part in module.modules()):
        return False
    if {step.opname for step in dis.get_instructions(code)} & {"STORE_GLOBAL", "STORE_DEREF"}:
        return False
    used = inspect.getclosurevars(code)
    return all(
        value is owner or isinstance(value, CONSTANTS) or inspect.isroutine(value)
        for value in (*used.nonlocals.values(), *used.globals.values(), *(code.__defaults__ or ()))
    )


def _changes(rates: list[float]) -> list[int]:
    """The calls after which the rate is another one."""
    return [i for i in range(1, len(rates)) if rates[i] != rates[i - 1]]


def _functions(scheduler: Any) -> Iterator[Any]:
    """The functions of a scheduler and of those in it, which its copy shares."""
    yield from (each for each in vars(scheduler).get("lr_lambdas") or [] if inspect.isroutine(each))
    for inner in vars(scheduler).get("_schedulers") or []:
        yield from _functions(inner)


def _is_pure(function: Any) -> bool:
    """Whether nothing that a function refers to can change when it is called."""
    if inspect.isbuiltin(function):
        return True
    if inspect.ismethod(function):
        return _only_reads(function.__func__, function.__self__)
    if not inspect.isfunction(function):
        return False
    names = {step.opname for step in dis.get_instructions(function)}
    if names & {"STORE_GLOBAL", "STORE_DEREF"}:
        return False
    used = inspect.getclosurevars(function)
    return all(
        isinstance(value, CONSTANTS)
        or (value is not function and inspect.isroutine(value) and _is_pure(value))
        or (_is_config(value) and _only_reads(function, value))
        for value in (*used.nonlocals.values(), *used.globals.values(), *(function.__defaults__ or ()))
    )


def _is_config(value: Any) -> bool:
    """Whether an object is the module, or one that has attributes and cannot be called, such as of arguments."""
    return isinstance(value, L.LightningModule) or (hasattr(value, "__dict__") and not callable(value))


def _only_reads(function: Any, owner: Any) -> bool:
    """Whether a function only reads attributes of an object that do not change in training, and calls no other one."""
    steps = [*dis.get_instructions(function)]
    members = {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    calls = any(inspect.isroutine(inspect.getattr_static(owner, str(name), None)) for name in members)
    writes = any(step.opname.startswith(("STORE_", "DELETE_")) and "FAST" not in step.opname for step in steps)
    used = inspect.getclosurevars(function)
    return not (calls or writes or members & CHANGING) and all(
        value is owner or isinstance(value, CONSTANTS) or (inspect.isroutine(value) and _is_pure(value))
        for value in (*used.nonlocals.values(), *used.globals.values(), *(function.__defaults__ or ()))
    )


def _twin(seen: Evidence, scheduler: Any) -> Any:
    """A copy of a scheduler, for an optimizer without parameters; all else of the training it can neither read nor set.

    Somebody else's scheduler may hold its optimizer, or the model, in any attribute.
    """
    original = scheduler.optimizer
    groups = [
        {key: list(value) if isinstance(value, list) else value for key, value in group.items()} | {"params": []}
        for group in original.param_groups
    ]
    optimizer = SimpleNamespace(step=lambda: None, param_groups=groups, state={}, defaults=dict(original.defaults))
    hidden = (seen.trainer, *seen.trainer.optimizers, *seen.module.modules(), *seen.module.parameters())
    twin = object.__new__(type(scheduler))
    memo: dict[int, Any] = {id(each): object() for each in hidden} | {id(original): optimizer, id(scheduler): twin}
    memo.update({id(each): each for each in _functions(scheduler)})  # also methods of the module, which only read it
    # A step of the instance is a wrapper that holds the original.
    vars(twin).update(copy.deepcopy({key: value for key, value in vars(scheduler).items() if key != "step"}, memo))
    return twin
