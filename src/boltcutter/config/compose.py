"""Compose the configuration from YAML groups, one experiment and ``key=value`` overrides.

``train.yaml`` names an option of each group under ``defaults``; ``model=mlp`` selects ``model/mlp.yaml``;
``experiment=x`` is merged over everything, and ``debug=x`` over that; ``trainer.devices=8`` sets one value. Options of
the project come before the built-in options of the library. This module imports neither torch nor Lightning, so that
help and completion are fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from boltcutter import extend
from boltcutter.config import foreign, redaction, remedies
from boltcutter.config.errors import ConfigError, Mistake, one_line
from boltcutter.config.locate import keeps_arguments
from boltcutter.config.references import multiplies
from boltcutter.config.settings import Settings
from boltcutter.config.values import (
    leaves,
    plain,
    read_value,
    read_yaml,
    resolve_reference,
    texts_as_typed,
    without_texts,
)
from boltcutter.project import BUILTIN_CONFIGS, Project

KEY = r"[^\s=+~.-][^\s=.]*(?:\.[^\s=.]+)*"

OVERRIDE = re.compile(rf"(\+{{0,2}})({KEY})=(.*)|(~)({KEY})", re.S)
PATH_KEY = re.compile(r"^runs$|^paths\.|^data\.(.*[_.])?(dir|file|folder|path|root)s?$")
FEW_REFERENCES = 40  # which cannot multiply to many, besides the 25 of the built-in options
# Groups that training or a launch instantiates; others are instantiated where they are referred to.
OVERLAYS = ("experiment", "debug")  # merged over all other groups, in this order
ALWAYS_BUILT = ("data", "task", "trainer", "callback", "logger")


def compose(project: Project, overrides: Iterable[str] = (), base: Settings | None = None) -> Settings:
    """Merge ``train.yaml``, its groups, the experiment and the overrides of the command line.

    Args:
        project: Project in which options are searched; its ``train.yaml`` is merged over the built-in one.
        overrides: ``group=option``, ``key=value``, ``+key=value`` or ``~key``.
        base: An earlier result to change by the overrides, instead of ``train.yaml``.

    Raises:
        ConfigError: An override or a file is wrong.
    """
    register_resolvers(project)
    values, defaults, local = _read_train(project) if base is None else (base.texts, {}, {})
    picks, settings = _sort(project, overrides)
    given = {**defaults, **picks}
    overlay, chosen, named = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for layer in OVERLAYS:
        own, others = _pick(project, layer, given.get(layer))
        overlay, chosen = merge(overlay, own or {}), chosen | others
        for group, option in (own or {}).items():
            label = f"{layer}={_label(given[layer])}"
            if isinstance(option, str) and project.has_group(group):
                raise ConfigError(f"{label}: '{group}: {option}' sets no key; write it under defaults")
            named |= {group: label} if option else {}
    options = {**defaults, **chosen, **picks}
    for group, option in options.items():
        if group not in OVERLAYS:
            if not project.has_group(group):
                raise ConfigError(remedies.no_such_group(project, group))
            values[group], others = _pick(project, group, option)
            if others:
                listed = ", ".join(others)
                raise ConfigError(f"{group}={_label(option)}: only an experiment's defaults can pick {listed}")
    local = {key: value for key, value in local.items() if value is not None or key not in picks}  # they win
    local = _of_selected_loggers(project, values, local)
    for group in ALWAYS_BUILT:
        own = local.get(group)
        if options.get(group, group) is None and isinstance(own, dict) and own and "_target_" not in own:
            raise ConfigError(
                f"{group}=null: {_machine_file(project)} sets {', '.join(f'{group}.{key}' for key in own)}; remove it "
                f"there, or give {group}=<option>"
            )
    values = merge(merge(values, _of_selected_loggers(project, values, overlay)), local)
    if given.get("debug") and (name := values.get("name")) is not None:
        values["name"] = f"{texts_as_typed(name)}-{_label(given['debug']).replace('+', '-')}"
    recorded = values.get("choices", {})
    if not isinstance(recorded, dict) or not all(isinstance(label, str) for label in recorded.values()):
        raise ConfigError("choices: not the names of options by group; restore the configuration from a copy")
    choices = {**recorded, **{group: _label(option) for group, option in options.items()}}
    cfg = DictConfig(values | {"choices": choices})
    for key, text in settings:
        if key.lstrip("+~").partition(".")[0] == "choices":
            raise ConfigError(remedies.choice_is_no_setting(key, text))
        _set(project, cfg, key, text)
    written = plain(cfg)
    if str(written).count("${") > FEW_REFERENCES and (place := multiplies(written, is_own=True)):
        raise ConfigError(f"{place}: its references multiply to more than can be resolved; leave out some of them")
    _refuse_secrets(written)
    _anchor_paths(project, cfg, [key.lstrip("+~") for key, _ in settings])
    if "task" in picks:  # in place of the experiment's, which may refer to other groups
        named, chosen = {}, {}
    named |= {key.lstrip("+~").partition(".")[0]: f"{key}={text}".rstrip("=") for key, text in settings}
    named |= {group: f"{group}={_label(option)}" for group, option in (chosen | picks).items() if option is not None}
    _drop_unused(cfg, named)
    return Settings(cfg)


def register_resolvers(project: Project) -> None:
    """Import the module of a project that registers resolvers of OmegaConf, if it names one.

    Raises:
        ConfigError: It cannot be imported.
    """
    if not project.resolvers:
        return
    try:
        import_module(project.resolvers)
    except Exception as error:  # it is the project's own code
        raise ConfigError(
            f"{project.root / 'pyproject.toml'}: resolvers={project.resolvers} cannot be imported "
            f"({type(error).__name__}: {one_line(error, 200)}); correct the module, or remove the line"
        ) from error


def default_options(project: Project) -> dict[str, Any]:
    """The option, or list of options, of each group that is chosen if no override chooses one."""
    return _read_train(project)[1]


def _read_train(project: Project) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """``train.yaml``, that of the project over the built-in one; the default option of each group; ``local.yaml``.

    The values of ``configs/local.yaml``, which belongs to a machine, are merged over those of the experiment.
    """
    values, defaults = dict[str, Any](), dict[str, Any]()
    files = [file for folder in reversed(project.config_dirs) if (file := folder / "train.yaml").is_file()]
    for file in files or [project.config_dirs[0] / "train.yaml"]:
        own, picked = read_option(file)
        if not isinstance(picked or {}, dict):
            raise ConfigError(
                f"{file}: defaults must name an option of each group; write group: option", kind="invalid_file"
            )
        values, defaults = merge(values, own), defaults | (picked or {})
    machine = _machine_file(project)
    local, picked = read_option(machine) if machine.is_file() else ({}, None)
    return values, defaults | dict(picked or {}), local


def _machine_file(project: Project) -> Path:
    return project.config_dirs[0] / "local.yaml"


def _of_selected_loggers(project: Project, values: dict[str, Any], experiment: dict[str, Any]) -> dict[str, Any]:
    """An experiment, or a machine's file, without the settings of loggers that are not selected."""
    loggers, selected = experiment.get("logger"), values.get("logger")
    if not isinstance(loggers, dict):
        return experiment
    names = {*project.groups().get("logger", {})} - {*(selected if isinstance(selected, dict) else ())}
    unused = {n for n, own in loggers.items() if n in names and isinstance(own, dict) and "_target_" not in own}
    return experiment | {"logger": {name: own for name, own in loggers.items() if name not in unused}}


