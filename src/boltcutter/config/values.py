"""The values of a configuration: parsed from the command line, formatted for messages, resolved and redacted."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import yaml
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException as OmegaConfBaseException  # re-exported

from boltcutter.config import foreign
from boltcutter.config.errors import ConfigError, Mistake, one_line, suggestion

SPECIAL = (
    "_target_",
    "_partial_",
    "_check_",
    "_recursive_",
    "_args_",
)  # keys of a call that are no arguments
INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,4000})")  # Python limits the digits of integers in text
NUMBER = re.compile(r"[-+]?(?!0[0-9])(([0-9]+\.[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+)", re.I)
UNREADABLE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EISDIR)
RESERVED = {"true": True, "false": False, "null": None}
UNSET = ("null", "~", "")  # how YAML writes that there is no value
YAML_TRUTH = {"yes": True, "on": True, "no": False, "off": False}  # also booleans in YAML 1.1
BASED = re.compile(r"[-+]?0[xbo]_?[0-9a-f][0-9a-f_]*", re.I)
NOT_FINITE = {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
WRITTEN = {str(value): text for text, value in (RESERVED | NOT_FINITE).items()}
MAX_DEPTH = 50  # of a configuration: OmegaConf needs many calls for each level
MAX_VALUES = 1 << 17  # of YAML, where aliases repeat some of them
MAX_YAML = 1 << 20  # characters of YAML, which take minutes to read
NESTED = re.compile(rf"(\$\{{[^{{}}]*){{{MAX_DEPTH + 1}}}")  # a reference in a reference in …
QUOTING = ("[", "{", "'", '"')
OPENING, CLOSING = "[{(", "]})"
RESOLVER = re.compile(r"\$\{(\w+:[^{}]*)\}")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
VARIABLE_REFERENCE = re.compile(r"\$\{oc\.env:\s*\w+\s*\}")  # whose value the user has chosen
CONTAINERS = (DictConfig, ListConfig)


def raw_node(cfg: Any, key: Any) -> Any:
    """The node at ``key``, with references unresolved; None if there is none."""
    return cfg._get_node(key, validate_access=False) if is_map(cfg) else None


def is_map(node: Any) -> bool:
    """Whether a node has keys: neither null, missing nor a reference."""
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


class Written(AnyNode):
    """A value whose text is not how the value is formatted, such as 1.10, 1e5 or yes.

    Which of the two is meant depends on the annotation of what receives it: ``instantiate.follow_annotations``.

    Args:
        value: What the text is read as where nothing else is known.
        text: The text as typed.
        readings: What the text may also be read as, if the annotation takes neither value nor text.
    """

    text: str
    readings: tuple[Any, ...]

    def __init__(self, value: Any = None, text: str = "", readings: tuple[Any, ...] = ()) -> None:
        super().__init__(value)
        self.__dict__.update(text=text, readings=readings)

    @property
    def is_ambiguous(self) -> bool:
        """Whether another reading than the value is possible: until an annotation has decided for the text."""
        return bool(self.readings) or self._value() != self.text

    def decide(self, value: Any) -> None:
        """Set the reading that is meant."""
        self._set_value(value)
        if value == self.text:
            self.__dict__["readings"] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Written:
        copied = Written(text=self.text, readings=self.readings)
        self._deepcopy_impl(copied, memo)
        return copied


class _Loader(yaml.SafeLoader):
    """Reads scalars without quotes as ``read_scalar`` does, and keeps their text."""

    is_file = True

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of a node; one of our own for scalars without quotes."""
        is_plain = kind is yaml.ScalarNode and implicit[0] and value != "<<"
        return "!plain" if is_plain else super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def construct_plain(self, node: Any) -> Any:
        """Read a scalar without quotes."""
        return read_scalar(node.value, yaml_words=True, is_file=self.is_file)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Build a mapping; its keys are texts as typed, unless they are numbers that are formatted in the same way.

        Raises:
            yaml.constructor.ConstructorError: A key is there twice.
        """
        seen = set()
        for at, (key, value) in enumerate(node.value):
            if key.tag != "!plain":
                continue
            if key.value in seen:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError("in a mapping", node.start_mark, problem, key.start_mark)
            seen.add(key.value)
            if not isinstance(read_scalar(key.value), int | float):
                node.value[at] = (yaml.ScalarNode("tag:yaml.org,2002:str", key.value, key.start_mark), value)
        return super().construct_mapping(node, deep=deep)


class _ArgumentLoader(_Loader):
    is_file = False


_Loader.add_constructor("!plain", _Loader.construct_plain)


def read_scalar(text: str, *, yaml_words: bool = False, is_file: bool = False) -> Any:
    """Read a text without quotes: decimal numbers, true, false and null as such, anything else as text.

    Args:
        text: The text.
        yaml_words: Whether it may also be a boolean or number of YAML 1.1 where the annotation takes no text.
        is_file: Whether it is in a YAML file, where these are read as such if the annotation is unknown.

    Returns:
        The value; ``Written`` with the text if the value is formatted otherwise, or may be meant otherwise.
    """
    value: Any = text
    readings: tuple[Any, ...] = ()
    if text.lower() in RESERVED:
        value = RESERVED[text.lower()]
    elif yaml_words and text in UNSET:
        return None
    elif INTEGER.fullmatch(text):
        value = int(text)
    elif text.lower() in NOT_FINITE:
        value = NOT_FINITE[text.lower()]
    elif NUMBER.fullmatch(text):
        value = number if math.isfinite(number := float(text)) else text  # 12e4567 is none
    elif yaml_words and (text.lower() in YAML_TRUTH or BASED.fullmatch(text)):
        other = YAML_TRUTH[text.lower()] if text.lower() in YAML_TRUTH else int(text.replace("_", ""), 0)
        value, readings = (other if is_file else text), (other,)
    is_as_formatted = isinstance(value, str) or (not isinstance(value, bool) and format_value(value) == text)
    return value if is_as_formatted and not readings else Written(value, text, readings)


def read_yaml(text: str, *, is_file: bool = True) -> Any:
    """Read YAML; scalars whose text is not how their value is formatted are ``Written``.

    Raises:
        yaml.YAMLError: It is no YAML.
        OmegaConfBaseException: A reference in it cannot be read.
    """
    loader = _Loader if is_file else _ArgumentLoader
    if len(text) > MAX_YAML:
        raise yaml.YAMLError(f"it has more than {MAX_YAML} characters; put what are data into a file of data")
    try:
        if NESTED.search(text):
            raise RecursionError
        if "&" in text:
            _check_aliases(yaml.compose(text, loader))
        content = yaml.load(text, loader)  # noqa: S506 - a SafeLoader
        if isinstance(content, str | Written):
            return {texts_as_typed(content): None}
        if is_deep(content, MAX_DEPTH):
            raise RecursionError
        OmegaConf.create(content)  # which reads the references
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    return {} if content is None else content


def read_plain_yaml(text: str) -> Any:
    """Read YAML of an option that may be half written: scalars as by PyYAML, and None for what cannot be read."""
    try:
        if "&" in text or len(text) > MAX_YAML:  # which takes longer
            return without_texts(read_yaml(text))
        return yaml.safe_load(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        return None


def is_deep(content: Any, depth: int) -> bool:
    """Whether lists and mappings are nested in more levels."""
    level, containers = [content], (dict, list)
    for _ in range(depth + 1):
        inner = (node.values() if type(node) is dict else node for node in level if type(node) in containers)
        if not (level := [value for values in inner for value in values if type(value) in containers]):
            return False
    return True


def _check_aliases(root: yaml.Node | None) -> None:
    """Check that aliases, each of which stands for all that its anchor has, do not multiply.

    Raises:
        yaml.YAMLError: They do, or one stands for a part of itself.
    """
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if isinstance(node, tuple):  # key and value of a mapping
            return sum(map(size, node))
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = math.inf
            sizes[id(node)] = 1 + sum(map(size, node.value))
        return sizes[id(node)]

    if size(root) > MAX_VALUES:
        raise yaml.YAMLError(f"its aliases (*name) stand for more than {MAX_VALUES} values, or for themselves")


def read_value(key: str, text: str) -> Any:
    """Read numbers, true, false, null, [lists], {maps} and "quoted text" as YAML; anything else is text.

    Values whose text is not how they are formatted are ``Written``.

    Raises:
        ConfigError: Brackets or quotes do not match.
    """
    if text[:1] not in QUOTING:
        return read_scalar(text)
    try:
        return read_yaml(f"v: {text}", is_file=False)["v"]
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError):
        remedy = f"quote it for the shell, as in '{key}=[1,2]'"
        if unquoted := REFERENCE.search(text):
            remedy = f"quote the reference inside, as in '{key}=[\"{unquoted[0]}\"]'"
        raise ConfigError(f"{key}: cannot read {text}; {remedy}", kind="invalid_override") from None


def parse(key: str, text: str) -> Any:
    """Read a value as ``read_value`` does, without the texts: for one whose annotation is not known."""
    return without_texts(read_value(key, text))


def without_texts(value: Any) -> Any:
    """Return plain values, in which each ``Written`` is replaced by its value."""
    return _replace_written(value, lambda written: written._value())


def texts_as_typed(value: Any) -> Any:
    """Return plain values, in which each ``Written`` that is not null is replaced by its text."""
    return _replace_written(value, lambda written: None if written._value() is None else written.text)


def _replace_written(value: Any, replacement: Callable[[Written], Any]) -> Any:
    if isinstance(value, Written):
        return replacement(value)
    if isinstance(value, dict):
        return {key: _replace_written(inner, replacement) for key, inner in value.items()}
    return [_replace_written(inner, replacement) for inner in value] if isinstance(value, list) else value


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The keys or indices of a node of the configuration, and what is there; nothing for a reference or a value."""
    if not isinstance(node, DictConfig | ListConfig):
        return
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        yield key, node._get_node(key)


