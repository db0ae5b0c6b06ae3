"""Checkpoints of modules that ``torch.compile`` wraps, in training only or in evaluation only."""

from __future__ import annotations

from typing import Any

from torch import nn

WRAPPER = "_orig_mod"  # what torch.compile inserts into names


def load_compiled(task: nn.Module) -> None:
    """Let a module load weights that were saved with or without the wrapper of ``torch.compile``.

    Modules of users often compile their network in ``setup("fit")``, so that evaluation has other names than training.
    """
    task.register_load_state_dict_pre_hook(_match_names)  # type: ignore[no-untyped-call]


def _match_names(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = [name for each in named for name, _ in each]
    if any(WRAPPER in name for name in (*names, *state)):
        own = {_plain(name): name for name in names}
        for key in list(state):
            state[own.get(_plain(key), key)] = state.pop(key)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPER)
