"""Convert configuration files of Lightning CLI into experiments."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from boltcutter.config.errors import ConfigError
from boltcutter_scaffold.foreign import with_targets
from boltcutter_scaffold.port_lht import Rows, dump, read, write

SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
SET_ELSEWHERE = ("default_root_dir", "logger", "callbacks")
TASK = "boltcutter_scaffold.configured.with_optimizer"


def config_files(folder: Path) -> list[Path]:
    """The configuration files of Lightning CLI in a folder and its folders of configuration."""
    files = [*folder.glob("*.y*ml"), *(folder / "configs").rglob("*.y*ml"), *(folder / "config").rglob("*.y*ml")]
    return sorted(file for file in files if {"model", "trainer"} & unnested(read(file)).keys())


def entry_script(folder: Path) -> Path | None:
    """The script that calls Lightning CLI."""
    scripts = [*sorted(folder.glob("*.py")), *sorted(folder.glob("src/**/*.py"))]
    found = (file for file in scripts if file.is_file() and re.search(r"CLI\(", file.read_text(errors="replace")))
    return next(found, None)


def convert(source: Path, target: Path) -> Rows:
    """Write an experiment for each configuration file, and return what became of each file.

    Raises:
        ConfigError: A class is given neither by a file nor by the script, or a file is not valid YAML.
    """
    script = entry_script(source)
    classes, links = read_script(script, source) if script else ({}, [])
    rows: Rows = []
    for file in config_files(source):
        experiment, note = convert_file(unnested(read(file)), classes, links, file)
        write(target / "experiment" / f"{file.stem}.yaml", dump(experiment))
        rows.append((str(file.relative_to(source)), f"configs/experiment/{file.stem}.yaml", note))
    write(target / "train.yaml", dump({"defaults": {"callback": "default", "logger": "csv"}}))
    for name in ("data", "task"):
        write(target / name / "imported.yaml", f"# Set by an experiment: {name} of Lightning CLI.\n")
    trainer = {"_target_": "lightning.pytorch.Trainer", "plugins": ["${checkpoint_io}"]}
    write(target / "trainer" / "imported.yaml", dump(trainer))
    return rows


def unnested(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of the subcommand ``fit``, if a file has them below it."""
    return values["fit"] if isinstance(values.get("fit"), dict) else values


def read_script(script: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    """The dotted paths of the model and data class that a script passes to Lightning CLI, and what it links to."""
    tree = ast.parse(script.read_text())
    own = ".".join(script.relative_to(folder).with_suffix("").parts)
    places = {node.name: f"{own}.{node.name}" for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            places |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            places |= {alias.asname or alias.name: alias.name for alias in node.names}
    classes: dict[str, str] = {}
    links: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "link_arguments" and all(isinstance(argument, ast.Constant) for argument in node.args[:2]):
            links.append(ast.literal_eval(node.args[1]))
        elif name.endswith("CLI"):
            given = dict(zip(("model", "data"), node.args, strict=False))
            given |= {str(k.arg).removesuffix("_class").replace("datamodule", "data"): k.value for k in node.keywords}
            for key in ("model", "data"):
                if isinstance(given.get(key), ast.Name | ast.Attribute):
                    first, dot, rest = ast.unparse(given[key]).partition(".")
                    classes[key] = f"{places.get(first, first)}{dot}{rest}"
    return classes, links


def convert_file(
    values: dict[str, Any], classes: dict[str, str], links: list[str], file: Path
) -> tuple[dict[str, Any], str]:
    """One file as an experiment, and a note about what is left to do by hand."""
    found: dict[str, Any] = {key: with_targets(values[key]) for key in SECTIONS if values.get(key) is not None}
    for key in ("model", "data"):
        if key in classes and "_target_" not in found.get(key, {}):
            found[key] = {"_target_": classes[key], **found.get(key, {})}
    if "_target_" not in found.get("model", {}):
        raise ConfigError(f"{file}: model has no class_path, and no script names its class; add class_path to the file")
    trainer = found.get("trainer", {})
    experiment: dict[str, Any] = {"defaults": {"data": "imported", "task": "imported", "trainer": "imported"}}
    if "data" not in found:
        experiment["defaults"]["data"] = None
    seed = values.get("seed_everything")
    experiment |= {"seed": int(seed)} if type(seed) is int else {}
    task = found["model"]
    if "optimizer" in found or "lr_scheduler" in found:
        task = {"_target_": TASK, "module": task, "optimizer": None, "scheduler": None}
        for key, ours in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
            task[ours] = {**found[key], "_partial_": True} if key in found else None
    experiment["task"] = task
    experiment |= {"data": found["data"]} if "data" in found else {}
    notes = [f"link_arguments to {end}: set it by hand" for end in links]
    experiment["trainer"] = {key: value for key, value in trainer.items() if key not in SET_ELSEWHERE}
    for key, group in (("callbacks", "callback"), ("logger", "logger")):
        made = trainer.get(key) if isinstance(trainer.get(key), list) else [trainer.get(key)]
        named = {_snake(entry["_target_"]): entry for entry in made if isinstance(entry, dict) and "_target_" in entry}
        if best := named.pop("model_checkpoint", None):
            kept = {name: best[name] for name in ("monitor", "mode", "save_top_k") if best.get(name)}
            named |= {"best": kept} if kept else {}
            notes.append("ModelCheckpoint is callback.best")
        named = {name: entry for name, entry in named.items() if not name.endswith("progress_bar")}
        experiment |= {group: named} if named else {}
    if values.get("ckpt_path"):
        notes.append(f"ckpt_path={values['ckpt_path']}: use resume=<folder of a run>")
    return experiment, "; ".join(notes)


def _snake(target: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", target.rpartition(".")[2]).lower()