def has_written(node: Any) -> bool:
    """Whether something in a node of the configuration is ambiguous: a value, what a reference refers to, or a key."""
    if node is not None and node._is_interpolation():
        with suppress(OmegaConfBaseException, RecursionError):  # reported when the reference is resolved
            node = node._dereference_node()
            return isinstance(node, Written) and node.is_ambiguous
        return False
    if isinstance(node, Written):
        return node.is_ambiguous
    return any(is_ambiguous(key) or has_written(inner) for key, inner in children(node))


def is_ambiguous(key: Any) -> bool:
    """Whether a key of a mapping is a text that may stand for a number or boolean."""
    return isinstance(key, str) and not isinstance(read_scalar(key), str)


def with_texts(node: Any) -> Any:
    """Convert to plain types with references unresolved, where each ``Written`` stays as it is."""
    if not (is_map(node) or isinstance(node, ListConfig)) or node._is_interpolation():
        return node if isinstance(node, Written) else node._value()
    inner = {key: with_texts(value) for key, value in children(node)}
    return inner if isinstance(node, DictConfig) else list(inner.values())


def format_value(value: Any) -> str:
    """Format a value such that ``parse`` reads it back."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_format_inner, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_format_inner(key)}: {_format_inner(inner)}' for key, inner in value.items())}}}"
    if not isinstance(value, str):
        return WRITTEN.get(str(value), str(value))
    return value if value[:1] not in QUOTING and isinstance(parse("", value), str) else _quote(value)


def _format_inner(value: Any) -> str:
    """Format a value in brackets, where more characters have a meaning."""
    if not isinstance(value, str):
        return format_value(value)
    is_plain = value and not re.search(r"""[][{},:#'"\\\n]|^[\s&*!|>%@`?-]|\s$""", value) and value != "<<"
    return value if is_plain and isinstance(read_scalar(value, yaml_words=True), str) else _quote(value)


def _quote(text: str) -> str:
    """Quote a text for YAML."""
    return f"'{text}'" if "'" not in text and text.isprintable() else json.dumps(text, ensure_ascii=False)


def format_unresolved(error: OmegaConfBaseException, cfg: DictConfig) -> Mistake:
    """Summarize OmegaConf's error on a reference in one line: setting, problem, remedy."""
    where = getattr(error, "full_key", None) or "configuration"
    text = str(error).split("\n")[0]
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return Mistake.of(missing[1], "not set", f"give {missing[1]}=…", kind="missing_value")
    problem, remedy = text, "correct the reference"
    if unset := re.search(r"Environment variable '(\w+)' not found", text):
        problem, remedy = f"environment variable {unset[1]} is not set", f"export {unset[1]}=…"
    elif key := re.search(r"Interpolation key '(.+)' not found|Error trying to access (.+): node", text):
        name = key[1] or key[2]
        problem = f"${{{name}}} refers to nothing"
        near = suggestion(name, (path for path in paths(cfg) if path != where), 0.75)
        remedy = foreign.reference_remedy(name) or near or f"set {where}=…, or add {name}"
    elif unknown := re.search(r"nterpolation type (\S+)", text):
        told = map(foreign.reference_remedy, RESOLVER.findall(str(OmegaConf.to_container(cfg))))
        register = f"register {unknown[1]} in the module that resolvers of [tool.boltcutter] in pyproject.toml names"
        remedy = next(filter(None, told), register)
    return Mistake.of(where, problem, remedy, kind="unresolved_reference")


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Convert to plain types, with references unresolved."""
    return dict(OmegaConf.to_container(cfg))  # type: ignore[arg-type]


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Convert to plain types, with references resolved.

    Raises:
        ConfigError: A reference points to nothing.
    """
    try:
        return dict(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(format_unresolved(error, cfg)) from None


def resolved_texts(values: Any, known: Container[Any] = ()) -> Iterator[str]:
    """Yield each text with a reference in plain values as it is resolved now; not of tags and variables.

    Args:
        values: A configuration; what is no mapping has none.
        known: Last keys, in a tuple, and texts that are left out.
    """
    try:
        cfg = DictConfig(values) if isinstance(values, dict) else None
    except OmegaConfBaseException as error:  # a reference that cannot be parsed
        raise ConfigError(f"{str(error).splitlines()[0][:200]}; correct the reference") from None
    for path, node in leaves(cfg):
        name = path.rpartition(".")[2]
        if node is None or not node._is_interpolation() or name == "tags":  # which are only shown
            continue
        if not VARIABLE_REFERENCE.fullmatch(node._value()) and ((name,), node._value()) not in known:
            with suppress(OmegaConfBaseException, RecursionError):
                yield str(node._dereference_node()._value())


def as_yaml(values: dict[str, Any]) -> str:
    """Format values as YAML."""
    return OmegaConf.to_yaml(DictConfig(values))


def paths(node: Any, prefix: str = "") -> Iterator[str]:
    """List every dotted key below ``node``."""
    for key in map(str, node if is_map(node) else ()):
        yield f"{prefix}{key}"
        yield from paths(raw_node(node, key), f"{prefix}{key}.")


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List the nodes of all values below ``node`` with their dotted keys; elements of a list have that of the list."""
    if is_map(node):
        for key in node:
            yield from leaves(raw_node(node, key), f"{prefix}.{key}".lstrip("."))
    elif isinstance(node, ListConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation()):
        for index in range(len(node)):
            yield from leaves(node._get_node(index), prefix)
    else:
        yield prefix, node


def leaf_values(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """List the dotted key of each value below ``node``, as it is written, and resolved; None if it cannot be."""
    for path, leaf in leaves(node):
        raw = resolved = None if leaf is None else leaf._value()
        if leaf is not None and leaf._is_interpolation():
            resolved = None
            with suppress(OmegaConfBaseException, RecursionError):
                resolved = leaf._dereference_node()._value()
        yield path, raw, resolved


def flatten(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return each plain value that is not a mapping, with its dotted key."""
    if not (isinstance(node, dict) and node):
        return [(path, node)]
    found = list[tuple[str, Any]]()
    for key, value in node.items():
        found += flatten(value, f"{path}.{key}" if path else str(key))
    return found


def resolve_reference(cfg: DictConfig, path: str) -> str:
    """Replace the part of ``path`` that is only a reference by its target, as for ``task.model: ${model}``."""
    node, parts = cfg, path.split(".")
    for end, part in enumerate(parts, 1):
        node = raw_node(node, part)
        refers = REFERENCE.fullmatch(str(node._value())) if node is not None and node._is_interpolation() else None
        if refers:
            return resolve_reference(cfg, ".".join([refers[1], *parts[end:]]))
    return path


def last_of_each(overrides: Iterable[str]) -> list[str]:
    """Keep the last override of each key, for a command, which refuses a key that is given twice."""
    return list({override.partition("=")[0].lstrip("+"): override for override in overrides}.values())


def split_overrides(overrides: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Split overrides into those whose key is one of ``names``, as a dictionary, and the others."""
    selected = {
        override.partition("=")[0]: override.partition("=")[2]
        for override in overrides
        if override.partition("=")[0] in names
    }
    return selected, [override for override in overrides if override.partition("=")[0] not in names]


def split_values(text: str) -> list[str]:
    """Split at commas that are not inside brackets or quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += 0 if quote else (letter in OPENING) - (letter in CLOSING)
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


@contextmanager
def name_missing_files(settings: dict[str, Any]) -> Iterator[None]:
    """In this context, an error about a file that is missing or not readable names the setting that has its path.

    Raises:
        ConfigError: In place of such an error, if a setting has the path, or the folder of the file.
    """
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        files = (cause.filename for cause in chain if isinstance(cause, OSError) and cause.errno in UNREADABLE)
        path = next((file for file in files if isinstance(file, str)), None)
        found = path and _setting_of(settings, path)
        if not found or f"{found[0]}=" in str(error):
            raise
        if getattr(error, "hide_traceback", False):  # it has a remedy of its own
            error.args = (f"{found[0]}={found[1]}: {one_line(error)}",)
            raise
        text = one_line(error).removeprefix(f"{path}: ") if found[1] == path else one_line(error)
        raise ConfigError(f"{found[0]}={found[1]}: {text.rstrip('.')}; correct the path") from error


def _setting_of(settings: Any, path: str) -> tuple[str, str] | None:
    """The setting of a component with the longest path that is, or is above, a path."""
    found: list[tuple[str, str]] = []

    def search(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                search(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                search(inner, f"{key}.{index}")
        elif (
            isinstance(value, str)
            and value.strip("./")
            and f"{os.path.abspath(path)}/".startswith(f"{os.path.abspath(value)}/")
        ):
            found.append((key, value))

    for group in ("data", "task", "model", "callback"):
        search(settings.get(group), group)
    return max(found, key=lambda each: len(each[1]), default=None)