def _anchor_paths(project: Project, cfg: DictConfig, given: Sequence[str]) -> None:
    """Resolve ``runs``, ``paths`` and the paths in ``data`` from the project's root if the working directory is below.

    ``${root}`` is replaced by the project's root anywhere.

    The values of ``given`` keys, set on the command line, are relative to the working directory.
    """
    is_below = project.root in Path.cwd().parents
    for key, node in leaves(cfg):
        value = node._value() if node is not None else None
        if not isinstance(value, str):
            continue
        if "${root}" in value and "root" not in cfg:
            node._set_value(value.replace("${root}", str(project.root)))
        is_given = any(f"{key}.".startswith(f"{prefix}.") for prefix in given)
        is_relative = not re.match(r"[/~]|\?\?\?$|.*(\$\{|://)", value)
        may_be_name = key.endswith(".path") and not (project.root / value).exists()  # of a dataset
        if is_below and is_relative and not is_given and not may_be_name and PATH_KEY.search(key):
            node._set_value(f"{project.root}/{value}")


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge plain values; a different ``_target_`` drops the arguments ``below``, except ``_partial_``."""
    keeps = "_target_" not in above or keeps_arguments(below.get("_target_"), above["_target_"])
    out = {key: value for key, value in below.items() if keeps or key == "_partial_"}
    for key, new in above.items():
        out[key] = merge(out[key], new) if isinstance(new, dict) and isinstance(out.get(key), dict) else new
    return out


def _sort(project: Project, overrides: Iterable[str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Overrides that select an option of a group, and those that set one value; another ``_target_`` comes first."""
    picks: dict[str, Any] = {}
    values = []
    for override in overrides:
        found = OVERRIDE.fullmatch(override)
        if not found:
            is_key = OVERRIDE.fullmatch(override.partition("=")[0]) is not None
            raise ConfigError(remedies.no_override(override, is_key=is_key))
        sign, key, text = found[1] or found[4] or "", found[2] or found[5], found[3] or ""
        if project.has_group(key):
            picks[key] = None if sign == "~" else texts_as_typed(read_value(key, text))
        else:
            values.append((sign + key, text))
    return picks, sorted(values, key=lambda value: not value[0].endswith("._target_"))


