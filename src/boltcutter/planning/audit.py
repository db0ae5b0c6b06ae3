"""The audit command: what is silently wrong in module and data, of a configuration, a run, or any Lightning script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

from boltcutter.assembly.assemble import assemble, complete_config, read_config
from boltcutter.assembly.overrides import load_run_config
from boltcutter.checkpoint.weights import load_weights
from boltcutter.config.errors import ConfigError, hint, one_line
from boltcutter.config.values import split_overrides
from boltcutter.diagnosis import Finding
from boltcutter.diagnosis.checks import CHECKS
from boltcutter.diagnosis.trial import Trial
from boltcutter.environment.cluster_variables import LAUNCHER_VARIABLES
from boltcutter.environment.startup import PARENT_PID
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.planning.check import TWO_RANKS, run_trial
from boltcutter.planning.device_test import kill
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter.run.best import find_checkpoint
from boltcutter.run.folder import read_record
from boltcutter.topology import ONE_DEVICE, count_devices
from boltcutter.training.failure import explain_errors

RANKS = "BOLTCUTTER_AUDIT_RANKS"  # set in a process that trains on two ranks: the file for what they have found
RANKS_SECONDS = 300.0  # for which two ranks may train eight steps
OBJECT = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
DATA = (L.LightningDataModule, DataLoader)


def audit_command(project: Project, arguments: list[str]) -> dict[str, list[Finding]]:
    """Train eight steps of a copy, ask all checks, probes and baselines, and print what they found, notes too.

    Steps and probes are those of one device. If several ranks are requested, two of them also train eight steps on the
    CPU, in processes of their own, by which weights, learning rates and batches are compared.

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
        found, num_ranks = audit_objects(objects, [argument for argument in arguments if argument not in objects])
    else:
        found, num_ranks = audit_configuration(project, arguments)
    if file := os.environ.get(RANKS):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            of_ranks = [name for name, group in CHECKS.items() if any(each.at == "ranks" for each in group)]
            theirs = [each for each in found if each.check in (*of_ranks, "invariants")]  # or that it could not look
            Path(file).write_text(json.dumps([asdict(each) for each in theirs]))
        return {"findings": found}
    if num_ranks > 1:
        found += compare_ranks(project, arguments)
    loud = sum(finding.level != "note" for finding in found)
    print(f"{loud or 'no'} finding{'s' * (loud != 1)}, {len(found) - loud} note{'s' * (len(found) - loud != 1)}")
    return {"findings": found}


def compare_ranks(project: Project, arguments: Sequence[str]) -> list[Finding]:
    """What two ranks have found that train eight steps on the CPU; a note, if they cannot."""
    trusted = ["trust=true"] if trust.is_granted() else []
    with TemporaryDirectory() as folder:
        file = Path(folder, "findings.json")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
        with subprocess.Popen(
            [sys.executable, "-m", "boltcutter", "audit", *arguments, *trusted],
            env={**inherited, **project.environment, RANKS: str(file), PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                lines = [line for line in process.communicate(timeout=RANKS_SECONDS)[1].splitlines() if line.strip()]
                reason = (lines or [f"exit status {process.returncode}"])[-1]
            except subprocess.TimeoutExpired:
                reason = f"eight steps took over {RANKS_SECONDS:.0f} s"
            finally:
                kill(process)
        if file.is_file():
            found = [Finding(**each) for each in json.loads(file.read_text())]
        else:
            found = [Finding("ranks", "note", f"could not be compared: {one_line(reason)}")]
    for finding in found:
        print(f"{'note' if finding.level == 'note' else 'warning'}: {finding}", file=sys.stderr)
    return found


def audit_configuration(project: Project, arguments: list[str]) -> tuple[list[Finding], int]:
    """Audit a configuration, or that of a run with its weights; return findings, and over how many ranks it trains."""
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
            on_ranks = RANKS in os.environ
            found = run_trial(cfg, num_ranks, with_data=not on_ranks, weights=weights, on_ranks=on_ranks)
        except Exception as error:
            if getattr(error, "hide_traceback", False):
                raise ConfigError(str(error)) from error
            raise
    return found, num_ranks


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


def audit_objects(objects: Sequence[str], settings: Sequence[str]) -> tuple[list[Finding], int]:
    """Audit a module and data that scripts define.

    Args:
        objects: ``script.py:Name`` of a LightningModule, and of a LightningDataModule, a loader or two (train, val),
            each a class or function without arguments, or an object; a module that has its own loaders needs no data.
        settings: ``trainer.<argument>=<value>``.

    Returns:
        Findings, and over how many ranks the trainer trains.

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
    on_ranks = RANKS in os.environ
    watch = Trial(with_data=not on_ranks)
    num_nodes = given.get("num_nodes", 1)
    if not isinstance(num_nodes, int):
        raise ConfigError(f"trainer.num_nodes={num_nodes} is not a number of nodes; try trainer.num_nodes=1")
    if isinstance(name := given.get("strategy"), str) and name not in (*StrategyRegistry, "auto"):
        raise ConfigError(f"trainer.strategy={name}: no such strategy{hint(name, StrategyRegistry) or '; try ddp'}")
    num_ranks = max(1, count_devices(given)) * num_nodes
    place = TWO_RANKS if on_ranks else ONE_DEVICE if num_ranks > 1 else {}
    with TemporaryDirectory() as folder:
        defaults = {"max_epochs": 1000, "accelerator": "auto", "devices": 1, "limit_val_batches": 2}
        ours = {**quiet, **place, "default_root_dir": folder, "callbacks": [watch]}
        try:
            trainer = L.Trainer(**{**defaults, **given, **ours})
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise ConfigError(f"{' '.join(settings)}: {one_line(error)}; correct it") from error
        with explain_errors(trainer):
            trainer.fit(module, **options)
    return watch.findings, num_ranks


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
