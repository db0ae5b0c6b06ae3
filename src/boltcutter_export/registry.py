"""A registry of models: numbered versions of trained runs under a name, in a folder, on object storage or at W&B.

``<registry>/<name>/v1/`` is the folder of a run with one checkpoint, its exports and its reports, and can be used
wherever a run can: as ``registry:<name>@v1``, ``@latest`` or ``@best``. A later registration adds a version and changes
none. ``registered.json`` has the lineage, and the checksum of each file. At W&B a version is an artifact, and is
downloaded when it is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.atomic import write_text
from boltcutter.checkpoint.storage import is_url, open_file, resolve_filesystem
from boltcutter.config.errors import ConfigError
from boltcutter.environment.process import is_rank_zero
from boltcutter.extend import RUNS
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter.run.folder import is_signed_by_user, read_record
from boltcutter.run.store import join, run_store
from boltcutter_export.runner import digest, sha256
from boltcutter_remote.transfer import is_file_of_run, publish, storage_errors

VARIABLE = "BOLTCUTTER_REGISTRY"  # folder or URL of the registry
WANDB = "wandb://"  # followed by entity and project
PREFIX = "registry:"
DOWNLOADED = "/registry/.wandb/"  # below the root of a project: versions of W&B
LINEAGE = "registered.json"
SIGNED = ("name", "version", "files", "best")  # entries of the lineage; earlier versions were signed without the last
KEPT = (
    "record.json",
    "config.yaml",
    "code.patch",
    "library.patch",
    "metrics.csv",
    "report.html",
    "evaluation",
    "export",
)
NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def location(project: Project) -> str:
    """Folder or URL of the registry: that of ``BOLTCUTTER_REGISTRY``, or ``registry`` in the project."""
    return os.environ.get(VARIABLE) or str(project.root / "registry")


def register(project: Project, name: str, folder: Path, checkpoint: str) -> str:
    """Copy a run with one of its checkpoints to the registry, as the next version of a name.

    Returns:
        The reference of the version, such as ``registry:digits@v3``.

    Raises:
        ConfigError: The name is invalid, or the registry cannot be written.
    """
    check_name(name)
    if location(project).startswith(WANDB):
        return f"{PREFIX}{name}@{log_artifact(location(project), name, folder, checkpoint)}"
    place = join(location(project), name)
    if not is_url(place):
        Path(place).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=None if is_url(place) else place) as parent:
        draft = Path(parent, "run")
        collect(folder, checkpoint, draft)
        for number in range(max(versions(place), default=0) + 1, 10**6):
            write_lineage(draft, name, number, folder, checkpoint)
            if publish_version(draft, join(place, f"v{number}")):
                return f"{PREFIX}{name}@v{number}"
    raise ConfigError(f"export.register={name}: no further version; use another name")


def check_name(name: str) -> None:
    """Check the name of a model."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"export.register={name}: not a name; use letters, digits, _, - and .")


def _special(folder: str, names: Iterable[str]) -> set[str]:
    """Those of the names that are links, or neither files nor folders."""
    paths = {name: Path(folder, name) for name in names}
    return {name for name, path in paths.items() if path.is_symlink() or not (path.is_file() or path.is_dir())}


def collect(folder: Path, checkpoint: str, draft: Path) -> None:
    """Copy what belongs to a version of a model to a new folder; no links, which may lead elsewhere, and no FIFOs."""
    (draft / "checkpoints").mkdir(parents=True)
    left_out = _special(str(folder), KEPT)
    for part in (folder / name for name in KEPT if name not in left_out):
        if part.is_dir():
            shutil.copytree(part, draft / part.name, ignore=_special)
        else:
            shutil.copy2(part, draft / part.name)
    with storage_errors(checkpoint, checkpoint):
        store, path = resolve_filesystem(checkpoint)
        parent, _, file = path.rpartition("/")
        for found in store.ls(parent, detail=False):
            if str(found).rpartition("/")[2].startswith(file):  # with its shards
                store.get(str(found), str(draft / "checkpoints" / str(found).rpartition("/")[2]), recursive=True)
    record = read_record(draft)
    config = {**record["config"], "checkpoints": "${folder}/checkpoints"}
    if config != record["config"] and is_signed_by_user(draft):
        record["signature"] = trust.sign(config)
    record = {name: value for name, value in record.items() if name != "launch"}
    by = record.get("best_by") if checkpoint == record.get("best") else {"monitor": None}
    record |= {"config": config, "best": f"checkpoints/{file}", "best_by": by}
    write_text(draft / "record.json", json.dumps(record, indent=2) + "\n")


