"""``boltcutter schema``: JSON Schemas of configuration files, by which editors complete and check them.

Each class that an option of the project names has a definition with the arguments of its signature. A schema accepts
what one file may hold: references to other settings, and arguments without those that the file inherits.

Source: https://json-schema.org/draft-07
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from boltcutter import files
from boltcutter.assembly.assemble import Config
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.annotations import is_subclass
from boltcutter.config.compose import read_option
from boltcutter.config.describe import argument_texts
from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import locate, parameters
from boltcutter.config.values import SPECIAL, without_texts
from boltcutter.project import Project, display_path

FOLDER = ".boltcutter/schema"  # in the project
RUN = "train"  # of train.yaml, and of groups whose options change settings of a whole run
Schema = dict[str, Any]

REFERENCE: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": ["string", "number"]},  # a number becomes text
    Path: {"type": "string"},
    type(None): {"type": "null"},
}
ANY: Schema = {"$ref": "#/definitions/any"}
IS_COMPONENT: Schema = {"type": "object", "required": ["_target_"]}
UNCHECKED: Schema = {"required": ["_check_"], "properties": {"_check_": {"const": False}}}
NULL: Schema = {"type": "null"}


def schema_command(project: Project, arguments: list[str]) -> None:
    """Write a schema for each config group, and one for ``train.yaml`` and experiments."""
    if arguments:
        raise ConfigError(f"{arguments[0]}: schema takes no such argument; remove it", kind="unknown_key")
    project.activate()
    folder = project.root / FOLDER
    if link := files.foreign_link(folder, below=project.root):
        raise ConfigError(f"{link}: a link of another user; remove it")
    schemas = make_schemas(project)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, schema in schemas.items():
            write_text(folder / f"{name}.json", json.dumps(schema))  # which replaces a link in its place
    except OSError as error:
        raise ConfigError(f"{display_path(folder)}: cannot be written ({error.strerror}); make it writable") from error
    print(f"{len(schemas)} schemas in {display_path(folder)}; first line of a file of the group model, for example:")
    print(f"# yaml-language-server: $schema=../../{FOLDER}/model.json")


def make_schemas(project: Project) -> dict[str, Schema]:
    """Return a schema by the name of each group, and that of ``train.yaml``."""
    files = {
        group: {name: _read(file) for name, file in options.items()} for group, options in project.groups().items()
    }
    every = [content for options in files.values() for content in options.values()]
    every += [_read(project.root / "configs" / "train.yaml")] if (project.root / "configs/train.yaml").is_file() else []
    targets = sorted({target for content in every for target in _targets(content)})
    definitions: dict[str, Schema] = {"any": {"if": IS_COMPONENT, "then": _definition("component")}}
    known: dict[str, Callable[..., Any]] = {}
    for target in targets:
        try:
            definitions[target] = {"type": "object", "if": UNCHECKED, "else": _arguments(found := locate(target))}
        except ConfigError:
            continue  # of a package that is not installed: any arguments are accepted
        known[target] = found
    named = ({"properties": {"_target_": {"const": target}}} for target in known)
    definitions["component"] = {
        "allOf": [{"if": name, "then": _definition(target)} for name, target in zip(named, known, strict=True)]
    }
    groups = {group: _Group(group, options, known) for group, options in files.items()}
    run = _of_run(groups)
    schemas = {}
    for name, group in groups.items():
        schema = run if group.changes_run else group.schema()
        schemas[name] = _document(f"Options of the group {name}", schema, definitions)
    return schemas | {RUN: _document("Settings of a run", run, definitions)}


class _Group:
    """A config group: its options and the classes that they name."""

    def __init__(self, name: str, options: dict[str, Any], known: Mapping[str, Callable[..., Any]]) -> None:
        self.name, self.options, self.known = name, options, known
        self.targets = {option: target for option in options if (target := self._target(option))}
        self.named = {  # of a group of several components by name
            key: value["_target_"]
            for content in options.values()
            for key, value in content.items()
            if not self.targets and isinstance(value, dict) and "_target_" in value
        }
        self.changes_run = not self.targets and not self.named

    def _contents(self, option: str) -> list[dict[str, Any]]:
        """The contents of an option, and of those that it inherits."""
        names, more = list[str](), [option]
        while more:
            name = more.pop(0)
            if name in self.options and name not in names:
                names.append(name)
                below = self.options[name].get("defaults") or []
                more += [one for one in ([below] if isinstance(below, str) else below) if isinstance(one, str)]
        return [self.options[name] for name in names]

    def _target(self, option: str) -> str | None:
        return next((str(one["_target_"]) for one in self._contents(option) if "_target_" in one), None)

    def schema(self) -> Schema:
        """What a file of this group may hold, or the key of the group elsewhere."""
        if self.named:
            properties = {
                key: _value({"anyOf": [NULL, _definition(path)]})
                for key, path in self.named.items()
                if path in self.known
            }
            others = {"anyOf": [NULL, REFERENCE, {"allOf": [IS_COMPONENT, ANY]}]}
            return {"properties": properties | {"defaults": {}}, "additionalProperties": others}
        paths = sorted({*self.targets.values()})
        arguments = [_arguments(self.known[path]) for path in paths if path in self.known]
        closed = len(arguments) == len(paths) and all(one["additionalProperties"] is False for one in arguments)
        merged: dict[str, list[Schema]] = {}
        for one in arguments:
            for key, value in one["properties"].items():
                merged.setdefault(key, []).append(value)
        properties = {
            key: one_of[0] if len(one_of := _unique(values)) == 1 else {"anyOf": one_of}
            for key, values in merged.items()
        }
        nested = {"properties": _nested([*self.options.values()], self.known)}
        return _component_or(
            {"properties": properties, "additionalProperties": False if closed else ANY, "allOf": [nested]}
        )

    def choices(self) -> Schema:
        """What the group's entry in ``defaults`` may be."""
        names: list[Schema] = [{"enum": [*self.options, None]}, {"type": "string", "pattern": r"[/\\]|\.ya?ml$"}]
        return {"anyOf": [*names, {"type": "array", "items": {"anyOf": names}}, {"type": "object"}]}


