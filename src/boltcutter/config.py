"""Read configuration: YAML groups under one folder, one experiment, and ``key=value`` words.

``configs/train.yaml`` names its groups under ``defaults``; ``model=mlp`` picks ``configs/model/mlp.yaml``;
``experiment=x`` lays ``configs/experiment/x.yaml`` over everything; ``trainer.devices=8`` sets one value.
This module imports neither torch nor Lightning, so that help and completion answer at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig as DictConfig  # the type of a configuration, for those who take one
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from boltcutter import redaction

INTEGER = re.compile(r"[-+]?(0|[1-9](_?\d)*)")
NUMBER = re.compile(r"[-+]?(?!0\d)((\d+\.\d*|\.\d+)(e[-+]?\d+)?|\d+e[-+]?\d+)", re.I)
RESERVED = {"true": True, "false": False, "null": None}
NOT_FINITE = {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
WRITTEN = {str(value): text for text, value in (RESERVED | NOT_FINITE).items()}
QUOTING = ("[", "{", "'", '"')
KEY = r"[^\s=+~.-][^\s=.]*(?:\.[^\s=.]+)*"
OVERRIDE = re.compile(rf"(\+{{0,2}})({KEY})=(.*)|(~)({KEY})", re.S)
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# Groups that a training or a launch builds itself; any other is built where something refers to it, as model by a task.
ALWAYS_BUILT = ("data", "task", "trainer", "callback", "logger", "launch")


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
    if not isinstance(picked, dict):
        raise ConfigError(f"{folder / 'train.yaml'}: defaults must name an option of each group; write group: option")
    picks, values = _sort(folder, words)
    experiment, chosen = _pick(folder, "experiment", (picks if "experiment" in picks else picked).get("experiment"))
    options = {**picked, **chosen, **picks}
    for group, option in options.items():
        if group != "experiment":
            _known_group(folder, group)
            cfg[group], others = _pick(folder, group, option)
            if others:
                raise ConfigError(
                    f"{group}={_label(option)}: only an experiment's defaults can pick {', '.join(others)}"
                )
    cfg = merge(cfg, experiment or DictConfig({}))
    cfg.choices = {**cfg.get("choices", {}), **{group: _label(option) for group, option in options.items()}}
    for word in values:
        _set(cfg, *word)
    _refuse_secrets(cfg)
    named = {
        group: f"experiment={_label(options['experiment'])}"
        for group, value in plain(experiment or DictConfig({})).items()
        if value
    }
    named |= {key.lstrip("+~").partition(".")[0]: f"{key}={text}".rstrip("=") for key, text in values}
    named |= {group: f"{group}={_label(option)}" for group, option in (chosen | picks).items() if option is not None}
    _drop_unused(cfg, named)
    return cfg


def merge(below: DictConfig, above: DictConfig) -> DictConfig:
    """Lay ``above`` over ``below``; another ``_target_`` replaces the call with its arguments, not ``_partial_``."""
    out = below.copy()
    if "_target_" in above and above._target_ != below.get("_target_"):
        out = DictConfig({"_partial_": below._partial_} if "_partial_" in below else {})
    for key in above:
        new, old = _node(above, key), _node(out, key)
        out[key] = merge(old, new) if _is_map(new) and _is_map(old) else new
    return out


def _node(cfg: Any, key: Any) -> Any:
    """What stands at ``key``, references not followed; None where nothing does."""
    return cfg._get_node(key, validate_access=False) if _is_map(cfg) else None


def _is_map(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def parse(key: str, text: str) -> Any:
    """Numbers, true, false, null, [lists], {maps} and "quoted text" as in YAML; all else is text."""
    if text.lower() in RESERVED:
        return RESERVED[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text) or text in NOT_FINITE:
        return NOT_FINITE.get(text) or float(text)
    if text[:1] in QUOTING:
        try:
            return OmegaConf.create(f"v: {text}").v
        except (yaml.YAMLError, OmegaConfBaseException):
            raise ConfigError(f"{key}: cannot read {text}; quote the word for the shell, as in '{key}=[1,2]'") from None
    return text


def format_value(value: Any) -> str:
    """A value as a person would write it: what ``parse`` reads."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {format_value(inner)}' for key, inner in value.items())}}}"
    if not isinstance(value, str):
        return WRITTEN.get(str(value), str(value))
    plain = value[:1] not in QUOTING and isinstance(parse("", value), str)
    return value if plain else repr(value)


