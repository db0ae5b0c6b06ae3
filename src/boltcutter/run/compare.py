"""Compare two runs: settings, records, steps, metrics and weights; one may be a reproduction of the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boltcutter.checkpoint.load import load_checkpoint
from boltcutter.checkpoint.weights import extract_weights
from boltcutter.config.errors import ConfigError, printable
from boltcutter.config.values import split_overrides
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.extend import NegativeResult
from boltcutter.project import Project
from boltcutter.run.best import find_checkpoint
from boltcutter.run.differences import record_differences
from boltcutter.run.folder import read_record, read_run_config
from boltcutter.run.ledger import differences, ledger_path, read_ledger
from boltcutter.run.remote.store import run_store

LOCATION_SETTINGS = ("folder", "checkpoints", "resume", "reproduce", "runs")  # paths, which do not affect results
# Settings, or the groups of settings, that do not change what a step computes: they are listed last.
WITHOUT_EFFECT = (
    *("name", "tags", "report", "test", "timeout", "logger", "trust", "choices.logger", "launch"),
    *("callback.progress", "callback.throughput", "callback.ledger", "data.num_workers"),
)
IGNORED_METRICS = {"recompiles"}  # restarts from 0 in a resumed run


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs.

    Args:
        settings: Settings that differ, with both values.
        data: Fingerprints of the data; None if they are equal.
        metrics: Metrics that differ, with both values.
        weights: How the weights differ.
        identical: Whether metrics and weights are bitwise identical.
        nondeterministic: Devices of attempts whose rounding varies, for lack of ``trainer.deterministic=true``.
        steps: The first step that differs, of each rank, and in what; empty if none does.
        records: What else differs in the records: code, packages and hardware.
    """

    settings: list[str]
    data: str | None
    metrics: list[str]
    weights: str
    identical: bool
    nondeterministic: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    records: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = sorted(self.settings, key=has_no_effect)
        matter = [line for line in settings if not has_no_effect(line)]
        lines = [
            *(f"step      {line}" for line in self.steps),
            *(f"setting   {line}" for line in matter),
            *self.records,
            *(f"setting   {line}, without effect on a step" for line in settings[len(matter) :]),
            *([f"data      {self.data}"] if self.data else []),
            *(f"metric    {line}" for line in self.metrics or ["identical"]),
            f"weights   {self.weights}",
            *(f"rounding  varies on {device} without trainer.deterministic=true" for device in self.nondeterministic),
        ]
        return "\n".join(lines)


def compare_command(project: Project, overrides: list[str]) -> Comparison:
    """Print the differences between two runs; the exit status is 1 if metrics or weights differ."""
    found = compare(project, overrides)
    print(printable(str(found)))
    if not found.identical:
        raise NegativeResult(found)
    return found


def compare(project: Project, overrides: list[str]) -> Comparison:
    """Compare two runs.

    Args:
        project: Project whose configuration is used.
        overrides: ``run=<folder> with=<folder>``, and ``ckpt=last|best|<name>``.

    Raises:
        ConfigError: One of the folders holds no run, or an override is not one of these.
    """
    filter_warnings()
    special, rest = split_overrides(overrides, "run", "with", "ckpt")
    if rest or not special.get("run") or not special.get("with"):
        problem = f"{rest[0]}: no such argument" if rest else f"{'with' if special.get('run') else 'run'} is not set"
        raise ConfigError(
            f"{problem}; use boltcutter compare <run> <run> [ckpt=last|best|<name>], or --metric for groups of runs"
        )
    cfgs = [
        read_run_config(project, Path(special[name]), setting=name, instantiates=False, shows=True)
        for name in ("run", "with")
    ]
    records = [read_record(Path(special[name])) for name in ("run", "with")]
    settings = list(setting_differences(cfgs[0].written, cfgs[1].written))
    first, second = (record.get("data") for record in records)
    metrics = list(metric_differences(*records))
    checkpoints = [find_checkpoint(cfg.place, special.get("ckpt", "last")) for cfg in cfgs]
    weights, equal = weight_difference(*(extract_weights(load_checkpoint(path)) for path in checkpoints))
    data = None if first == second else f"{first} → {second}"
    varying = nondeterministic_devices(*records)
    folders = Path(special["run"]), Path(special["with"])
    steps, is_different = step_differences(*folders)
    return Comparison(
        settings,
        data,
        metrics,
        weights,
        identical=equal and not metrics and not is_different,
        nondeterministic=varying,
        steps=tuple(steps),
        records=tuple(record_differences(folders, tuple(records), project.root)),
    )