def _nested(contents: list[dict[str, Any]], known: Mapping[str, Any]) -> Schema:
    """What keys may hold without ``_target_`` where these contents, one of which they change, have components."""
    found: Schema = {}
    for key in sorted({key for content in contents for key, value in content.items() if isinstance(value, dict)}):
        values = [content[key] for content in contents if isinstance(content.get(key), dict)]
        targets = sorted({str(value["_target_"]) for value in values if "_target_" in value})
        if not targets:
            then: Schema = {"properties": _nested(values, known)}
        elif set(targets) <= set(known):
            then = {"anyOf": [_definition(target) for target in targets]}
        else:
            continue
        found[key] = {"if": {"type": "object", "not": IS_COMPONENT}, "then": then}
    return found


def _of_run(groups: Mapping[str, _Group]) -> Schema:
    """What ``train.yaml`` and options that change a whole run may hold."""
    of_config = _arguments(Config)["properties"]
    own = {name: group for name, group in groups.items() if not group.changes_run}
    properties = of_config | {
        name: {"anyOf": [NULL, REFERENCE, {"type": "object"} | group.schema()]} for name, group in own.items()
    }
    choices = {name: group.choices() for name, group in groups.items()}
    defaults = {"properties": choices, "additionalProperties": False}
    properties |= {"defaults": {"anyOf": [{"type": ["string", "array", "null"]}, {"type": "object"} | defaults]}}
    return {"properties": properties, "additionalProperties": False}


def _document(title: str, schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """A schema with the definitions that it refers to."""
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, "type": ["object", "null"]}
    return whole | schema | {"definitions": definitions}


def _arguments(target: Callable[..., Any]) -> Schema:
    """The arguments of a class or function, none of which is required, as a file may inherit them."""
    known, texts = parameters(target), argument_texts(target)
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
    properties = {
        name: _value(_of_annotation(p.annotation)) | ({"description": texts[name]} if name in texts else {})
        for name, p in known.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    special: Schema = {key: {} for key in (*SPECIAL, "defaults")}
    return {"properties": properties | special, "additionalProperties": ANY if takes_anything else False}


def _value(schema: Schema) -> Schema:
    """A value that may be a reference or a component as well."""
    return _component_or({"anyOf": [REFERENCE, schema]})


def _component_or(schema: Schema) -> Schema:
    return {"if": IS_COMPONENT, "then": _definition("component"), "else": schema}


def _definition(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _of_annotation(wanted: Any) -> Schema:
    """What matches an annotation; anything if it says nothing about plain data."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted in PLAIN:
        return PLAIN[wanted]
    if origin is Annotated:
        return _of_annotation(inner[0])
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        each = _unique([_of_annotation(one) for one in inner])
        return ANY if ANY in each else {"anyOf": each}
    if is_subclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _value(_of_annotation(inner[1]))}
    if origin is tuple and inner[-1] is not ...:
        items = [_value(_of_annotation(one)) for one in inner]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    if is_subclass(origin, Collection):
        return {"type": "array", "items": _value(_of_annotation(inner[0]))}
    if inspect.isclass(wanted) and wanted.__module__ not in ("builtins", "datetime", "typing", "enum"):
        return {"type": "object"}  # a component
    return ANY


def _unique(schemas: list[Schema]) -> list[Schema]:
    return [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]


def _targets(content: Any) -> Iterator[str]:
    """All paths of classes in the contents of a file."""
    if isinstance(content, dict):
        if isinstance(content.get("_target_"), str):
            yield content["_target_"]
        for value in content.values():
            yield from _targets(value)
    if isinstance(content, list):
        for value in content:
            yield from _targets(value)


def _read(file: Path) -> dict[str, Any]:
    content, defaults = read_option(file)
    content = dict(without_texts(content))
    return content | ({} if defaults is None else {"defaults": defaults})
