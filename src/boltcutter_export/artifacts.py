"""Versions of models as W&B artifacts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb

from boltcutter import extend
from boltcutter.config.errors import ConfigError

PROTOCOL = "wandb://"
TYPE = "model"
TIMEOUT = 600  # seconds for the server to confirm an artifact after its upload


def log(registry: str, name: str, folder: Path, lineage: Mapping[str, Any], aliases: Sequence[str]) -> str:
    """Log a folder as the next version of a model.

    Args:
        registry: ``wandb://<entity>/<project>``, or ``wandb://<project>`` of the default entity.
        name: Name of the model.
        folder: Folder of the version.
        lineage: Where the model comes from, the metadata of the artifact.
        aliases: Aliases that move to this version.

    Returns:
        The version, such as ``v3``.

    Raises:
        ConfigError: No login was found, or W&B refused.
    """
    entity, project = parse(registry)
    with as_config_error(registry), tempfile.TemporaryDirectory() as scratch:
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
            return str(run.log_artifact(artifact, aliases=list(aliases)).wait(TIMEOUT).version)


def find(registry: str, name: str, which: str) -> Any:
    """The artifact of a version, such as ``v3``, or of an alias; None if there is none."""
    path = "/".join([*filter(None, parse(registry)), f"{name}:{which}"])
    with as_config_error(registry):
        try:
            return wandb.Api().artifact(path, type=TYPE)
        except wandb.errors.CommError as error:
            if isinstance(error.exc, ValueError):
                return None
            raise


def download(registry: str, artifact: Any, folder: Path) -> None:
    """Download a version to a folder."""
    with as_config_error(registry):
        artifact.download(root=str(folder))


def parse(registry: str) -> tuple[str | None, str]:
    """Entity and project of a registry."""
    *entity, project = registry.removeprefix(PROTOCOL).rstrip("/").split("/")
    if len(entity) > 1 or not all([*entity, project]):
        raise ConfigError(
            f"BOLTCUTTER_REGISTRY={registry}: not a W&B project; use wandb://<entity>/<project>, or wandb://<project>"
        )
    return (entity[0] if entity else None), project


@contextmanager
def as_config_error(registry: str) -> Iterator[None]:
    """Check the login and the server, and report errors of W&B in one line.

    Raises:
        ConfigError: W&B cannot be used, or an error was raised.
    """
    setting = f"BOLTCUTTER_REGISTRY={registry}"
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise ConfigError(f"{setting}: WANDB_MODE={os.environ['WANDB_MODE']}; unset it, or set it to online")
    server = extend.require("wandb_server", setting)
    url = server.base_url()
    if not server.logged_in():
        raise ConfigError(f"{setting}: not logged in to {url}; run `wandb login`")
    if not server.is_reachable(url):
        raise ConfigError(f"{setting}: {url} is unreachable; try again later, or use a version by its number")
    try:
        yield
    except (wandb.errors.Error, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{setting}: W&B failed ({type(error).__name__}: {reason}); try again later") from error
