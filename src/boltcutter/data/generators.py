"""Random generators that datasets, transforms, collate functions and samplers hold themselves."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor

from boltcutter.data.streams import hash64, seed32

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LIBRARIES = ("builtins", "torch", "numpy", "lightning", "pytorch_lightning", "typing", "abc", "boltcutter")
LEAVES = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, types.ModuleType, type, L.Trainer)
MAX_DEPTH = 12  # of attributes and containers; a generator of a transform in a list of a split is four deep
MAX_OBJECTS = 20_000
MAX_ITEMS = 256  # of a container; a longer one is data


def find_generators(*owners: Any) -> list[Any]:
    """Find the generators that objects hold: in attributes, containers, closures, and globals of their functions.

    Returns:
        Generators in an order that depends on the objects only, without the global ones.
    """
    found, seen = [], {id(torch.default_generator), *map(id, _GLOBAL)}
    queue = deque((owner, 0) for owner in owners)
    while queue and len(seen) < MAX_OBJECTS:
        value, depth = queue.popleft()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, KINDS):
            found.append(value)
        elif depth < MAX_DEPTH:
            queue.extend((child, depth + 1) for child in _children(value))
    return found


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of any kind with 64 bits; one of the operating system cannot be seeded."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed32(seed))
    else:
        generator.seed(seed)


def seed_each(generators: Iterable[Any], seed: int) -> None:
    """Seed each of several generators differently."""
    for number, generator in enumerate(generators, 1):
        seed_generator(generator, hash64(seed, number))


def generator_state(generator: Any) -> Any:
    """State of a generator of any kind, which can be pickled."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return cast(Any, generator.bit_generator).state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if can_be_seeded(generator) else None


def can_be_seeded(generator: Any) -> bool:
    """Whether a generator repeats its numbers after it was seeded."""
    return not isinstance(generator, random.SystemRandom)


# Seeded with the global generators; ``numpy.random.rand`` and ``random.random`` are methods of these.
_GLOBAL: tuple[Any, ...] = (getattr(random.random, "__self__", None), getattr(np.random.rand, "__self__", None))


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) and not hasattr(value, "__dict__"):
        yield from islice(value.values(), MAX_ITEMS)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from islice(value, MAX_ITEMS)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif not isinstance(owner := getattr(value, "__self__", None), types.ModuleType | types.NoneType):
        yield owner  # of a method that is not written in Python, such as numpy.random.Generator.random
    else:
        yield from _of_object(value)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (function.__defaults__, function.__kwdefaults__)
    if not (function.__module__ or "").startswith(LIBRARIES):
        for name in function.__code__.co_names:
            yield function.__globals__.get(name)


def _of_object(value: Any) -> Iterator[Any]:
    yield getattr(value, "__dict__", None)
    for cls in type(value).__mro__:
        if str(cls.__module__).partition(".")[0].startswith(LIBRARIES):  # of functions of Cython, it is a descriptor
            continue
        for name, item in vars(cls).items():
            if isinstance(item, types.MemberDescriptorType):  # of __slots__
                yield getattr(value, name, None)
            elif isinstance(item, (*KINDS, types.FunctionType, list, tuple, dict)):
                yield item
