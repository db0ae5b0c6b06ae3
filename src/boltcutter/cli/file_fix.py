"""The place of a mistake in the YAML files of a project, and the lines that correct it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from boltcutter.cli.mistake import REMOVABLE, REMOVED, Explanation, concerns
from boltcutter.project import Project

PLACE = re.compile(r"(.+?\.yaml)(?::([0-9]+))?")
HYDRA = re.compile(r"(\s*)- (?:override )?/?(?:_self_|([\w/]+: .+))")  # an entry of a list of defaults
ENTRY = re.compile(r"- ([\w.]+:(?: .*)?)")
ENDS = ("]", "}", "'", '"', "]}", "}]")  # that a line may lack
Edit = tuple[int, int, str]  # the first character that is replaced, the one after the last, and the new text


def locate(mistake: Explanation, project: Project, arguments: Sequence[str]) -> Explanation:
    """Give a mistake in a file of the project its place and, where there is one, its correction.

    Args:
        mistake: What was reported.
        project: Its own options are searched, as only these may be changed.
        arguments: Those of the command; a mistake in these is returned as it is.

    Returns:
        The mistake: ``fix`` are the lines that replace those of ``replaces``, from ``line`` on; None leaves them out.
    """
    own = project.root / "configs"
    if any(concerns(argument, mistake.setting) for argument in arguments):
        return mistake
    if place := PLACE.fullmatch(mistake.setting):
        files = [Path(place[1])] if own.resolve() in Path(place[1]).resolve().parents else []
    else:
        files = [file for file in sorted(own.rglob("*.yaml")) if _entry(_read(file), _path(file, mistake))]
        for text in (" ".join(arguments), _read(own / "train.yaml")):  # which choose options
            files = [file for file in files if file.stem in re.findall(r"[\w-]+", text)] or files
    if len(files) != 1:
        return mistake
    (file,), text = files, _read(files[0])
    path = _path(file, mistake)
    for start, end, new in _of_file(mistake, text, int(place[2] or 0)) if place else _of_entry(mistake, text, path):
        corrected = text[:start] + new + text[end:]
        if corrected != text and _is_valid(corrected):
            first, before, after = _changed_lines(text, corrected)
            fix = "\n".join(after) if after else None
            return replace(mistake, file=str(file), line=first, fix=fix, replaces=tuple(before))
    if mistake.fix:  # an argument
        return mistake
    entry = _entry(text, path)
    line = int(place[2]) if place and place[2] else entry[0].start_mark.line + 1 if entry else None
    return replace(mistake, file=str(file), line=line, replaces=())


def _changed_lines(before: str, after: str) -> tuple[int, list[str], list[str]]:
    """The number of the first line in which two texts differ, and the lines from there on that are not the same."""
    old, new = before.splitlines(), after.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    while len(old) > first < len(new) and old[-1] == new[-1]:
        old.pop(), new.pop()
    return first + 1, old[first:], new[first:]


def _of_file(mistake: Explanation, text: str, number: int) -> Iterator[Edit]:
    """Corrections of a file that cannot be read, the likeliest first; ``number`` is the line of the error, or 0."""
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:index])) for index in range(len(lines) + 1)]
    if "inherits from itself" in mistake.message:
        yield from ((starts[i], starts[i + 1], "") for i, line in enumerate(lines) if line.startswith("defaults:"))
    if "is Hydra's syntax" in mistake.message or "found a list" in mistake.message:
        pattern = HYDRA if "Hydra" in mistake.message else ENTRY
        listed = [index for index, line in enumerate(lines) if pattern.fullmatch(line.rstrip())]
        if listed and listed == [*range(listed[0], listed[-1] + 1)]:
            entries = [pattern.fullmatch(lines[index].rstrip()) for index in listed]
            texts = ["".join(m.groups() or ()) for m in entries if m and m[m.lastindex or 0].strip() and m[m.re.groups]]
            yield starts[listed[0]], starts[listed[-1] + 1], "".join(f"{one}\n" for one in texts)
    if "duplicate key" in mistake.message:
        yield starts[number - 1], starts[number], ""
    for index in range(min(number or len(lines), len(lines)) - 1, -1, -1):  # from the line of the error upwards
        line, end = lines[index].rstrip("\n"), starts[index] + len(lines[index].rstrip("\n"))
        if "\t" in line:
            yield starts[index], end, line.replace("\t", "  ")
        if line.count("${") > line.count("}"):
            yield end, end, "}"
        if number:
            yield from ((end, end, missing) for missing in ENDS)
            yield starts[index], end, re.sub(r"^(\s*[\w.]+):(?=[^\s:])", r"\1: ", line)


def _of_entry(mistake: Explanation, text: str, path: Sequence[str]) -> Iterator[Edit]:
    """Corrections of an entry: another value, another key, or neither."""
    entry = _entry(text, path)
    if entry is None:
        return
    (key, value), near = entry, re.search(r"did you mean ([\w.]+)\?", mistake.message)
    start, end = value.start_mark.index, value.end_mark.index
    parent = mistake.setting.rpartition(".")[0]
    if mistake.fix and mistake.fix.partition("=")[0].lstrip("+") == mistake.setting:
        yield start, end, mistake.fix.partition("=")[2]
    elif near and near[1].rpartition(".")[0] in ("", parent):
        yield key.start_mark.index, key.end_mark.index, near[1].rpartition(".")[2]
    if mistake.code in REMOVABLE or REMOVED.search(mistake.message):
        begin = key.start_mark.index
        if text[begin - key.start_mark.column : begin].strip():  # in braces
            yield begin, len(text) - len(text[end:].lstrip().removeprefix(",").lstrip()), ""
        else:
            yield begin - key.start_mark.column, text.find("\n", max(end - 1, start)) + 1 or len(text), ""


def _path(file: Path, mistake: Explanation) -> list[str]:
    """The keys that lead to a setting in a file: without that of the group, if the file is an option of it."""
    keys, group = mistake.setting.split("."), file.parent.name
    if mistake.code == "unknown_option":
        return ["defaults", *keys]
    return keys[1:] if keys[0] == group else keys if group in ("configs", "experiment", "debug") else []


def _entry(text: str, path: Sequence[str]) -> tuple[yaml.Node, yaml.Node] | None:
    """The key and the value at a path; None if there is no such entry."""
    try:
        node, entry = yaml.compose(text, yaml.SafeLoader), None
    except yaml.YAMLError:
        return None
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        entry = next((pair for pair in pairs if pair[0].value == name), None)
        if entry is None:
            return None
        node = entry[1]
    return entry


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _is_valid(text: str) -> bool:
    """Whether a text is YAML with keys and values."""
    try:
        return isinstance(yaml.compose(text, yaml.SafeLoader), yaml.MappingNode | None)
    except yaml.YAMLError:
        return False
