"""Convert configuration files of Lightning CLI into experiments."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter.assembly.data_values import node_of
from boltcutter.config.annotations import matches
from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import canonical, locate, parameters
from boltcutter.scaffold.port_lht import GIVEN_BY_RUN, TRAINER, by_class, callbacks, trainer_arguments
from boltcutter.scaffold.source_code import IGNORED, NotConstantError, SourceFile, parameter, source_files
from boltcutter.scaffold.yaml_text import Rows, dump, read_yaml, write_yaml

SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
CONFIGURED = "boltcutter.scaffold.configured.with_optimizer"
LIBRARY_PLACES = {  # where Lightning CLI finds a class that is given by its name only
    "trainer.callbacks": ("lightning.pytorch.callbacks",),
    "trainer.logger": ("lightning.pytorch.loggers",),
    "trainer.profiler": ("lightning.pytorch.profilers",),
    "trainer.strategy": ("lightning.pytorch.strategies",),
    "optimizer": ("torch.optim",),
    "lr_scheduler": ("lightning.pytorch.cli", "torch.optim.lr_scheduler"),
}
DOCUMENTED = ("*.md", "*.rst", "*.txt", "*.sh", "*.slurm", "Makefile", "justfile", "Justfile", "*.toml")
CONFIG = re.compile(r"(?:--config|-c)[ =]+(\S+\.ya?ml)")
MAKER = re.compile(r"(Optimizer|Scheduler)Callable|Callable\[.*(Optimizer|Scheduler)\w*\]")  # an annotation
METHOD = re.compile(r"(before|after)_(instantiate_classes|fit)|instantiate_trainer")  # that a class of a CLI overrides
MAX_SETS = 12  # of files that commands of the documentation name


@dataclass(frozen=True)
class Link:
    """A value that Lightning CLI copies from one setting to another.

    Args:
        source: The setting that it is read from.
        target: The setting that it is given to.
        place: Where the script says so.
        is_plain: Whether it is copied as it is, before anything is instantiated.
        is_attribute: Whether it is read from what is instantiated, as it is.
    """

    source: str
    target: str
    place: str
    is_plain: bool
    is_attribute: bool = False


@dataclass
class Cli:
    """What a script says about its configuration.

    Args:
        script: The script; None if there is none.
        classes: Dotted paths of the classes that are fixed, by the section of their arguments.
        defaults: Settings that files override.
        files: Configuration files that are read before those of the command line.
        callbacks: Sections that are arguments of a callback, which the script adds.
        links: Settings that are copied.
        has_subcommands: Whether it is called with ``fit``.
        unread: Arguments of its own, which only the script reads, and where they are added.
        unknown: Settings whose value only the program knows, and where they are.
        left_out: What the script does besides, and where.
    """

    script: SourceFile | None = None
    classes: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    callbacks: dict[str, str] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    has_subcommands: bool = True
    unread: dict[str, str] = field(default_factory=dict)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """An experiment that was written.

    Args:
        name: Its name here.
        files: The files that the original reads instead.
        subcommand: ``fit``, or nothing.
        has_optimizer: Whether optimizer and schedule are beside the module.
    """

    name: str
    files: tuple[Path, ...]
    subcommand: tuple[str, ...] = ("fit",)
    has_optimizer: bool = False

    @property
    def label(self) -> str:
        """Its files, for messages."""
        return ", ".join(file.name for file in self.files)


def config_files(folder: Path) -> list[Path]:
    """The configuration files of Lightning CLI in a folder: usually in folders of that name, else anywhere."""
    places = [folder.glob("*.y*ml"), *((folder / name).rglob("*.y*ml") for name in ("configs", "config", "examples"))]
    files = sorted({file for place in places for file in place if file.is_file()})
    if found := [file for file in files if {*SECTIONS} & unnested(read_yaml(file)).keys()]:
        return found
    other = sorted(file for file in folder.rglob("*.y*ml") if file.is_file() and not _is_hidden(file, folder))
    return [file for file in other if {"trainer", "model"} & unnested(_readable(file)).keys()]


def _is_hidden(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    return any(part.startswith(".") or part in IGNORED for part in parts)


def _readable(file: Path) -> dict[str, Any]:
    """The contents of a file of any program; nothing if it is not read as one of configuration is."""
    with suppress(ConfigError):
        return read_yaml(file)
    return {}


def entry_script(folder: Path) -> Path | None:
    """The script that calls Lightning CLI."""
    found = _find_call(folder)
    return found[0].file if found else None


def _find_call(folder: Path) -> tuple[SourceFile, ast.Call] | None:
    for source in source_files(folder, "CLI("):
        if "test" not in source.file.name:
            found = next((call for name, call in source.calls() if name.endswith("CLI") and _is_outermost(call)), None)
            if found:
                return source, found
    return None


def _is_outermost(call: ast.Call) -> bool:
    return not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Call)  # super().CLI()


def unnested(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of the subcommand ``fit``, if a file has them below it."""
    return values["fit"] if isinstance(values.get("fit"), dict) else values