def _find_option(project: Project, group: str, option: str, above: tuple[Path, ...]) -> Path:
    """The file of an option; for a file that inherits from its own name, the next one on the search path.

    Raises:
        ConfigError: There is no such option, or it inherits from itself.
    """
    if option.endswith(".yaml"):
        path = Path(option)
    else:
        paths = [folder / group / f"{option}.yaml" for folder in project.config_dirs]
        skipped = paths.index(above[-1]) + 1 if above and above[-1] in paths else 0
        path = next((path for path in paths[skipped:] if path.is_file()), above[-1] if skipped else paths[-1])
    if path in above:
        raise ConfigError(f"{path}: inherits from itself; correct its defaults", kind="invalid_file")
    if not path.is_file():
        raise ConfigError(remedies.no_such_option(project, group, option))
    return path


def _pick(project: Project, group: str, options: Any, above: tuple[Path, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """One option of a group, or several merged in order; and what their ``defaults`` select of other groups.

    Args:
        project: Where options are searched.
        group: Their group.
        options: A name, a path of a YAML file, a list of these, or None.
        above: Files that inherit from this one, the nearest last.
    """
    if options is None:
        return None, {}
    values, chosen = dict[str, Any](), dict[str, Any]()
    for option in options if isinstance(options, list | ListConfig) else [options]:
        if option is None:
            continue
        path = _find_option(project, group, str(option), above)
        own, defaults = read_option(path)
        others = dict(defaults) if isinstance(defaults, dict) else {group: defaults}
        below, inherited = _pick(project, group, others.pop(group, None), (*above, path))
        chosen |= inherited | others
        values = merge(values, merge(below or {}, own))
    return values, chosen


def read_option(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the contents of a file without its ``defaults``, and these.

    Raises:
        ConfigError: It cannot be read, or is no mapping.
    """
    try:
        content = _parse(path.read_text("utf-8"))
        if path.resolve().is_relative_to(BUILTIN_CONFIGS.resolve()):
            content = without_texts(content)  # as there is no text that looks like a number
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = one_line(error.problem or error)
        raise ConfigError(f"{path}{line}: not valid YAML: {reason}; correct that line", kind="invalid_file") from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {one_line(error)}", kind="invalid_file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys with values, found a list; write key: value", kind="invalid_file")
    values = {key: value for key, value in content.items() if key != "defaults"}
    defaults = texts_as_typed(content.get("defaults"))
    values = foreign.with_targets(values) or values
    if remedy := foreign.defaults_remedy(defaults):
        raise ConfigError(f"{path}: {remedy}", kind="invalid_file")
    return values, defaults


@lru_cache(1000)
def _parse(text: str) -> Any:
    """The contents of a YAML file as plain values and ``Written``, which nobody may change."""
    return read_yaml(text)


def _set(project: Project, cfg: DictConfig, key: str, text: str) -> None:
    """Set ``key``, add ``+key`` or delete ``~key``; ``instantiate.check`` validates the arguments of a ``_target_``."""
    parent, _, leaf = key.lstrip("+~").rpartition(".")
    parent = resolve_reference(cfg, parent)
    path = f"{parent}.{leaf}".lstrip(".")
    try:
        node = OmegaConf.select(cfg, parent) if parent else cfg
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}", kind="invalid_file") from None
    keys = node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ()
    known = [str(k) for k in keys]
    is_call = isinstance(node, DictConfig) and "_target_" in node
    may_be_new = key[0] == "+" or (is_call and key[0] != "~")  # an argument of a call is checked later
    if leaf not in known and (path in foreign.REMOVED or not may_be_new):
        raise ConfigError(remedies.no_such_key(project, cfg, path, text, parent=node, is_deleted=key[0] == "~"))
    if key[0] == "~":
        del node[int(leaf) if isinstance(node, ListConfig) else leaf]
        return
    value = read_value(path, text)
    if is_call and leaf == "_target_" and not keeps_arguments(node._target_, value):
        for argument in [k for k in node if k not in ("_target_", "_partial_")]:
            del node[argument]
    try:
        OmegaConf.update(cfg, path, value, merge=False, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        reason = one_line(str(error).splitlines()[0])
        raise ConfigError(Mistake.of(path, reason, "correct the value, or remove it", value=text)) from None


def refuse_duplicates(overrides: Sequence[str]) -> None:
    """Check that no key is given twice.

    Raises:
        ConfigError: It is.
    """
    given: dict[str, str] = {}
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if OVERRIDE.fullmatch(override) and given.setdefault(key, override) is not override:
            raise ConfigError(
                f"{override}: {key} is given twice, also as {given[key]}; remove one of the two", kind="conflict"
            )


def _refuse_secrets(written: dict[str, Any]) -> None:
    """Refuse literal secrets, as the configuration is stored in the run's folder and in W&B; references are fine."""
    for path, what in redaction.find_secrets(written):
        raise ConfigError(remedies.stored_secret(path, what))


def _drop_unused(cfg: DictConfig, named: Mapping[str, str]) -> None:
    """Remove groups that nothing refers to, so that they are neither checked, instantiated nor recorded.

    ``named`` has the override that set each top-level key.

    Raises:
        ConfigError: The user named such a group.
    """
    texts = {key: str(value) for key, value in plain(cfg).items()}
    used = [key for key in texts if key not in cfg.choices or key in (*ALWAYS_BUILT, *extend.groups())]
    for key in used:  # grows while it is read
        used += [group for group in texts.keys() & cfg.choices.keys() - {*used} if _refers(texts[key], group)]
    for group in [group for group in cfg.choices if group not in (*used, *OVERLAYS)]:
        if group in named:
            raise ConfigError(
                f"{named[group]}: nothing refers to {group}, so it would have no effect; remove it, or refer to it "
                f"as ${{{group}}} in task={cfg.choices.get('task')}"
            )
        cfg.pop(group, None)
        del cfg.choices[group]


def _refers(text: str, group: str) -> bool:
    """Whether ``text`` has a reference to ``group`` or to a key below it."""
    return re.search(rf"\$\{{(?:[^{{}}]*[:,])?\s*\.*{re.escape(group)}[.\[,}}]", text) is not None


def _label(option: Any) -> str:
    """The name of an option without its folder; several are joined by a plus sign."""
    if isinstance(option, list | ListConfig):
        return "+".join(map(_label, option)) or "none"
    return "none" if option is None else Path(str(option)).stem if str(option).endswith(".yaml") else str(option)
