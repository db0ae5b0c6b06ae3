"""Compare two runs: settings, data, metrics and weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from boltcutter.checkpoint.load import load
from boltcutter.checkpoint.select import find_checkpoint
from boltcutter.checkpoint.weights import extract_weights
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import plain
from boltcutter.environment.warnings import filter_warnings
from boltcutter.project import Project
from boltcutter.run import folder as run

IGNORED_METRICS = {"recompiles"}  # restarts from 0 in a resumed run
LOCATION_SETTINGS = ("folder", "checkpoints", "resume", "reproduce", "runs")  # paths, which do not affect results


def main(project: Project, overrides: list[str]) -> None:
    """Print the differences between two runs; the exit status is 1 if metrics or weights differ.

    Args:
        project: Whose configuration is used.
        overrides: ``run=<folder> with=<folder>``, and ``ckpt=last|best|<name>``.
    """
    filter_warnings()
    special, rest = run.split_overrides(overrides, "run", "with", "ckpt")
    if rest or not special.get("run") or not special.get("with"):
        raise ConfigError(
            f"{rest[0] if rest else 'run, with'}: expected run=<folder> with=<folder> [ckpt=last|best|<name>]"
        )
    cfgs = [
        run.load_run_config(project, Path(special[name]), setting=name, instantiates=False) for name in ("run", "with")
    ]
    records = [run.read_record(Path(special[name])) for name in ("run", "with")]
    for line in setting_differences(plain(cfgs[0]), plain(cfgs[1])):
        print(f"setting   {line}")
    if records[0].get("data") != records[1].get("data"):
        print(f"data      {records[0].get('data')} → {records[1].get('data')}")
    different = list(metric_differences(*records))
    print(*(f"metric    {line}" for line in different or ["identical"]), sep="\n")
    checkpoints = [find_checkpoint(cfg.checkpoints, special.get("ckpt", "last")) for cfg in cfgs]
    line, equal = weight_difference(*(extract_weights(load(path)) for path in checkpoints))
    print(f"weights   {line}")
    if different or not equal:
        sys.exit(1)


def report_reproduction(original: Path, reproduction: Path) -> None:
    """Print whether a reproduced run has the same data and bitwise identical metrics as the original."""
    before, after = run.read_record(original), run.read_record(reproduction)
    if before.get("data") != after.get("data"):
        print(f"warning: data differ: fingerprint {after.get('data')}, was {before.get('data')}")
    different = list(metric_differences(after, before))
    if not different:
        count = len({**before.get("metrics", {}), **before.get("test", {})}.keys() - IGNORED_METRICS)
        print(f"reproduced: all {count} metrics equal those of {original}")
    for line in different:
        print(f"not reproduced: {line}")


def setting_differences(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Describe each setting that differs, except paths of the runs."""
    for key in dict.fromkeys([*first, *second]):
        here, there, path = first.get(key), second.get(key), f"{prefix}{key}"
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from setting_differences(here, there, f"{path}.")
        elif here != there and path not in LOCATION_SETTINGS:
            yield f"{path}={here} → {there}"


def metric_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Describe each metric that differs between two records."""
    here, there = ({**record.get("metrics", {}), **record.get("test", {})} for record in (first, second))
    for name in sorted((here.keys() | there.keys()) - IGNORED_METRICS):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name)}, was {there.get(name)}"


def weight_difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> tuple[str, bool]:
    """Describe how two sets of weights differ, and whether they are bitwise identical."""
    unmatched = list(first.keys() ^ second.keys())
    unmatched += [name for name in first.keys() & second.keys() if first[name].shape != second[name].shape]
    if unmatched:
        return (
            f"different models: {len(unmatched)} tensors have no counterpart ({', '.join(sorted(unmatched)[:3])} …)",
            False,
        )
    count = sum(tensor.numel() for tensor in first.values())
    unequal = [name for name in first if not bitwise_equal(first[name], second[name])]
    if not unequal:
        return f"{len(first)} tensors, {count:,} parameters, bitwise identical", True
    largest = max(float((first[name].double() - second[name].double()).abs().max()) for name in unequal)
    return (
        f"{len(unequal)} of {len(first)} tensors differ, by at most {largest:.3g} ({', '.join(unequal[:3])} …)",
        False,
    )


def bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype and bytes; NaN equals NaN."""
    if first.dtype != second.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second)))
