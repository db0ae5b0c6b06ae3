import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from boltcutter.data.generators import can_be_seeded, find_generators, seed_each

SHARED = random.Random(0)


class Flip:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


class Slotted:
    __slots__ = ("generator",)

    def __init__(self, generator: Any) -> None:
        self.generator = generator


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


class Augmented(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4


class Shared(Dataset[Any]):
    """Draws from a generator of its module."""

    def __getitem__(self, index: int) -> float:
        return SHARED.random()


def make(kind: str) -> Any:
    kinds: dict[str, Any] = {
        "torch": torch.Generator,
        "numpy": np.random.default_rng,
        "legacy": np.random.RandomState,
        "python": random.Random,
    }
    return kinds[kind]()


HOLDERS: dict[str, Any] = {
    "attribute": Flip,
    "two levels": lambda g: Augmented(Flip(g)),
    "slots": lambda g: Augmented(Slotted(g)),
    "list": lambda g: Augmented(Compose(str, Flip(g))),
    "dictionary": lambda g: Augmented({"image": [Flip(g)]}),
    "split": lambda g: random_split(Augmented(Compose(Flip(g))), [2, 2])[0],
    "concatenated": lambda g: Subset(ConcatDataset([Augmented(Flip(g))]), [0]),
    "closure": lambda g: Augmented(lambda image: (image, g)),
    "partial": lambda g: functools.partial(print, end=g),
}


@pytest.mark.parametrize("kind", ["torch", "numpy", "legacy", "python"])
@pytest.mark.parametrize("holder", list(HOLDERS))
def test_generators_are_found_where_objects_hold_them(holder: str, kind: str) -> None:
    generator = make(kind)
    assert find_generators(HOLDERS[holder](generator)) == [generator]


def test_the_generator_of_a_method_of_it_is_found() -> None:
    """As of a transform that has stored ``numpy.random.default_rng().random``."""
    generator, python = np.random.default_rng(), random.Random()
    assert find_generators(Flip(generator.random), python.random) == [python, generator]
    assert find_generators(python.gauss) == [python]


def test_a_generator_of_the_module_is_found() -> None:
    assert find_generators(Shared()) == [SHARED]


def test_global_generators_are_not_found() -> None:
    assert (
        find_generators(Flip(random.random), Flip(np.random.rand), torch.default_generator, [random, np.random]) == []
    )


def test_cycles_and_long_lists_end() -> None:
    holder = Flip(None)
    holder.generator = [holder, list(range(10**6))]
    assert find_generators(holder) == []


def test_generators_are_seeded_differently_and_repeatably() -> None:
    own = [make(kind) for kind in ("torch", "numpy", "legacy", "python") for _ in range(2)]

    def draw() -> list[float]:
        found = [torch.rand((), generator=g).item() if isinstance(g, torch.Generator) else g.random() for g in own[:4]]
        return [*found, *(g.random_sample() for g in own[4:6]), *(g.random() for g in own[6:])]

    seed_each(own, 5)
    first = draw()
    assert len(set(first)) == 8
    assert draw() != first
    seed_each(own, 5)
    assert draw() == first


def test_the_generator_of_the_operating_system_cannot_be_seeded() -> None:
    assert not can_be_seeded(random.SystemRandom())
    assert can_be_seeded(random.Random())
