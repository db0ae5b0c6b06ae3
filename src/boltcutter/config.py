"""Read configuration: YAML groups under one folder, one experiment, and ``key=value`` words.

``configs/train.yaml`` names its groups under ``defaults``; ``model=mlp`` picks ``configs/model/mlp.yaml``;
``experiment=x`` lays ``configs/experiment/x.yaml`` over everything; ``trainer.devices=8`` sets one value.
This module imports neither torch nor Lightning, so that help and completion answer at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SECRET = re.compile(r"(^|_)(api_?key|access_key|token|secret|password|passwd|credentials?)$", re.I)
NUMBER = re.compile(r"[-+]?(?!0\d)((\d+\.\d*|\.\d+)(e[-+]?\d+)?|\d+e[-+]?\d+)", re.I)
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class ConfigError(Exception):
    """A mistake in what the user wrote, told in one line."""


def hint(word: str, known: Iterable[Any]) -> str:
    """``; did you mean …?`` where something known is near ``word``, else nothing."""
    near = difflib.get_close_matches(word, map(str, known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def one_line(error: object) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())


def groups(folder: Path) -> dict[str, dict[str, str]]:
    """Each group of ``folder`` with its options, and the first comment line of each option."""
    return {
        group.name: {file.stem: _first_comment(file) for file in sorted(group.glob("*.yaml"))}
        for group in sorted(folder.iterdir())
        if group.is_dir()
    }


def compose(folder: Path, words: Iterable[str] = (), base: DictConfig | None = None) -> DictConfig:
    """Put together ``train.yaml``, its groups, the experiment and the words of the command line.

    Args:
        folder: Where ``train.yaml`` and a folder for each group are.
        words: ``group=option``, ``key=value``, ``+key=value`` or ``~key``.
        base: An earlier result, kept as it was but for the words; instead of ``train.yaml``.

    Raises:
        ConfigError: A word or a file is wrong.
    """
    if base is None:
        cfg, picked = _read(folder / "train.yaml")
    else:
        cfg, picked = base.copy(), {}
    picks, values = _sort(folder, words)
    experiment, chosen = _pick(folder, "experiment", (picks if "experiment" in picks else picked).get("experiment"))
    options = {**picked, **chosen, **picks}
    for group, option in options.items():
        if group != "experiment":
            _known_group(folder, group)
            cfg[group], _ = _pick(folder, group, option)
    cfg = merge(cfg, experiment)
    cfg.choices = {**cfg.get("choices", {}), **{group: _say(option) for group, option in options.items()}}
    for word in values:
        _set(cfg, *word)
    _refuse_secrets(cfg)
    return cfg


def merge(below: DictConfig, above: DictConfig) -> DictConfig:
    """Lay ``above`` over ``below``; another ``_target_`` replaces the whole call, with its arguments."""
    out = below.copy()
    for key in above:
        new, old = _node(above, str(key)), _node(out, str(key))
        same = _is_map(new) and _is_map(old) and ("_target_" not in new or new._target_ == old.get("_target_"))
        out[key] = merge(old, new) if same else new
    return out


def _node(cfg: Any, key: str) -> Any:
    """What stands at ``key``, references not followed; None where nothing does."""
    return cfg._get_node(key) if isinstance(cfg, DictConfig) and key in cfg else None


def _is_map(node: Any) -> bool:
    return isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation()


def parse(key: str, text: str) -> Any:
    """Numbers, true, false, null, [lists], {maps} and "quoted text" as in YAML; all else is text."""
    if text.lower() in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[text.lower()]
    if re.fullmatch(r"[-+]?(0|[1-9]\d*)", text):
        return int(text)
    if NUMBER.fullmatch(text):
        return float(text)
    if text[:1] in ("[", "{", "'", '"'):
        try:
            return OmegaConf.create(f"v: {text}").v
        except (yaml.YAMLError, OmegaConfBaseException):
            raise ConfigError(f"{key}: cannot read {text}; quote the word for the shell, as in '{key}=[1,2]'") from None
    return text


def paths(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key under ``node``."""
    for key in map(str, node if _is_map(node) else ()):
        yield f"{prefix}{key}"
        yield from paths(_node(node, key), f"{prefix}{key}.")


