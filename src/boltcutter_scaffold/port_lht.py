"""Convert the configuration of a project made from lightning-hydra-template."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from boltcutter.config.compose import OVERLAYS
from boltcutter.config.errors import ConfigError, one_line

GROUPS = {"model": "task", "datamodule": "data", "callbacks": "callback"}
NOT_USED = {
    "extras": "left out: nothing reads it",
    "hparams_search": "left out: write the space in configs/search, see docs/search.md",
    "hydra": "left out: each run has a folder, a log and a record of its own",
    "local": "left out: write configs/local.yaml",
}
OPTIONS = ("data", "task", "callback", "logger", "trainer", "paths")  # groups that train.yaml selects here
SETTINGS = ("seed", "test", "tags", "name", *OPTIONS)  # keys that have the same meaning here
REFERENCES = {
    r"\$\{(model|datamodule|callbacks)(?=[.}])": lambda match: f"${{{GROUPS[match[1]]}",
    r"\$\{hydra:\s*(runtime\.output_dir|run\.dir)\}": lambda match: "${folder}",
    r"\$\{hydra:\s*runtime\.cwd\}|\$\{oc\.env:\s*PROJECT_ROOT\}": lambda match: ".",
}

MAX_SIZE, MAX_EXPANDED = 1 << 18, 1 << 18  # characters of a file, and its nodes

Rows = list[tuple[str, str, str]]  # file, what it became, and a note


def convert(configs: Path, target: Path) -> Rows:
    """Write the configuration of ``configs`` to the folder ``target``, and return what became of each file.

    Raises:
        ConfigError: There is no main configuration, or a file is not valid YAML.
    """
    main = next((file for name in ("train.yaml", "config.yaml") if (file := configs / name).is_file()), None)
    if main is None:
        raise ConfigError(f"{configs}: no train.yaml or config.yaml there; give the folder of the project")
    rows: Rows = []
    files = sorted(filter(Path.is_file, configs.rglob("*.yaml")))  # a FIFO would block
    used = [file for file in files if file.relative_to(configs).parts[0] not in NOT_USED]
    everything = "\n".join(file.read_text() for file in used)
    own = [key for key in read(main) if key not in (*SETTINGS, *GROUPS, "defaults")]
    constants = [key for key in own if re.search(rf"\$\{{{re.escape(key)}\b", everything)]
    included = {name for file in (configs / "callbacks").glob("*.yaml") for name, _ in entries(read(file), "callbacks")}
    for file in files:
        path = file.relative_to(configs)
        group = path.parts[0] if len(path.parts) > 1 else ""
        name = GROUPS.get(group, group)
        new, note = Path(name, *path.parts[1:]), ""
        text = with_references(file.read_text(), constants)
        if group in NOT_USED or (not group and file != main):
            note = NOT_USED.get(group, "left out: `boltcutter evaluate run=<folder>` takes its place")
            rows.append((f"configs/{path}", "–", note))
            continue
        if file == main:
            new, text, note = Path("train.yaml"), main_file(text, constants, own), ", ".join({*own} - {*constants})
            note = note and f"without {note}"
        elif name == "callback":
            text, note = (
                callback_file(text, file.stem, included),
                "adds to the built-in ones; ModelCheckpoint is best",
            )
        elif name in OVERLAYS:
            text = experiment_file(text, name, own, constants)
        else:
            text = with_defaults(text, entries(parse(text) or {}, group), name)
            if name == "trainer":
                text = trainer_file(text)
        write(target / new, text)
        rows.append((f"configs/{path}", f"configs/{new}", note))
    if constants:
        kept = {key: read(main)[key] for key in constants}
        write(target / "constants" / "default.yaml", with_references(dump(kept), constants))
        rows.append((f"configs/{main.name}", "configs/constants/default.yaml", "keys that other files refer to"))
    return rows


def read(file: Path) -> dict[str, Any]:
    """The contents of a YAML file.

    Raises:
        ConfigError: It is not valid.
    """
    try:
        found = parse(file.read_text()) if file.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}; correct it") from error
    return found if isinstance(found, dict) else {}


def parse(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: It is not valid, or too large, with its aliases expanded.
        RecursionError: It is nested too deeply.
    """
    try:
        if len(text) > MAX_SIZE or expanded_size(yaml.compose(text, yaml.SafeLoader), {}) > MAX_EXPANDED:
            raise ValueError("too large")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error


def expanded_size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """The number of nodes below one of a YAML document with its aliases expanded; infinite if it contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(expanded_size(part, known) for part in inner)
    return known[id(node)]


def dump(values: dict[str, Any]) -> str:
    """Format values as YAML, in their order."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=200)


def write(file: Path, text: str) -> None:
    """Write a file, in a new folder if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.lstrip("\n"))


def with_references(text: str, constants: list[str]) -> str:
    """Rewrite references to renamed groups, Hydra's values, and keys of the main configuration."""
    text = re.sub(r"^#\s*@package.*\n", "", text, flags=re.M)
    for pattern, replacement in REFERENCES.items():
        text = re.sub(pattern, replacement, text)
    for key in constants:
        text = re.sub(rf"\$\{{{re.escape(key)}(?=[.}}])", f"${{constants.{key}", text)
    return text


