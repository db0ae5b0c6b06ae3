"""Whether a resumed run can be exact: what changed while training, and differs from what the checkpoint had."""

from __future__ import annotations

import dis
import hashlib
import itertools
import re
import sys
import types
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from boltcutter.config.settings import Settings
from boltcutter.data.generators import can_be_seeded, find_generators, generator_state
from boltcutter.data.sampler import EpochState
from boltcutter.internals import tree_leaves
from boltcutter.protocols import NativeData, NativeTask
from boltcutter.run.folder import update_record
from boltcutter.run.remote.store import run_store

KEY = "attributes"  # in a checkpoint
LIBRARIES = ("boltcutter", "lightning", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics")
START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_epoch_start")
RESETS = ("clear", "reset")  # methods by which a hook begins anew
GROWS = ("append", "appendleft", "extend", "insert", "pop", "popleft")  # of a list or a queue
CHANGES = r"append|appendleft|add|extend|insert|pop|popleft|push|setdefault|step|update|[a-z]\w*_"  # methods in place
NOT_IN_TRAINING = ("__init__", "setup", "configure_model", "on_load_checkpoint", "load_state_dict")
PLAIN = (types.SimpleNamespace, Namespace)  # of the standard library, whose attributes are the user's
MAX_ITEMS = 1000  # of a container, of a larger one the size is compared; of a tensor, of a larger one some are
MAX_SHOWN = 100  # items of an array of which some are shown
MAX_DEPTH = 5  # of objects in one another
MAX_OBJECTS = 10_000
SHOWN = 3  # attributes in the message


class ExactnessCheck(Callback):
    """Compares plain attributes of module, data module, callbacks, samplers and datasets with those of the checkpoint.

    Lightning saves what has a ``state_dict``. A counter that a module increases, a curriculum of a callback, an average
    of weights in an object of one's own, or a batch sampler that depends on what it has drawn begins anew in a resumed
    run, unless the user saves it. What changed since the start, and differs after all is restored, is reported once and
    recorded. Of what a module only holds, a value counts if it is computed from its last one, as by ``+=``: others,
    such as activations that are kept for a moment, are set before they are used.

    Args:
        cfg: The configuration of the run.
    """

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self._start: dict[str, str] = {}  # attributes at the first batch of the run
        self._saved: dict[str, str] | None = None  # those of the checkpoint from which the run is resumed
        self._loaders: list[Any] = []
        self._generators: dict[str, Any] = {}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the attributes of the checkpoint."""
        found = checkpoint.get(KEY)
        if trainer.state.fn == "fit" and isinstance(found, dict):
            start, saved = found.get("start"), found.get("saved")
            if isinstance(start, dict) and isinstance(saved, dict):
                self._start, self._saved = start, saved

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the loaders, which a later hook may replace."""
        self._loaders = tree_leaves(trainer.train_dataloader)
        vars(self)["on_train_batch_start"] = self._before_first_batch  # no hook that each step would call

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset for another training."""
        vars(self).pop("on_train_batch_start", None)

    def _before_first_batch(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """When all hooks at the start have run, compare or note the attributes."""
        del vars(self)["on_train_batch_start"]
        self._generators = _generators(trainer)
        current = dict(_attributes(trainer, self._generators))
        if self._saved is None:
            self._start = {label: value for label, (value, _) in current.items()}
            return
        mid_epoch = trainer.fit_loop.restarted_mid_epoch
        changed, found = [], []
        for label, value in self._saved.items():
            now, is_set_at_start = current.get(label, ("not set", False))
            if value not in (self._start.get(label), now) and (mid_epoch or not is_set_at_start):
                changed.append(f"{label} (was {value:.30}, is {now:.30})")
        if changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            found.append(
                f"{', '.join(changed[:SHOWN])}{more} changed while training and was not restored; save it in "
                "on_save_checkpoint, or in state_dict"
            )
        replaced = {id(loader) for loader in tree_leaves(trainer.train_dataloader)} != set(map(id, self._loaders))
        if replaced and mid_epoch:
            found.append("loaders are replaced in on_train_start, so batches are repeated; return them as loaders")
        if mid_epoch and (names := _changed_by_workers(trainer)):
            found.append(
                f"{', '.join(names[:SHOWN])} changes in workers, which are not saved: what depends on it differs until "
                "the epoch ends"
            )
        self._saved = None
        if found and trainer.is_global_zero:
            for line in found:
                print(f"resume={run_store().show(self.cfg.place.folder)}: not exact: {line}")
            update_record(self.cfg.place.folder, inexact=found)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the attributes at the start and now."""
        if trainer.is_global_zero:
            saved = {label: value for label, (value, _) in _attributes(trainer, self._generators)}
            changed = {label: value for label, value in saved.items() if value != self._start.get(label)}
            start = {label: value for label, value in self._start.items() if label in changed}
            checkpoint[KEY] = {"start": start, "saved": changed}


def _attributes(trainer: L.Trainer, generators: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Plain attributes of the user's objects: a text for each value, and whether a hook at the start sets it.

    Also attributes of their classes, and globals, that functions compute from the last value.
    """
    for label, generator in generators.items():
        state = hashlib.sha256(repr(generator_state(generator)).encode()).hexdigest()[:8]
        yield label, (f"state {state}", False)
    module, parts = trainer.lightning_module, list(_loader_parts(trainer))
    seen = {id(each) for each in (*module.modules(), *parts)}  # whose weights are restored, or are below
    for label, owner, is_part_of_module in _owners(trainer, parts):
        kind: Any = type(owner)
        uses, at_start, inherited = _uses(kind), _set_by_hooks(kind), _base_attributes(owner)
        own = [base for base in kind.__mro__[::-1] if _is_of_user(base)]
        shared = {name: item for base in own for name, item in vars(base).items() if name in uses.computed}
        for name, value in (shared | vars(owner)).items():
            is_epoch = name == "epoch" and hasattr(owner, "set_epoch")
            is_set_anew = name not in uses.computed if is_part_of_module else name in uses.set_anew
            if name not in inherited and not is_epoch and not is_set_anew:
                for path, text in _texts(value, f"{label}.{name}", seen, uses.computed):
                    yield path, (text, name in at_start)
        for path, namespace in uses.changed_globals.items():
            name = path.rpartition(".")[2]
            classes = [item for item in namespace.values() if isinstance(item, type)]
            is_set_at_start = any(name in _set_by_hooks(each) for each in classes)
            for part, text in _texts(namespace.get(name), path, seen, uses.computed):
                yield part, (text, is_set_at_start)


def _generators(trainer: L.Trainer) -> dict[str, Any]:
    """The generators of module and callbacks, apart from those of loaders, which are seeded, or drawn again."""
    module, parts = trainer.lightning_module, list(_loader_parts(trainer))
    callbacks = [callback for callback in trainer.callbacks if _is_of_user(callback)]  # type: ignore[attr-defined]
    if not callbacks and not any(map(_is_of_user, module.modules())):
        return {}
    seeded = {id(g) for g in find_generators(*(part for part in parts if not isinstance(part, EpochState)))}
    found = [g for g in find_generators(module, *callbacks) if id(g) not in seeded and can_be_seeded(g)]
    return {f"{type(g).__name__} {number} of {type(module).__name__}": g for number, g in enumerate(found, 1)}


def _owners(trainer: L.Trainer, parts: list[Any]) -> Iterator[tuple[str, Any, bool]]:
    """A label for each of the user's objects, the object, and whether it is a part of the module."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    name = type(module).__name__
    for path, part in module.named_modules():
        if _is_of_user(part):
            yield f"{name}.{path}".rstrip("."), part, part is not module
    others = [data] if data is not None and not isinstance(data, NativeData) else []
    others += trainer.callbacks  # type: ignore[attr-defined]
    others += [part for part in parts if hasattr(part, "__dict__") and not hasattr(part, "load_state_dict")]
    yield from ((type(owner).__name__, owner, False) for owner in others if _is_of_user(owner))


def _loader_parts(trainer: L.Trainer) -> Iterator[Any]:
    """Samplers, datasets and collate functions of the loaders, each once, also those around which others are."""
    seen = set[int]()
    for loader in tree_leaves(trainer.train_dataloader):
        parts = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset", "collate_fn")]
        while parts:
            part = parts.pop(0)
            if part is None or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            parts += [getattr(part, "sampler", None), getattr(part, "source", None)]
            parts += [part.dataset] if isinstance(part, Subset) else []
            parts += part.datasets if isinstance(part, ConcatDataset) else []


def _changed_by_workers(trainer: L.Trainer) -> list[str]:
    """Attributes that datasets and collate functions compute from their last value while workers call them."""
    found = set[str]()
    for loader in tree_leaves(trainer.train_dataloader):
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)  # which is read again
        for part in _loader_parts(trainer) if getattr(loader, "num_workers", 0) and not is_stream else ():
            if hasattr(part, "__getitem__") or part is loader.collate_fn:
                held = getattr(part, "__dict__", {}).values()  # such as transforms
                kinds: set[Any] = {type(each) for each in (part, *held)}
                found |= {f"{kind.__name__}.{name}" for kind in kinds for name in _uses(kind).computed}
    return sorted(found)


def _texts(value: Any, label: str, seen: set[int], computed: set[str], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Labels and texts of a plain value, or of those within containers, functions, modules and the user's objects.

    Args:
        value: The value.
        label: Its label.
        seen: Identities of objects whose values are known; changed.
        computed: Attributes of objects that count, besides those that their own classes compute from the last value.
        depth: How many objects it is in.
    """
    if (text := _describe(value)) is not None:
        yield label, text
    elif id(value) not in seen and depth < MAX_DEPTH and len(seen) < MAX_OBJECTS:
        seen.add(id(value))
        for name, item in _inner(value, computed):
            yield from _texts(item, f"{label}{name}", seen, computed, depth + 1)


def _inner(value: Any, computed: set[str]) -> Iterator[tuple[str, Any]]:
    """What a value holds: the end of the label, and the value."""
    if isinstance(value, Mapping | list | tuple | deque):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield from ((f"[{key!r:.30}]", item) for key, item in itertools.islice(items, MAX_ITEMS))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from [(f".{name}", cell.cell_contents)] if cell != types.CellType() else []
    elif isinstance(value, types.GeneratorType):
        yield from ((f".{name}", item) for name, item in getattr(value.gi_frame, "f_locals", {}).items())
    elif isinstance(value, nn.Module):  # which is none of the module that is trained
        yield from (
            (f".{name}", item) for name, item in itertools.chain(value.named_parameters(), value.named_buffers())
        )
    elif isinstance(value, type | types.ModuleType) or not (_is_of_user(value) or isinstance(value, PLAIN)):
        return
    else:
        kind: Any = type(value)
        slots = {name: getattr(value, name, None) for name in getattr(kind, "__slots__", ())}
        for name, item in (slots | getattr(value, "__dict__", {})).items():
            is_simple = not isinstance(item, Mapping | list | tuple | deque) and _describe(item) is not None
            if not is_simple or name in computed | _uses(kind).computed:
                yield f".{name}", item


def _is_of_user(owner: Any) -> bool:
    package = (owner if isinstance(owner, type) else type(owner)).__module__.partition(".")[0]
    return package not in LIBRARIES and package not in sys.stdlib_module_names - {"__main__"}


def _base_attributes(owner: Any) -> set[str]:
    """Attributes that are Lightning's or this library's, which are restored or follow from the configuration."""
    if isinstance(owner, NativeTask):
        return {name for name in vars(owner) if name.startswith("_")} | {"gradient_norm", "scheduled_steps", "training"}
    bases: tuple[type, ...] = (L.LightningModule, L.LightningDataModule, nn.Module)
    return set(next((vars(base()) for base in bases if isinstance(owner, base)), ()))


@cache
def _set_by_hooks(kind: type) -> set[str]:
    """Names of attributes and globals that hooks at the start of an epoch set, or reset."""
    found = set[str]()
    for code in (getattr(getattr(kind, name, None), "__code__", None) for name in START_HOOKS):
        last = None
        for step in dis.get_instructions(code) if code else ():
            if step.opname in ("STORE_ATTR", "STORE_GLOBAL"):
                found.add(step.argval)
            elif (
                last
                and last.opname in ("LOAD_ATTR", "LOAD_GLOBAL")
                and step.opname.startswith("LOAD_")
                and step.argval in RESETS
            ):
                found.add(last.argval)
            last = step
    return found


class Uses(NamedTuple):
    """How methods of a class other than ``__init__`` use its attributes."""

    computed: set[str]  # assigned in a statement that reads the last value, as by ``+=``; or passed to ``next``
    set_anew: set[str]  # assigned, and in no method read before that, or changed in place
    changed_globals: dict[str, dict[str, Any]]  # computed from the last value: ``module.NAME``, and where it is


@cache
def _uses(kind: type) -> Uses:
    computed, assigned, kept = set[str](), set[str](), set[str]()
    own = [base for base in kind.__mro__ if _is_of_user(base)]
    methods = {name: item for base in own[::-1] for name, item in vars(base).items() if name not in NOT_IN_TRAINING}
    for method in (item for item in methods.values() if isinstance(item, types.FunctionType)):
        read, in_statement, is_over, is_next = set[str](), set[str](), False, False
        for step in dis.get_instructions(method):
            if is_over and not step.opname.startswith(("STORE", "LOAD_F")):  # of ``a, self.b = …``, it goes on
                in_statement.clear()
            if is_next and step.opname == "LOAD_ATTR":
                computed.add(step.argval)
            is_next = step.argval == "next" or (is_next and step.opname.startswith(("LOAD_FAST", "PUSH_NULL")))
            if step.opname == "STORE_ATTR":
                computed |= in_statement & {step.argval}
                kept |= read & {step.argval}
                assigned.add(step.argval)
            elif step.opname == "STORE_SUBSCR" or (
                step.opname.startswith("LOAD_") and re.fullmatch(CHANGES, str(step.argval))
            ):
                kept |= in_statement
            if step.opname == "LOAD_ATTR":
                read.add(step.argval)
                in_statement.add(step.argval)
            # Of ``self.file = self.file or open(…)``, too.
            is_over = step.opname.startswith(("STORE_", "POP_")) or "JUMP_IF" in step.opname
    functions = [*methods.values(), *vars(sys.modules.get(kind.__module__, kind)).values()]
    own_functions = {
        item for item in functions if isinstance(item, types.FunctionType) and item.__module__ == kind.__module__
    }
    grown = _grown_globals(own_functions)
    changed = {
        f"{kind.__module__}.{name}": item.__globals__
        for item in own_functions
        for name in sorted(grown | _changed_globals(item))
    }
    return Uses(computed, assigned - computed - kept, changed)


def _grown_globals(functions: set[types.FunctionType]) -> set[str]:
    """Lists, queues and iterators in globals that functions change in place, as by ``append``, and also read."""
    grown, read = set[str](), set[str]()
    for step, after in itertools.chain(*(itertools.pairwise(dis.get_instructions(each)) for each in functions)):
        if step.opname != "LOAD_GLOBAL":
            continue
        method = after.argval if after.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        if step.argval == "next" and after.opname == "LOAD_GLOBAL":
            grown.add(after.argval)
        elif method in GROWS:
            grown.add(step.argval)
        if method not in (*GROWS[:4], *RESETS):
            read.add(step.argval)
    return grown & read


def _changed_globals(function: types.FunctionType) -> set[str]:
    """Globals that a function computes from their last value: ``N += 1``, ``N = f(N)``, ``STATE["n"] += 1``."""
    found, names = set[str](), set[str]()
    first, is_in_place, is_over = "", False, True
    for step in dis.get_instructions(function):
        if is_over:
            names, first, is_in_place = set(), "", False
        if step.opname == "LOAD_GLOBAL":
            names.add(step.argval)
        if step.opname.startswith("LOAD_"):
            first = first or (step.argval if step.opname == "LOAD_GLOBAL" else "none")
        is_in_place |= step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr[-1:] == "=")
        if step.opname == "STORE_GLOBAL":
            found |= names & {step.argval}
        elif step.opname in ("STORE_SUBSCR", "STORE_ATTR") and is_in_place and first in names:
            found.add(first)
        is_over = step.opname.startswith(("STORE_", "POP_"))
    return found


def _describe(value: Any, depth: int = 3) -> str | None:
    """A text that is equal for equal plain values; None for others."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return repr(value)[:MAX_ITEMS]
    if isinstance(value, torch.Tensor | np.ndarray):
        shape = tuple(value.shape)
        if isinstance(value, torch.Tensor):
            if value.is_meta or value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
                return None
            value = value.detach().as_subclass(torch.Tensor)
            value = value.reshape(-1)[:: value.numel() // MAX_ITEMS + 1] if value.numel() > MAX_ITEMS else value
            value = value.float() if value.is_floating_point() and value.element_size() < 4 else value
            value = value.cpu().numpy()
        if value.dtype.hasobject:
            return f"array {shape}"
        value = value.reshape(-1)[:: value.size // MAX_ITEMS + 1] if value.size > MAX_ITEMS else value
        text = np.array2string(value, threshold=4) if value.size <= MAX_SHOWN else f"array {shape}"
        return f"{text} {hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Iterator) and not isinstance(value, types.GeneratorType) and not _is_of_user(value):
        return _position(value)
    if not isinstance(value, list | tuple | dict | set | deque) or not depth:
        return None
    if len(value) > MAX_ITEMS:
        return f"{len(value)} items"
    items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    texts = [_describe(item, depth - 1) for item in items]
    if any(text is None for text in texts):
        return None
    listed = [text for text in texts if text is not None]
    return f"[{', '.join(sorted(listed) if isinstance(value, set) else listed)}]"


def _position(iterator: Iterator[Any], depth: int = 3) -> str | None:
    """How far an iterator is, by those that it reads; None if it does not tell."""
    if (count := getattr(iterator, "_num_yielded", None)) is not None:  # of a DataLoader
        return f"{count} batches yielded"
    if (line := getattr(iterator, "line_num", None)) is not None:  # of a reader of CSV files
        return f"line {line}"
    if (left := getattr(iterator, "__length_hint__", None)) is not None:
        return f"{left()} left"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced: Any = iterator.__reduce__()
    except Exception:  # of a file, for example
        return None
    parts = [part for part in reduced[1] if isinstance(part, Iterator)] if depth else []
    return ", ".join(text for part in parts if (text := _position(part, depth - 1))) or None