def _sort(folder: Path, words: Iterable[str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Words that pick an option of a group, and words that set one value."""
    picks: dict[str, Any] = {}
    values = []
    for word in words:
        key, equals, text = word.partition("=")
        if key.startswith("~") and not equals and (folder / key[1:]).is_dir():
            picks[key[1:]] = None
        elif not key.strip("+~") or (not equals and not key.startswith("~")):
            raise ConfigError(f"{word}: expected group=option, key=value, +key=value or ~key")
        elif (folder / key).is_dir():
            picks[key] = parse(key, text)
        else:
            values.append((key, text))
    return picks, values


def _known_group(folder: Path, group: str) -> None:
    if not (folder / group).is_dir():
        known = [path.name for path in folder.iterdir() if path.is_dir()]
        raise ConfigError(f"{group}: no such group{hint(group, known)} (there are: {', '.join(sorted(known))})")


def _pick(folder: Path, group: str, options: Any) -> tuple[DictConfig, dict[str, Any]]:
    """One option of a group, or several laid over each other; and which other groups their ``defaults`` pick."""
    cfg, chosen = DictConfig({}), dict[str, Any]()
    for option in options if isinstance(options, list | ListConfig) else [options]:
        if option is None:
            continue
        path = Path(str(option)) if str(option).endswith(".yaml") else folder / group / f"{option}.yaml"
        own, base = _read(path, f"{group}={option}")
        if isinstance(base, dict):
            chosen |= base
        elif base is not None:
            below, inherited = _pick(folder, group, base)
            own, chosen = merge(below, own), chosen | inherited
        cfg = merge(cfg, own)
    return cfg, chosen


def _read(path: Path, what: str = "") -> tuple[DictConfig, Any]:
    """A file's contents, and its ``defaults`` apart."""
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        listed = f" (there are: {', '.join(known)})" if known else ""
        raise ConfigError(f"{what or path}: no such option{hint(path.stem, known)}{listed}")
    try:
        cfg = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{path}{line}: not valid YAML: {one_line(error.problem or error)}; correct that line"
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    if not isinstance(cfg, DictConfig):
        raise ConfigError(f"{path}: expected keys with values, found a list; write key: value")
    defaults = cfg.pop("defaults", None)
    return cfg, OmegaConf.to_container(defaults) if OmegaConf.is_config(defaults) else defaults


def _set(cfg: DictConfig, key: str, text: str) -> None:
    """Set ``key``, add ``+key``, or drop ``~key``. Next to a ``_target_`` any key may be set: ``check`` knows."""
    path = _follow(cfg, key.lstrip("+~"))
    parent, _, leaf = path.rpartition(".")
    try:
        node = OmegaConf.select(cfg, parent) if parent else cfg
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    keys = node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ()
    known = [str(k) for k in keys]
    free = key[0] == "+" or (key[0] != "~" and isinstance(node, DictConfig) and "_target_" in node)
    if leaf not in known and not free:
        everything = list(paths(cfg))
        alike = [p for p in everything if p.endswith(f".{leaf}")] or difflib.get_close_matches(path, everything, 1)
        remedy = f"; did you mean {alike[0]}?" if alike else f"; +{path}=… adds it, --print shows all"
        raise ConfigError(f"{path}: no such key{remedy}")
    if key[0] == "~":
        del node[int(leaf) if isinstance(node, ListConfig) else leaf]
        return
    try:
        OmegaConf.update(cfg, path, parse(path, text), merge=False, force_add=True)
    except (OmegaConfBaseException, IndexError, ValueError) as error:
        raise ConfigError(f"{path}={text}: {one_line(error)}") from None


def _follow(cfg: DictConfig, path: str) -> str:
    """The place that ``path`` means when a key on its way only refers to another, as ``task.model: ${model}``."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        node: Any = cfg
        for part in parts[:end]:
            node = _node(node, part)
        refers = REFERENCE.fullmatch(str(node._value())) if node is not None and node._is_interpolation() else None
        if refers:
            return _follow(cfg, ".".join([refers[1], *parts[end:]]))
    return path


def _refuse_secrets(cfg: DictConfig) -> None:
    """A run's folder and W&B keep the configuration, so a secret may stand there by reference only."""
    for path in paths(cfg):
        leaf = path.rpartition(".")[2]
        if SECRET.search(leaf):
            node: Any = cfg
            for part in path.split("."):
                node = _node(node, part)
            if isinstance(node._value(), str) and node._value() and "${" not in node._value():
                name = leaf.upper()
                remedy = f"write '{path}=${{oc.env:{name}}}' and set {name}"
                raise ConfigError(f"{path}: a secret must not be stored with the run; {remedy}")


def _say(option: Any) -> str:
    """An option's name without its folder; several with a plus between them."""
    if isinstance(option, list | ListConfig):
        return "+".join(map(_say, option)) or "none"
    return "none" if option is None else Path(str(option)).stem if str(option).endswith(".yaml") else str(option)


def _first_comment(file: Path) -> str:
    first = file.read_text().split("\n", 1)[0]
    return first.lstrip("# ") if first.startswith("#") else ""
