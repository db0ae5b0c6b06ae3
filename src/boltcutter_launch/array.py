"""Parse ``launch.array``, which stands for many runs."""

from __future__ import annotations

import itertools
import re

from boltcutter.config.values import split_values


def combinations(spec: str | list[str]) -> list[list[str]]:
    """Return the overrides of each run: the Cartesian product of the values of all keys.

    Args:
        spec: ``key=value,value``; several keys separated by semicolons, or as a list.

    Raises:
        ValueError: ``spec`` has no valid syntax, or a key or value twice.
    """
    axes = [axis.strip() for axis in (spec.split(";") if isinstance(spec, str) else spec)]
    overrides = []
    for axis in axes:
        key, equals, text = axis.partition("=")
        values = split_values(text)
        if not key or not equals or "" in values:
            raise ValueError(f"launch.array={axis}: invalid syntax; give launch.array='seed=1,2;model=mlp,convnet'")
        if len(set(values)) < len(values):
            raise ValueError(f"launch.array={axis} has a duplicate value; remove it")
        overrides.append([f"{key}={value}" for value in values])
    keys = [re.sub(r"=.*", "", axis) for axis in axes]
    if len(set(keys)) < len(keys):
        raise ValueError(f"launch.array={';'.join(axes)} has a duplicate key; merge its values")
    return [list(combination) for combination in itertools.product(*overrides)]
