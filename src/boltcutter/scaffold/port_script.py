"""Convert a project whose script calls the constructors of module and data itself, with values of the configuration.

The configuration as a whole becomes ``constants``, to which what the script constructs refers.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from boltcutter.config.errors import ConfigError
from boltcutter.scaffold.hydra_defaults import expand, expand_file, merged
from boltcutter.scaffold.port_cli import importable, of_data
from boltcutter.scaffold.port_lht import (
    CONFIG_NAMES,
    GIVEN_BY_RUN,
    HYDRA_REFERENCES,
    NOT_USED,
    TRAINER,
    Layout,
    callbacks,
    is_instantiate,
    left_open,
    trainer_arguments,
)
from boltcutter.scaffold.source_code import NotConstantError, source_files
from boltcutter.scaffold.yaml_text import Rows, dump, replace_all, write_yaml

LOADERS = "boltcutter.scaffold.configured.with_loaders"
PLAIN = {"dict", "list", "str", "int", "float", "bool", "Path", "to_container", "to_absolute_path"}  # keep a value
UNSET: Final = object()
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


def convert(layout: Layout, target: Path) -> Rows:
    """Write the configuration to the folder ``target``, and return what became of each file.

    Raises:
        ConfigError: A file is not valid YAML, or the script gives a value that only the program knows.
    """
    return _Conversion(layout, target).run()


def constants(layout: Layout) -> list[str]:
    """The keys of the configuration, which are in the group ``constants`` here."""
    return [*_composed(layout).keys() - {"trainer"}]


def _composed(layout: Layout) -> dict[str, Any]:
    """The whole configuration, with the first option of each group that the main file wants to be given."""
    parts = expand_file(layout.configs, layout.main, "", ())
    for group, option in left_open(layout).items():
        parts += expand(layout.configs, group, option, tuple(group.split("/")))
    return merged(parts)


class _Conversion:
    def __init__(self, layout: Layout, target: Path) -> None:
        assert layout.fit is not None
        self.layout, self.target, self.rows = layout, target, Rows()
        self.script, self.call = layout.fit
        self.assigned = self.script.assigned_at(self.call)
        self.values = _composed(layout)
        self.data: str | None = None  # the variable of the data module, if the script only makes it
        self.data_class = ""

    def run(self) -> Rows:
        given = dict(zip(("model", "train_dataloaders", "val_dataloaders", "datamodule"), self.call.args, strict=False))
        given |= {str(keyword.arg): keyword.value for keyword in self.call.keywords}
        if len(self.call.args) == 2 and not self._makes_loader(given["train_dataloaders"]):
            given["datamodule"] = given.pop("train_dataloaders")
        made = self._role("datamodule", "data", given["datamodule"]) if "datamodule" in given else {}
        if made and isinstance(variable := given["datamodule"], ast.Name):
            owners = {ast.unparse(call.func.value) for name, call in self.script.calls()
                      if name in ("setup", "prepare_data") and isinstance(call.func, ast.Attribute)}  # fmt: skip
            self.data = None if variable.id in owners else variable.id
            self.data_class = str(made["_target_"]).rpartition(".")[2]
        self._write("task", self._role("model", "task", given["model"]))
        if made:
            self._write("data", made)
        elif "train_dataloaders" in given:
            names = {"train_dataloaders": "train", "val_dataloaders": "val"}
            loaders = {ours: self._role(n, "data", given[n]) for n, ours in names.items() if n in given}
            self._write("data", {"_target_": LOADERS, **loaders})
        self._trainer()
        used = {key: value for key, value in self.values.items() if key not in NOT_USED}
        write_yaml(self.target / "constants" / "default.yaml", self._referring(dump({"_recursive_": False} | used)))
        selected = {role: "imported" for role in ("task", "data", "trainer", "callback")
                    if (self.target / role / "imported.yaml").is_file()}  # fmt: skip
        main: dict[str, Any] = {"defaults": {"logger": None, "data": None, **selected, "constants": "default"}}
        main |= {"seed": seed} if type(seed := self.values.get("seed")) is int else {}
        write_yaml(self.target / "train.yaml", dump(main))
        note = "the whole configuration, to which what the script constructs refers as ${constants.…}"
        self.rows.append((self._place(self.layout.main), "configs/constants/default.yaml", note))
        for file in sorted(filter(Path.is_file, self.layout.configs.rglob("*.yaml"))):
            if file != self.layout.main:
                note = "merged into constants if the main file selects it, else left out"
                self.rows.append((self._place(file), "–", note))
        return self.rows

    def _place(self, file: Path) -> str:
        return f"{self.layout.configs.name}/{file.relative_to(self.layout.configs)}"

    def _write(self, role: str, values: dict[str, Any]) -> None:
        write_yaml(self.target / role / "imported.yaml", dump(values))
        self.rows.append((self.script.place(self.call), f"configs/{role}/imported.yaml", ""))

    def _referring(self, text: str) -> str:
        """References of the project to its own keys, and to values of Hydra, as they are here."""
        text = replace_all(text, HYDRA_REFERENCES)
        return replace_all(text, {rf"\$\{{{key}(?=[.\[}}])": f"${{constants.{key}" for key in self.values})

    def _makes_loader(self, node: ast.expr) -> bool:
        try:
            made = self._assigned(node)
        except NotConstantError:
            made = node
        called = ast.unparse(made.func) if isinstance(made, ast.Call) else ""
        return "loader" in ast.unparse(node).lower() or called.endswith("DataLoader")

    def _assigned(self, node: ast.expr) -> ast.expr:
        """What a name has, or else the expression itself.

        Raises:
            NotConstantError: It depends on what only the program knows.
        """
        found = self.assigned.get(node.id, node) if isinstance(node, ast.Name) else node
        while isinstance(found, ast.IfExp):
            found = self._chosen(found)
        return found

    def _role(self, argument: str, role: str, node: ast.expr) -> dict[str, Any]:
        try:
            made = self.value(node)
        except NotConstantError as error:
            raise ConfigError(
                f"{self.script.place(self.call)}: {argument} of fit is made from {error}, whose value only the program "
                f"knows; write a class that makes it itself, and its file in configs/{role}"
            ) from None
        if not (isinstance(made, dict) and "_target_" in made):
            raise ConfigError(
                f"{self.script.place(self.call)}: {argument} of fit is not instantiated from the configuration there; "
                f"write a class that is, and its file in configs/{role}"
            )
        return dict(made)

    def _trainer(self) -> None:
        owner = self.call.func.value if isinstance(self.call.func, ast.Attribute) else self.call.func
        values, made, named = dict[str, Any](), owner, dict[str, Any]()
        try:
            made = self._assigned(owner)
        except NotConstantError as error:
            note = f"left out, as only the program knows {error}; set trainer by hand"
            self.rows.append((f"{self.script.place(self.call)}: trainer", "–", note))
        for keyword in made.keywords if isinstance(made, ast.Call) else ():
            try:
                if keyword.arg is None:
                    values |= self._spread(keyword.value)
                elif keyword.arg == "callbacks":
                    named = self._configured(keyword.value)
                    values["callbacks"] = [self.value(each) for each in self._entries(keyword.value, bool(named))]
                elif keyword.arg not in GIVEN_BY_RUN:
                    values[keyword.arg] = self.value(keyword.value)
            except NotConstantError as error:
                note = f"left out, as only the program knows {error}; set trainer.{keyword.arg}"
                self.rows.append((f"{self.script.place(keyword.value)}: {keyword.arg}", "–", note))
        if isinstance(made, ast.Call) and is_instantiate(made) and made.args:
            path = self._path_of(made.args[0])
            inner = self._read(path) if path else {}
            values = (_rewritten(inner, self._referring) if isinstance(inner, dict) else {}) | values
        listed = values.pop("callbacks", None)
        named |= listed if isinstance(listed, dict) else {}
        kept, unknown = trainer_arguments({k: v for k, v in values.items() if k not in (*GIVEN_BY_RUN, "_target_")})
        self.rows += [(f"{self.script.place(made)}: {key}", "–", note) for key, note in unknown]
        self._write("trainer", {"_target_": TRAINER, "plugins": ["${checkpoint_io}"], **kept})
        found = listed if isinstance(listed, list) else []
        named |= {str(e["_target_"]).rpartition(".")[2].lower(): e for e in found if isinstance(e, dict)}
        saving = [name for name, entry in named.items() if entry["_target_"].endswith(".ModelCheckpoint")]
        best = next((name for name in saving if named[name].get("monitor") is not None), None)
        kept, notes = callbacks(named, {name: "best" if name == best else name for name in saving})
        for key, _, text in (note.partition(": ") for note in notes):
            self.rows.append((f"{self.script.place(made)}: {key}", "–", text or key))
        if kept:
            self._write("callback", {"defaults": ["default"], **kept})

    def _configured(self, node: ast.expr) -> dict[str, Any]:
        """The settings of a group of objects that a function or a loop of the script instantiates; empty if none."""
        text, made = f"{ast.unparse(node)}.append", self._assigned(node)
        loops = [each for each in ast.walk(self.script.tree) if isinstance(each, ast.For) and text in ast.unparse(each)]
        is_listed = isinstance(made, ast.List | ast.Tuple)  # one by one, which is not all of the group
        for expression in (*([] if is_listed else [made]), *(loop.iter for loop in loops)):
            for inner in ast.walk(expression):
                path = self._path_of(inner) if isinstance(inner, ast.expr) else None
                found = self._read(path) if path else None
                each = found.items() if isinstance(found, dict) else ()
                if kept := {name: value for name, value in each if isinstance(value, dict) and "_target_" in value}:
                    return dict(_rewritten(kept, self._referring))
        return {}

    def _entries(self, node: ast.expr, has_loop: bool) -> list[ast.expr]:
        """The entries of a list, with those that the script appends to it, but for loops if their group is known."""
        listed = self._assigned(node)
        if not isinstance(listed, ast.List | ast.Tuple):
            if has_loop:
                return []
            raise NotConstantError(ast.unparse(node))
        loops = [each for each in ast.walk(self.script.tree) if isinstance(each, ast.For) and has_loop]
        others = [inner for loop in loops for inner in ast.walk(loop)]
        entries = list(listed.elts)
        for name, call in self.script.calls():
            is_own = ast.unparse(call.func) == f"{ast.unparse(node)}.{name}" and name in ("append", "extend", "insert")
            if is_own and call.args and call not in others and self._is_done(call):
                added = call.args[-1]
                if name == "extend" and not isinstance(added, ast.List | ast.Tuple):
                    raise NotConstantError(ast.unparse(added))
                entries += added.elts if name == "extend" and isinstance(added, ast.List | ast.Tuple) else [added]
        return entries

    def _is_done(self, call: ast.Call) -> bool:
        """Whether the script comes to a call, by the settings in each ``if`` around it."""
        for each in (each for each in ast.walk(self.script.tree) if isinstance(each, ast.If)):
            inside = [[*ast.walk(ast.Module(part, []))] for part in (each.body, each.orelse)]
            place = next((at for at, nodes in enumerate(inside) if call in nodes), None)
            if place is None or self.call in inside[place]:
                continue
            try:
                if self._decide(each.test, each.test) is bool(place):
                    return False
            except NotConstantError as error:
                note = f"left out, as only the program knows {error}"
                self.rows.append((f"{self.script.place(call)}: {ast.unparse(call)}", "–", note))
                return False
        return True

    def value(self, node: ast.expr, seen: tuple[str, ...] = ()) -> Any:
        """The value of an expression of the script, with references to the configuration.

        Raises:
            NotConstantError: Only the program knows it.
        """
        if (path := self._path_of(node)) is not None:
            if self._read(path) is not UNSET:
                return _reference(path)
            if not isinstance(node, ast.Call):
                raise NotConstantError(ast.unparse(node))
            return self.value(node.args[1], seen) if len(node.args) > 1 else None  # of get
        if isinstance(node, ast.Attribute) and (names := ast.unparse(node).split("."))[0] == self.data:
            return of_data(self.script.root, self.data_class, names[1:])
        if isinstance(node, ast.IfExp):
            return self.value(self._chosen(node), seen)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(entry, seen) for entry in node.elts]
        if isinstance(node, ast.Name) and node.id in self.assigned and node.id not in seen:
            return self.value(self.assigned[node.id], (*seen, node.id))
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self.value(v.value if isinstance(v, ast.FormattedValue) else v, seen)) for v in node.values
            )
        if isinstance(node, ast.Call):
            return self._called(node, seen)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            raise NotConstantError(ast.unparse(node)) from None

    def _chosen(self, node: ast.IfExp) -> ast.expr:
        """The expression that the script takes as its settings are.

        Raises:
            NotConstantError: It does not depend on settings only.
        """
        return node.body if self._decide(node.test, node) else node.orelse

    def _decide(self, test: ast.expr, node: ast.expr) -> bool:
        """Whether a condition holds, which a note says beside what depends on it."""
        is_true = self._holds(test, node)
        note = f"as {ast.unparse(test)} is {'true' if is_true else 'false'}; that is decided once, by the import"
        row = (f"{self.script.place(node)}: {ast.unparse(node)}", "–", note)
        self.rows += [] if row in self.rows else [row]
        return is_true

    def _holds(self, test: ast.expr, node: ast.expr) -> bool:
        """Whether a condition of settings and constants holds, such as ``cfg.x``, ``not cfg.x`` or ``cfg.x == 3``."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._holds(test.operand, node)
        if isinstance(test, ast.BoolOp):
            return (all if isinstance(test.op, ast.And) else any)(self._holds(each, node) for each in test.values)
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in COMPARED:
            ends = [self._plain(each, node) for each in (test.left, test.comparators[0])]
            return bool(COMPARED[type(test.ops[0])](*ends))
        return bool(self._plain(test, node))

    def _plain(self, part: ast.expr, node: ast.expr) -> Any:
        path = self._path_of(part)
        try:
            found = self._read(path) if path else ast.literal_eval(part)
        except (ValueError, TypeError):
            raise NotConstantError(ast.unparse(node)) from None
        if isinstance(found, str) and "${" in found:
            raise NotConstantError(ast.unparse(node))
        return None if found is UNSET else found

    def _called(self, node: ast.Call, seen: tuple[str, ...]) -> Any:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in PLAIN and node.args:
            return self.value(node.args[0], seen)
        if name == "join" and ast.unparse(node.func).endswith("path.join"):
            return "/".join(str(self.value(each, seen)) for each in node.args)
        options = {str(k.arg): k.value for k in node.keywords if k.arg in ("_recursive_", "_convert_", "_partial_")}
        keywords = [k for k in node.keywords if k.arg not in options]
        if is_instantiate(node) and node.args:
            path = self._path_of(node.args[0])
            inner = self._read(path) if path is not None else None
            if not isinstance(inner, dict):
                raise NotConstantError(f"{ast.unparse(node)}, which {self.layout.main.name} does not set")
            more = self._arguments(keywords, seen)
            kept = {key: self.value(value, seen) for key, value in options.items() if key != "_convert_"}
            return _rewritten(inner, self._referring) | more | kept
        target = self.script.path(node.func)
        target = importable(target, self.script) if target else ""
        if not target or target.partition(".")[0] in ("os", "hydra", "omegaconf"):
            raise NotConstantError(ast.unparse(node))
        positional = [self.value(entry, seen) for entry in node.args]
        names = self._parameters(name)[: len(positional)]
        found = dict(zip(names, positional, strict=True)) if len(names) == len(positional) else {"_args_": positional}
        found |= self._arguments(keywords, seen)
        settings = [str(value) for value in found.values() if self._is_mapping(value)]
        made = [value for value in found.values() if isinstance(value, dict)]
        if made and any("_target_" in str(self._read(_path_in(value))) for value in settings):
            raise NotConstantError(ast.unparse(node))  # it gets what is instantiated beside what is not
        lazily = {"_recursive_": False} if settings and not made and "_args_" not in found else {}
        return {"_target_": target, **found, **lazily}

    def _is_mapping(self, value: Any) -> bool:
        if not (isinstance(value, str) and value.startswith("${constants")):
            return False
        return isinstance(self._read(_path_in(value)), dict)

    def _arguments(self, keywords: list[ast.keyword], seen: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword in keywords:
            found |= (
                self._spread(keyword.value) if keyword.arg is None else {keyword.arg: self.value(keyword.value, seen)}
            )
        return found

    def _spread(self, node: ast.expr) -> dict[str, Any]:
        """Keyword arguments that are given as ``**mapping``."""
        node = self._assigned(node)
        while isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PLAIN and node.args:
            node = node.args[0]
        path = self._path_of(node)
        inner = self._read(path) if path is not None else None
        if not isinstance(inner, dict):
            raise NotConstantError(ast.unparse(node))
        return {key: _reference([*(path or []), key]) for key in inner if key != "_target_"}

    def _parameters(self, name: str) -> list[str]:
        """The names of the arguments of a class's constructor, if the project defines it."""
        for source in source_files(self.script.root, f"class {name}", f"def {name}"):
            for made in source.constructors(name):
                return [a.arg for a in [*made.posonlyargs, *made.args] if a.arg != "self"]
        return []

    def _path_of(self, node: ast.expr) -> list[str] | None:
        """The key of a setting that an expression such as ``cfg.model.lr`` reads; empty for all of them."""
        parts = list[str]()
        while True:
            if isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                parts.append(str(node.slice.value))
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                if not (node.args and isinstance(node.args[0], ast.Constant)):
                    return None
                parts.append(str(node.args[0].value))
                node = node.func.value
            else:
                break
        is_config = isinstance(node, ast.Name) and node.id in CONFIG_NAMES
        return parts[::-1] if is_config else None

    def _read(self, path: list[str]) -> Any:
        found: Any = self.values
        for part in path:
            if not isinstance(found, dict) or part not in found:
                return UNSET
            found = found[part]
        return found


def _reference(path: list[str]) -> str:
    return "${" + ".".join(["constants", *path]) + "}"


def _path_in(reference: str) -> list[str]:
    return reference[2:-1].split(".")[1:]


def _rewritten(values: Any, rewrite: Any) -> Any:
    if isinstance(values, dict):
        return {key: _rewritten(value, rewrite) for key, value in values.items()}
    if isinstance(values, list):
        return [_rewritten(value, rewrite) for value in values]
    return rewrite(values) if isinstance(values, str) else values