def entries(values: dict[str, Any], group: str) -> list[tuple[str, str]]:
    """The group and option of each entry of a defaults list, without those that have no meaning here; of ``group``."""
    found = []
    for entry in values.get("defaults") or []:
        key, option = next(iter(entry.items())) if isinstance(entry, dict) else (group, entry)
        name = re.sub(r"(override|optional)\s+", "", str(key)).strip("/").partition("@")[0]
        if option == "_self_" or name.partition("/")[0] in NOT_USED:
            continue
        value = "null" if option is None else str(option).removesuffix(".yaml")
        found.append((value, "") if name == group and not isinstance(entry, dict) else (GROUPS.get(name, name), value))
    return found


def with_defaults(text: str, chosen: list[tuple[str, str]], group: str) -> str:
    """Replace the defaults list of an option by the names of the options of its group from which it inherits."""
    names = [name for name, option in chosen if not option]
    body = without(text, "defaults")
    return f"defaults: [{', '.join(names)}]\n{body}" if names else body


def without(text: str, *keys: str) -> str:
    """Remove top-level keys from YAML text, so that comments of the others stay."""
    for key in keys:
        text = re.sub(rf"^{re.escape(key)}:.*\n?(?:[ \t-].*\n?|\n(?=[ \t-]))*", "", text, flags=re.M)
    return text


def main_file(text: str, constants: list[str], own: list[str]) -> str:
    """Convert ``train.yaml``: it selects the options, and has the settings of the run as a whole."""
    values = parse(text)
    chosen = {group: option for group, option in entries(values, "") if group in OPTIONS}
    chosen |= {"logger": "null"} if "logger" not in chosen else {}
    lines = [f"  {group}: {option}" for group, option in chosen.items()]
    lines += ["  constants: default"] if constants else []
    text = without(text, "defaults", *own, *(["seed"] if values.get("seed") is None else []))
    return "defaults:\n" + "\n".join(lines) + "\n" + text


def experiment_file(text: str, layer: str, own: list[str], constants: list[str]) -> str:
    """Convert an experiment or a preset for debugging: what it selects, renamed groups, and its callbacks."""
    values = parse(text) or {}
    lines = [f"  {group}: {option}" for group, option in entries(values, layer) if option]
    parents = [name for name, option in entries(values, layer) if not option]
    lines += [f"  {layer}: [{', '.join(parents)}]"] if parents else []
    lines += [f"  {GROUPS.get(key, key)}: null" for key in ("callbacks", "logger") if values.get(key, "") is None]
    moved = {key: values[key] for key in constants if key in values}
    unset = [key for key in OPTIONS if values.get(key, "") is None]
    text = without(text, "defaults", "callbacks", *NOT_USED, *own, *unset)
    text = re.sub(r"^(model|datamodule):", lambda match: f"{GROUPS[match[1]]}:", text, flags=re.M)
    if isinstance(values.get("callbacks"), dict):
        text += "\n" + dump({"callback": callbacks(values["callbacks"])})
    text += "\n" + dump({"constants": moved}) if moved else ""
    return ("defaults:\n" + "\n".join(lines) + "\n" if lines else "") + text


def callbacks(values: dict[str, Any]) -> dict[str, Any]:
    """Convert callbacks: that of the best checkpoint is ``best`` here, and the progress bar is built in."""
    found: dict[str, Any] = {}
    for name, settings in values.items():
        target = str((settings or {}).get("_target_", ""))
        if name == "model_checkpoint" or target.endswith(".ModelCheckpoint"):
            kept = {key: settings[key] for key in ("monitor", "mode", "save_top_k") if (settings or {}).get(key)}
            found["best"] = kept if settings else None
        elif not (target.endswith("ProgressBar") or name in ("rich_progress_bar", "tqdm_progress_bar")):
            found[name] = settings
    return {name: settings for name, settings in found.items() if settings != {}}


def callback_file(text: str, name: str, included: set[str]) -> str:
    """Convert an option of callbacks; it adds to the built-in ones, unless another option includes it."""
    values = parse(text) or {}
    names = [inherited for inherited, option in entries(values, "callbacks") if not option]
    names = names if name in included else ["default", *names]
    kept = callbacks({key: value for key, value in values.items() if key != "defaults"})
    return dump(({"defaults": names} if names else {}) | kept)


def trainer_file(text: str) -> str:
    """Convert an option of the trainer: what other settings set is removed, and checkpoints are written atomically."""
    text = without(text, "default_root_dir", "logger", "callbacks")
    is_complete = re.search(r"^_target_:", text, re.M) and not re.search(r"^plugins:", text, re.M)
    return text.rstrip("\n") + ("\n\nplugins:\n  - ${checkpoint_io}\n" if is_complete else "\n")
