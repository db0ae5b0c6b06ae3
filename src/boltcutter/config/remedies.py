"""What is wrong with an override or a choice of options, and what corrects it: computed once it has been refused.

``compose`` decides that something is wrong; here is what the user is told. Imports are as light as
those of ``compose``.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from boltcutter.config import foreign
from boltcutter.config.errors import Mistake, hint, suggestion
from boltcutter.config.values import is_map, paths, resolve_reference
from boltcutter.project import Project


def no_override(override: str, *, is_key: bool) -> Mistake:
    """An argument that is neither ``group=option`` nor ``key=value``; ``is_key``: what is before = can be a key."""
    key = override.partition("=")[0]
    remedy = f"write {key}" if is_key else "write group=option, key=value, +key=value or ~key"
    if key.endswith(".yaml"):
        remedy = f"write experiment={key}"
    return Mistake.of(override or repr(override), "not a valid override", remedy, kind="invalid_override")


def choice_is_no_setting(key: str, text: str) -> Mistake:
    """A value for the names of the chosen options, which follow from the choice."""
    choice = f"{key.lstrip('+~').partition('.')[2] or 'model'}={text if '.' in key else 'mlp'}"
    return Mistake.of(key, "filled in from the chosen options", f"write {choice}", value=text)


def no_such_group(project: Project, group: str) -> Mistake:
    """An unknown group, with the known ones."""
    known = list(project.groups())
    problem = f"no such group{hint(group, known)} (there are: {', '.join(known)})"
    return Mistake.of(group, problem, kind="unknown_option")


def no_such_option(project: Project, group: str, option: str) -> Mistake:
    """An option, a name or a file, that a group has not, with those that it has."""
    stem = Path(option).stem if option.endswith(".yaml") else option.rpartition("/")[2]
    near = hint(stem, project.groups().get(group, {}))
    if group == "model" and stem in project.groups().get("task", {}):  # as others call their LightningModule
        near = f"; use task={stem}"
    if replacement := foreign.OPTIONS.get(f"{group}={stem}"):
        near = f"; use {replacement}"
    others = (folder / group / f"{option}.yml" for folder in project.config_dirs)
    if other := next((file for file in others if file.is_file()), None):
        near = f"; rename {other} to {option}.yaml"
    if option == "???":
        return Mistake.of(group, f"not set; give {group}=<option>{project.list_options(group)}", kind="missing_value")
    problem = f"no such option{near}{project.list_options(group)}"
    return Mistake.of(group, problem, value=option, kind="unknown_option")


def no_such_key(project: Project, cfg: DictConfig, path: str, text: str, *, parent: Any, is_deleted: bool) -> Mistake:
    """A key that is set, or deleted, where there is none.

    Args:
        project: Whose options are suggested.
        cfg: The configuration.
        path: Dotted key, with references resolved.
        text: The value that it was to get.
        parent: The node that has no such key; None if there is none.
        is_deleted: It was to be deleted.
    """
    above, _, leaf = path.rpartition(".")
    everything = list(paths(cfg))
    alike = difflib.get_close_matches(path, [p for p in everything if p.endswith(f".{leaf}")], 1, cutoff=0)
    known = [p for p in everything if "." in p or not above]
    remedy = f"did you mean {alike[0]}?" if alike else suggestion(path, known)
    group, _, name = above.partition(".")
    if group == "callback" and name in project.groups().get(group, {}):
        remedy = f"select it by callback=[default,{name}]"
    ours = resolve_reference(cfg, re.sub(r"^model\b", "task", path))  # others keep their LightningModule in model
    if theirs := foreign.replacement(path, text) or (f"{ours}={text}" if ours in everything else None):
        remedy = f"use {theirs}"
    elif told := foreign.advice(path):
        remedy = told
    if not remedy:
        remedy = f"+{path}=… adds it" if is_map(parent) and above and not is_deleted else "--print shows all"
    return Mistake.of(path, "no such key", remedy, kind="unknown_key")


def stored_secret(path: str, what: str) -> Mistake:
    """A secret that would be stored with the run; ``what`` it is."""
    name = re.sub(r"\W", "_", path.rpartition(".")[2]).upper()
    remedy = f"write '{path}=${{oc.env:{name}}}' and set {name}"
    if what.startswith("the value of "):  # in a line of shell
        remedy = f"export {what.split()[-1]} where you start, so that runs and jobs inherit it"
    return Mistake.of(path, f"{what} must not be stored with the run", remedy, kind="secret")