def format_unresolved(error: OmegaConfBaseException, cfg: DictConfig) -> str:
    """OmegaConf's several lines on a reference as one: where, what, remedy."""
    where = getattr(error, "full_key", None) or "configuration"
    text = str(getattr(error, "msg", None) or error).split("\n")[0]
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing[1]}: not set; say {missing[1]}=…"
    if unset := re.search(r"Environment variable '(\w+)' not found", text):
        return f"{where}: environment variable {unset[1]} is not set; export {unset[1]}=…"
    if key := re.search(r"Interpolation key '(.+)' not found|Error trying to access (.+): node", text):
        name = key[1] or key[2]
        near = hint(name, (path for path in paths(cfg) if path != where)) if key[1] else ""
        return f"{where}: ${{{name}}} refers to nothing{near or '; --print shows all keys'}"
    return f"{where}: {text}; correct the reference"


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Plain types, references as they are written."""
    return dict(OmegaConf.to_container(cfg))  # type: ignore[arg-type]


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Plain types, every reference followed.

    Raises:
        ConfigError: A reference leads nowhere.
    """
    try:
        return dict(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(format_unresolved(error, cfg)) from None


def redacted(cfg: DictConfig) -> dict[str, Any]:
    """Plain types, every reference followed, secrets veiled.

    Raises:
        ConfigError: A reference leads nowhere.
    """
    return redaction.redact(resolved(cfg), plain(cfg))


def as_yaml(values: dict[str, Any]) -> str:
    """Values as a YAML file."""
    return OmegaConf.to_yaml(DictConfig(values))


def paths(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key under ``node``."""
    for key in map(str, node if _is_map(node) else ()):
        yield f"{prefix}{key}"
        yield from paths(_node(node, key), f"{prefix}{key}.")


def _sort(folder: Path, words: Iterable[str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Words that pick an option of a group, and words that set one value; another ``_target_`` comes first."""
    picks: dict[str, Any] = {}
    values = []
    for word in words:
        found = OVERRIDE.fullmatch(word)
        if not found:
            key = word.partition("=")[0]
            remedy = f"say {key}" if OVERRIDE.fullmatch(key) else "say group=option, key=value, +key=value or ~key"
            raise ConfigError(f"{word or repr(word)}: cannot be read; {remedy}")
        sign, key, text = found[1] or found[4] or "", found[2] or found[5], found[3] or ""
        if _is_group(folder, key):
            picks[key] = None if sign == "~" else parse(key, text)
        else:
            values.append((sign + key, text))
    return picks, sorted(values, key=lambda value: not value[0].endswith("._target_"))


def _is_group(folder: Path, name: str) -> bool:
    return name.isidentifier() and (folder / name).is_dir()


def _known_group(folder: Path, group: str) -> None:
    if not _is_group(folder, group):
        known = [path.name for path in folder.iterdir() if path.is_dir()]
        raise ConfigError(f"{group}: no such group{hint(group, known)} (there are: {', '.join(sorted(known))})")


def _pick(folder: Path, group: str, options: Any, above: tuple[Path, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """One option of a group, or several laid over each other; and which other groups their ``defaults`` pick.

    Args:
        folder: Of the configuration.
        group: Whose option.
        options: A name, a path of a YAML file, a list of these, or None.
        above: Files that inherit from this.
    """
    if options is None:
        return None, {}
    cfg, chosen = DictConfig({}), dict[str, Any]()
    for option in options if isinstance(options, list | ListConfig) else [options]:
        if option is None:
            continue
        path = Path(str(option)) if str(option).endswith(".yaml") else folder / group / f"{option}.yaml"
        if path in above:
            raise ConfigError(f"{path}: inherits from itself; correct its defaults")
        own, defaults = _read(path, f"{group}={option}")
        others = dict(defaults) if isinstance(defaults, dict) else {group: defaults}
        below, inherited = _pick(folder, group, others.pop(group, None), (*above, path))
        chosen |= inherited | others
        cfg = merge(cfg, merge(below or DictConfig({}), own))
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
    defaults = OmegaConf.to_container(defaults) if OmegaConf.is_config(defaults) else defaults
    for entry in defaults if isinstance(defaults, list) else ():
        for key, option in (entry if isinstance(entry, dict) else {entry: None}).items():
            if option is not None or key == "_self_":
                group = str(key).removeprefix("override ").strip("/").partition("@")[0]
                remedy = f"write {group}: {option}, without the dash" if option is not None else "leave it out"
                given = f"{key}: {option}" if option is not None else key
                raise ConfigError(f"{path}: '- {given}' is how Hydra says it; {remedy}")
    return cfg, defaults


def _set(cfg: DictConfig, key: str, text: str) -> None:
    """Set ``key``, add ``+key``, or drop ``~key``. Next to a ``_target_`` any key may be set: ``check`` knows."""
    parent, _, leaf = key.lstrip("+~").rpartition(".")
    parent = resolve_reference(cfg, parent)
    path = f"{parent}.{leaf}".lstrip(".")
    try:
        node = OmegaConf.select(cfg, parent) if parent else cfg
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    keys = node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ()
    known = [str(k) for k in keys]
    is_call = isinstance(node, DictConfig) and "_target_" in node
    if leaf not in known and key[0] != "+" and (key[0] == "~" or not is_call):
        everything = list(paths(cfg))
        alike = difflib.get_close_matches(path, [p for p in everything if p.endswith(f".{leaf}")], 1, cutoff=0)
        near = f"; did you mean {alike[0]}?" if alike else hint(path, everything)
        adds = f"; +{path}=… adds it" if _is_map(node) and parent and key[0] != "~" else "; --print shows all"
        raise ConfigError(f"{path}: no such key{near or adds}")
    if key[0] == "~":
        del node[int(leaf) if isinstance(node, ListConfig) else leaf]
        return
    value = parse(path, text)
    if is_call and leaf == "_target_" and value != node._target_:
        for argument in [k for k in node if k not in ("_target_", "_partial_")]:
            del node[argument]
    try:
        OmegaConf.update(cfg, path, value, merge=False, force_add=True)
    except (OmegaConfBaseException, IndexError, ValueError) as error:
        raise ConfigError(f"{path}={text}: {one_line(str(error).splitlines()[0])}; correct the value") from None


def resolve_reference(cfg: DictConfig, path: str) -> str:
    """The place that ``path`` means when a key on it only refers to another, as ``task.model: ${model}``."""
    node, parts = cfg, path.split(".")
    for end, part in enumerate(parts, 1):
        node = _node(node, part)
        refers = REFERENCE.fullmatch(str(node._value())) if node is not None and node._is_interpolation() else None
        if refers:
            return resolve_reference(cfg, ".".join([refers[1], *parts[end:]]))
    return path


def _refuse_secrets(cfg: DictConfig) -> None:
    """A run's folder and W&B keep the configuration, so a secret may stand there by reference only."""
    for path, what in redaction.find_secrets(plain(cfg)):
        name = re.sub(r"\W", "_", path.rpartition(".")[2]).upper()
        remedy = f"write '{path}=${{oc.env:{name}}}' and set {name}"
        if what.startswith("the value of "):  # in a line of shell
            remedy = f"export {what.split()[-1]} where you start, which runs and jobs inherit"
        raise ConfigError(f"{path}: {what} must not be stored with the run; {remedy}")


def _drop_unused(cfg: DictConfig, named: Mapping[str, str]) -> None:
    """Take out groups that nothing refers to, so that they are neither checked, nor built, nor recorded.

    Args:
        cfg: Composed.
        named: What the user said of each top-level key.

    Raises:
        ConfigError: The user named such a group.
    """
    texts = {key: str(value) for key, value in plain(cfg).items()}
    used = [key for key in texts if key not in cfg.choices or key in ALWAYS_BUILT]
    for key in used:  # grows while it is read
        used += [group for group in cfg.choices if group not in used and _refers(texts[key], group)]
    for group in [group for group in cfg.choices if group not in (*used, "experiment")]:
        if group in named:
            raise ConfigError(
                f"{named[group]}: nothing refers to {group}, so it would have no effect; leave it out, or refer to it "
                f"as ${{{group}}} in task={cfg.choices.get('task')}"
            )
        cfg.pop(group, None)
        del cfg.choices[group]


def _refers(text: str, group: str) -> bool:
    """Whether a reference in ``text`` leads to ``group`` or below it."""
    return re.search(rf"\$\{{(?:[^{{}}]*[:,])?\s*\.*{re.escape(group)}[.\[,}}]", text) is not None


def _label(option: Any) -> str:
    """An option's name without its folder; several with a plus between them."""
    if isinstance(option, list | ListConfig):
        return "+".join(map(_label, option)) or "none"
    return "none" if option is None else Path(str(option)).stem if str(option).endswith(".yaml") else str(option)


def _first_comment(file: Path) -> str:
    first = file.read_text().split("\n", 1)[0]
    return first.lstrip("# ") if first.startswith("#") else ""
