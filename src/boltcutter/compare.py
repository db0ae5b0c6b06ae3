"""Whether two runs are the same: settings, data, metrics, and the weights to the bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from boltcutter import run
from boltcutter.config import ConfigError, plain
from boltcutter.environment.warnings import filter_warnings
from boltcutter.evaluate import find_checkpoint
from boltcutter.loading import load
from boltcutter.project import Project
from boltcutter.weights import extract_weights

NO_RESULT = {"recompiles"}  # which a run that was resumed counts anew
OWN = ("folder", "checkpoints", "resume", "reproduce", "runs")  # settings that say where, and not what


def main(project: Project, words: list[str]) -> None:
    """Tell in what two runs differ; end with 1 if their metrics or weights do.

    Args:
        project: Whose configuration is used.
        words: ``run=<folder> with=<folder>``, and ``ckpt=last|best|<name>``.
    """
    filter_warnings()
    special, rest = run.split_overrides(words, "run", "with", "ckpt")
    if rest or not special.get("run") or not special.get("with"):
        raise ConfigError(f"{rest[0] if rest else 'run, with'}: say run=<folder> with=<folder>, and ckpt=best if so")
    cfgs = [
        run.load_run_config(project, Path(special[name]), setting=name, instantiates=False) for name in ("run", "with")
    ]
    records = [run.read_record(Path(special[name])) for name in ("run", "with")]
    for line in setting_differences(plain(cfgs[0]), plain(cfgs[1])):
        print(f"setting   {line}")
    if records[0].get("data") != records[1].get("data"):
        print(f"data      {records[0].get('data')} or {records[1].get('data')}")
    different = list(metric_differences(*records))
    print(*(f"metric    {line}" for line in different or ["all equal"]), sep="\n")
    checkpoints = [find_checkpoint(cfg.checkpoints, special.get("ckpt", "last")) for cfg in cfgs]
    line, equal = weight_difference(*(extract_weights(load(path)) for path in checkpoints))
    print(f"weights   {line}")
    if different or not equal:
        sys.exit(1)


def report_reproduction(original: Path, again: Path) -> None:
    """Say whether a run that was made again has the data and the metrics of the first, to the bit."""
    before, after = run.read_record(original), run.read_record(again)
    if before.get("data") != after.get("data"):
        print(f"warning: the data differs: fingerprint {after.get('data')}, was {before.get('data')}")
    different = list(metric_differences(after, before))
    if not different:
        count = len({**before.get("metrics", {}), **before.get("test", {})}.keys() - NO_RESULT)
        print(f"reproduced: all {count} metrics equal those of {original}")
    for line in different:
        print(f"not reproduced: {line}")


def setting_differences(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each setting that differs; where the run's files lie is none."""
    for key in dict.fromkeys([*first, *second]):
        here, there, path = first.get(key), second.get(key), f"{prefix}{key}"
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from setting_differences(here, there, f"{path}.")
        elif here != there and path not in OWN:
            yield f"{path}={here} or {there}"


def metric_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """A line for each metric of two records that is not the same number."""
    here, there = ({**record.get("metrics", {}), **record.get("test", {})} for record in (first, second))
    for name in sorted((here.keys() | there.keys()) - NO_RESULT):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name)}, was {there.get(name)}"


def weight_difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> tuple[str, bool]:
    """In one line, how far two sets of weights are apart; and whether they are the same bits."""
    odd = list(first.keys() ^ second.keys())
    odd += [name for name in first.keys() & second.keys() if first[name].shape != second[name].shape]
    if odd:
        return f"of two models: {len(odd)} have no counterpart ({', '.join(sorted(odd)[:3])} …)", False
    count = sum(tensor.numel() for tensor in first.values())
    unequal = [name for name in first if not bitwise_equal(first[name], second[name])]
    if not unequal:
        return f"{len(first)} tensors, {count:,} numbers, the same to the bit", True
    far = max(float((first[name].double() - second[name].double()).abs().max()) for name in unequal)
    return f"{len(unequal)} of {len(first)} tensors differ, by {far:.3g} at most ({', '.join(unequal[:3])} …)", False


def bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same type and bytes, NaN among them."""
    if first.dtype != second.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second)))
