"""Convert the configuration of a project that uses Hydra, such as one made from lightning-hydra-template."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from boltcutter.config.annotations import matches
from boltcutter.config.compose import OVERLAYS
from boltcutter.config.errors import ConfigError
from boltcutter.config.foreign import with_targets
from boltcutter.scaffold.hydra_defaults import entries, expand_file, is_plain, merge_all, merged, place_of
from boltcutter.scaffold.source_code import SourceFile, source_files
from boltcutter.scaffold.yaml_text import Rows, dump, parse, read_yaml, replace_all, without, write_yaml

NOT_USED = {
    "extras": "left out: nothing reads it",
    "hparams_search": "left out: write the space in configs/search, see docs/search.md",
    "hydra": "left out: each run has a folder, a log and a record of its own",
    "local": "left out: write configs/local.yaml",
}
SETTINGS = ("seed", "test", "tags", "name")  # keys that have the same meaning here
CONFIG_NAMES = ("cfg", "config", "conf", "args", "hparams")  # what scripts call the configuration
ROLES = ("task", "data", "trainer", "callback", "logger")
NO_TARGET = "left out, as its entries have no _target_"
LISTED = ("callback", "logger")  # objects that have names here, and may be in a list there
USUAL = {  # what the group of each is called, where the script does not say it
    "task": ("model", "module", "system", "lit_module", "lightning_module", "pl_module", "task"),
    "data": ("data", "datamodule", "data_module", "dataset", "dm"),
    "trainer": ("trainer",),
    "callback": ("callbacks", "callback"),
    "logger": ("logger", "loggers"),
}
NOT_TRAINING = ("eval", "test", "predict", "infer", "export")  # words in the names of other scripts and main files
MAIN_FILES = ("train.yaml", "config.yaml", "main.yaml", "default.yaml")
SCALAR = r"(?:\$\{[^{}\n]*\}|[^\n#{},\[\]])*"  # beside a reference, also in a list of one line
HYDRA_REFERENCES = {
    rf"(?<=: ){SCALAR}\$\{{now:[^{{}}\n]*\}}{SCALAR}": "${folder}",  # one for each run
    r"\$\{hydra[:.]\s*(runtime\.output_dir|run\.dir|sweep\.dir)\}": "${folder}",
    r"\$\{hydra[:.]\s*(runtime\.cwd|runtime\.original_cwd)\}": ".",
    r"\$\{hydra[:.]\s*job\.name\}": "${name}",
    r"\$\{oc\.env:\s*PROJECT_ROOT(\s*,[^{}]*)?\}": ".",
}
GIVEN_BY_RUN = ("default_root_dir", "logger", "callbacks")  # arguments of the trainer
TURNED_OFF = {  # what callbacks of each run do, which an argument of the trainer cannot turn off
    "enable_progress_bar": "left out; callback.progress=null shows no progress",
    "enable_checkpointing": "left out; callback.best=null callback.last=null saves no checkpoints",
}
OLD_NULL = "left out, as null was the default of an older version"
TRAINER = "lightning.pytorch.Trainer"


@dataclass(frozen=True)
class Layout:
    """Where a project's configuration is, and what its groups are.

    Args:
        configs: Folder of the configuration.
        main: The main file.
        script: The script that trains; None if it was not found.
        groups: For each of this project's groups that trains here, the name that it has here, such as ``task``.
        not_recursive: Groups that the script instantiates without what is in them.
        fit: The script and its call of ``fit``, if it constructs module or data itself.
    """

    configs: Path
    main: Path
    script: Path | None = None
    groups: dict[str, str] = field(default_factory=dict)
    not_recursive: frozenset[str] = frozenset()
    fit: tuple[SourceFile, ast.Call] | None = None

    def ours(self, group: str) -> str:
        """The name of a group here."""
        return self.groups.get(group, group)


def find_layout(source: Path) -> Layout | None:
    """Find the configuration of a project; None if it has none of Hydra's form.

    Raises:
        ConfigError: A script is not valid Python.
    """
    sources = [file for file in source_files(source, "hydra") if "test" not in file.file.name]
    scripts = sorted(_scripts(sources), key=lambda found: _rank(f"{found[0].file.stem} {found[2].stem}"))
    for script, configs, main in scripts:
        is_flat = any("_target_" in section for section in read_yaml(main).values() if isinstance(section, dict))
        groups, lazily, fit = _groups(script, sources, read_yaml(main), configs)
        if fit or "defaults" in read_yaml(main) or is_flat or any(configs.glob("*/*.yaml")):
            return Layout(configs, main, script.file, groups, lazily, fit)
    for configs in (source / name for name in ("configs", "config", "conf")):
        for main in (configs / name for name in MAIN_FILES):
            if "defaults" in read_yaml(main):
                return Layout(configs, main, None, _usual_groups(read_yaml(main), configs))
    return None


def _rank(name: str) -> tuple[bool, bool]:
    """What sorts the files that train before others, by their names."""
    return "train" not in name, any(word in name for word in NOT_TRAINING)


def missing_main(source: Path) -> str | None:
    """Where a script names a configuration that is not there; None if none does."""
    for script in source_files(source, "hydra"):
        for call, folder, stem in _main_calls(script):
            return f"{script.place(call)}: hydra.main reads {folder}/{stem}.yaml, which is not there; add it"
    return None


def _main_calls(script: SourceFile) -> Iterator[tuple[ast.Call, str, str]]:
    """The calls of ``hydra.main`` with the folder and the name of the main file that each gives."""
    for name, call in script.calls():
        if name != "main" or not ast.unparse(call.func).startswith("hydra"):
            continue
        given = dict(zip(("config_path", "config_name"), call.args, strict=False))
        given |= {str(keyword.arg): keyword.value for keyword in call.keywords}
        texts = {key: _last_text(script, given[key]) for key in ("config_path", "config_name") if key in given}
        folder, stem = str(texts.get("config_path") or "."), str(texts.get("config_name", "config"))
        if folder.endswith(".yaml"):  # as before Hydra 1.0
            folder, stem = str(Path(folder).parent), Path(folder).name
        yield call, folder, stem.removesuffix(".yaml")


def _scripts(sources: list[SourceFile]) -> list[tuple[SourceFile, Path, Path]]:
    """The scripts with ``hydra.main``, with the folder and the main file of the configuration."""
    found = []
    for script in sources:
        for _, folder, stem in _main_calls(script):
            named = script.root.rglob(f"{Path(folder).name}/{stem}.yaml") if folder.startswith("/") else ()
            places = [*(base / folder for base in (script.file.parent, script.root)), *(f.parent for f in named)]
            if folder == "." and not (script.file.parent / f"{stem}.yaml").is_file():  # a function returns it
                places = [script.root / name for name in ("configs", "config", "conf")]
            for configs in (place.resolve() for place in places):
                main = configs / f"{stem}.yaml"
                if not main.is_file():  # it is given as --config-name
                    others = (file for file in sorted(configs.glob("*.yaml")) if "defaults" in read_yaml(file))
                    main = min(others, key=lambda file: _rank(file.stem), default=main)
                if main.is_file() and configs.is_relative_to(script.root.resolve()):
                    found.append((script, script.root / configs.relative_to(script.root.resolve()), main))
                    break
    return [(script, configs, configs / main.name) for script, configs, main in found]


def _last_text(script: SourceFile, node: ast.expr) -> str:
    """The text of an expression such as ``ROOT / "configs"``."""
    if isinstance(node, ast.Name) and node.id in script.assigned:
        node = script.assigned[node.id]
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return texts[-1] if texts else "."


def _usual_groups(values: dict[str, Any], configs: Path) -> dict[str, str]:
    listed = {entry.group for entry in entries(values)} | values.keys() | {p.name for p in configs.iterdir()}
    named = {ours: next((name for name in names if name in listed), "") for ours, names in USUAL.items()}
    return {theirs: ours for ours, theirs in named.items() if theirs}


def _groups(
    script: SourceFile, sources: list[SourceFile], values: dict[str, Any], configs: Path
) -> tuple[dict[str, str], frozenset[str], tuple[SourceFile, ast.Call] | None]:
    """What each group is, by the arguments of ``fit``, and the groups that are not instantiated recursively.

    The third is the call of ``fit`` where the script constructs the module or the data otherwise.
    """
    usual = _usual_groups(values, configs)
    for source in sorted(sources, key=lambda each: each is not script):
        made = dict(_instantiated(source))
        for call in (call for name, call in source.calls() if name == "fit"):
            if not made and "trainer" not in ast.unparse(call.func).lower():
                continue
            given = dict(zip(("model", "datamodule"), call.args, strict=False))
            given |= {str(keyword.arg): keyword.value for keyword in call.keywords}
            if "model" not in given:
                continue
            found = {}
            for argument, role in (("model", "task"), ("datamodule", "data")):
                node = given.get(argument, given.get("train_dataloaders"))
                if isinstance(node, ast.Name) and node.id not in made and node.id in source.assigned:
                    value = source.assigned[node.id]  # such as torch.compile(model)
                    node = value.args[0] if isinstance(value, ast.Call) and value.args else None
                if isinstance(node, ast.Name) and node.id in made and made[node.id].is_whole:
                    found[made[node.id].group] = role
                elif argument in given or role == "task" or "train_dataloaders" in given:
                    return usual, frozenset(), (source, call)
            roles = {theirs: ours for theirs, ours in usual.items() if ours not in found.values()} | found
            return roles, frozenset(each.group for each in made.values() if not each.is_recursive), None
    return usual, frozenset(), None


class Made(NamedTuple):
    """What a script instantiates: a group, whether with what is in it, and whether with nothing else."""

    group: str
    is_recursive: bool
    is_whole: bool


def is_instantiate(node: ast.Call) -> bool:
    """Whether a call is one of ``hydra.utils.instantiate``."""
    return ast.unparse(node.func).endswith("instantiate")


def _instantiated(source: SourceFile) -> list[tuple[str, Made]]:
    """The variables that hold what is instantiated from a group."""
    found = []
    for variable, value in source.assignments:
        if not (isinstance(value, ast.Call) and value.args and is_instantiate(value)):
            continue
        names = "|".join(CONFIG_NAMES)
        group = re.search(rf"\b(?:{names})(?:\.(\w+)|\[['\"](\w+)['\"]\])$", ast.unparse(value.args[0]))
        if group:
            options = {k.arg: ast.unparse(k.value) for k in value.keywords}
            is_whole = {*options} <= {"_recursive_", "_convert_"}
            found.append((variable, Made(group[1] or group[2], options.get("_recursive_") != "False", is_whole)))
    return found


def convert(layout: Layout, target: Path) -> Rows:
    """Write the configuration to the folder ``target``, and return what became of each file.

    Raises:
        ConfigError: A file is not valid YAML, or selects what is not there.
    """
    return Conversion(layout, target).run()


def constants(layout: Layout) -> list[str]:
    """The keys of the main file that other files refer to, which are in the group ``constants`` here."""
    return Conversion(layout, layout.configs).constants


def left_open(layout: Layout) -> dict[str, str]:
    """The first option of each group for which the main file wants one to be given; or of ``experiment`` alone."""
    groups = [entry.group for entry in entries(read_yaml(layout.main)) if entry.option == "???"]
    options = {group: sorted((layout.configs / group).glob("*.yaml")) for group in groups}
    found = {group: files[0].stem for group, files in options.items() if files}
    return {"experiment": found["experiment"]} if "experiment" in found else found


class Conversion:
    """Converts one configuration.

    Args:
        layout: Where it is.
        target: The folder that is written.
    """

    def __init__(self, layout: Layout, target: Path) -> None:
        self.layout, self.target, self.rows = layout, target, Rows()
        files = sorted(filter(Path.is_file, layout.configs.rglob("*.yaml")))  # a FIFO would block
        self.files = {file: file.relative_to(layout.configs) for file in files}
        self.values = {file: self._read(file) for file in files}
        self.main = self.values[layout.main]
        used = [file for file in files if self.group(file).partition("/")[0] not in NOT_USED]
        known = {*SETTINGS, *layout.groups, *NOT_USED, "defaults", *(p.name for p in layout.configs.iterdir())}
        tops = [layout.main, *(file for file in used if self.group(file).partition("/")[0] in OVERLAYS)]
        self.own = [key for key in dict.fromkeys(k for f in tops for k in self.values[f]) if key not in known]
        everything = "\n".join(file.read_text() for file in used)
        self.constants = [key for key in self.own if re.search(rf"\$\{{(?:[^{{}}]*:)?{re.escape(key)}\b", everything)]
        listed = {entry.group for file in files for entry in entries(self.values[file])}
        self.nested = {  # groups inside of groups, whose options are merged into what selects them
            f"{self.group(file)}/{entry.group}".strip("/")
            for file in files
            for entry in entries(self.values[file])
            if entry.group and not entry.is_absolute and self.group(file) not in ("", *OVERLAYS)
        } | {group for group in listed if "/" in group}
        self.checkpoints = self._checkpoint_callbacks()

    def _read(self, file: Path) -> dict[str, Any]:
        """The contents of a file, with names for callbacks and loggers that are in a list."""
        group = self.group(file).partition("/")[0]
        if self.layout.ours(group) in LISTED:
            return by_class(parse(file.read_text())) or read_yaml(file)
        values = read_yaml(file)
        none = [key for key, each in values.items() if self.layout.ours(key) in LISTED and each == []]
        named = {key: by_class(each) for key, each in values.items() if self.layout.ours(key) in LISTED}
        return values | dict.fromkeys(none) | {key: each for key, each in named.items() if each}

    def _text(self, file: Path) -> str:
        """The text of a file as it is, if nothing in it got a name."""
        values = self.values[file]
        return file.read_text() if values == read_yaml(file) else dump(values)

    def group(self, file: Path) -> str:
        """The group of a file, such as ``model/optimizer``."""
        return self.files[file].parent.as_posix().removeprefix(".")

    def run(self) -> Rows:
        """Convert all files."""
        for file, path in self.files.items():
            if file != self.layout.main:
                self._convert_file(file, path)
        self._convert_main()
        if not any("_target_" in file.read_text() for file in (self.target / "task").rglob("*.yaml")):
            place = self.layout.script or self.layout.main
            raise ConfigError(
                f"{place}: no group of {self.layout.configs.name} has the class of a LightningModule as _target_; "
                "write it, in a group that is instantiated there"
            )
        return self.rows

    def _row(self, path: Path, became: str, *notes: str) -> None:
        place = f"{self.layout.configs.name}/{path}"
        lost = [note for note in notes if ": left out" in note]
        self.rows.append((place, became, "; ".join(note for note in notes if note and note not in lost)))
        for key, _, note in (note.partition(": ") for note in lost):
            self.rows.append((f"{place}: {key}", "–", note))

    def _convert_file(self, file: Path, path: Path) -> None:
        group = self.group(file)
        top = group.partition("/")[0]
        if top in NOT_USED:
            self._row(path, "–", NOT_USED[top])
        elif not group:
            self._row(path, "–", "left out: `boltcutter evaluate run=<folder>` takes the place of other main files")
        elif group in self.nested:
            self._row(path, "–", "merged into the options that select it")
        elif not self.values[file] and isinstance(listed := parse(file.read_text()), list) and listed:
            raise ConfigError(f"{file}: a list; write key: value")
        else:
            new = Path(self.layout.ours(top), *path.parts[1:])
            text, notes = self._overlay(file, top) if top in OVERLAYS else self._option(file, top)
            self._write(new, text)
            self._row(path, f"configs/{new}", *notes)

    def _write(self, new: Path, text: str) -> None:
        write_yaml(self.target / new, self.with_references(text))

    def with_references(self, text: str) -> str:
        """Rewrite references to renamed groups, Hydra's values, and keys of the main configuration."""
        text = re.sub(r"^#\s*@package.*\n", "", text, flags=re.M)
        text = re.sub(r"^\s*_convert_:.*\n", "", text, flags=re.M)  # values are plain here
        text = replace_all(text, HYDRA_REFERENCES)
        renamed = self.layout.groups | {key: f"constants.{key}" for key in self.constants}
        for old, new in renamed.items():
            text = re.sub(rf"\$\{{{re.escape(old)}(?=[.\[}}])", f"${{{new}", text)
        return text

    def _option(self, file: Path, group: str) -> tuple[str, list[str]]:
        """The text of an option here, and notes on what it lost."""
        role, values, notes = self.layout.ours(group), self.values[file], list[str]()
        text = self._text(file)
        if is_plain(values):
            parents = [entry.option for entry in entries(values) if entry.option]
            text = without(text, "defaults")
        else:
            parents, (values, notes) = [], self._merged(file, group)
            text = dump(values)
        if role == "callback":
            return self._callbacks(values, file, parents, notes)
        if role == "trainer":
            text, more = self._trainer(text, values, is_complete=not parents)
            notes += more
        if role == "logger" and "_target_" in values:  # a single logger
            text = dump({file.stem: with_targets(values)})
        if group in self.layout.not_recursive and "_target_" in values and "_recursive_" not in values:
            text = f"{text.rstrip()}\n_recursive_: false\n"
        return (f"defaults: [{', '.join(parents)}]\n" if parents else "") + text, notes

    def _merged(self, file: Path, group: str) -> tuple[dict[str, Any], list[str]]:
        """The values of an option with all that its defaults select, and a note on what is outside of its group."""
        parts = expand_file(self.layout.configs, file, group, (group,))
        everything = merged(parts)
        values = everything.pop(group, {})
        values = by_class(values) if isinstance(values, list) else values
        outside = [f"{key}: left out, as an option sets its own group only; set it in train.yaml" for key in everything]
        selected = [entry for entry in entries(self.values[file]) if entry.group]
        chosen = ", ".join(f"{entry.group}: {entry.option}" for entry in selected)
        return values, [*([f"with {chosen}, which it selects, merged in"] if chosen else []), *outside]

    def _trainer(self, text: str, values: dict[str, Any], is_complete: bool) -> tuple[str, list[str]]:
        """An option of the trainer: what the run gives, and arguments that Lightning no longer has, are left out."""
        from lightning.pytorch import Trainer  # slow import

        known = {*inspect.signature(Trainer).parameters, "defaults"}
        removed = [key for key in values if key not in known and not key.startswith("_") and key != "gpus"]
        unset = [key for key in values if values[key] is None and not takes_null(key)]
        notes = [f"{key}: {OLD_NULL}" for key in unset]
        notes += [f"{key}: left out, as Lightning's trainer has no such argument" for key in removed]
        notes += [f"{key}: left out; use configs/{key.rstrip('s')}" for key in ("callbacks",) if values.get(key)]
        off = [key for key in TURNED_OFF if values.get(key) is False]
        notes += [f"{key}: {TURNED_OFF[key]}" for key in off]
        text = without(text, *GIVEN_BY_RUN, *removed, *off, *unset)
        text = re.sub(r"^gpus:", "devices:", text, flags=re.M)
        if "_target_" not in values and is_complete:
            text = f"_target_: {TRAINER}\n{text}"
        if is_complete and "plugins" not in values:  # checkpoints are written atomically
            text = text.rstrip("\n") + "\n\nplugins:\n  - ${checkpoint_io}\n"
        return text, notes

    def _checkpoint_callbacks(self) -> dict[str, str]:
        """The callbacks that save checkpoints by the name that they have here: the first monitored one is ``best``."""
        found = dict[str, bool]()
        for file, values in self.values.items():
            if self.layout.ours(self.group(file).partition("/")[0]) == "callback":
                for name, settings in values.items():
                    target = str((settings or {}).get("_target_", "")) if isinstance(settings, dict) else ""
                    if name == "model_checkpoint" or target.endswith(".ModelCheckpoint"):
                        monitored = isinstance(settings, dict) and settings.get("monitor") is not None
                        found[name] = found.get(name, False) or monitored
        best = next((name for name, is_monitored in found.items() if is_monitored), None)
        return {name: "best" if name == (best or "model_checkpoint") else name for name in found}

    def _callbacks(
        self, values: dict[str, Any], file: Path, parents: list[str], notes: list[str]
    ) -> tuple[str, list[str]]:
        """An option of callbacks; it adds to the built-in ones, unless another option includes it."""
        name = file.stem
        included = {str(e.option) for f in self.files if self.layout.ours(self.group(f)) == "callback" for e in
                    entries(self.values[f])}  # fmt: skip
        parents = parents if name in included and name != "default" else ["default", *parents]
        parents = [parent for parent in dict.fromkeys(parents) if parent != name or name == "default"]
        whole, _ = self._merged(file, self.group(file))  # also what it includes
        incomplete = [key for key in values if key not in self.checkpoints and not _is_made(whole.get(key))]
        notes = [*notes, *(f"{key}: left out, as without _target_ nothing makes it" for key in incomplete)]
        given = {key: value for key, value in values.items() if key not in ("defaults", *incomplete)}
        kept, more = callbacks(given, self.checkpoints)
        head = "adds to the built-in callbacks"
        return dump(({"defaults": parents} if parents else {}) | kept), [head, *notes, *more]

    def _overlay(self, file: Path, layer: str) -> tuple[str, list[str]]:
        """An experiment or a preset for debugging: what it selects, renamed groups, and its callbacks."""
        values, text, notes = self.values[file], self._text(file), list[str]()
        selected, parents, below = dict[str, Any](), list[str](), dict[str, Any]()
        for entry in entries(values):
            top = entry.group.partition("/")[0]
            if not entry.group:
                parents += [entry.option]
            elif top in NOT_USED:
                notes.append(f"{entry.group}: left out")
            elif (entry.package is not None or "/" in entry.group) and (
                option := self.layout.configs / f"{entry.group}/{entry.option}.yaml"
            ).is_file():
                place = place_of(entry)
                below = merge_all(below, merged(expand_file(self.layout.configs, option, entry.group, place)))
                notes.append(f"with {entry.group}: {entry.option} merged in")
            else:
                selected[self.layout.ours(entry.group)] = entry.option
        for theirs, ours in self.layout.groups.items():
            if theirs in values and values[theirs] is None:
                selected[ours] = None
        left_out = [key for key in values if key in NOT_USED or (key in self.own and key not in self.constants)]
        notes += [f"{key}: left out{', as nothing here refers to it' if key in self.own else ''}" for key in left_out]
        moved = {key: values[key] for key in self.constants if key in values}
        names = {ours: theirs for theirs, ours in self.layout.groups.items()}
        trainer, named = names.get("trainer", "trainer"), names.get("callback", "callbacks")
        made = merge_all(below.pop(named, {}), values.get(named) or {}) if named in below else values.get(named)
        unset = [theirs for theirs in self.layout.groups if values.get(theirs, "") is None]
        text = without(text, "defaults", names.get("callback", "callbacks"), *left_out, *moved, *unset)
        if below or (isinstance(values.get(trainer), dict) and values[trainer].keys() & {*GIVEN_BY_RUN}):
            rest = dict(parse(text) or {})
            rest[trainer] = {k: v for k, v in rest.get(trainer, {}).items() if k not in GIVEN_BY_RUN}
            text = dump({key: value for key, value in merge_all(below, rest).items() if value != {}})
        for theirs, ours in self.layout.groups.items():
            text = re.sub(rf"^{re.escape(theirs)}:", f"{ours}:", text, flags=re.M)
        if isinstance(made, dict):
            kept, more = callbacks(made, self.checkpoints)
            text, notes = f"{text.rstrip()}\n{dump({'callback': kept})}" if kept else text, [*notes, *more]
        elif made:
            notes.append(f"{named}: {NO_TARGET}")
        text = f"{text.rstrip()}\n{dump({'constants': moved})}" if moved else text
        chosen = selected | ({layer: parents} if parents else {})
        return (dump({"defaults": chosen}) if chosen else "") + text, notes

    def _convert_main(self) -> None:
        """Convert the main file: it selects the options, and has the settings of the run as a whole."""
        layout, notes = self.layout, list[str]()
        chosen: dict[str, Any] = {"logger": None}
        inside: dict[str, dict[str, Any]] = {}
        for entry in entries(self.main):
            top = entry.group.partition("/")[0]
            ours = layout.ours(entry.group)
            if entry.option == "???" and top not in NOT_USED and (layout.configs / entry.group).is_dir():
                chosen[ours] = entry.option
                notes.append(f"{entry.group}: to be given, as in {ours}=<option>")
                continue
            if entry.group in OVERLAYS:
                names = entry.option if isinstance(entry.option, list) else [entry.option]
                names = [str(name).removesuffix(".yaml") for name in names if name is not None]
                there = [name for name in names if (layout.configs / entry.group / f"{name}.yaml").is_file()]
                chosen |= {entry.group: there if len(there) > 1 else there[0]} if there else {}
                continue
            if top in NOT_USED:
                continue
            if (entry.package is not None or "/" in entry.group) and entry.option is not None:
                option = layout.configs / entry.group / f"{entry.option}.yaml"
                place = place_of(entry)
                inside = merge_all(inside, merged(expand_file(layout.configs, option, entry.group, place)))
            elif not entry.group:
                base = layout.configs / f"{entry.option}.yaml"
                notes.append(f"{entry.option}: left out; copy what {base.name} sets" if base.is_file() else "")
            elif entry.is_optional and not (layout.configs / entry.group / f"{entry.option}.yaml").is_file():
                notes.append(f"{entry.group}: {entry.option}: left out, as it is not there")
            elif (layout.configs / entry.group).is_dir():
                chosen[ours] = entry.option
        for theirs in [*layout.groups, *(key for key in inside if key not in layout.groups)]:
            given = self.main.get(theirs) or {}
            values = merge_all(inside.get(theirs, {}), given) if isinstance(given, dict) else given
            if isinstance(values, list):
                notes.append(f"{theirs}: {NO_TARGET}")
            elif isinstance(values, dict) and values:
                chosen[layout.ours(theirs)] = self._imported(theirs, values, chosen.get(layout.ours(theirs)))
                notes.append(f"{theirs} became configs/{layout.ours(theirs)}/imported.yaml")
        lost = [key for key in self.main if key in NOT_USED or (key in self.own and key not in self.constants)]
        notes += [f"{key}: left out, as nothing here refers to it" for key in lost]
        unset = [key for key in SETTINGS if self.main.get(key) is None]
        text = without(layout.main.read_text(), "defaults", *NOT_USED, *self.own, *layout.groups, *inside, *unset)
        if self.constants:
            chosen["constants"] = "default"
            kept = {key: self.main[key] for key in self.constants if key in self.main}
            self._write(
                Path("constants", "default.yaml"),
                self._without_loggers(dump(kept)) if kept else "# Set by experiments.\n",
            )
        self._write(Path("train.yaml"), dump({"defaults": chosen}) + self._without_loggers(text))
        self._row(self.files[layout.main], "configs/train.yaml", *notes)
        if self.constants:
            note = "keys that other files refer to, as ${constants.…}"
            self._row(self.files[layout.main], "configs/constants/default.yaml", note)

    def _without_loggers(self, text: str) -> str:
        """Replace references to settings of loggers, which other loggers do not have, by the values."""
        names = {ours: theirs for theirs, ours in self.layout.groups.items()}
        pattern = rf"\$\{{({names.get('logger', 'logger')}\.[\w.]+)\}}"
        if not re.search(pattern, text):
            return text
        values = merged(expand_file(self.layout.configs, self.layout.main, "", ()))

        def value(found: re.Match[str]) -> str:
            inner: Any = values
            for part in found[1].split("."):
                inner = inner.get(part) if isinstance(inner, dict) else None
            if inner is None or isinstance(inner, dict):
                return found[0]
            return json.dumps(inner) if isinstance(inner, list) else str(inner)

        return re.sub(pattern, value, text)

    def _imported(self, theirs: str, values: dict[str, Any], option: Any) -> str:
        """Write an option with the settings that the main file has for a group; return its name."""
        role = self.layout.ours(theirs)
        if role == "callback":
            values, _ = callbacks(values, self.checkpoints)
            option = option or "default"
        text = dump(values)
        if role == "trainer":
            text, _ = self._trainer(text, values, is_complete=not option)
        inherited = option if isinstance(option, list) else [option] if option else []
        self._write(Path(role, "imported.yaml"), (dump({"defaults": inherited}) if inherited else "") + text)
        return "imported"