def write_lineage(draft: Path, name: str, number: int | None, folder: Path, checkpoint: str) -> dict[str, Any]:
    """Write ``registered.json``, and return what it contains."""
    from boltcutter.checkpoint.load import read_metadata

    record = read_record(draft)
    scored = read_metadata(checkpoint).get("best") or record.get("best_by") or {}
    files = sorted(file for file in draft.rglob("*") if file.is_file() and file.name != LINEAGE)
    facts: dict[str, Any] = {
        "name": name,
        "version": number,
        "registered": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "run": record.get("id"),
        "folder": run_store().show(folder),
        "checkpoint": checkpoint.rpartition("/")[2],
        "commit": (record.get("git") or {}).get("commit"),
        "data": record.get("data"),
        "test": record.get("test"),
        "best": {key: scored.get(key) for key in ("monitor", "mode", "score")},
        "files": {str(file.relative_to(draft)): sha256(file) for file in files},
    }
    facts["signature"] = trust.sign({key: facts[key] for key in SIGNED})
    write_text(draft / LINEAGE, json.dumps(facts, indent=2) + "\n")
    return facts


def verify(place: str, reference: str) -> None:
    """Check that record and checkpoints of a version are those that were registered.

    Exports have digests of their own, and evaluations are written to the version when it is used.

    Raises:
        ConfigError: A file was added or changed, also where the lineage was changed with it.
    """
    from boltcutter.checkpoint.select import list_names

    lineage = read_lineage(place)
    names = {"record.json", *(f"checkpoints/{name}" for name in list_names(join(place, "checkpoints")))}
    for name in sorted(names | {name for name in lineage["files"] if name.startswith("checkpoints/")}):
        with storage_errors(reference, place), open_file(join(place, name)) as file:
            is_same = file and is_file_of_run(name) and digest(file) == lineage["files"].get(name)
            if file and name == "record.json":
                file.seek(0)
                record = trust.parse_json(file.read(trust.MAX_BYTES))
        if not is_same:
            raise ConfigError(f"{reference}: {name} is not the file that was registered; register the run again")
    is_own = trust.is_signed(record.get("config"), record.get("signature"))
    *_, name, number = place.split("/")
    version = None if DOWNLOADED in place else int(number[1:])  # W&B numbers versions after they are signed
    facts = {**lineage, "name": name, "version": version}
    signed = [{key: facts[key] for key in keys} for keys in (SIGNED, SIGNED[:-1])]
    if is_own and not (trust.is_granted() or any(trust.is_signed(s, lineage.get("signature")) for s in signed)):
        raise ConfigError(f"{reference}: you have signed the run, but not {LINEAGE} of this version; {trust.REMEDY}")


def publish_version(draft: Path, target: str) -> bool:
    """Move a draft to its place, or upload it; whether that was still free."""
    if is_url(target):
        names = [str(file.relative_to(draft)) for file in draft.rglob("*") if file.is_file()]
        publish(draft, target, sorted(names, key=lambda name: name == LINEAGE))  # the lineage last: then it exists
        return True
    try:
        draft.rename(target)
    except OSError:
        if not Path(target).exists():
            raise
        return False
    return True


def versions(place: str) -> list[int]:
    """The numbers of the complete versions of a name, in increasing order."""
    with storage_errors(place, place):
        store, path = resolve_filesystem(place)
        found = store.glob(f"{path}/v*/{LINEAGE}")
    numbers = [re.fullmatch(r"v([1-9][0-9]*)", str(file).split("/")[-2]) for file in found]
    return sorted(int(number[1]) for number in numbers if number)


def read_lineage(place: str) -> dict[str, Any]:
    """Read ``registered.json`` of a version.

    Raises:
        ConfigError: It cannot be read, or is damaged.
    """
    with storage_errors(place, place), open_file(f"{place}/{LINEAGE}") as file:
        content = file.read(trust.MAX_BYTES) if file else b""
    with suppress(ValueError):
        match found := trust.parse_json(content):
            case {"files": dict(), "best": {"monitor": str() | None, "mode": str() | None, "score": float() | None}}:
                return found
    raise ConfigError(f"{place}: {LINEAGE} is damaged; use another version, or register the run again")


