"""Words and YAML to one configuration. Imports neither torch nor Lightning, so that --help answers at once.

``configs/train.yaml`` names an option of each group under ``defaults``; ``logger=wandb`` picks another one, the file
``configs/logger/wandb.yaml``; ``trainer.devices=8`` sets one value. An option may name one under its ``defaults``, too:
it is laid over that.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig as DictConfig  # the type of a configuration, for those who take one
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


class ConfigError(Exception):
    """A mistake in what the user wrote, told in one line."""


def compose(folder: Path, words: Iterable[str] = (), base: DictConfig | None = None) -> DictConfig:
    """The configuration below ``folder`` that the words mean; or ``base``, an earlier one, as the words change it."""
    cfg = read(folder / "train.yaml") if base is None else base.copy()
    picks, values = dict(cfg.pop("defaults", {})), {}
    for word in words:
        key, equals, text = word.partition("=")
        name = key.lstrip("+~")
        if not name or name.startswith(".") or bool(equals) == key.startswith("~"):
            raise ConfigError(f"{word or repr(word)}: cannot be read; say group=option, key=value, +key=value or ~key")
        if "." not in name and (folder / name).is_dir():
            picks[name] = parse(key, text) if equals else None
        else:
            values[key] = parse(key, text) if equals else None
    for group, option in picks.items():
        cfg[group] = None if option is None else pick(folder, group, option)
        OmegaConf.update(cfg, f"choices.{group}", say(option), force_add=True)
    for key, value in values.items():
        put(cfg, key, value)
    return cfg


def pick(folder: Path, group: str, option: Any) -> DictConfig:
    """One option of a group, laid over the one that it begins with; or several, laid over each other."""
    if isinstance(option, list | ListConfig):
        return DictConfig(OmegaConf.merge({}, *(pick(folder, group, one) for one in option)))
    path = folder / group / f"{option}.yaml"
    if not path.is_file():
        known = groups(folder)[group]
        raise ConfigError(f"{group}={option}: no such option{hint(str(option), known)} (there are: {', '.join(known)})")
    cfg = read(path)
    below = cfg.pop("defaults", None)
    return cfg if below is None else DictConfig(OmegaConf.merge(pick(folder, group, below), cfg))


def put(cfg: DictConfig, key: str, value: Any) -> None:
    """Set ``key``, add ``+key``, or drop ``~key``. Beside a ``_target_`` any key may be set: ``build.check`` knows."""
    path = key.lstrip("+~")
    parent, _, leaf = path.rpartition(".")
    try:
        node = OmegaConf.select(cfg, parent) if parent else cfg
        known = node if isinstance(node, DictConfig) else ()
        if leaf not in known and not (key[0] == "+" or (key[0] != "~" and "_target_" in known)):
            raise ConfigError(f"{path}: no such key{hint(leaf, map(str, known)) or '; --print shows all'}")
        if key[0] == "~":
            del node[leaf]
        else:
            OmegaConf.update(cfg, path, value, merge=False, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}; correct the value") from None


def read(path: Path) -> DictConfig:
    """A YAML file."""
    try:
        return DictConfig(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({one_line(error)}); correct it") from None


def parse(key: str, text: str) -> Any:
    """A value as YAML has it: numbers, true, false, null, [lists], {maps}, and text."""
    try:
        return plain(DictConfig(OmegaConf.create(f"value: {text}")))["value"]
    except (YAMLError, OmegaConfBaseException):
        raise ConfigError(f"{key}: cannot read {text}; quote the word for the shell, as in '{key}=[1,2]'") from None


def plain(cfg: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Plain types, references as they are written or followed.

    Raises:
        ConfigError: A reference leads nowhere.
    """
    try:
        return dict(OmegaConf.to_container(cfg, resolve=resolve))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        where, text = getattr(error, "full_key", None), one_line(str(error).splitlines()[0])
        raise ConfigError(f"{where}: {text}; correct the reference, or set what it refers to") from None


def as_yaml(values: dict[str, Any]) -> str:
    """Values as a YAML file."""
    return OmegaConf.to_yaml(DictConfig(values))


def groups(folder: Path) -> dict[str, dict[str, str]]:
    """Each group with its options, and the first line of each, which says what it is."""
    found = {group.name: sorted(group.glob("*.yaml")) for group in sorted(folder.iterdir()) if group.is_dir()}
    return {name: {f.stem: f.read_text().split("\n")[0].lstrip("# ") for f in files} for name, files in found.items()}


def hint(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` where something known is near ``word``, else nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def say(value: Any) -> str:
    """A value as a person would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=list)


def one_line(error: object) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())
