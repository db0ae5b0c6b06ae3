"""Arrays: one word for many runs."""

from __future__ import annotations

import itertools
import re

OPENING, CLOSING = "[{(", "]})"


def combinations(spec: str | list[str]) -> list[list[str]]:
    """The words of each run: every value of one key with every value of the others.

    Args:
        spec: ``key=value,value``; several with a semicolon between them, or as a list.

    Raises:
        ValueError: It cannot be read.
    """
    axes = [axis.strip() for axis in (spec.split(";") if isinstance(spec, str) else spec)]
    words = []
    for axis in axes:
        key, equals, text = axis.partition("=")
        values = split(text)
        if not key or not equals or "" in values:
            raise ValueError(f"launch.array={axis}: cannot be read; say launch.array='seed=1,2;optimizer.lr=0.1,0.01'")
        if len(set(values)) < len(values):
            raise ValueError(f"launch.array={axis} has a value twice; give each once")
        words.append([f"{key}={value}" for value in values])
    keys = [re.sub(r"=.*", "", axis) for axis in axes]
    if len(set(keys)) < len(keys):
        raise ValueError(f"launch.array={';'.join(axes)} has a key twice; give all its values at once")
    return [list(combination) for combination in itertools.product(*words)]


def split(text: str) -> list[str]:
    """Values between commas; those inside brackets and quotes do not count."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else (letter in OPENING) - (letter in CLOSING)
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]
