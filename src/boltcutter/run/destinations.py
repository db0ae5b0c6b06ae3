"""Where the record of somebody else writes: its destinations are replaced by those of this user."""

from __future__ import annotations

import hashlib
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.storage import is_within
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError, one_line, printable
from boltcutter.config.settings import Settings
from boltcutter.config.values import OmegaConfBaseException, flatten, format_value, read_plain_yaml
from boltcutter.environment.process import is_rank_zero
from boltcutter.project import Project

CHECKPOINTS = "${folder}/checkpoints"
# What data, model and task name is read: their paths and object storage are checked as other references are.
READ = ("data", "model", "task", "optimizer", "scheduler", "name", "tags", "choices", "launch", "search", "init_from")
# Loggers that continue what has the same name at their service, and the argument that sets another one.
IDS = {"boltcutter.logger.wandb.WandbLogger": "id", "boltcutter.logger.trackio.TrackioLogger": "name"}
PLACES = ("folder", "runs", "checkpoints")
OWN = (*PLACES, "logger", "resume", "ckpt", "reproduce")
NAME = re.compile(r"(filename|entity|workspace|project|space_id)$")  # no place, but what is there
SIGNS = ("_target_", "${", "://", "::")  # of targets within lists, of references and of addresses
DESTINATION = re.compile(
    r"(^|_)(dirpath|dir|directory|root|folder|path|file|filename|repo|ur[il]|host|server|endpoint|address|entity"
    r"|workspace|project|space_id)$"
)


def use_own_destinations(
    recorded: dict[str, Any], folder: Path, project: Project, *, continues: bool = False
) -> dict[str, Any]:
    """Return the configuration of somebody else's run without the places that it writes to; a line for each of them.

    ``runs`` is that of the project, ``checkpoints`` that in the folder, each logger is as the project or the library
    configures it, and paths and addresses of callbacks, of the trainer and the like are in the folder, or not set.

    Args:
        recorded: Configuration in the record, which is left as it is.
        folder: Folder of the run.
        project: The project, whose options are used.
        continues: Whether the run goes on in its folder, so that loggers take its name for that of a run.
    """
    found, notes = dict(recorded), list[str]()
    if "runs" in found:
        found["runs"] = compose(project).written.get("runs")
    if found.get("checkpoints") not in (None, CHECKPOINTS):
        if not str(found["checkpoints"]).endswith("/checkpoints") or "://" in str(found["checkpoints"]):
            notes.append(_note("checkpoints", found["checkpoints"]))
        found["checkpoints"] = CHECKPOINTS
    if isinstance(loggers := found.get("logger"), dict):
        found["logger"] = {name: _own_logger(project, name) for name in loggers}
        notes += [
            f"logger.{name} of the record is not used; "
            + (f"it logs as configs/logger/{name}.yaml says" if own else f"add a file configs/logger/{name}.yaml")
            for name, own in found["logger"].items()
            if own != loggers[name]
        ]
        found["logger"] = {name: own for name, own in found["logger"].items() if own}
        for name, own in found["logger"].items() if continues else ():
            if (target := str(own.get("_target_"))) in IDS:
                found["logger"][name] = {IDS[target]: logged_id(folder), **own}
    for key, value in _outside(found, folder, compose(project)):
        notes.append(_note(key, value))
        found = _without(found, key.split("."))
    if is_rank_zero():
        print(*(f"note: {printable(one_line(note))}\n" for note in notes), sep="", end="", file=sys.stderr)
    return found


def logged_id(folder: Path) -> str:
    """Id of somebody else's run where this user logs it: by its name, it could continue a run of this user."""
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', folder.name)[:40]}-{place}"


def outside_of_project(values: dict[str, Any], project: Project) -> str | None:
    """The first setting that names a place to write outside of a project; None if there is none.

    Places are those that ``configs`` name, and folders below that of the project or the working directory, in which a
    try trains copies of its code.
    """
    known, roots = _configured(project), [project.root, Path.cwd()]
    for path, raw in flatten(values):
        top, name = path.partition(".")[0], path.rpartition(".")[2]
        is_place = path in PLACES or (top not in READ and DESTINATION.search(name))
        if not isinstance(raw, str) or not is_place or (name, raw) in known:
            continue
        if NAME.search(name) or "${" in raw or not any(is_within(f"{raw}/x", root) for root in roots):
            return f"{path}={format_value(raw)}"
    return None


def has_foreign_texts(values: dict[str, Any], project: Project) -> bool:
    """Whether a configuration has a target, reference or address that no configuration file has under the same key.

    What it was composed of is not asked: YAML writes each of them in many ways, also in a file elsewhere.
    """
    known = _configured(project)
    texts = ((path.rpartition(".")[2], str(raw)) for path, raw in flatten(values) if isinstance(raw, str | list))
    return any(
        text not in known and (text[0].startswith("_") or any(sign in text[1] for sign in SIGNS)) for text in texts
    )


@cache
def _configured(project: Project) -> frozenset[tuple[str, str]]:
    """The texts and lists in configuration files of the project and of the library, with their last keys."""
    found = (item for text in project.option_texts() for item in flatten(read_plain_yaml(text) or {}))
    return frozenset((path.rpartition(".")[2], str(value)) for path, value in found if isinstance(value, str | list))


def _note(key: str, value: Any) -> str:
    return f"{key}={format_value(value)} of the record is not used, as the run is not yours; set {key}=… to use it"


def _own_logger(project: Project, name: str) -> dict[str, Any] | None:
    """Settings of a logger as the project or the library configures it; None if there is no such option."""
    if name not in project.groups().get("logger", {}):
        return None
    with suppress(ConfigError):
        found = compose(project, [f"logger={name}"]).written.get("logger")
        return found.get(name) if isinstance(found, dict) else None
    return None


def _outside(found: dict[str, Any], folder: Path, own: Settings) -> list[tuple[str, Any]]:
    """Keys that name a place outside of the folder, with the value in the record."""
    try:
        cfg = Settings(found).changed({"folder": str(folder)})
    except OmegaConfBaseException:  # a reference that cannot be parsed, which is reported by what checks them
        return []
    result, configured = [], {path: raw for path, raw, _ in own.leaf_values()}
    for path, raw, text in cfg.leaf_values():
        top, name = path.partition(".")[0], path.rpartition(".")[2]
        if top in READ or top in OWN or not DESTINATION.search(name):
            continue
        if not isinstance(text, str) or (path in configured and raw == configured[path]):
            continue
        if name.endswith("filename"):
            is_inside = is_within(f"{folder}/{text}", folder)
        else:
            is_inside = not NAME.search(name) and is_within(f"{text}/x", folder)  # or the folder itself
        if not is_inside:
            result.append((path, raw))
    return result


def _without(values: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A copy in which one value is null."""
    name, *inner = names
    below = values.get(name)
    return {**values, name: _without(below, inner) if inner and isinstance(below, dict) else None}
