"""Call hooks without the profiling and debug messages around them, if there is neither a profiler nor a debug log."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call

from boltcutter.environment.process import call_glibc
from boltcutter_parallel.internals import CALLING, CURRENT_HOOK, replaced


class SkipNoOpHooks(Callback):
    """Call hooks without the profiling and debug messages around them, if nobody reads these.

    For each hook of each callback, also if it is not overridden, Lightning enters a profiler context and formats two
    messages, which takes as long as a training step of a small model. Each call finds out anew which callbacks and
    hooks there are, and whether a profiler or a debug log observes them; if so, Lightning's own function makes it.
    """

    _users: ClassVar[set[Callback]] = set()  # those of running trainers, one of which may run within another
    _replaced: ClassVar[ExitStack] = ExitStack()  # restores Lightning's functions

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace the functions of Lightning that call hooks."""
        if not self._users:
            for name, function in zip(CALLING, (_call_callbacks, _call_module, _call_strategy), strict=True):
                self._replaced.enter_context(replaced(call, name, function))
        self._users.add(self)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Return to the system the memory that the sanity check left in pieces."""
        call_glibc("malloc_trim", 0)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore Lightning's functions."""
        self._users.discard(self)
        if not self._users:
            self._replaced.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore Lightning's functions, as ``teardown`` is not called after an exception."""
        self.teardown(trainer, pl_module, "")


by_lightning = {name: getattr(call, name) for name in CALLING}


def _is_observed(trainer: Any) -> bool:
    """Whether a profiler or a debug log observes the calls of hooks."""
    profiler = trainer.profiler
    is_profiled = type(profiler) is not PassThroughProfiler or "profile" in vars(profiler)
    return is_profiled or call.log.isEnabledFor(logging.DEBUG)


def _call_callbacks(trainer: Any, hook_name: str, *args: Any, **options: Any) -> None:
    module = trainer.lightning_module
    if not module or "monitoring_callbacks" in options or _is_observed(trainer):
        by_lightning["_call_callback_hooks"](trainer, hook_name, *args, **options)
        return
    state, arguments = vars(module), (trainer, module, *args)
    previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook_name
    for hook in map(attrgetter(hook_name), trainer.callbacks):  # one by one, as a hook may set that of the next one
        if callable(hook):
            hook(*arguments, **options)
    state[CURRENT_HOOK] = previous


def _call_module(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
    module = trainer.lightning_module
    if not module or "pl_module" in options or _is_observed(trainer):
        return by_lightning["_call_lightning_module_hook"](trainer, hook_name, *args, **options)
    return _call(module, module, hook_name, args, options)


def _call_strategy(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
    module = trainer.lightning_module
    if not module or _is_observed(trainer):
        return by_lightning["_call_strategy_hook"](trainer, hook_name, *args, **options)
    return _call(module, trainer.strategy, hook_name, args, options)


def _call(module: L.LightningModule, owner: Any, hook_name: str, args: Any, options: dict[str, Any]) -> Any:
    """Call a hook, on whose name the defaults of ``log`` depend."""
    if not callable(hook := getattr(owner, hook_name)):
        return None
    state = vars(module)  # setting an attribute of a module takes as long as the call
    previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook_name
    output = hook(*args, **options)
    state[CURRENT_HOOK] = previous
    return output
