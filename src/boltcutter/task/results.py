"""What a module logs, over all ranks: the results of an epoch, and monitored values, are the same on each of them."""

from __future__ import annotations

import math
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor

from boltcutter.internals import logger_connector, set_logger_connector
from boltcutter.protocols import data_parallel, gather_objects
from boltcutter.task.after_hook import AfterHook
from boltcutter.task.host_copy import HostCopy, copy_to_host

REDUCTIONS: dict[str, Callable[..., float]] = {"sum": sum, "min": min, "max": max}
MARKS = 1 << 19  # of names, between this and twice as much, which floats of 32 bits and sums of ranks tell apart
ONCE = ("on_train_start", "on_validation_start", "on_test_start")  # hooks that are called once, besides those of epochs


class LoggedNamesError(RuntimeError):
    """Ranks log a synchronized value under different names, so that each would wait for others, or get their value."""

    hide_traceback = True  # needs no traceback


class Logged(NamedTuple):
    """What one rank has logged under a name in an epoch.

    Args:
        value: Sum over its batches, weighted by ``weight`` if the mean is logged; or minimum or maximum. None: a metric
            of torchmetrics, which reduces its state itself.
        weight: Number of samples.
        is_synchronized: Whether the module asks for it, by ``sync_dist=True``.
        options: Arguments with which another rank logs the same.
    """

    value: float | None
    weight: float
    reduction: str
    is_synchronized: bool
    options: dict[str, Any]


class NameChecks:
    """Whether ranks log the same names in steps; what a device has found is read later, when it has arrived."""

    def __init__(self) -> None:
        self._pending: deque[tuple[HostCopy, str]] = deque()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NameChecks, ()  # a trainer may be pickled

    def add(self, differs: Tensor, line: str) -> None:
        """Read what has arrived, and begin to copy whether names differ, which is an error of this line.

        Raises:
            LoggedNamesError: Names differ.
        """
        self._pending.append((copy_to_host(differs), line))
        self.read(waits=False)

    def read(self, *, waits: bool = True) -> None:
        """Read all, or what has arrived.

        Raises:
            LoggedNamesError: Names differ.
        """
        while self._pending and (waits or self._pending[0][0].is_ready()):
            copy, line = self._pending.popleft()
            if copy.wait():
                raise LoggedNamesError(line)