def read_script(folder: Path) -> Cli:
    """Read the script that calls Lightning CLI.

    Raises:
        ConfigError: It is not valid Python.
    """
    found = _find_call(folder)
    if found is None:
        return Cli()
    script, call = found
    cli = Cli(script)
    given = dict(zip(("model_class", "datamodule_class"), call.args, strict=False))
    given |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    for name, section in (("model_class", "model"), ("datamodule_class", "data")):
        path = script.path(given[name]) if name in given else None
        if path and ast.unparse(given.get(f"subclass_mode_{section}", ast.Constant(False))) != "True":
            cli.classes[section] = importable(path, script)
    cli.has_subcommands = ast.unparse(given.get("run", ast.Constant(True))) != "False"
    for name, key in (("trainer_defaults", "trainer"), ("seed_everything_default", "seed_everything")):
        if name in given:
            _set(cli, key, given[name], script)
    if "trainer_class" in given:
        text = f"trainer_class={ast.unparse(given['trainer_class'])}: left out; set trainer._target_"
        cli.left_out.append((script.place(given["trainer_class"]), text))
    for source in source_files(folder, "CLI)"):
        for node in (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)):
            if any(ast.unparse(base).endswith("CLI") for base in node.bases):
                methods = [
                    each for each in node.body if isinstance(each, ast.FunctionDef) and METHOD.fullmatch(each.name)
                ]
                note = "left out; write it as a callback, or in the module"
                cli.left_out += [(source.place(each), f"{each.name}: {note}") for each in methods]
    if "parser_kwargs" in given:
        texts = [n.value for n in ast.walk(given["parser_kwargs"]) if isinstance(n, ast.Constant)]
        files = [folder / text for text in texts if isinstance(text, str) and text.endswith((".yaml", ".yml"))]
        cli.files += [file for file in files if file.is_file()]
    for source in source_files(folder, "add_arguments_to_parser"):
        _read_parser(source, cli)
    return cli


def importable(path: str, script: SourceFile) -> str:
    """The dotted path under which a class is found from the root, where the script finds it beside itself."""
    first = path.partition(".")[0]
    place = script.file.parent
    is_beside = place != script.root and ((place / f"{first}.py").is_file() or (place / first).is_dir())
    if is_beside and not any((folder / first).with_suffix(end).exists() for folder in
                             (script.root, script.root / "src") for end in ("", ".py")):  # fmt: skip
        return ".".join([*place.relative_to(script.root).parts, path])
    return path


def _read_parser(source: SourceFile, cli: Cli) -> None:
    """Read the arguments that a script adds to the parser."""
    for name, call in source.calls():
        given = {str(keyword.arg): keyword.value for keyword in call.keywords}
        if name == "link_arguments" and len(call.args) + len(given) >= 2:
            ends = [*call.args, *(given[key] for key in ("source", "target") if key in given)][:2]
            is_whole = "compute_fn" not in given and len(call.args) < 3 and isinstance(ends[0], ast.Constant)
            when = ast.unparse(given.get("apply_on", ast.Constant("parse")))
            text = [str(end.value) if isinstance(end, ast.Constant) else ast.unparse(end) for end in ends]
            moments = (is_whole and when == "'parse'", is_whole and when == "'instantiate'")
            cli.links.append(Link(text[0], text[1], source.place(call), *moments))
        elif name == "set_defaults":
            for node in call.args:
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant):
                            _set(cli, str(key.value), value, source)
            for argument, expression in given.items():
                _set(cli, argument, expression, source)
        elif name == "add_lightning_class_args" and call.args and (target := source.path(call.args[0])):
            nested = call.args[1] if len(call.args) > 1 else given.get("nested_key")
            section = str(nested.value) if isinstance(nested, ast.Constant) else ""
            (cli.classes if section in SECTIONS else cli.callbacks)[section] = target
        elif name in ("add_optimizer_args", "add_lr_scheduler_args") and call.args:
            section = "optimizer" if name == "add_optimizer_args" else "lr_scheduler"
            if "link_to" in given or "nested_key" in given:
                cli.unknown.append((source.place(call), f"{section} of another name"))
            elif target := source.path(call.args[0]):
                cli.classes[section] = target
        elif name == "add_argument" and call.args and isinstance(call.args[0], ast.Constant):
            cli.unread[str(call.args[0].value).lstrip("-")] = source.place(call)


