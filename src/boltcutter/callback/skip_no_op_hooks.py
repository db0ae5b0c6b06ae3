"""Call hooks without the profiling and debug messages around them, if there is neither a profiler nor a debug log."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import CO_VARARGS
from itertools import compress, repeat
from operator import attrgetter, is_not
from types import FunctionType
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from boltcutter.environment.process import call_glibc
from boltcutter.internals import CALLING, CURRENT_HOOK, replaced


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
            for owner, name, function in REPLACED:
                self._replaced.enter_context(replaced(owner, name, function))
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


def _no_op() -> None:
    """An empty function, such as the hooks of Lightning's base class."""


_compare = RunningStage.__eq__  # that of all enumerations of Lightning
by_lightning = {name: getattr(call, name) for name in CALLING}
_EMPTY = {
    name: hook
    for name, hook in vars(Callback).items()
    if isinstance(hook, FunctionType) and hook.__code__.co_code == _no_op.__code__.co_code
}
_FUNCTIONS = {name: (attrgetter(name), repeat(hook)) for name, hook in _EMPTY.items()}
_FUNC, _NONE = repeat("__func__"), repeat(None)
_is_logged = call.log.isEnabledFor


def _unobserved(trainer: Any) -> Any:
    """The strategy of a trainer; None if a profiler or a debug log observes the calls of hooks."""
    profiler = trainer.profiler
    if type(profiler) is not PassThroughProfiler or "profile" in profiler.__dict__ or _is_logged(10):
        return None
    return trainer._accelerator_connector.strategy


def _call_callbacks(trainer: Any, hook_name: str, *args: Any, **options: Any) -> None:
    strategy = _unobserved(trainer)
    if strategy is None or options or hook_name not in _FUNCTIONS or not (module := strategy.lightning_module):
        by_lightning["_call_callback_hooks"](trainer, hook_name, *args, **options)
        return
    callbacks, state, arguments = trainer.callbacks, vars(module), (trainer, module, *args)
    previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook_name
    # No Python code for hooks that are not overridden, which are most. Each is looked up after the one before it was
    # called, as that may set it. What is set on an object is no method, so it has no __func__.
    get, empty = _FUNCTIONS[hook_name]
    functions = map(getattr, map(get, callbacks), _FUNC, _NONE)
    for callback in compress(callbacks, map(is_not, functions, empty)):
        if callable(hook := get(callback)):
            hook(*arguments)
    state[CURRENT_HOOK] = previous


def _call_module(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
    strategy = _unobserved(trainer)
    if strategy is None or "pl_module" in options or not (module := strategy.lightning_module):
        return by_lightning["_call_lightning_module_hook"](trainer, hook_name, *args, **options)
    if not callable(hook := getattr(module, hook_name)):
        return None
    state = vars(module)  # setting an attribute of a module takes as long as the call
    previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook_name
    output = hook(*args, **options)
    state[CURRENT_HOOK] = previous
    return output


def _call_strategy(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
    strategy = _unobserved(trainer)
    if strategy is None or not (module := strategy.lightning_module):
        return by_lightning["_call_strategy_hook"](trainer, hook_name, *args, **options)
    if not callable(hook := getattr(strategy, hook_name)):
        return None
    state = vars(module)
    previous, state[CURRENT_HOOK] = state[CURRENT_HOOK], hook_name
    output = hook(*args, **options)
    state[CURRENT_HOOK] = previous
    return output


def _is_overridden(name: str, instance: Any = None, parent: Any = None) -> bool:
    """Whether a hook of the data is overridden, which Lightning asks eight times for each batch."""
    original, kind = vars(DataHooks).get(name), type(instance)
    if original is None or not hasattr(kind, name) or name in vars(instance):
        return is_overridden(name, instance, parent)
    if (hook := getattr(kind, name)) is original:
        return False
    is_plain = type(hook) is FunctionType and not vars(hook) and isinstance(instance, DataHooks)
    # Such as a function that wraps another one, or a mock.
    return hook.__code__ != original.__code__ if is_plain else is_overridden(name, instance, parent)


def _takes(hook: Any, parameter: str, explicit: bool = False, min_args: int | None = None) -> bool:
    """Whether a step takes a parameter, which Lightning finds by a signature that it creates for each batch."""
    function = getattr(hook, "__func__", None)
    if type(function) is not FunctionType or vars(function):  # such as that of what it wraps
        return is_param_in_hook_signature(hook, parameter, explicit, min_args)
    code = function.__code__
    names = code.co_varnames[1 : code.co_argcount]
    takes_any = not explicit and bool(code.co_flags & CO_VARARGS)
    return parameter in names or takes_any or (min_args is not None and len(names) >= min_args)


def _is_same_member(self: Any, other: object) -> bool:
    """Compare members of an enumeration, whose values Lightning lowers and compares, for each batch twenty times."""
    return self is other or (type(other) is not type(self) and _compare(self, other))


REPLACED = (
    *((call, name, by) for name, by in zip(CALLING, (_call_callbacks, _call_module, _call_strategy), strict=True)),
    (data_connector, "is_overridden", _is_overridden),
    (training_epoch_loop, "is_param_in_hook_signature", _takes),
    *((kind, "__eq__", _is_same_member) for kind in (RunningStage, TrainerFn)),
)