class NamedReduction(NamedTuple):
    """Reduces the value of a step over ranks, all of which must log it under the same name.

    Ranks reduce what they log in the order in which they log it, so names that differ would be mixed. Nothing waits for
    a device, as the barrier of Lightning's ``reduce`` does: its error is that of a later step.

    Args:
        reduce: ``reduce`` of the strategy, for integers.
        hook: The hook that logs.
        name: The name.
        checks: Those of the training.
    """

    reduce: Callable[..., Any]
    hook: str
    name: str
    checks: NameChecks

    def __call__(self, value: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
        """Reduce a value, a tensor without dimensions.

        Raises:
            LoggedNamesError: Another rank logs under another name.
        """
        if not value.is_floating_point():
            return cast(Tensor, self.reduce(value, group=group, reduce_op=reduce_op))
        mark = value.new_full((), MARKS + zlib.crc32(f"{self.hook}.{self.name}".encode()) % MARKS)
        # Both signs, so that minimum and maximum differ on all ranks.
        found, is_mean = torch.stack((value, mark, -mark)), reduce_op in ("mean", "avg")
        dist.all_reduce(found, getattr(dist.ReduceOp, "SUM" if is_mean else reduce_op.upper()), group)
        size = dist.get_world_size(group)
        if is_mean:
            found /= size
        expected = mark * (size if reduce_op == "sum" else 1)
        self.checks.add(
            torch.isclose(found[1:], torch.stack((expected, -expected))).logical_not().any(),
            f"{self.name}: logged in {self.hook} with sync_dist=True on rank {dist.get_rank()}, while another rank "
            "logs another name; log the same names in the same order on all ranks",
        )
        return found[0]


class StepLog:
    """Logs values of steps: monitored ones as with ``sync_dist=True``, and what is synchronized with its name.

    Args:
        log: ``log`` of the results.
        names: What is monitored within epochs.
        checks: Of names.
    """

    def __init__(self, log: Callable[..., None], names: set[str], checks: NameChecks) -> None:
        self.log, self.names, self.checks = log, names, checks

    def __call__(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Log a value."""
        if options.get("on_step") and isinstance(value, Tensor) and "sync_dist_fn" in options:
            options["sync_dist"] = options.get("sync_dist") or name in self.names
            options["sync_dist_fn"] = NamedReduction(options["sync_dist_fn"], fx, name, self.checks)
        self.log(fx, name, value, **options)


class LoggerConnector(_LoggerConnector):
    """Reduces what a module logs over all ranks at the end of each epoch, where all of them are at the same point.

    Without ``sync_dist=True`` Lightning returns the values of the samples of rank 0, and lets each rank monitor its
    own; with it, the number of samples of ranks is rounded in the weighted mean. Here the mean of an epoch is that over
    all samples; sum, minimum and maximum are those of all ranks. Values of a single step stay those of rank 0, except
    those that a callback or scheduler monitors within epochs.

    Attributes:
        name_checks: Of values that are synchronized in steps.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self.name_checks = NameChecks()
        self._reported: set[str] = set()
        self._has_ended = False  # whether the hooks at the end of the epoch were called

    @property
    def metrics(self) -> Any:
        """Logged values as plain tensors: subclasses, such as those with metadata, cannot be saved and loaded.

        Until results are reduced they are those of this rank, so that a hook can read them on one rank only.
        """
        results: Any = self.trainer._results
        if self._first_loop_iter is None and self._is_distributed():
            for _, item in results.valid_items():
                if item._computed is None and item.is_tensor and item.meta.on_epoch and item.meta.sync.group is None:
                    item._computed = _local(item)
        found = super().metrics
        _make_plain(found["callback"])
        _make_plain(found["log"])
        return found

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """What callbacks monitor, also of what they have set there."""
        found = super().callback_metrics
        _make_plain(found)
        return found

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Before the first batch of an epoch, find what is monitored within it."""
        if self._first_loop_iter is None and self._is_distributed():
            results, names = self.trainer._results, set(step_monitors(self.trainer) if self.trainer.training else ())
            if isinstance(log := vars(results).get("log"), StepLog):
                log.names = names
            else:
                vars(results)["log"] = StepLog(results.log, names, self.name_checks)  # type: ignore[union-attr]
        super().on_batch_start(batch, dataloader_idx)

    def epoch_end_reached(self) -> None:
        """Reduce what was logged in training steps, and then what ``on_train_epoch_end`` of the module logs."""
        super().epoch_end_reached()
        self._has_ended = False
        if self.trainer.training and self._is_distributed():
            self._reduce()
            module: Any = self.trainer.lightning_module
            # Callbacks that monitor are called after this hook of the module; Lightning has no other place between.
            AfterHook(module, "on_train_epoch_end", self.end_of_training_hook)

    def end_of_training_hook(self) -> None:
        """Reduce what was logged at the end of a training epoch."""
        self._reduce()
        self._compare_monitored()

    def on_epoch_end(self) -> None:
        """Reduce what was logged in hooks at the end of the epoch."""
        if self._is_distributed():
            self._reduce()
        self._has_ended = True
        super().on_epoch_end()

    def update_eval_epoch_metrics(self) -> dict[str, Tensor]:
        """Reduce what was logged for one of the loaders of an evaluation."""
        if self._is_distributed() and not self._has_ended:
            self._reduce()
        return super().update_eval_epoch_metrics()

    def log_eval_end_metrics(self, metrics: dict[str, Tensor]) -> None:
        """Compare what is monitored after an evaluation."""
        super().log_eval_end_metrics(metrics)
        if self.trainer.state.fn == "fit" and self._is_distributed() and not self.trainer.sanity_checking:
            self._compare_monitored()

    def _is_distributed(self) -> bool:
        return self.trainer.world_size > 1 and dist.is_available() and dist.is_initialized()

    def _reduce(self) -> None:
        """Reduce all results of this epoch that are not yet reduced.

        Raises:
            LoggedNamesError: A value that is synchronized is not logged by all ranks.
        """
        self.name_checks.read()
        results: Any = self.trainer._results
        local = {key: _logged(item) for key, item in results.valid_items() if _is_shared(item)}
        for _, item in results.valid_items():
            if item.meta.sync.rank_zero_only and item.meta.on_epoch and item.is_tensor:
                item._computed = _local(item)  # Lightning would recommend to synchronize it
        progress: Any = self.trainer._active_loop
        progress = getattr(progress, "epoch_loop", progress).batch_progress.current
        ranks: list[tuple[int, bool, dict[str, Logged]]] = gather_objects(
            (data_parallel(self.trainer.strategy).rank, progress.ready > 0, local)
        )
        for key in dict.fromkeys(key for *_, logged in ranks for key in logged):
            self._check_holders(key, ranks)
            if key not in local:
                some = next(logged[key] for *_, logged in ranks if key in logged)
                _log_missing(self.trainer, key, some)
            item = results[key]
            if item.is_tensor:
                # Ranks of tensor parallelism process the same samples.
                parts = {rank: logged[key] for rank, _, logged in ranks if key in logged}
                self._set_result(item, list(parts.values()))
            else:
                item.compute()  # in the same order on all ranks
            item.reduced = item._computed

    def _check_holders(self, key: str, ranks: list[tuple[int, bool, dict[str, Logged]]]) -> None:
        holders = [rank for rank, (*_, logged) in enumerate(ranks) if key in logged]
        some = ranks[holders[0]][-1][key]
        of_steps = not _is_once(some.options["fx"])
        others = [
            rank for rank, (_, has_run, _) in enumerate(ranks) if rank not in holders and (has_run or not of_steps)
        ]
        if not others:
            return
        name = some.options["name"]
        where = f"{name}: logged by {_ranks(holders)}, but not by {_ranks(others)}"
        if some.is_synchronized or some.value is None:
            what = "sync_dist=True" if some.value is not None else "a metric of torchmetrics"
            raise LoggedNamesError(f"{where}, which {what} requires; log it on all ranks")
        self._report(name, f"{where}: its value is that of the former; log it on all ranks")

    def _set_result(self, item: Any, parts: list[Logged]) -> None:
        is_once, name = _is_once(item.meta.fx), item.meta.name
        is_equal = all(_is_same(part.value, parts[0].value) and part.weight == parts[0].weight for part in parts)
        if is_equal and (is_once or parts[0].reduction != "sum") and not (is_once and parts[0].is_synchronized):
            value = _mean(parts[:1]) if parts[0].reduction == "mean" else parts[0].value
        elif parts[0].reduction == "mean":
            value = _mean(parts)
        else:
            # As torch.minimum and torch.maximum: NaN if any is NaN.
            values = [float(part.value) for part in parts if part.value is not None]
            reduce = REDUCTIONS[parts[0].reduction]
            value = math.nan if any(map(math.isnan, values)) else reduce(values)
        if is_once and not is_equal and not parts[0].is_synchronized:
            self._report(
                name,
                f"{name}: logged in {item.meta.fx} with another value on each rank; the {parts[0].reduction} of ranks "
                "is used, which may differ from the value over all samples; log a metric of torchmetrics, or "
                "self.all_gather what it is computed from",
            )
        item._computed = torch.tensor(value, dtype=item.value.dtype, device=item.value.device)

    def _compare_monitored(self) -> None:
        """Replace monitored values that differ between ranks by their mean: those of steps, or set by a callback."""
        names = sorted({name for _, name in monitors(self.trainer)})
        results: Any = self.trainer._results
        reduced = {name for item in results.values() if _is_reduced(item) for name in _names(item)}
        if names := [name for name in names if name not in reduced]:
            found = self.callback_metrics
            ranks = gather_objects({name: float(found[name]) for name in names if name in found})
            for name in names:
                self._replace_monitored(name, [rank.get(name) for rank in ranks])

    def _replace_monitored(self, name: str, values: list[float | None]) -> None:
        known = [value for value in values if value is not None]
        if not known or all(value is not None and _is_same(value, known[0]) for value in values):
            return
        if len(known) < len(values):
            having = [rank for rank, value in enumerate(values) if value is not None]
            lacking = [rank for rank, value in enumerate(values) if value is None]
            what = f"{name} is monitored: logged by {_ranks(having)}, but not by {_ranks(lacking)}"
        else:
            what = f"{name} is monitored, but differs between ranks"
        self._report(name, f"{what}; their mean is used; log it with sync_dist=True on all ranks")
        mean = torch.tensor(sum(known) / len(known), device=self.trainer.strategy.root_device)
        self._callback_metrics[name] = mean
        for item in (self.trainer._results or {}).values():
            if name in _names(item) and item._computed is not None:
                item._computed = mean

    def _report(self, name: str, line: str) -> None:
        if name not in self._reported and self.trainer.is_global_zero:
            print(f"warning: {line}", file=sys.stderr)
        self._reported.add(name)


def reduce_results(trainer: L.Trainer) -> None:
    """Let a trainer reduce what its module logs over ranks."""
    connector = LoggerConnector(trainer)
    vars(connector).update(vars(logger_connector(trainer)))
    set_logger_connector(trainer, connector)


def reduction(trainer: L.Trainer, hook: str, name: str, *, on_step: bool) -> Any:
    """How a value that a hook logs is reduced over ranks."""
    if on_step and trainer.world_size > 1:
        return NamedReduction(trainer.strategy.reduce, hook, name, logger_connector(trainer).name_checks)
    return trainer.strategy.reduce


def monitors(trainer: L.Trainer) -> Iterator[tuple[Any, str]]:
    """Callbacks and configurations of schedulers, each with the name of the metric that it monitors."""
    callbacks: Iterable[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedulers = (config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau)
    for owner in (*callbacks, *schedulers):
        if isinstance(name := getattr(owner, "monitor", None), str):
            yield owner, name


def step_monitors(trainer: L.Trainer) -> Iterator[str]:
    """Names of metrics that are monitored within epochs."""
    for owner, name in monitors(trainer):
        by_step = getattr(owner, "interval", None) == "step" or getattr(owner, "_every_n_train_steps", 0) > 0
        if by_step or getattr(owner, "_train_time_interval", None) is not None:
            yield from (name, name.removesuffix("_step"))


def _make_plain(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if type(value) is not Tensor and isinstance(value, Tensor):
            values[name] = value.as_subclass(Tensor)


def _logged(item: Any) -> Logged:
    meta = item.meta
    names = ("name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")
    options = {name: getattr(meta, name) for name in names} | {"reduce_fx": meta.reduce_fx.__name__}
    options["fx"] = meta.fx if meta.dataloader_idx is None else meta.fx.removesuffix(f".{meta.dataloader_idx}")
    if not item.is_tensor:
        return Logged(None, 0.0, "", False, options)
    options |= {"sync_dist": meta.sync.should, "metric_attribute": None}
    weight = float(item.cumulated_batch_size) if meta.is_mean_reduction else 1.0
    return Logged(float(item.value), weight, meta.reduce_fx.__name__, meta.sync.should, options)


def _local(item: Any) -> Tensor:
    """The result of this rank."""
    value: Tensor = item.value / item.cumulated_batch_size if item.meta.is_mean_reduction else item.value.clone()
    return value


def _log_missing(trainer: L.Trainer, key: str, logged: Logged) -> None:
    """Log in this rank, which has no batch with it, what others have logged."""
    options, module = dict(logged.options), trainer.lightning_module
    is_metric = logged.value is None
    value = module.get_submodule(options["metric_attribute"]) if is_metric else torch.zeros((), device=module.device)
    results: Any = trainer._results
    results.pop(key, None)  # of an earlier epoch
    fx, name = options.pop("fx"), options.pop("name")
    results.log(fx, name, value, batch_size=1, **options)  # without a reduction, as no other rank takes part
    sync = results[key].meta.sync  # this rank may log it later, too
    sync.fn = reduction(trainer, fx, name, on_step=options["on_step"] and not is_metric)
    sync.should = sync.should  # which uses the function


def _is_shared(item: Any) -> bool:
    """Whether a result is that of an epoch, and is not yet reduced over ranks or to be reduced over some of them."""
    sync = item.meta.sync
    return item.meta.on_epoch and not sync.rank_zero_only and sync.group is None and not _is_reduced(item)


def _is_reduced(item: Any) -> bool:
    return item._computed is not None and getattr(item, "reduced", None) is item._computed


def _names(item: Any) -> tuple[str, ...]:
    """Names under which callbacks find a result."""
    index = item.meta.dataloader_idx if item.meta.add_dataloader_idx else None
    suffix = "" if index is None else f"/dataloader_idx_{index}"
    return f"{item.meta.name}{suffix}", f"{item.meta.forked_name(on_step=False)}{suffix}"


def _is_once(hook: str) -> bool:
    """Whether a hook is called once in an epoch, rather than for each batch."""
    return "_epoch_" in hook or hook in ONCE


def _mean(parts: list[Logged]) -> float:
    weight = sum(part.weight for part in parts)
    return sum(part.value or 0.0 for part in parts) / weight if weight else math.nan


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one != one and other != other)  # both NaN


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
