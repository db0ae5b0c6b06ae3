"""``boltcutter golden``: keeps the ledger of a short run as a test, which fails at the first step that differs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from boltcutter import run_files
from boltcutter.assembly.overrides import INFERRED
from boltcutter.checkpoint.atomic import write_atomically, write_text
from boltcutter.config.compose import OVERRIDE, compose
from boltcutter.config.errors import ConfigError, hint, one_line
from boltcutter.config.redaction import MAX_COMMAND
from boltcutter.config.values import as_yaml, read_yaml, split_overrides
from boltcutter.project import LIBRARY, Project, display_path
from boltcutter.replay.job import folder_of, ranks_of, surroundings
from boltcutter.run import trust
from boltcutter.run.compare import has_no_effect, setting_differences
from boltcutter.run.folder import read_record, recorded_config
from boltcutter.run.ledger import COLUMNS, DIGESTS, Ledger, first_difference, header, ledger_path, read_ledger

FOLDER = Path("tests", "golden")
MAX_STEPS = 500  # of 64 bytes each
NUMBERS = tuple(name for name in COLUMNS if name not in DIGESTS)
OWN = ("folder", "name", "runs", "report", "test", "logger", "resume", "reproduce", "ckpt", "trust", "tags")
PLACE = ("logger=null", "report=false", "test=false")  # of the training that is compared


def golden_command(project: Project, overrides: list[str]) -> Path:
    """Keep the ledger of a run, and the arguments that train it again, below ``tests/golden`` of the project.

    Args:
        project: In whose tests they are kept.
        overrides: ``run=<folder>``, ``name=<name>`` of the files, by default the name of the run, and
            ``tolerance.<column>=<value>``, relative, of ``loss``, ``gradient_norm`` or ``lr``.

    Returns:
        The ledger.

    Raises:
        ConfigError: The run is long, its arguments do not lead to its settings, or it is that of somebody else.
    """
    given, rest = split_overrides(overrides, "run", "name", *(f"tolerance.{name}" for name in NUMBERS))
    if rest:
        names = ("run", "name", *(f"tolerance.{name}" for name in NUMBERS))
        raise ConfigError(
            f"{rest[0]}: not an argument of golden{hint(rest[0].partition('=')[0], names)}; use run=<run>"
        )
    folder = folder_of(given.get("run"))
    config, signature = recorded_config(folder, "run")
    # Its arguments become those of a test, which executes what they name.
    trust.check_record(config, f"run={folder}", folder, project, signature=signature, walks=True, runs=True)
    record, ledger = read_record(folder), read_ledger(ledger_path(folder))
    if ledger is None or not ledger.last:
        raise ConfigError(f"run={folder}: it has no steps.ledger with a step; train with callback.ledger")
    if int(ledger.rows["step"][0]) != 1 or len(ledger.rows) > MAX_STEPS:
        raise ConfigError(
            f"run={folder}: it has {ledger.last} steps, and a test has at most {MAX_STEPS}, from the first on; train a "
            "shorter one, as with trainer.max_steps=50"
        )
    if any(attempt.get("resumed_from") for attempt in record.get("attempts") or ()):
        raise ConfigError(f"run={folder}: it was resumed, which no arguments repeat; train one without a break")
    name = given.get("name") or str(record.get("name") or folder.name)
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"name={name}: not the name of a file; give letters, digits, dots and dashes")
    tolerance = {key: _tolerance(key, given[f"tolerance.{key}"]) for key in NUMBERS if f"tolerance.{key}" in given}
    hardware = record.get("hardware") or {}
    facts: dict[str, Any] = {"overrides": overrides_of(project, folder, record), "threads": hardware.get("threads")}
    facts |= {"torch": (record.get("packages") or {}).get("torch"), "tolerance": tolerance}
    if variables := dict(surroundings(project, record, own=True).variables):
        facts["variables"] = variables
    path = project.root / FOLDER / f"{name}.ledger"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = header(ledger.device) + ledger.rows.tobytes()
    write_atomically(path, lambda file: file.write(content))
    comment = f"# A training whose steps are {path.name}: {LIBRARY} golden\n"
    write_text(path.with_suffix(".yaml"), comment + as_yaml(facts))
    ranks = ranks_of(record)[-1]
    print(f"{display_path(path)}: {len(ledger.rows)} steps{f' of rank 0 of {ranks}' if ranks > 1 else ''}")
    print(f"a test compares them: boltcutter.check_golden({str(FOLDER / path.name)!r})")
    return path


def _tolerance(key: str, text: str) -> float:
    try:
        if 0 <= (found := float(text)) < 1:
            return found
    except ValueError:
        pass
    raise ConfigError(f"tolerance.{key}={text}: not a relative tolerance; give a number from 0 to 1, such as 1e-5")


def overrides_of(project: Project, folder: Path, record: Mapping[str, Any]) -> list[str]:
    """The overrides with which a run was started.

    Raises:
        ConfigError: They do not lead to its settings.
    """
    words = shlex.split(str(record.get("command") or "")[:MAX_COMMAND])
    found = [
        w for w in words if OVERRIDE.fullmatch(w) and w.partition("=")[0].lstrip("+~").partition(".")[0] not in OWN
    ]
    recorded, composed = recorded_config(folder, "run")[0], compose(project, found).written
    free = {f"data.{name}" for name in INFERRED if (composed.get("data") or {}).get(name) is None}
    for line in setting_differences(recorded, composed):
        key = line.partition("=")[0]
        if not (has_no_effect(line) or key in free or key.startswith(("choices.", *OWN))):
            raise ConfigError(
                f"run={folder}: its arguments ({shlex.join(found) or 'none'}) do not lead to its settings: {line}; "
                "train it by the command, with the current configuration"
            )
    return found


def check_golden(ledger: str | Path, *, project: Project | Path | str | None = None, **tolerance: float) -> None:
    """Train as ``boltcutter golden`` has noted, in a process of its own, and compare each step.

    Args:
        ledger: ``tests/golden/<name>.ledger``, relative to the project.
        project: The project, or a file or folder in it; by default the project of the working directory.
        tolerance: Relative, of the columns ``loss``, ``gradient_norm`` and ``lr``, in place of those in the file. With
            one, digests of gradients, weights and states are not compared, only those of samples.

    Raises:
        AssertionError: A step differs; with the step and its columns.
        ConfigError: There is no such ledger, or the training fails.
    """
    if unknown := sorted(tolerance.keys() - set(NUMBERS)):
        raise ConfigError(f"{unknown[0]}: no column with a tolerance{hint(unknown[0], NUMBERS)}; there are {NUMBERS}")
    found = project if isinstance(project, Project) else Project.find(project)
    path = found.root / ledger
    kept = read_ledger(path)
    if kept is None or not path.with_suffix(".yaml").is_file():
        raise ConfigError(f"{path}: no ledger with its .yaml; write both by boltcutter golden run=<folder>")
    facts = read_yaml(path.with_suffix(".yaml").read_text())
    kept_with = {name: float(str(value)) for name, value in (facts.get("tolerance") or {}).items()}  # 1e-6 is a text
    allowed = {**kept_with, **tolerance}
    with tempfile.TemporaryDirectory(prefix="boltcutter-golden-") as scratch:
        trained = _train(found, Path(scratch, "run"), facts)
    shown, then = display_path(path), facts.get("torch")
    now = torch.__version__.partition("+")[0]
    note = f" (written with torch {then}, this is {now})" if then and str(then).partition("+")[0] != now else ""
    if different := first_difference(compared(kept, allowed), trained, tolerance=allowed):
        raise AssertionError(
            f"{shown}: {different}{note}; if that is meant, write it again: boltcutter golden run=<run>"
        )
    if kept.last != trained.last:
        raise AssertionError(f"{shown}: it has {kept.last} steps, this training {trained.last}{note}")


def compared(ledger: Ledger, tolerance: Mapping[str, float]) -> Ledger:
    """A ledger without digests that have no tolerance, where numbers have one."""
    if not any(tolerance.values()):
        return ledger
    rows = ledger.rows.copy()
    for name in set(DIGESTS) - {"samples"}:
        rows[name] = 0  # not computed
    return replace(ledger, rows=rows)


def _train(project: Project, folder: Path, facts: Mapping[str, Any]) -> Ledger:
    """The ledger of a training in a process of its own, as numbers of threads are read when libraries are loaded.

    Raises:
        ConfigError: It fails.
    """
    given = [*map(str, facts.get("overrides") or ()), *PLACE, f"folder={folder}"]
    threads = {"OMP_NUM_THREADS": str(facts["threads"])} if isinstance(facts.get("threads"), int) else {}
    variables = {**os.environ, **(facts.get("variables") or {})}
    inherited = {name: str(value) for name, value in variables.items() if value is not None}
    done = subprocess.run(
        [sys.executable, *project.train_command, *given],
        cwd=project.root,
        env={**inherited, **project.environment, **threads},
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    trained = read_ledger(ledger_path(folder)) if (folder / run_files.RECORD).is_file() else None
    if done.returncode or trained is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ConfigError(f"{shlex.join(given)}: the training failed: {one_line(lines[-1], 300)}")
    return trained
