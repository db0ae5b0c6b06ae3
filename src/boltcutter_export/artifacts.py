"""Versions of models as W&B artifacts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb

from boltcutter import extend

PROTOCOL = "wandb://"
TYPE = "model"
TIMEOUT = 600  # seconds for the server to confirm an artifact after its upload


class ArtifactError(ValueError):
    """An artifact cannot be logged or found."""

    hide_traceback = True  # needs no traceback


def log(
    registry: str,
    name: str,
    folder: Path,
    lineage: Mapping[str, Any],
    is_better: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
) -> str:
    """Log a folder as the next version of a model.

    Args:
        registry: ``wandb://<entity>/<project>``, or ``wandb://<project>`` of the default entity.
        name: Name of the model.
        folder: Folder of the version.
        lineage: Where the model comes from, the metadata of the artifact.
        is_better: Whether a version has a better score than another, by their metadata; the best one has the alias
            ``best``.

    Returns:
        The version, such as ``v3``.

    Raises:
        ArtifactError: No login was found, or W&B refused.
    """
    entity, project = parse(registry)
    with as_artifact_error(registry), tempfile.TemporaryDirectory() as scratch:
        known = get(registry, name, "best")
        artifact = wandb.Artifact(name, TYPE, metadata=dict(lineage))
        artifact.add_dir(str(folder))
        with wandb.init(
            entity=entity,
            project=project,
            name=f"register {name}",
            job_type="register",
            dir=scratch,
            mode="online",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=30),
        ) as run:
            best = ["best"] if known is None or is_better(lineage, known.metadata) else []
            return str(run.log_artifact(artifact, aliases=["latest", *best]).wait(TIMEOUT).version)


def find(registry: str, name: str, which: str) -> str | None:
    """The number of a version, as ``v3``, from that or an alias; None if there is none.

    Raises:
        ArtifactError: No login was found, or the server is unreachable.
    """
    with as_artifact_error(registry):
        found = get(registry, name, which)
    return None if found is None else str(found.version)


def download(registry: str, name: str, version: str, folder: Path) -> None:
    """Download a version to a folder.

    Raises:
        ArtifactError: No login was found, the server is unreachable, or there is no such version.
    """
    with as_artifact_error(registry):
        found = get(registry, name, version)
        if found is None:
            raise ArtifactError(f"{registry}: {name} has no version {version}")
        found.download(root=str(folder))


def parse(registry: str) -> tuple[str | None, str]:
    """Entity and project of a registry.

    Raises:
        ArtifactError: The URL has another form.
    """
    *entity, project = registry.removeprefix(PROTOCOL).rstrip("/").split("/")
    if len(entity) > 1 or not all([*entity, project]):
        raise ArtifactError(f"{registry}: not a W&B project; use wandb://<entity>/<project>, or wandb://<project>")
    return (entity[0] if entity else None), project


def get(registry: str, name: str, which: str) -> Any:
    """An artifact; None if it does not exist."""
    path = "/".join([*filter(None, parse(registry)), f"{name}:{which}"])
    try:
        return wandb.Api().artifact(path, type=TYPE)
    except wandb.errors.CommError as error:
        if isinstance(error.exc, ValueError):
            return None
        raise


@contextmanager
def as_artifact_error(registry: str) -> Iterator[None]:
    """Check the login and the server, and report errors of W&B in one line.

    Raises:
        ArtifactError: W&B cannot be used, or an error was raised.
    """
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise ArtifactError(f"{registry}: WANDB_MODE={os.environ['WANDB_MODE']}; unset it, or set it to online")
    server = extend.require("wandb_server", registry)
    url = server.base_url()
    if not server.logged_in():
        raise ArtifactError(f"{registry}: not logged in to {url}; run `wandb login`")
    if not server.is_reachable(url):
        raise ArtifactError(f"{registry}: {url} is unreachable; try again later, or use a version by its number")
    try:
        yield
    except (wandb.errors.Error, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{registry}: W&B failed ({type(error).__name__}: {reason}); try again later") from error
