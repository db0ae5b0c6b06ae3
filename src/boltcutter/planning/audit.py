"""The audit command: what is silently wrong in module and data, of a configuration, a run, or any Lightning script."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from boltcutter.assembly.assemble import assemble, complete_config, read_config
from boltcutter.assembly.overrides import load_run_config
from boltcutter.checkpoint.weights import load_weights
from boltcutter.config.errors import ConfigError, hint, one_line
from boltcutter.config.values import split_overrides
from boltcutter.diagnosis import Finding
from boltcutter.diagnosis.trial import Trial
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.planning.check import run_trial
from boltcutter.project import Project
from boltcutter.run.best import find_checkpoint
from boltcutter.run.folder import read_record
from boltcutter.training.failure import explain_errors

OBJECT = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
DATA = (L.LightningDataModule, DataLoader)


def audit_command(project: Project, arguments: list[str]) -> dict[str, list[Finding]]:
    """Train eight steps of a copy, ask all checks, probes and baselines, and print what they found, notes too.

    Args:
        project: Project whose configuration is used.
        arguments: Overrides of training; ``run=<folder>`` and ``ckpt=best|last|<path>`` for those of a run; or
            ``script.py:Module script.py:Data`` and arguments of the trainer, such as ``trainer.max_epochs=10``.

    Returns:
        The findings.
    """
    filter_warnings()
    objects = [argument for argument in arguments if OBJECT.fullmatch(argument)]
    if objects:
        found = audit_objects(objects, [argument for argument in arguments if argument not in objects])
    else:
        found = audit_configuration(project, arguments)
    loud = sum(finding.level != "note" for finding in found)
    print(f"{loud or 'no'} finding{'s' * (loud != 1)}, {len(found) - loud} note{'s' * (len(found) - loud != 1)}")
    return {"findings": found}


def audit_configuration(project: Project, arguments: list[str]) -> list[Finding]:
    """Audit a configuration, or that of a run with its weights."""
    special, rest = split_overrides(arguments, "run", "ckpt")
    run, weights = special.get("run"), None
    if "ckpt" in special and not run:
        raise ConfigError(f"ckpt={special['ckpt']}: run is not set; use run=<folder of a run>")
    if run:
        cfg = complete_config(load_run_config(project, Path(run), rest))
        checkpoint = find_checkpoint(cfg.place, special.get("ckpt", "best"))
        weights = partial(load_trained, path=checkpoint, record=read_record(cfg.place.folder))
    else:
        cfg = read_config(project, rest)
    with TemporaryDirectory() as folder:
        cfg = cfg.changed({"folder": folder})
        num_ranks = assemble(cfg).topology.data_ranks
        try:
            return run_trial(cfg, num_ranks, with_data=True, weights=weights)
        except Exception as error:
            if getattr(error, "hide_traceback", False):
                raise ConfigError(str(error)) from error
            raise


def load_trained(task: L.LightningModule, path: str, record: Mapping[str, Any]) -> bool:
    """Load the weights of a checkpoint, and return whether validation had been best before its run was completed."""
    load_weights(task, path)
    return is_converged(record)


def is_converged(record: Mapping[str, Any]) -> bool:
    """Whether validation was best before the end of a run that is completed: training longer did not help it."""
    try:
        last = record["measured_after"][record["best_by"]["monitor"]]
        return bool(record["attempts"][-1]["reason"] == "completed" and record["best_after"] < last)
    except (KeyError, TypeError, IndexError):  # of a run without a best checkpoint, or of an earlier version
        return False


def audit_objects(objects: Sequence[str], settings: Sequence[str]) -> list[Finding]:
    """Audit a module and data that scripts define.

    Args:
        objects: ``script.py:Name`` of a LightningModule, and of a LightningDataModule, a loader or two (train, val),
            each a class or function without arguments, or an object; a module that has its own loaders needs no data.
        settings: ``trainer.<argument>=<value>``.

    Raises:
        ConfigError: They cannot be made, or are something else.
    """
    made = {name: make(name) for name in objects}
    modules = {name: value for name, value in made.items() if isinstance(value, L.LightningModule)}
    others = {name: value for name, value in made.items() if name not in modules}
    strange = [name for name, value in others.items() if not isinstance(value, (*DATA, list, tuple))]
    if len(modules) != 1 or len(others) > 1 or strange:
        kinds = ", ".join(f"{name} is a {type(value).__name__}" for name, value in made.items())
        raise ConfigError(
            f"{kinds}: expected one LightningModule, and at most one of data: a LightningDataModule, a loader, or "
            "(train, val)"
        )
    module = next(iter(modules.values()))
    (data,) = others.values() or (None,)
    options = {"datamodule": data} if isinstance(data, L.LightningDataModule) else _loaders(data, *others)
    given = dict(_setting(text) for text in settings)
    quiet: Mapping[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    watch = Trial(with_data=True)
    with TemporaryDirectory() as folder:
        defaults = {"max_epochs": 1000, "accelerator": "auto", "devices": 1, "limit_val_batches": 2}
        try:
            trainer = L.Trainer(**{**defaults, **given, **quiet, "default_root_dir": folder, "callbacks": [watch]})
        except TypeError as error:
            raise ConfigError(f"{' '.join(settings)}: {one_line(error)}; correct it") from error
        with explain_errors(trainer):
            trainer.fit(module, **options)
    return watch.findings


def make(reference: str) -> Any:
    """Import ``script.py:Name``, and call it, if it is a class or a function."""
    match = OBJECT.fullmatch(reference)
    assert match is not None
    file, name = Path(match["file"]).absolute(), match["name"]
    if not file.is_file():
        raise ConfigError(f"{reference}: no such file; give the path of a script")
    module = sys.modules.get(file.stem)
    if module is None or getattr(module, "__file__", None) != str(file):
        spec = spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[file.stem] = module  # as dataclasses and pickle look there
        sys.path[:0] = [str(file.parent)]  # for the modules beside it
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[file.stem]
            raise ConfigError(f"{reference}: cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{reference}: {file.name} has no {name}{hint(name, dir(module)) or '; correct the name'}")
    value = getattr(module, name)
    if not isinstance(value, type) and (isinstance(value, (L.LightningModule, *DATA)) or not callable(value)):
        return value
    try:
        return value()
    except TypeError as error:
        raise ConfigError(
            f"{reference}: {one_line(error)}; it is called without arguments: give a function that returns it"
        ) from error


def _loaders(data: Any, *names: str) -> dict[str, Any]:
    """Arguments of ``fit`` for loaders."""
    if data is None:
        return {}
    parts = list(data) if isinstance(data, list | tuple) else [data]
    if not 1 <= len(parts) <= 2:
        raise ConfigError(f"{names[0]}: {len(parts)} loaders; expected (train, val)")
    return dict(zip(("train_dataloaders", "val_dataloaders"), parts, strict=False))


def _setting(text: str) -> tuple[str, Any]:
    """Name and value of an argument of the trainer."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not key.startswith("trainer."):
        raise ConfigError(f"{text}: with a script, only trainer.<argument>=<value> is known; remove it")
    return key.removeprefix("trainer."), yaml.safe_load(value)