def find(project: Project, reference: str) -> str:
    """The folder or URL of a version.

    Args:
        project: The project.
        reference: ``registry:<name>``, or with ``@v<number>``, ``@latest`` or ``@best``; ``latest`` is the default.

    Raises:
        ConfigError: There is no such version, or versions cannot be compared.
    """
    name, _, which = reference.removeprefix(PREFIX).partition("@")
    if location(project).startswith(WANDB) and NAME.fullmatch(name):
        return str(download_artifact(project, name, which or "latest"))
    place = join(location(project), name)
    known = versions(place) if NAME.fullmatch(name) else []
    if not known:
        raise ConfigError(f"{reference}: not in {location(project)}; register it with export.register={name}")
    if which in ("", "latest"):
        return join(place, f"v{known[-1]}")
    if which == "best":
        return join(place, f"v{best(place, known, reference)}")
    if which not in [f"v{number}" for number in known]:
        there = ", ".join(f"v{number}" for number in known)
        raise ConfigError(f"{reference}: no such version (there are: {there}); use one of them, latest or best")
    return join(place, which)


def best(place: str, known: Sequence[int], reference: str) -> int:
    """The version whose checkpoint has the best score; of equal ones the latest.

    Raises:
        ConfigError: The scores are of different metrics.
    """
    scores = {number: read_lineage(join(place, f"v{number}"))["best"] for number in known}
    scores = {number: score for number, score in scores.items() if is_finite(score["score"])} or scores
    metrics = {(score["monitor"], score["mode"]) for score in scores.values()}
    if len(metrics) > 1 or not all(is_finite(score["score"]) for score in scores.values()):
        names = ", ".join(sorted(str(monitor) for monitor, _ in metrics))
        raise ConfigError(f"{reference}: versions have no metric in common ({names}); choose a version, such as @v1")
    sign = 1 if next(iter(metrics))[1] == "max" else -1
    return max(scores, key=lambda number: (sign * float(scores[number]["score"]), number))


def is_finite(score: object) -> bool:
    """Whether a checkpoint has a score that can be compared."""
    return isinstance(score, int | float) and abs(score) <= sys.float_info.max


def resolve(project: Project, overrides: Sequence[str]) -> list[str]:
    """Replace references to the registry in overrides by folders or URLs of runs."""
    found = []
    for override in overrides:
        key, _, value = override.partition("=")
        if not (key in RUNS and value.startswith(PREFIX)):
            found.append(override)
            continue
        if key == "resume":
            raise ConfigError(f"{override}: registered runs do not continue; use init_from=<checkpoint> in a new run")
        found.append(f"{key}={(place := find(project, value))}")
        if is_rank_zero():
            verify(place, value)
    return found


def log_artifact(place: str, name: str, folder: Path, checkpoint: str) -> str:
    """Log a run with one of its checkpoints as a W&B artifact, and return its version."""
    from boltcutter_export import artifacts  # imports wandb

    best = artifacts.find(place, name, "best")  # an error of W&B is reported before checkpoints are copied
    with tempfile.TemporaryDirectory() as parent:
        draft = Path(parent, "run")
        collect(folder, checkpoint, draft)
        lineage = write_lineage(draft, name, None, folder, checkpoint)
        is_best = best is None or is_better(lineage, best.metadata)
        return artifacts.log(place, name, draft, lineage, ["latest", *["best"] * is_best])


def is_better(lineage: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a version has a better score than another, of the same metric, or as good a one."""
    new, old = lineage["best"], other.get("best")
    if not isinstance(old, dict) or not is_finite(old.get("score")):
        return True
    if not is_finite(new["score"]):
        return False
    sign = 1 if new["mode"] == "max" else -1
    comparable = all(new[key] == old.get(key) for key in ("monitor", "mode"))
    return comparable and sign * float(new["score"]) >= sign * float(old["score"])


def download_artifact(project: Project, name: str, which: str) -> Path:
    """The folder of a version at W&B, downloaded at its first use."""
    place = location(project)
    parent = Path(f"{project.root}{DOWNLOADED}{place.removeprefix(WANDB)}", name)
    if re.fullmatch(r"v[0-9]+", which) and (parent / which).is_dir():
        return parent / which
    from boltcutter_export import artifacts  # imports wandb

    artifact = artifacts.find(place, name, which)
    if artifact is None:
        reference = f"{PREFIX}{name}@{which}"
        raise ConfigError(f"{reference}: not in {place}; register it with export.register={name}, or use latest")
    target = parent / str(artifact.version)
    if not target.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=parent) as draft:
            artifacts.download(place, artifact, Path(draft, "run"))
            publish_version(Path(draft, "run"), str(target))
    return target
