"""Upload runs that were logged offline to W&B, each step once."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
import yaml

from boltcutter.logger.wandb import base_url, is_reachable, logged_in


class SyncError(ValueError):
    """A run cannot be uploaded."""

    hide_traceback = True  # needs no traceback


def main(project: object, overrides: list[str]) -> None:
    """Upload ``run=<folder>``, one or several, from its configuration, record and ``metrics.csv``.

    A run that was killed and resumed has a W&B folder per attempt, and ``wandb sync`` uploads repeated steps twice.
    ``metrics.csv`` has each step once. Data of the run that the server may already have is replaced.

    Args:
        project: Not used; the run folder holds the configuration.
        overrides: ``run=<folder>``, once or several times.

    Raises:
        SyncError: The run does not exist, no login was found, or the server is unreachable.
    """
    folders = [Path(override.partition("=")[2]) for override in overrides if override.startswith("run=")]
    if not folders or len(folders) != len(overrides):
        invalid = next((override for override in overrides if not override.startswith("run=")), "run")
        raise SyncError(f"{invalid}: expected run=<folder of a run>, once or several times")
    for folder in folders:
        if not (folder / "record.json").is_file():
            raise SyncError(f"run={folder}: not a run folder (record.json is missing); give the folder of a run")
    if not logged_in():
        raise SyncError(f"{base_url()}: not logged in; run `wandb login`")
    if not is_reachable(base_url()):
        raise SyncError(f"{base_url()} is unreachable; try again later")
    for folder in folders:
        print(f"{folder}: {sync(folder)}")


def sync(folder: Path) -> str:
    """Upload one run.

    Returns:
        URL of the run.
    """
    try:
        record = json.loads((folder / "record.json").read_text())
        record = {name: record[name] for name in ("id", "name")}
    except (ValueError, LookupError, TypeError) as error:
        raise SyncError(f"{folder}/record.json is damaged ({error!r}); restore it from a copy") from None
    config = yaml.safe_load((folder / "config.yaml").read_text())
    settings = (config.get("logger") or {}).get("wandb") or {}
    rest = {k: v for k, v in settings.items() if k not in ("_target_", "folder", "project", "mode", "best")}
    with tempfile.TemporaryDirectory() as scratch:
        run = wandb.init(
            id=record["id"],
            name="/".join(folder.resolve().parts[-2:]),
            project=settings.get("project") or record["name"],
            config=config,
            dir=scratch,
            mode="online",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            **rest,
        )
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        for metric, summary in (settings.get("best") or {}).items():
            run.define_metric(metric, summary=summary, step_metric="trainer/global_step")
        for row in rows(folder / "metrics.csv"):
            run.log(row)
        run.summary.update(record.get("test", {}))
        reason = (record.get("attempts") or [{}])[-1].get("reason")
        run.finish(exit_code=0 if str(reason).startswith("completed") else 1)
    return str(run.url)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Metrics of each step."""
    if not path.is_file():
        return
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            yield {name: float(value) for name, value in row.items() if value} | {"trainer/global_step": step}
