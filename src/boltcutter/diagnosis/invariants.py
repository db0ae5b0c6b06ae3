"""A callback that looks closely at a few steps of a training, and says what is silently wrong."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MaxMetric, Metric, MinMetric
from torchmetrics.metric import CompositionalMetric

from boltcutter import run_files
from boltcutter.diagnosis import data, gradients, layers, losses, nothing, optimizers, ranks, schedules  # noqa: F401
from boltcutter.diagnosis.checks import CHECKS, Check, Finding, FindingError, Line, Moment
from boltcutter.diagnosis.evidence import Evidence, Update, any_nonzero, is_metric, joined, nonzero, norms, sampled
from boltcutter.diagnosis.graph import read_graph
from boltcutter.diagnosis.seam import ActiveDropout
from boltcutter.diagnosis.source import is_of_package
from boltcutter.run.folder import read_record, update_record

FIRST = 8  # optimizer steps; all are looked at in a trial, and where batches of workers are compared
LOOKS = (1, 2, 4, *(FIRST << 2 * i for i in range(24)))
SUMMARIES = frozenset(FIRST << 4 * i for i in range(12))  # 8, 128, 2048, …
ALL_VALIDATION = 8  # validation batches that are looked at, and after them the 16th, 32nd, 64th, …
VALIDATIONS = 3  # in the first of which metrics are watched
LONG = 1000  # optimizer steps, of which the last one is left out if one of the second half was looked at
FOLLOW_UPS = 8  # further looks in a training, right after one at which gradients are missing or 0
OF_AUTHORS = frozenset(  # what only the author of a module can correct
    (
        *("unused-parameter", "cut-gradient", "hidden-unused", "in-no-optimizer", "split-layer", "same-layer"),
        *("updated-in-validation", "nan-hidden", "averaged-metric", "graph-kept", "unread-attribute"),
    )
)
OPPOSED, UNLIKE = -0.5, -0.05  # cosine of two gradients
PATIENCE = 64  # batches without an optimizer step, after which it no longer looks


class Invariants(Callback):
    """Say what is silently wrong, from what the real training computes.

    It looks at steps 1, 2, 4, 8, 32, 128, …, and mostly at the last one. Between them, one hook of each optimizer
    counts. It changes no weight, draws no random number, and stores nothing in checkpoints. Where it cannot see, as
    within a compiled model, it says nothing. ``boltcutter.diagnosis.CHECKS`` lists the checks and their rules.

    Args:
        ignore: Names of checks that are not asked.
        on_finding: ``warn`` prints certain and likely findings; ``error`` also stops training at the first one.
        folder: Folder of the run, in whose ``record.json`` findings are stored; None: they are only in ``findings``.

    Attributes:
        findings: All findings, also notes, which are true but often meant, and not printed.

    Raises:
        ValueError: ``ignore`` names no check, or ``on_finding`` is neither.
    """

    shows_notes = False
    is_trial = False

    def __init__(
        self,
        *,
        ignore: Sequence[str] = (),
        on_finding: Literal["warn", "error"] = "warn",
        folder: Path | None = None,
    ) -> None:
        if not CHECKS.keys() >= set(ignore):
            from boltcutter.diagnosis import on_demand  # noqa: F401  which only a trial asks
        if unknown := [name for name in ignore if name not in CHECKS]:
            from boltcutter.config.errors import hint

            near = hint(unknown[0], CHECKS) or "; boltcutter.diagnosis.CHECKS lists them"
            raise ValueError(f"callback.invariants.ignore={unknown[0]}: no check of this name{near}")
        if on_finding not in ("warn", "error"):
            raise ValueError(f"callback.invariants.on_finding={on_finding}: must be warn or error; try warn")
        self.ignore, self.on_finding, self.folder = tuple(ignore), on_finding, folder and Path(folder)
        self._checks: dict[Moment, list[Check]] = {}
        self.findings: list[Finding] = []
        self._said: set[tuple[str, str]] = set()
        self._until = math.inf  # of a trial: when no further check is asked
        self._seen: Evidence | None = None
        self._handles: list[Any] = []  # of hooks that count steps
        self._watch: Watch | None = None  # while it looks
        self._next = 1
        self._last = -1
        self._first = 1
        self._follow_ups = FOLLOW_UPS
        self._hooked = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy that is made while it trains sees nothing, until it is trained itself."""
        state = vars(self).copy()
        return state | {"_seen": None, "_handles": [], "_watch": None, "_checks": {}}

    @property
    def is_looking(self) -> bool:
        """Whether it looks at the next step, which must then be computed by Python."""
        return self._watch is not None

    # Life cycle

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember which parameters there are when optimizers are made; validation, which may create some, is later."""
        self._close()
        self._seen, self._checks = Evidence(trainer, pl_module), {}
        # Here, as a copy of it may be what is trained, in a process that was spawned.
        for each in (each for name, group in CHECKS.items() if name not in self.ignore for each in group):
            self._checks.setdefault(each.at, []).append(each)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check what is known before the first step, and look at it."""
        seen = self._seen
        if seen is None:
            return
        with Guarded(self):
            seen.begin()
            total = seen.total_steps - trainer.global_step / max(1, len(seen.optimizers))
            self._last = int(total) if math.isfinite(total) else -1
            self._next, self._follow_ups, self._hooked = 1, FOLLOW_UPS, bool(seen.repeated)
            self._first = FIRST if self.is_trial or data.num_workers(seen) > 1 else 1  # whose batches are compared
            if trainer.world_size > 1:
                seen.store = ranks.store_of(seen)
            self._ask("start")
            self._handles = [o.register_step_post_hook(StepHook(self, seen.steps[id(o)])) for o in seen.optimizers]
            self._look()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Conclude."""
        if self._seen is not None and self._handles:
            with Guarded(self):
                self._stop_looking()
                self._seen.ended = True
                self._compare_ranks(self._seen)
                self._ask("summary")
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave."""
        self._close()

    def _close(self) -> None:
        self._stop_looking()
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], None

    # When it looks

    def _look(self) -> None:
        """Look at the next step."""
        if self._watch is None and self._seen is not None:
            self._watch = Watch(self, self._seen, with_hooks=self._hooked)

    def _stop_looking(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def count(self, optimizer: Any, steps: Any) -> None:
        """Called after each step of an optimizer."""
        seen, watch = self._seen, self._watch
        if seen is None:
            return
        if seen.sharded:  # each rank has a part of each gradient, and to compare parts is to wait for other ranks
            self._stop_looking()
            self._next = sys.maxsize
            return
        with Guarded(self, in_step=True):
            if watch is None:
                if steps.count + 1 >= self._next:
                    seen.step = max(seen.step, steps.count)
                    self._look()
                return
            seen.step = max(seen.step, steps.count)
            watch.after_step(optimizer, steps.count)
            if seen.module.automatic_optimization or not watch.is_within_step:
                self.end_look()

    def end_look(self) -> None:
        """After a step that was looked at: conclude, and decide when to look again."""
        seen, watch = self._seen, self._watch
        if seen is None or watch is None or seen.step < self._next:
            return  # no optimizer has made the step
        seen.looks += 1
        suspicious = watch.conclude()
        if seen.step in SUMMARIES:
            self._ask("summary")
        if seen.step in ranks.STEPS:
            self._compare_ranks(seen)
        follow = suspicious and self._follow_ups > 0 and seen.step >= FIRST
        self._follow_ups -= follow
        self._hooked = suspicious
        self._next = next_look(seen.step, self._last, self._first) if not follow else seen.step + 1
        self._stop_looking()
        if self._next == seen.step + 1:
            self._look()

    def _compare_ranks(self, seen: Evidence) -> None:
        """Ask about what all ranks have left, and leave what this one has seen."""
        if seen.store is None:
            return
        while ranks.collect(seen):
            self._ask("ranks")
        if not seen.ended:
            ranks.publish(seen)

    # What it says

    def _ask(self, moment: Moment) -> None:
        """Ask all checks of a moment."""
        for each in self._checks.get(moment, ()):
            if monotonic() > self._until:
                self._note("probes", f"{each.name} and checks behind it were not asked: those before took too long")
                return
            try:
                for line in each.decide(self._seen):  # type: ignore[arg-type]
                    self._say(each, line if isinstance(line, Line) else Line(line))
            except FindingError:
                raise
            except Exception as error:  # a check that fails must not end a training
                self._note(each.name, f"could not be decided: {type(error).__name__}: {str(error)[:200]}")

    def _say(self, asked: Check, line: Line) -> None:
        if (asked.name, line.subject) in self._said or self._seen is None:
            return
        self._said.add((asked.name, line.subject))
        from boltcutter.diagnosis.facts import facts_of  # which a training without a finding does not need

        evidence: dict[str, Any] = {}
        with suppress(Exception):  # of tensors of any kind: the line says what is wrong without it, too
            evidence = facts_of(self._seen, line.text, line.sample)
        level = line.level or asked.level
        if level == "likely" and asked.name in OF_AUTHORS and is_of_package(self._seen.module):
            level = "note"  # as the user of a package cannot correct it
        finding = Finding(asked.name, level, line.text, self._seen.step, evidence)
        self.findings.append(finding)
        if self._seen.trainer.is_global_zero:
            self._record()
            if finding.level != "note" or self.shows_notes:
                print(f"{'note' if finding.level == 'note' else 'warning'}: {finding}", file=sys.stderr)
        if finding.level != "note" and self.on_finding == "error":
            raise FindingError(f"{finding}; callback.invariants.ignore=[{finding.check}] leaves it out")

    def _note(self, name: str, text: str) -> None:
        if (name, "failed") not in self._said:
            self._said.add((name, "failed"))
            self.findings.append(Finding(name, "note", text, self._seen.step if self._seen else 0))
            if self._seen is not None and self._seen.trainer.is_global_zero:
                self._record()

    def _record(self) -> None:
        if self.folder is not None:
            file = self.folder / run_files.RECORD
            earlier = read_record(self.folder).get("findings", []) if file.is_file() else []
            now = [{key: value for key, value in asdict(f).items() if value != {}} for f in self.findings]
            known = {each["check"] for each in now}
            update_record(self.folder, findings=[*(each for each in earlier if each["check"] not in known), *now])
            if text := next((f.text for f in self.findings if f.check == nothing.NAME), None):
                update_record(self.folder, warning=f"nothing is trained: {text}")  # which the end of the run repeats

    # Validation

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See which metrics still have their updates, and watch the first validations."""
        seen = self._seen
        if seen is None or seen.validations > VALIDATIONS:
            return
        with Guarded(self):
            seen.validation_batches = 0
            if not trainer.sanity_checking:
                still = [(n, m._update_count) for n, (m, count) in seen.metrics.items() if m._update_count >= count]
                seen.stale_metrics = still
                self._ask("validated")

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch for dropout in the first batch of the first validations, and keep labels of some batches."""
        seen = self._seen
        if seen is None or seen.validations > 1:
            return
        seen.validation_batches = count = seen.validation_batches + 1
        if count > ALL_VALIDATION and count & (count - 1):
            return
        with Guarded(self):
            seen.validation_batch = batch
            if not trainer.sanity_checking:
                data.remember_validation(seen)
            if seen.validation_batches == 1 and not seen.compiled:
                seen.active_dropout = []
                Around(trainer.strategy, "validation_step", ActiveDropout(seen.active_dropout, pl_module.modules()))

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Ask about the first batch."""
        seen = self._seen
        if seen is None or seen.validations > 1 or seen.validation_batches > 1:
            return
        with Guarded(self):
            Around.remove(trainer.strategy, "validation_step")
            self._ask("validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember which metrics were computed in this validation, and not reset."""
        seen = self._seen
        if seen is None:
            return
        with Guarded(self):
            seen.validations += 1
            seen.validation_batch = None
            watches = not trainer.sanity_checking and seen.validations <= VALIDATIONS
            seen.metrics = _computed_metrics(pl_module) if watches else {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See which metrics of training were computed at the end of two epochs, and have the updates of both."""
        seen = self._seen
        if seen is None or seen.epochs > VALIDATIONS:
            return
        with Guarded(self):
            seen.epochs += 1
            metrics = {n: (m, count) for n, (m, count) in _computed_metrics(pl_module).items() if _is_of_epoch(m)}
            known = seen.epoch_metrics
            seen.stale_metrics = [(n, c) for n, (_, c) in metrics.items() if c >= 2 * known.get(n, c)]
            seen.epoch_metrics = {n: count for n, (_, count) in metrics.items()}
            self._ask("validated")


def next_look(step: int, last: int, first: int = 1) -> int:
    """The step after this one that is looked at: the first ones, 2, 4, 8, 32, 128, …, and the last one.

    A long training whose second half was looked at is not looked at again at its end.
    """
    upcoming = next(look for look in LOOKS if look > step) if step >= first else step + 1
    is_seen = last >= LONG and 2 * step > last
    return last if step < last < upcoming and not is_seen else upcoming


def _computed_metrics(module: L.LightningModule) -> dict[str, tuple[Metric, int]]:
    """Metrics that were computed after their last update, and not reset, and the number of their updates."""
    return {
        name: (m, m._update_count)
        for name, m in module.named_modules()
        if is_metric(m) and m._update_count and m._computed is not None and not _keeps_state(m)
    }


def _is_of_epoch(metric: Metric) -> bool:
    """Whether a metric is none of those that count, add or average all that training has seen."""
    return ".aggregation" not in type(metric).__module__


def _keeps_state(metric: Metric) -> bool:
    """Whether a metric is over several epochs on purpose."""
    kinds = (MaxMetric, MinMetric, CompositionalMetric)
    return isinstance(metric, kinds) or ".wrappers" in type(metric).__module__


class Guarded:
    """A failure of what only looks ends the looking, not the training; a finding that is an error does end it.

    Tensors that are computed meanwhile have no gradient.

    Args:
        owner: What looks.
        in_step: Whether a hook of an optimizer does.
    """

    def __init__(self, owner: Invariants, *, in_step: bool = False) -> None:
        self.owner, self.in_step, self.no_grad = owner, in_step, torch.no_grad()

    def __enter__(self) -> None:
        self.no_grad.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        self.no_grad.__exit__(kind, error, traceback)
        if isinstance(error, Exception) and not getattr(error, "hide_traceback", False):
            self.owner._note("invariants", f"no longer looks: {type(error).__name__}: {str(error)[:200]}")
            if self.in_step:
                self.owner._seen = None  # hooks of optimizers are removed when these do not iterate over them
            else:
                self.owner._close()
            return True
        return False


class StepHook:
    """Counts the steps of an optimizer; a copy of the optimizer does not have it."""

    __slots__ = ("owner", "steps")

    def __init__(self, owner: Invariants, steps: Any) -> None:
        self.owner, self.steps = owner, steps

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count."""
        steps = self.steps
        steps.count += 1
        owner = self.owner
        if owner._watch is not None or steps.count + 1 >= owner._next:
            owner.count(optimizer, steps)


class Around:
    """Stands for a method of an object, and calls a function around it.

    A copy of the object, also by pickle, has the method itself.

    Args:
        owner: The object.
        name: Of its method.
        call: Called with the method, its arguments and options.
    """

    def __init__(self, owner: Any, name: str, call: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self.owner, self.name, self.call = owner, name, call
        self.replaced = vars(owner).get(name)  # what somebody else has set
        self.method = getattr(owner, name)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        return self.call(self.method, args, options)

    def __reduce__(self) -> Any:
        return _method, (self.owner, self.name)

    @staticmethod
    def remove(owner: Any, name: str) -> None:
        """Restore the method, unless somebody else has replaced it since."""
        found = vars(owner).get(name)
        if isinstance(found, Around):
            del vars(owner)[name]
            if found.replaced is not None:
                vars(owner)[name] = found.replaced


def _method(owner: Any, name: str) -> Any:
    return getattr(type(owner), name).__get__(owner)


class Watch:
    """What surrounds a step that is looked at: the forward pass, the backward passes, and the optimizer.

    Args:
        callback: Which asks the checks.
        seen: Where evidence is kept.
        with_hooks: Whether it also sees which layers are computed.
    """

    def __init__(self, callback: Invariants, seen: Evidence, *, with_hooks: bool) -> None:
        self.callback, self.seen = callback, seen
        self.before: dict[int, tuple[dict[str, Tensor], Tensor]] = {}  # by optimizer, samples of weights, and a copy
        self.kept: dict[int, int] = {}  # by optimizer, at which step
        self.cleared: dict[int, bool] = {}
        self.added: dict[int, bool] = {}  # whether a backward pass has changed gradients that were not 0
        self.had_gradient: dict[int, bool] = {}
        self.waiting = set[int]()  # optimizers with gradients of a training step in which none has stepped
        self.lost: dict[int, int] = {}
        # In one training step, by optimizer: parameters with a gradient after a backward pass, and its number; and
        # those of which it was cleared by the next one, without a step.
        self.held: dict[int, dict[str, int]] = {}
        self.dropped: dict[int, set[str]] = {}
        self.backward_passes = self.forward_passes = 0
        # In one training step: backward passes that added to the gradients of each optimizer, and its steps, by pass.
        self.sources: dict[int, set[int]] = {}
        self.stepped: dict[int, set[int]] = {}
        # Of parameters that several optimizers have: those with a gradient after each backward pass, and samples of
        # the gradients at each step.
        self.reach: dict[int, set[str]] = {}
        self.pulls: dict[int, dict[str, Tensor]] = {}
        self.left: dict[int, bool] = {}  # whether an optimizer has gradients when a training step begins
        self.ran: set[str] = set()
        self.reached: set[str] = set()  # parameters of optimizers that made a step, with a gradient
        self.unreached: set[str] = set()
        self.is_within_step = self.found_gradient = self.found_zero = False
        self.strategy, self.precision = seen.trainer.strategy, seen.trainer.precision_plugin
        Around(self.strategy, "training_step", self.around_training_step)
        Around(self.precision, "backward", self.around_backward)
        self.handles: list[Any] = []
        if not seen.module.automatic_optimization and not seen.sharded:
            self.handles = [o.register_step_pre_hook(self.before_step) for o in seen.optimizers]
        seen.parts = list(seen.module.named_modules())
        seen.hooks.append(layers.count_hooks(seen))
        self.with_hooks = with_hooks and not seen.compiled
        if self.with_hooks:
            for name, part in seen.parts:
                if part is not seen.module and not is_metric(part) and not isinstance(part, torch.jit.ScriptModule):
                    self.handles.append(part.register_forward_hook(ForwardHook(self, name)))

    def close(self) -> None:
        """Restore all."""
        Around.remove(self.strategy, "training_step")
        Around.remove(self.precision, "backward")
        for handle in self.handles:
            handle.remove()

    def around_training_step(self, step: Callable[..., Any], args: Any, options: Any) -> Any:
        """Keep the batch, and read the graph."""
        seen, callback = self.seen, self.callback
        if callback._seen is None:  # it no longer looks
            callback._close()
            return step(*args, **options)
        with Guarded(callback):
            seen.batch = args[0] if args else next(iter(options.values()), None)
            data.remember(seen)
            callback._ask("batch")
            if not seen.module.automatic_optimization and len(seen.optimizers) > 1 and not seen.sharded:
                owned = {id(o): [p for g in o.param_groups for p in g["params"]] for o in seen.optimizers}
                self.left = {key: any_nonzero([p.grad for p in ps if p.grad is not None]) for key, ps in owned.items()}
        self.is_within_step = True
        self.waiting = {key for key, had in self.had_gradient.items() if had and self.sources and not self.stepped}
        self.sources, self.stepped, self.held, self.dropped, self.reach, self.pulls = {}, {}, {}, {}, {}, {}
        output = step(*args, **options)
        self.is_within_step = False
        with Guarded(callback):
            self.forward_passes += 1
            seen.forward_passes += 1
            seen.loss = output.get("loss") if isinstance(output, Mapping) else output
            if seen.module.automatic_optimization:
                seen.without_loss += seen.loss is None
                self.look_at_loss()
            seen.batch = seen.loss = None
            if self.forward_passes > PATIENCE * seen.trainer.accumulate_grad_batches:
                callback._ask("summary")
                callback._close()  # no optimizer of which it knows makes steps
            if not seen.module.automatic_optimization:
                callback.end_look()
        return output

    def look_at_loss(self) -> None:
        """Ask the checks of the graph."""
        seen, loss = self.seen, self.seen.loss
        seen.graph = read_graph(loss) if isinstance(loss, Tensor) and loss.grad_fn is not None else None
        losses.remember(seen)
        self.callback._ask("graph")
        seen.graph = None  # it keeps the activations

    def around_backward(self, backward: Callable[..., Any], args: Any, options: Any) -> Any:
        """See which gradients there are before and after it."""
        seen = self.seen
        if seen.sharded:
            return backward(*args, **options)
        parameters = {id(o): [p for g in o.param_groups for p in g["params"]] for o in seen.optimizers}
        before: dict[int, list[tuple[int, int]]] = {}
        known: dict[int, list[tuple[int, int]]] = {}  # as before, but of all optimizers
        with Guarded(self.callback):
            if not seen.module.automatic_optimization and args:
                seen.loss = args[0]
                self.look_at_loss()
                seen.loss = None
            for key, group in parameters.items():
                self.cleared[key] = self.cleared.get(key, False) or not any_nonzero(
                    [p.grad for p in group if p.grad is not None]
                )
            before = {key: versions(group) for key, group in parameters.items() if not self.cleared[key]}
            for key, group in parameters.items() if not seen.module.automatic_optimization else ():
                if not any_nonzero([p.grad for p in group if p.grad is not None]):
                    self.sources[key] = set()
                    unused = {n for n, number in self.held.pop(key, {}).items() if self.last_step(n) < number}
                    self.dropped.setdefault(key, set()).update(unused)
                    self.lost[key] = self.lost.get(key, 0) + (key in self.waiting)
                self.waiting.discard(key)
                known[key] = versions(group)
        result = backward(*args, **options)
        with Guarded(self.callback):
            self.backward_passes += 1
            for key, earlier in before.items():  # else somebody assigns the gradients
                self.added[key] = self.added.get(key, False) or earlier != versions(parameters[key])
            for key, earlier in known.items():
                if earlier != versions(parameters[key]):
                    self.sources.setdefault(key, set()).add(self.backward_passes)
                    found = [p for p in parameters[key] if not {*versions([p])} <= {*earlier}]
                    flags = nonzero([p.grad for p in found])
                    names = [seen.names.get(id(p), "") for p, flag in zip(found, flags, strict=True) if flag]
                    self.held.setdefault(key, {}).update(dict.fromkeys(names, self.backward_passes))
                    self.reach.setdefault(self.backward_passes, set()).update(names)
            for optimizer in seen.optimizers:
                key = id(optimizer)
                self.had_gradient[key] = any_nonzero([p.grad for p in parameters[key] if p.grad is not None])
                if seen.module.automatic_optimization:
                    self.keep_weights(optimizer)
            seen.got_gradient.update(n for n, p in seen.parameters.items() if p.grad is not None)
        return result

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the weights; not with automatic optimization, which makes the forward pass within the step."""
        if self.callback._seen is not None:
            with Guarded(self.callback, in_step=True):
                self.keep_weights(optimizer)

    def keep_weights(self, optimizer: Optimizer) -> None:
        """Keep a sample of the weights, before a step that may make several forward and backward passes."""
        key, step = id(optimizer), self.seen.trainer.global_step
        is_kept = key in self.before and self.kept[key] == step
        if not self.seen.sharded and not is_kept:
            views = {name: sampled(p) for name, p in self._named(optimizer).items()}
            self.before[key], self.kept[key] = (views, joined([*views.values()])), step

    def _named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        found = [p for group in optimizer.param_groups for p in group["params"]]
        return {self.seen.names.get(id(p), f"tensor {i}"): p for i, p in enumerate(found)}

    def after_step(self, optimizer: Optimizer, number: int) -> None:
        """Ask the checks of a step."""
        seen, key = self.seen, id(optimizer)
        named = self._named(optimizer)
        with_gradient = [n for n, p in named.items() if p.grad is not None]
        flags = nonzero([named[n].grad for n in with_gradient])  # type: ignore[misc]
        live = {n for n, flag in zip(with_gradient, flags, strict=True) if flag}
        seen.got_gradient.update(with_gradient)
        seen.got_nonzero |= live
        if not live or len(live) == len(with_gradient):
            seen.dead.clear()  # no parameter is behind it: a margin of the loss that all samples keep
        self.reached.update(with_gradient)
        self.unreached.update(n for n, p in named.items() if p.requires_grad and p.grad is None)
        self.found_gradient |= bool(live)
        self.found_zero |= 0 < len(live) < len(with_gradient)
        known = self.backward_passes > 0
        of_others, dropped = self.other_loss(key), self.dropped.pop(key, set()) - live - {""}
        against = self.opposed(optimizer, named, live) if seen.shared else ""
        self.stepped.setdefault(key, set()).add(self.backward_passes)
        cleared = self.cleared.pop(key, not known) if known else True
        cleared = not self.added.pop(key, False) or cleared
        rate = max((float(group.get("lr", 1.0)) for group in optimizer.param_groups), default=1.0)
        update = Update(
            optimizer, number, named, set(with_gradient), live, None, {}, rate, 0.0, cleared,
            self.had_gradient.pop(key, False), of_others, self.lost.pop(key, 0), dropped, against,
            self.left.pop(key, False) and not live,
        )  # fmt: skip
        seen.steps[key].rated |= update.rate != 0
        self.compare(update)
        seen.update = update
        self.callback._ask("step")
        seen.update = None

    def last_step(self, name: str) -> int:
        """How many backward passes the last step of an optimizer with a parameter had seen; 0 before the first one."""
        steps = (
            max(numbers)
            for optimizer in self.seen.optimizers
            if (numbers := self.stepped.get(id(optimizer))) and name in self._named(optimizer)
        )
        return max(steps, default=0)

    def other_loss(self, key: int) -> str:
        """The optimizer that has made a step by one of several backward passes of which this one has the gradients."""
        mine = self.sources.get(key, set())
        for optimizer in self.seen.optimizers if len(mine) > 1 and key not in self.stepped else ():
            theirs, steps = self.sources.get(id(optimizer), set()), self.stepped.get(id(optimizer), set())
            between = any(first <= number < max(mine) for first in mine & theirs for number in steps)
            if id(optimizer) != key and between:
                return f"optimizer {self.seen.optimizers.index(optimizer)}"
        return ""

    def opposed(self, optimizer: Optimizer, named: Mapping[str, Tensor], live: set[str]) -> str:
        """The optimizer, with some of the same parameters, of which this one undoes the step that it has just made.

        By opposed gradients; or this one has all parameters, and follows a loss that trains others through those of an
        optimizer whose own loss reaches no others, as a generator is trained through its discriminator.
        """
        own = {n: sampled(p.grad).clone() for n in live & self.seen.shared if (p := named[n]).grad is not None}
        found = ""
        for number, other in enumerate(self.seen.optimizers):
            pulls, steps = self.pulls.get(id(other), {}), self.stepped.get(id(other), set())
            both = sorted(own.keys() & pulls.keys())
            if other is optimizer or not both or self.backward_passes in steps:
                continue
            one, two = (joined([each[n] for n in both]) for each in (own, pulls))
            cosine, others = float(torch.cosine_similarity(one, two, 0)), live - self._named(other).keys()
            is_whole = (
                {id(p) for p in named.values()} >= self.seen.owned and bool(others) and not others & self.seen.shared
            )
            if cosine < OPPOSED or (cosine < UNLIKE and is_whole and not self.reach[max(steps)] & others):
                found = f"optimizer {number}"
        self.pulls[id(optimizer)] = own
        return found

    def conclude(self) -> bool:
        """Count layers that were computed, but whose parameters got no gradient.

        Returns:
            Whether gradients are missing or 0, which the next look, with hooks of layers, may explain.
        """
        seen, missing = self.seen, self.unreached - self.reached
        if self.ran:
            seen.looks_with_hooks += 1
            seen.ran_without_gradient.update(n for n in missing if n.rpartition(".")[0] in self.ran)
        return self.found_gradient and (bool(missing) or self.found_zero)

    def compare(self, update: Update) -> None:
        """Measure how far the weights have moved."""
        before = self.before.pop(id(update.optimizer), None)
        # A fused optimizer skips a step on the device.
        if before is None or getattr(update.optimizer, "found_inf", None) is not None:
            return
        views, copied = before
        pairs = [(view, update.parameters.get(name, view)) for name, view in views.items()]
        # A view shows the new values, unless the parameter has got other memory.
        after = [view if view.data_ptr() == p.data_ptr() else sampled(p) for view, p in pairs]
        if not copied.numel() or [v.shape for v in after] != [v.shape for v in views.values()]:
            return
        change = joined(after) - copied
        both = norms(torch.cat([change, copied]), [*after, *after]).tolist()
        moved, size = both[: len(after)], both[len(after) :]
        known = {  # a frozen one may hold infinities, as a mask does
            n
            for n, each in zip(views, size, strict=True)
            if n in update.parameters
            and views[n].numel()
            and (math.isfinite(each) or update.parameters[n].requires_grad)
        }
        update.moved, update.size = (
            {n: each for n, each in zip(views, part, strict=True) if n in known} for part in (moved, size)
        )
        for name, moved_by in update.moved.items():
            if update.parameters[name].ndim > 1 and update.size[name] and update.rate > 0:
                self.seen.largest[name] = max(self.seen.largest.get(name, 0.0), moved_by / update.size[name])
        names = [*update.moved]
        frozen = {n for n in names if not update.parameters[n].requires_grad}
        steps = self.seen.steps[id(update.optimizer)]
        if update.rate > 0 and update.nonzero:
            total = math.hypot(*(s for n, s in update.size.items() if n not in frozen))
            ratio = math.hypot(*(m for n, m in update.moved.items() if n not in frozen)) / (total + 1e-12)
            steps.ratios.append((ratio if total else math.inf, update.rate))
            half = [n for n in names if update.parameters[n].dtype in (torch.bfloat16, torch.float16)]
            if half:
                parts = torch.split(change, [v.numel() for v in after])
                steps.stuck.append(stuck(update, half, dict(zip(views, parts, strict=True))))


def versions(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Which tensors gradients are, and how often each was changed."""
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]


def stuck(update: Update, names: list[str], change: Mapping[str, Tensor]) -> float:
    """The share of elements with a gradient that did not change."""
    with_gradient = unchanged = 0.0
    for name in names:
        gradient = update.parameters[name].grad
        if name in update.nonzero and gradient is not None and not gradient.is_sparse:
            live = sampled(gradient) != 0
            with_gradient += float(live.sum())
            unchanged += float((live & (change[name] == 0)).sum())
    return unchanged / max(with_gradient, 1.0)


class ForwardHook:
    """Sees which layers are computed, and whether activations are 0; a copy of the module does not have it."""

    def __init__(self, watch: Watch | None = None, name: str = "") -> None:
        self.watch, self.name = watch, name

    def __call__(self, part: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the name."""
        if self.watch is None:
            return
        seen = self.watch.seen
        if part.training or seen.module.training:
            self.watch.ran.add(self.name)
        if self.name in seen.repeated:
            layers.remember_call(seen.repeated[self.name], inputs, output)
        is_activation = isinstance(part, nn.ReLU | nn.ReLU6) and isinstance(output, Tensor)
        if is_activation and output.ndim > 1 and len(output) >= 8:  # an expert may get few samples
            seen.dead[self.name] = 0 if bool(output.detach().any()) else seen.dead[self.name] + 1

    def __reduce__(self) -> Any:
        return ForwardHook, ()
