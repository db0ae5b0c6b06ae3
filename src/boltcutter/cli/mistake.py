"""A one-line error as data: setting, value and remedy, and the override that corrects it.

Every error has the form ``setting=value: problem; remedy``. Where ``Mistake.of`` has made it, its parts are known. This
is the only place that takes other lines apart; what quotes the user, ``head_of``, is not searched for a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from boltcutter.config.compose import OVERRIDE
from boltcutter.config.errors import Mistake, quoted

VALUE = r"'[^']*'|\[[^\]]*\]|(?:[^\s,;?]|[,;?](?=\S))+"
ENDS = r"(?=\?|$|, | or | and | instead| \(|\)|;)"
SUGGESTION = re.compile(rf"\b(did you mean|try|use|set|write) (?!group=option)({VALUE}){ENDS}")
# In these kinds of errors, the argument cannot be right, so that leaving it out is a correction. The choice of an
# option, a class, a run or a file is the user's: it is left out only if nothing was chosen, or if the error says so.
REMOVABLE = ("unknown_key", "unknown_flag", "wrong_type", "invalid_override", "missing_value", "unresolved_reference")
REMOVED = re.compile(r"\bremove it\b|keep the defaults|cannot be combined")
PLACEHOLDER = re.compile(r"…|<\w")
IN_FILTER = re.compile(r"filter=(.*): position ([0-9]+): (?:(.*?)(?:: no metric, setting| is no \w+; did))?")  # of runs
LISTED = r" \(((?:there are|there is|project|built-in|checkpoints of the run): [^()]*)\)"
END = re.compile(rf"(.*?)(?:{LISTED}|: (expected [^;]*))?$")


@dataclass(frozen=True)
class Explanation:
    """A mistake of the user, as a program reads it."""

    code: str  # the kind of the mistake; or failed, interrupted, internal_error
    setting: str  # key, flag or file that is wrong
    value: str | None  # as text; None if the setting itself is wrong
    message: str  # the whole line
    remedy: str | None  # end of the line, which says what to do
    fix: str | None  # argument that corrects the mistake, in a file lines; None if there is no single one
    replaces: tuple[str, ...] = ()  # arguments or lines to leave out in its favor, or for their defaults
    file: str | None = None  # that is wrong; None if an argument is
    line: int | None = None  # that is wrong, from 1


def explain(line: Mistake, arguments: Sequence[str]) -> Explanation:
    """Take the line of a mistake apart."""
    parts = line.parts
    setting = parts.setting if parts and parts.setting else re.match(r"[^\s=:]*", line)[0]  # type: ignore[index]
    if is_place := re.match(r"[\w./ -]+\.yaml(:[0-9]+)?(?=: (?!not a valid override))", line):  # a line of a file
        setting = is_place[0]
    shown = re.match(r"=(.*?)(?:: | (?=[a-z(])|, (?=[\w.]+=|but ))", line[len(setting) :])
    names = [setting, *re.findall(r"\$\{(\w+)[^}]*\} refers to nothing", line)]
    given = next((argument for name in names for argument in arguments if concerns(argument, name)), None)
    word = re.match(r"[\w-]+ (?:[^:]* )?(\S+): ", line)  # after a command, an argument without a key
    bare = next((match[1] for match in (word, shown) if match and not given and match[1] in arguments), None)
    given = bare if bare in arguments[-1:] else given  # a correction is added at the end
    body = line[len(head_of(line, setting, arguments)) :]
    problem, listing, expected = END.match(body).groups()  # type: ignore[union-attr]
    remedy = body[problem.rfind("; ") + 2 :] if "; " in problem else listing or expected
    remedy = parts.remedy or remedy if parts else remedy
    if in_filter := IN_FILTER.match(line):
        given, start, near = in_filter[1], int(in_filter[2]) - 1, SUGGESTION.search(line)
        fix = f"{given[:start]}{near[2]}{given[start + len(in_filter[3]) :]}" if near and in_filter[3] else None
    else:
        has_value = parts.value is not None if parts else shown is not None and bare is None
        fix = None if is_place else _fix(line, body, setting, has_value, given)
    keys = {_key(argument) for argument in (fix, given) if argument is not None}
    is_removed = bool(fix) or (given is not None and _is_removable(line.kind, given, body))
    after_flag = shown[1] if shown and given == setting else None  # of --sort foo
    wrong = (in_filter[1],) if in_filter else tuple(a for a in arguments if _key(a) in keys or a == after_flag)
    value = given if in_filter else given.partition("=")[2] if given and given.find("=") > 0 else None
    if not (value and "${" in value and given and concerns(given, setting)):  # whose value may be a secret
        value = parts.value if parts and parts.value is not None else value or bare or (shown and shown[1])
    return Explanation(line.kind, setting, value, str(line), remedy, fix, wrong if is_removed else ())


def head_of(line: Mistake, setting: str, arguments: Sequence[str]) -> str:
    """The beginning of the line that quotes what the user wrote, whose words are no problem and no remedy."""
    if line.parts:
        return str(line.parts._replace(problem="", remedy=None)).removesuffix(": ")
    for key, _, text in (quoted(argument).partition("=") for argument in arguments if concerns(argument, setting)):
        shown = next((form for form in (text, repr(text)) if text and line.startswith(f"{setting}={form}")), None)
        if shown is not None:
            return f"{setting}={shown}"
        if not text and line.startswith(f"{key}: "):
            return key
    return ""


def _fix(line: str, body: str, setting: str, has_value: bool, given: str | None) -> str | None:
    """The argument that the error suggests; None if it suggests none, or several words."""
    found = SUGGESTION.search(body)
    if not found or PLACEHOLDER.search(found[2]):
        return None
    kind, word = found[1], found[2].strip("'")
    sign = given[: len(given) - len(given.lstrip("+"))] if given else ""
    if OVERRIDE.fullmatch(word) and kind != "did you mean":
        return sign * (given is not None and _key(given) == _key(word)) + word
    if kind not in ("did you mean", "try") or (kind == "try" and not has_value):
        return None
    if word.startswith("--"):
        return word
    inner = re.search(r"=.*: ([\w.]+): (?:\S+ takes no such argument|no such key)", line)  # of a search space
    if has_value and not inner:
        shown = re.escape(line[len(setting) + 1 :].partition(":")[0].partition(" ")[0])
        listed = given and re.fullmatch(rf"({re.escape(setting)}=\[.*?\b){shown}\b(.*)", given)
        return f"{listed[1]}{word}{listed[2]}" if listed else f"{setting}={found[2]}"
    if given is None:
        return None
    key, equals, value = given.partition("=")
    if wrong := re.search(r"\$\{([^}]+)\} refers to nothing|\bhas no (\w+); did you mean", line):
        name = wrong[1] or wrong[2]
        return f"{key}={value.replace(name, word)}" if name.count(".") == word.count(".") else None
    parent, sign = key.lstrip("+~").rpartition(".")[0], "~" if key.startswith("~") else sign
    above = key.lstrip("+~").removesuffix(inner[1]) if inner else ""
    return f"{sign}{above + word if '.' in word or not parent else f'{parent}.{word}'}{equals}{value}"


def _is_removable(code: str, given: str, body: str) -> bool:
    """Whether to leave out an argument for which the error has no replacement."""
    is_nothing = given.partition("=")[2] in ("", "null") and "=" in given and code != "unknown_run"
    is_known = code in REMOVABLE and not _key(given).endswith("._target_")
    return is_known or is_nothing or bool(REMOVED.search(body))


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~")


def concerns(argument: str, setting: str) -> bool:
    """Whether an argument sets ``setting``, maybe by a reference to it, such as task.optimizer.lr for optimizer.lr."""
    key = _key(argument)
    is_inside = "." in setting and key.endswith(f".{setting}")
    return setting in (key, argument, repr(argument), f"task.{key}") or is_inside