def _set(cli: Cli, key: str, node: ast.expr, source: SourceFile) -> None:
    """Set a default to the value of an expression, key by key where only some are known."""
    if isinstance(node, ast.Dict):
        for name, value in zip(node.keys, node.values, strict=True):
            if isinstance(name, ast.Constant):
                _set(cli, f"{key}.{name.value!s}", value, source)
        return
    try:
        nested: Any = source.value(node)
    except NotConstantError:
        cli.unknown.append((source.place(node), key))
        return
    for part in reversed(key.split(".")):
        nested = {part: nested}
    cli.defaults = combine(cli.defaults, nested)


def combine(below: Any, above: Any) -> Any:
    """Merge settings as Lightning CLI does: another ``class_path`` drops the arguments below; ``key+`` appends."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "class_path" in above and above["class_path"] != below.get("class_path", above["class_path"]):
        return above
    out = dict(below)
    for key, value in above.items():
        if key.endswith("+"):
            lists = [each if isinstance(each, list) else [each] for each in (out.get(key[:-1]) or [], value)]
            out[key[:-1]] = [*lists[0], *lists[1]]
        else:
            out[key] = combine(out.get(key), value)
    return out


def convert(source: Path, target: Path, rows: Rows, layers: list[Path] | None = None) -> list[Experiment]:
    """Write an experiment for each configuration file, or set of files that are read together.

    Args:
        source: Folder of the project.
        target: Folder of the configuration that is written.
        rows: To which what became of each file is added.
        layers: The files of one training; by default those that the commands of the documentation name together, and
            each other file alone.

    Raises:
        ConfigError: A class is given neither by a file nor by the script, or a file is not valid YAML.
    """
    cli = read_script(source)
    rows += [(place, "–", f"{what}: only the program knows its value; set it by hand") for place, what in cli.unknown]
    rows += [(place, "–", text) for place, text in cli.left_out]
    files = [] if layers else config_files(source)  # of which others may be for other programs
    sets = [tuple(layers)] if layers else documented_sets(source, files)
    together = {file for each in sets for file in each} | {*cli.files}
    sets += [] if layers else [(file,) for file in files if file not in together]
    if not sets and cli.files:
        sets = [()]
    made, problems = list[Experiment](), list[tuple[tuple[Path, ...], ConfigError]]()
    for each in sets:
        read_files = (*cli.files, *(file for file in each if file not in cli.files))
        name = "-".join(file.stem for file in each) or cli.files[0].stem
        try:
            experiment, notes = Converter(source, cli, read_files).convert()
        except ConfigError as error:
            problems.append((read_files, error))
            continue
        place = _joined(read_files, source)
        write_yaml(target / "experiment" / f"{name}.yaml", dump(experiment))
        rows.append((place, f"configs/experiment/{name}.yaml", ""))
        rows += [(what, "–", note) for what, note in notes]
        subcommand = ("fit",) if cli.has_subcommands else ()
        is_beside = experiment["task"].get("_target_") == CONFIGURED
        made.append(Experiment(name, each or tuple(cli.files), subcommand, is_beside))
    if not made and problems:
        raise problems[0][1]
    rows += [(_joined(parts, source), "–", f"left out: {problem}") for parts, problem in problems]
    write_yaml(target / "train.yaml", dump({"defaults": {"callback": "default", "logger": "csv"}}))
    for name in ("data", "task"):
        write_yaml(target / name / "imported.yaml", f"# Set by an experiment: {name} of Lightning CLI.\n")
    trainer = {"_target_": TRAINER, "plugins": ["${checkpoint_io}"]}
    write_yaml(target / "trainer" / "imported.yaml", dump(trainer))
    return made


def _shown(file: Path, source: Path) -> str:
    return str(file.relative_to(source) if file.is_relative_to(source) else file)


def _joined(files: tuple[Path, ...], source: Path) -> str:
    return " + ".join(_shown(file, source) for file in files)


def documented_sets(source: Path, files: list[Path]) -> list[tuple[Path, ...]]:
    """The sets of two or more configuration files that commands in the documentation and scripts read together."""
    found = dict[tuple[Path, ...], None]()
    documents = [file for pattern in DOCUMENTED for file in source.glob(pattern)]
    documents += [file for pattern in DOCUMENTED for file in source.glob(f"[!.]*/{pattern}")]
    for document in sorted(file for file in {*documents} if file.is_file() and file.stat().st_size < 1 << 20):
        text = re.sub(r"\\\s*\n\s*", " ", document.read_text(errors="replace"))
        for line in text.splitlines():
            names = CONFIG.findall(line) if len(line) < 4000 else []
            paths = [source / name.strip("'\"`") for name in names]
            known = tuple(path for path in paths if path in files)
            if len(known) > 1 and len(known) == len(paths):
                found[known] = None
    return list(found)[:MAX_SETS]


def renamed(override: str, experiment: Experiment) -> str:
    """An override of Lightning CLI, without its dashes, as it is written here."""
    key, equals, text = override.partition("=")
    first, dot, rest = key.replace(".init_args.", ".").partition(".")
    names = {"model": "task.module" if experiment.has_optimizer else "task", "seed_everything": "seed"}
    if experiment.has_optimizer:
        names |= {"optimizer": "task.optimizer", "lr_scheduler": "task.scheduler"}
    return f"{names.get(first, first)}{dot}{rest}{equals}{text}"


class Converter:
    """Converts the files that one training reads.

    Args:
        source: Folder of the project.
        cli: What its script says.
        files: The files, the first overridden by the later ones.
    """

    def __init__(self, source: Path, cli: Cli, files: tuple[Path, ...]) -> None:
        self.source, self.cli, self.files = source, cli, files
        self.notes = list[tuple[str, str]]()

    def _note(self, key: str, text: str) -> None:
        self.notes.append((f"{_joined(self.files, self.source)}: {key}", text))

    def convert(self) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """The experiment, and the place of what was left out with the reason.

        Raises:
            ConfigError: The class of the module is not given.
        """
        values = self.cli.defaults
        for file in self.files:
            values = combine(values, self._included(unnested(read_yaml(file)), file))
        found = {key: self._section(values[key], key) for key in SECTIONS if values.get(key) is not None}
        for key, target in self.cli.classes.items():
            if key in ("model", "data") or key in found or (key == "optimizer"):
                given = found.get(key, {})
                found[key] = given if "_target_" in given else {"_target_": target, **given}
        if "_target_" not in found.get("model", {}):
            names = ", ".join(_shown(file, self.source) for file in self.files)
            raise ConfigError(
                f"{names}: model has no class_path, and no script names its class; add it, or give the files that one "
                "training reads, as in --config base.yaml --config model.yaml"
            )
        experiment: dict[str, Any] = {"defaults": {"data": "imported", "task": "imported", "trainer": "imported"}}
        if "data" not in found:
            experiment["defaults"]["data"] = None
        experiment |= self._seed(values)
        task, module = found["model"], "task"
        if "optimizer" in found or "lr_scheduler" in found:
            module = "task.module"
            task = {"_target_": CONFIGURED, "module": task, "optimizer": None, "scheduler": None}
            for key, ours in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
                task[ours] = {**found[key], "_partial_": True} if key in found else None
        experiment["task"] = task
        experiment |= {"data": found["data"]} if "data" in found else {}
        experiment["trainer"] = self._trainer(found.get("trainer", {}))
        experiment |= self._groups(found.get("trainer", {}), values)
        for link in self.cli.links:
            self._apply_link(link, experiment, module)
        self._note_unread(values)
        return _with_references(experiment, module), self.notes

    def _included(self, values: dict[str, Any], file: Path) -> dict[str, Any]:
        """Settings in which a section may be the path of another file."""
        out = {}
        for key, value in values.items():
            if isinstance(value, str) and value.endswith((".yaml", ".yml")):
                places = [place for place in (file.parent / value, self.source / value) if place.is_file()]
                value = unnested(read_yaml(places[0])).get(key, unnested(read_yaml(places[0]))) if places else value
            out[key] = value
        return out

    def _seed(self, values: dict[str, Any]) -> dict[str, Any]:
        seed = values.get("seed_everything")
        return {"seed": int(seed)} if type(seed) is int else {}

    def _section(self, value: Any, place: str) -> Any:
        """Convert ``class_path`` and ``init_args`` to ``_target_`` and arguments, at every depth."""
        if isinstance(value, list):
            return [self._section(each, place) for each in value]
        if isinstance(value, str) and place in LIBRARY_PLACES and place != "trainer.strategy":
            path = self._class(value, place)
            return {"_target_": path} if path else value
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("class_path"), str):
            path = self._class(value["class_path"], place) or value["class_path"]
            rest = {key: inner for key, inner in value.items() if key not in ("class_path", "init_args", "dict_kwargs")}
            arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {}), **rest}
            return {"_target_": path, **self._arguments(path, self._section(arguments, ""))}
        values = value if "init_args" not in value else {**value.pop("init_args"), **value}
        below = "trainer." if place == "trainer" else "-"  # keys of the trainer have places of their own
        return {key: self._section(inner, f"{below}{key}") for key, inner in values.items()}

    def _arguments(self, path: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a class, where those that it calls itself, such as an optimizer, are not called before."""
        for key, value in arguments.items():
            if isinstance(value, dict) and "_target_" in value:
                known = parameter(self.source, path.rpartition(".")[2], key)
                annotation = ast.unparse(known.annotation) if isinstance(known, ast.arg) and known.annotation else ""
                if value["_target_"].startswith("torch.optim.") or MAKER.search(annotation):
                    value["_partial_"] = True
        return arguments

    def _class(self, name: str, place: str) -> str | None:
        """The dotted path of a class that may be given by its name only."""
        if "." in name:
            return name
        if self.cli.script and name in self.cli.script.names:
            return importable(self.cli.script.names[name], self.cli.script)
        for source in source_files(self.source, f"class {name}"):
            if source.names.get(name) == f"{source.module}.{name}":
                return f"{source.module}.{name}"
        for module in (*LIBRARY_PLACES.get(place, ()), "torch.nn"):
            if find_spec(module) and hasattr(__import__(module, fromlist=[name]), name):
                return f"{module}.{name}"
        return None

    def _trainer(self, trainer: dict[str, Any]) -> dict[str, Any]:
        kept, notes = trainer_arguments(trainer)
        for key, note in notes:
            self._note(f"trainer.{key}", note)
        if kept.get("plugins"):
            kept["plugins"] = [*(kept["plugins"] if isinstance(kept["plugins"], list) else [kept["plugins"]])]
            kept["plugins"].append("${checkpoint_io}")
        if kept.get("default_root_dir"):
            self._note("trainer.default_root_dir", "left out; runs=<folder> is the parent folder of all runs")
        return {k: v for k, v in kept.items() if k not in GIVEN_BY_RUN and not (v is None and k == "plugins")}

    def _groups(self, trainer: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Callbacks and loggers by name."""
        listed = [*_listed(trainer.get("callbacks"))]
        for key, target in self.cli.callbacks.items():
            listed.append({"_target_": target, **(_get(values, key.split(".")) or {})})
        named = by_class(listed)
        saving = [name for name, entry in named.items() if entry["_target_"].endswith(".ModelCheckpoint")]
        best = next((name for name in saving if named[name].get("monitor") is not None), None)
        kept, notes = callbacks(named, {name: "best" if name == best else name for name in saving})
        for key, _, text in (note.partition(": ") for note in notes):
            self._note(f"trainer.callbacks.{key}", text or key)
        loggers = by_class(_listed(trainer.get("logger")))
        for name, entry in loggers.items():
            for key in _refused_nulls(entry):
                del entry[key]
                self._note(f"trainer.logger.{name}.{key}", "left out: null, which is not of its type")
        return ({"callback": kept} if kept else {}) | ({"logger": loggers} if loggers else {})

    def _apply_link(self, link: Link, experiment: dict[str, Any], module: str) -> None:
        """Let the target of a link refer to its source, if that is a setting."""
        source, target = (_path(text, module) for text in (link.source, link.target))
        known = source[:1] in (["seed"], ["trainer"], ["data"]) or source[: module.count(".") + 1] == module.split(".")
        is_of_data = link.is_attribute and source[0] == "data" and len(source) > 1 and target[0] == "task"
        if not (is_of_data or (link.is_plain and known)) or target[0] not in ("task", "data"):
            text = f"link_arguments to {link.target}: set {'.'.join(target)} by hand"
            self.notes.append((link.place, text))
            return
        owner = str(_get(experiment, [*target[:-1], "_target_"]) or "").rpartition(".")[2]
        if owner and parameter(self.source, owner, target[-1]) is False:  # Lightning CLI ignores such a link
            note = f"link_arguments to {link.target}: left out, as {owner} takes no such argument"
            self.notes.append((link.place, note))
            return
        if is_of_data:
            cls = str(_get(experiment, ["data", "_target_"]) or "").rpartition(".")[2]
            _put(experiment, target, of_data(self.source, cls, source[1:]))
            return
        if source[0] == "data" and not _has(experiment, source):
            for each in source_files(self.source, "class "):
                defaults = each.defaults(str(experiment.get("data", {}).get("_target_")))
                if source[-1] in defaults:
                    _put(experiment, source, defaults[source[-1]])
        if _has(experiment, source) or source[0] in ("seed", "trainer"):
            _put(experiment, target, "${" + ".".join(source) + "}")
        else:
            text = f"link_arguments to {link.target}: {link.source} has no value here; set {'.'.join(target)} by hand"
            self.notes.append((link.place, text))

    def _note_unread(self, values: dict[str, Any]) -> None:
        if values.get("ckpt_path"):
            self._note("ckpt_path", f"left out: {values['ckpt_path']}; use resume=<folder of a run>")
        read_keys = {*SECTIONS, *self.cli.callbacks, "seed_everything", "ckpt_path", "fit"}
        for key in (key for key in values if key not in read_keys):
            self._note(key, "left out, as nothing here reads it")


def of_data(root: Path, cls: str, path: list[str]) -> Any:
    """The setting whose value is an attribute of the data module, which may differ from a setting of that name.

    Args:
        root: Folder of the project.
        cls: Class of the data module, without its module.
        path: The attribute, and attributes of it.
    """
    is_setting = parameter(root, cls, path[0]) is not False
    return node_of(".".join(path)) if is_setting or len(path) > 1 else f"${{data.{path[0]}}}"


def _listed(value: Any) -> list[dict[str, Any]]:
    made = value if isinstance(value, list) else [value]
    return [entry for entry in made if isinstance(entry, dict) and "_target_" in entry]


def _refused_nulls(entry: dict[str, Any]) -> list[str]:
    """The optional arguments of one of Lightning's loggers that are null against their type, which its CLI allows."""
    if not canonical(entry["_target_"]).startswith("lightning."):
        return []
    known = parameters(locate(entry["_target_"]))
    given = [known[key] for key, value in entry.items() if value is None and key in known]
    return [each.name for each in given if each.default is not each.empty and not matches(None, each.annotation)]


def _path(text: str, module: str) -> list[str]:
    """A setting of Lightning CLI as a path here."""
    first, *rest = [part for part in text.split(".") if part != "init_args"]
    return [*{"model": module, "seed_everything": "seed"}.get(first, first).split("."), *rest]


def _has(values: Any, path: list[str]) -> bool:
    return path[-1] in (_get(values, path[:-1]) or {})


def _get(values: Any, path: list[str]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def _with_references(experiment: dict[str, Any], module: str) -> dict[str, Any]:
    """Rewrite references between settings, which the parser of OmegaConf allows."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rewritten(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [rewritten(inner) for inner in value]
        if not isinstance(value, str):
            return value
        return re.sub(r"\$\{((?:model|data|trainer|seed_everything)\b[\w.]*)\}", _reference, value)

    def _reference(found: re.Match[str]) -> str:
        return "${" + ".".join(_path(found[1], module)) + "}"

    return {key: rewritten(value) for key, value in experiment.items()}