def trainer_arguments(values: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The arguments of the trainer that Lightning knows, and what was left out with the reason."""
    from lightning.pytorch import Trainer  # slow import

    kept = {"devices" if key == "gpus" else key: value for key, value in values.items()}
    notes = list[tuple[str, str]]()
    for key in [key for key in kept if key not in inspect.signature(Trainer).parameters]:
        if kept.pop(key) is not None:
            notes.append((key, "left out, as Lightning's trainer has no such argument"))
    for key in [key for key, value in kept.items() if value is None and not takes_null(key)]:
        del kept[key]
        notes.append((key, OLD_NULL))
    for key in [key for key in TURNED_OFF if kept.get(key, True) in (None, False)]:
        if kept.pop(key) is False:
            notes.append((key, TURNED_OFF[key]))
    return kept, notes


def takes_null(argument: str) -> bool:
    """Whether an argument of the trainer may be None; of older versions, more may."""
    from lightning.pytorch import Trainer  # slow import

    known = inspect.signature(Trainer).parameters
    return argument not in known or matches(None, known[argument].annotation)


def _is_made(settings: Any) -> bool:
    """Whether the settings of a callback name its class, without which scripts of such projects skip them."""
    return not isinstance(settings, dict) or "_target_" in settings


def by_class(listed: Any) -> dict[str, dict[str, Any]]:
    """Objects of a list by the name of their class, with a number for further ones; empty if it is no such list."""
    found: dict[str, dict[str, Any]] = {}
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "_target_" in entry for entry in listed):
        return found
    for entry in listed:
        name = number = snake(entry["_target_"])
        while number in found:
            number = f"{name}_{len(found) + 1}"
        found[number] = entry
    return found


def snake(target: str) -> str:
    """The name of a class in lower case, such as ``early_stopping`` of ``EarlyStopping``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", target.rpartition(".")[2]).lower()


def callbacks(values: dict[str, Any], checkpoints: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Convert callbacks, and note what is left out.

    Args:
        values: Callbacks by name.
        checkpoints: Those that save checkpoints, with the name that they have here. ``best`` is the built-in one with
            the arguments of theirs; others save to the folder of the run's checkpoints.
    """
    found, notes = dict[str, Any](), list[str]()
    for name, settings in values.items():
        target = str((settings or {}).get("_target_", "")) if isinstance(settings, dict) else ""
        if name in checkpoints or target.endswith(".ModelCheckpoint"):
            ours = checkpoints.get(name, name)
            found[ours], more = checkpoint(settings, ours == "best")
            notes += [f"{name}.{each}" for each in more]
            notes += [f"{name} is {ours}"] if ours != name else []
        elif target.endswith("ProgressBar") or name in ("rich_progress_bar", "tqdm_progress_bar"):
            notes.append(f"{name}: left out; the progress bar is built in")
        else:
            found[name] = settings
    return {name: settings for name, settings in found.items() if settings != {}}, notes


def checkpoint(settings: Any, is_best: bool) -> tuple[Any, list[str]]:
    """The arguments of a ``ModelCheckpoint`` here, and notes on those that are left out."""
    if not isinstance(settings, dict):
        return settings, []
    settings = {key: value for key, value in settings.items() if value is not None}
    notes = ["dirpath: left out; checkpoints are in the folder of the run"] if "dirpath" in settings else []
    lost = ("dirpath", "_target_", "save_last", "verbose") if is_best else ("dirpath",)
    kept = {key: value for key, value in settings.items() if key not in lost}
    if is_best and settings.get("save_last") is False:
        notes.append("save_last: left out; callback.last=null saves no last checkpoint")
    if not is_best and "_target_" in kept:
        kept["dirpath"] = "${checkpoints}"
    return kept, notes
