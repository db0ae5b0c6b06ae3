"""Generate the continuation of a text, for ``boltcutter predict``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from boltcutter.assembly.assemble import Components
from boltcutter.assembly.precision import apply_precision
from boltcutter.checkpoint.load import restore
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.environment import announcement
from boltcutter.export.exported import ExportedModel

SAMPLING = ("tokens", "temperature", "top_k", "seed")


def generate(components: Components, model: str | ExportedModel, overrides: dict[str, str]) -> str:
    """Print the text of ``input``, which may be a file, followed by its continuation by the model; and return it.

    Args:
        components: Components of a run whose task can ``generate`` and whose data has a ``tokenizer``.
        model: Checkpoint to load, or an export.
        overrides: ``input``, ``tokens`` (200), ``temperature`` (0.8), ``top_k`` (50), ``seed`` (0), and
            ``output``, a file to write to.
    """
    count, seed = _number(overrides, "tokens", 200, int, 1), _number(overrides, "seed", 0, int, 0)
    temperature, top_k = _number(overrides, "temperature", 0.8, float, 0), _number(overrides, "top_k", 50, int, 1)
    data: Any = components.data
    task: Any = components.task
    restore(data, model, task)
    with as_config_error():
        tokenizer = data.tokenizer
        text, file = overrides["input"].encode(), Path(overrides["input"])
        # The system refuses file names of 256 bytes or more, which a text may have.
        if len(text) < 256 and file.is_file():
            text = file.read_bytes()
        prompt = torch.tensor(tokenizer.encode(text))
    if isinstance(model, str):  # an export computes on the CPU
        apply_precision(components.trainer.precision_plugin, task, task.model, "forward")
        task.to(components.trainer.strategy.root_device)
    found = []
    for token in task.generate(prompt, count, temperature=temperature, top_k=top_k, seed=seed):
        found.append(token)
        announcement.count_progress()
    generated = str(tokenizer.decode([*prompt.tolist(), *found]))
    print(generated)
    if output := overrides.get("output"):
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(generated + "\n")
    return generated


def _number(overrides: dict[str, str], name: str, default: Any, kind: type, least: int) -> Any:
    """Parse a number from an override, or return the default."""
    text = overrides.get(name, str(default))
    pattern = r"[0-9]+" if kind is int else r"[0-9]+(\.[0-9]*)?|\.[0-9]+"
    if not re.fullmatch(pattern, text) or kind(text) < least:
        raise ConfigError(f"{name}={text} is not a number of at least {least}; try {name}={default}")
    return kind(text)
