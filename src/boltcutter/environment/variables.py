"""Check the environment variables that this library, Lightning and torch read, before anything depends on one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from boltcutter.config.errors import ConfigError, Mistake

# Smallest and largest value of each number.
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "BOLTCUTTER_NODES", "BOLTCUTTER_DEVICES")
COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
INTERNAL = ("BOLTCUTTER_LAUNCHER_PID", "BOLTCUTTER_TRIAL_FD")
LARGEST = 2**31 - 1
NUMBERS = {
    **dict.fromkeys((*RANKS, *COUNTS, *INTERNAL), (0, LARGEST)),
    **dict.fromkeys(SIZES, (1, LARGEST)),
    "MASTER_PORT": (1, 65535),
    "PL_GLOBAL_SEED": (0, 2**32 - 1),
    "PL_SEED_WORKERS": (0, 1),
}
FORMS = {  # a pattern, and what it is in words
    "OMP_NUM_THREADS": (r"0*[1-9][0-9]*(\s*,\s*0*[1-9][0-9]*)*", "a positive integer"),
    "CUDA_VISIBLE_DEVICES": (
        r"-1|NoDevFiles|[0-9]+(\s*,\s*-?[0-9]+)*|(GPU|MIG)-[\w/-]+(\s*,\s*(GPU|MIG)-[\w/-]+)*",
        "numbers of devices, such as 0,1, or their UUIDs",
    ),
    "WANDB_MODE": ("online|offline|disabled|shared|dryrun|run", "online, offline or disabled"),
    "BOLTCUTTER_DEBUG": ("[01]", "0 or 1"),
    "BOLTCUTTER_PARENT_PID": ("[0-9]{1,10}(:[0-9]{1,2})?", "the id of a process, and a signal or none"),
    "BOLTCUTTER_TRY_LIMITS": ("[0-9]{1,18}/[0-9]{1,18}", "runs per hour and in all, such as 30/200"),
}
UNSET_IF_EMPTY = ("CUDA_VISIBLE_DEVICES", "WANDB_MODE", "BOLTCUTTER_DEBUG", "OMP_NUM_THREADS")
WITHIN = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}  # each is less than the other


def check_variables(env: Mapping[str, str] = os.environ) -> None:
    """Check the values of environment variables that are read by this process, or by processes that it starts.

    Raises:
        ConfigError: One is not what its readers take; with a line for each.
    """
    if mistakes := list(_mistakes(env)):
        raise ConfigError(*mistakes)


def _mistakes(env: Mapping[str, str]) -> Iterator[Mistake]:
    numbers = dict[str, int]()
    for name, (least, most) in NUMBERS.items():
        if name not in env:
            continue
        text = env[name].strip()
        if re.fullmatch(r"[0-9]{1,20}", text, re.A) and least <= int(text) <= most:
            numbers[name] = int(text)
            continue
        expected = f"from {least} to {most}" if most < LARGEST else f"of at least {least}"
        problem = f"expected an integer {expected}"
        yield Mistake.of(name, problem, "correct it, or unset it", value=env[name], kind="wrong_type")
    for name, (pattern, expected) in FORMS.items():
        text = env.get(name, "").strip()
        is_unset = name not in env or (not text and name in UNSET_IF_EMPTY)
        if not is_unset and not re.fullmatch(pattern, text, re.A):
            problem = f"expected {expected}"
            yield Mistake.of(name, problem, "correct it, or unset it", value=env[name], kind="wrong_type")
    for name, size in WITHIN.items():
        if name in numbers and size in numbers and numbers[name] >= numbers[size]:
            problem = f"expected less than {size}={numbers[size]}, as it counts from 0"
            yield Mistake.of(name, problem, "correct one", value=numbers[name])