def has_no_effect(line: str) -> bool:
    """Whether a setting that differs does not change what a step computes."""
    key = line.partition("=")[0]
    return any(key == name or key.startswith(f"{name}.") for name in WITHOUT_EFFECT)


def step_differences(first: Path, second: Path) -> tuple[list[str], bool]:
    """Describe the first step of each rank that differs, or why there is none; and whether steps differ."""
    if found := [str(difference) for difference in differences(first, second)]:
        return found, True
    ledgers = {folder: read_ledger(ledger_path(folder)) for folder in (first, second)}
    if missing := [run_store().show(folder) for folder, ledger in ledgers.items() if ledger is None]:
        return [f"not compared, as {' and '.join(missing)} has no steps.ledger"], False
    lasts = [ledger.last for ledger in ledgers.values() if ledger is not None]
    if len({*lasts}) < 2:
        return [], False
    return [f"the first {min(lasts)} are equal; one run has {lasts[0]}, the other {lasts[1]}"], True


def setting_differences(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Describe each setting that differs, except paths of the runs."""
    for key in dict.fromkeys([*first, *second]):
        here, there, path = first.get(key), second.get(key), f"{prefix}{key}"
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from setting_differences(here, there, f"{path}.")
        elif here != there and path not in LOCATION_SETTINGS:
            yield f"{path}={here} → {there}"


def weight_difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> tuple[str, bool]:
    """Describe how two sets of weights differ, and whether they are bitwise identical."""
    if renamed := renamed_tensors(first, second):
        second = {**second, **{old: second[new] for old, new in renamed.items()}}
        second = {name: second[name] for name in first}
        line, equal = weight_difference(first, second)
        old, new = next(iter(renamed.items()))
        return f"{line}; {len(renamed)} of them are renamed, {old} → {new}", equal
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


def renamed_tensors(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """New names of tensors, if those that have no counterpart are equal one to one, in their order; else none."""
    old, new = ([name for name in one if name not in other] for one, other in ((first, second), (second, first)))
    pairs = list(zip(old, new, strict=False)) if len(old) == len(new) else []
    is_same = all(first[a].shape == second[b].shape and bitwise_equal(first[a], second[b]) for a, b in pairs)
    return dict(pairs) if is_same else {}


def bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype and bytes; NaN equals NaN."""
    if first.dtype != second.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second)))


def report_reproduction(original: Path, reproduction: Path) -> None:
    """Print whether a reproduced run has the same data and bitwise identical metrics as the original."""
    before, after = read_record(original), read_record(reproduction)
    if before.get("data") != after.get("data"):
        print(printable(f"warning: data differ: fingerprint {after.get('data')}, was {before.get('data')}"))
    different = list(metric_differences(after, before))
    if not different:
        count = len({**before.get("metrics", {}), **before.get("test", {})}.keys() - IGNORED_METRICS)
        print(f"reproduced: all {count} metrics equal those of {run_store().show(original)}")
    for line in different:
        print(printable(f"not reproduced: {line}"))
    for device in nondeterministic_devices(before, after) if different else ():
        print(f"note: rounding varies on {device} without trainer.deterministic=true")
    if different and any(attempt.get("resumed_from") for attempt in before.get("attempts", [])):
        print("note: the original was resumed; what changed then, such as trainer.max_epochs, now holds from the start")


def nondeterministic_devices(*records: Mapping[str, Any]) -> tuple[str, ...]:
    """Types of the devices on which an attempt trained without deterministic algorithms, although they need them."""
    attempts = [attempt for record in records for attempt in record.get("attempts", [])]
    return tuple(sorted({str(attempt.get("device")) for attempt in attempts if attempt.get("deterministic") is False}))


def metric_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Describe each metric that differs between two records."""
    here, there = ({**record.get("metrics", {}), **record.get("test", {})} for record in (first, second))
    for name in sorted((here.keys() | there.keys()) - IGNORED_METRICS):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name)}, was {there.get(name)}"
