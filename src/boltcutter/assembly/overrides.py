"""The configuration that the overrides of a command select: one of the project, or that of an earlier run.

``resume=`` and ``reproduce=`` train with the configuration of a run, ``run=`` evaluates one. The record of a run may be
somebody else's: ``read_run_config`` checks it before anything is composed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings, TopLevel
from boltcutter.config.values import split_overrides
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter.run.folder import moved_to, read_run_config, recorded_config
from boltcutter.run.remote.store import run_store
from boltcutter.topology import ONE_DEVICE

INFERRED = ("shape", "num_classes", "kind")  # settings of ``data`` that null lets training take from the data


def read_overrides(project: Project, overrides: Sequence[str]) -> Settings:
    """Compose the configuration; ``resume=`` and ``reproduce=`` start from the configuration of an earlier run.

    ``resume=`` takes the folder of the run, with ``ckpt=best|last|<name>|<path>``, or a checkpoint file in it.
    """
    special, rest = split_overrides(overrides, "resume", "reproduce")
    if special.get("resume", "").endswith(".ckpt"):
        rest = [f"ckpt={special['resume']}", *rest]
        special["resume"] = _run_above(special["resume"])
    given, rest = split_overrides(rest, "ckpt") if "resume" in special else ({}, rest)
    if len(special) == 2:
        raise ConfigError("resume and reproduce exclude each other; give one of them", kind="conflict")
    if not special:
        cfg = compose(project, rest)
        trust.check_arguments(rest, cfg.written, project)
        return _typed(cfg)
    ((verb, text),) = special.items()
    if verb == "resume":
        check_resume(Path(text), rest)
    cfg = load_run_config(project, Path(text), rest, verb)
    new: dict[str, Any] = {"resume": text if verb == "resume" else None, **given}
    if verb == "reproduce":
        folder = next((override.partition("=")[2] for override in rest if override.startswith("folder=")), None)
        new |= {"reproduce": text, "folder": folder}
    return cfg.without("ckpt").changed(new)  # that of an earlier attempt


def _run_above(checkpoint: str) -> str:
    """The folder of the run whose checkpoint is given.

    Raises:
        ConfigError: There is none above the file.
    """
    for folder in Path(checkpoint).parents:
        if (folder / run_files.RECORD).is_file():
            return str(folder)
    raise ConfigError(f"resume={checkpoint}: not in the folder of a run; use resume=<folder of the run> ckpt=<file>")


def check_resume(folder: Path, overrides: Sequence[str]) -> None:
    """Check that no override changes a setting that a resumed run cannot change."""
    given, _ = split_overrides(overrides, "folder", "name", "runs", "init_from")
    recorded = recorded_config(folder, "resume")[0] if given else {}
    for key, text in given.items():
        same = (
            run_store().locate(text).absolute() == folder.absolute()
            if key == "folder"
            else text == str(recorded.get(key))
        )
        if not same:
            what = "weights" if key == "init_from" else "folder"
            raise ConfigError(f"{key}={text}: resume={folder} continues with its own {what}; remove one of the two")


def load_run_config(project: Project, folder: Path, overrides: Sequence[str] = (), setting: str = "run") -> Settings:
    """Load the configuration of an earlier run and apply ``overrides``.

    ``setting`` is the key of the override that names the folder, for messages.

    Raises:
        ConfigError: The folder holds no run, or its record names a class that is not trusted.
    """
    base = read_run_config(project, folder, setting)
    cfg = compose(project, overrides, base=base)
    recorded = base.written
    # Only what the arguments have changed: classes of a record that the user has signed are allowed.
    changes = {key: value for key, value in cfg.written.items() if value != recorded.get(key)}
    trust.check_arguments(overrides, changes, project)
    return moved_to(folder, _typed(cfg), setting)


def _typed(cfg: Settings) -> Settings:
    """Return the configuration, in which texts that look like numbers are kept where annotations say so."""
    if cfg.has_texts:
        from boltcutter.config.annotations import follow_annotations  # imports pydantic, and classes of components

        return follow_annotations(cfg, TopLevel)
    return cfg


def load_evaluation_config(
    project: Project, special: dict[str, str], overrides: Sequence[str]
) -> tuple[Settings, Path]:
    """Load the configuration of ``run=<folder>``, for one device unless an override sets the trainer.

    Returns:
        The configuration and the folder of the run.

    Raises:
        ConfigError: ``run`` is not set, or the folder holds no run.
    """
    if not special.get("run"):
        given = next((text for text in overrides if "=" not in text), "runs/digits-convnet/…")
        raise ConfigError(f"run is not set; use run=<folder of a run>, as in run={given}", kind="missing_value")
    folder = Path(special["run"])
    cfg = load_run_config(project, folder, overrides)
    is_chosen = any(override.lstrip("+~").startswith("trainer") for override in overrides)
    if not is_chosen and isinstance(cfg.written.get("trainer"), dict):  # which a record of somebody else may lack
        cfg = cfg.changed({"trainer": ONE_DEVICE})
    return cfg, folder
