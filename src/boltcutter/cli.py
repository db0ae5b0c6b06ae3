"""The command line that all scripts share: words, help, completion, and errors of one line."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from boltcutter import trust
from boltcutter.config import ConfigError, as_yaml, compose, hint, paths, redacted
from boltcutter.environment import mpi, platform, slurm
from boltcutter.environment.process import distributed_rank, is_rank_zero, retain_freed_memory
from boltcutter.project import Project, summary

FLAGS = {
    "--help": "this text",
    "--print": "show the resolved configuration and leave",
    "--check": "look for mistakes and leave",
    "--describe": "list every key that can be set below the next word, with type, value and documentation",
    "--completion": 'complete words in bash and zsh: eval "$(boltcutter train --completion)"',
}
COMPLETION = r"""
_boltcutter_owns() {  # whether a word is one of the scripts that know --complete; no other is ever started
    case "${1##*/}" in %(scripts)s) [[ "$1" -ef "%(folder)s/${1##*/}" ]] ;; *) return 1 ;; esac
}
_boltcutter_bash() {
    local line="${COMP_LINE:0:COMP_POINT}" script="" word
    local current="${line##*[[:space:]]}"
    local kept="${current%%"${current##*=}"}"
    local -a words given
    read -ra words <<<"${line%%"$current"}"
    for word in "${words[@]}"; do
        if [[ -n "$script" ]]; then given+=("${word//[\"\']/}"); elif [[ "$word" == *.py ]]; then script="$word"; fi
    done
    COMPREPLY=()
    _boltcutter_owns "$script" || return 0
    # Readline replaces what stands after the last =, but all of a word in quotes.
    case "$current" in [\"\']*) current="${current:1}" kept="" ;; esac
    [[ "$COMP_WORDBREAKS" == *=* ]] || kept=""
    while IFS= read -r word; do
        COMPREPLY+=("${word#"$kept"}")
        case "$word" in *= | *. | *=\[*) compopt -o nospace 2>/dev/null ;; esac
    done < <("%(python)s" "$script" --complete "$current" "${given[@]}" 2>/dev/null)
}
_boltcutter_zsh() {
    local script="" word
    local -a open closed given
    for word in "${words[@]:0:$((CURRENT - 1))}"; do
        if [[ -n "$script" ]]; then given+=("${word//[\"\']/}"); elif [[ "$word" == *.py ]]; then script="$word"; fi
    done
    if ! _boltcutter_owns "$script"; then "${_boltcutter_before[$service]:-_default}" "$@"; return; fi
    while IFS= read -r word; do
        case "$word" in *= | *. | *=\[*) open+=("$word") ;; *) closed+=("$word") ;; esac
    done < <("%(python)s" "$script" --complete "${PREFIX//\\/}" "${given[@]}" 2>/dev/null)
    compadd -Q -S "" -- "${open[@]}"
    compadd -Q -- "${closed[@]}"
    (( ${#open[@]} + ${#closed[@]} )) || { compset -P "*=" && _files; }
}
if [[ -n "${ZSH_VERSION:-}" ]]; then
    whence compdef >/dev/null || { autoload -Uz compinit && compinit -u -D; }
    typeset -gA _boltcutter_before
    for _boltcutter_name in python python3 torchrun; do
        [[ "${_comps[$_boltcutter_name]:-}" == _boltcutter_zsh ]] ||
            _boltcutter_before[$_boltcutter_name]="${_comps[$_boltcutter_name]:-}"
    done
    compdef _boltcutter_zsh python python3 torchrun
else
    complete -o bashdefault -o default -F _boltcutter_bash python python3 torchrun
fi
"""


def main(
    project: Project,
    module: str,
    usage: str,
    arguments: Sequence[str] | None = None,
    *,
    begin: Callable[[], None] = lambda: None,
    own: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Answer what needs no training, else call ``module``'s own main; end with 2 for a mistake, 1 for a failure.

    Args:
        project: Whose configuration is used.
        module: Imported only once the words ask for what is heavy; its ``main`` takes the project and the words.
        usage: What --help says first.
        arguments: Instead of those of the process.
        begin: Called before anything else where there is more to do than to answer.
        own: Flags that ``module`` answers, with what --help says; one may stand in for one of ``FLAGS``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--complete" not in words:
        words = [expand_home(word) for word in words]
    project.activate()
    try:
        words = trust.apply_overrides(words)
        flags = [word for word in words if word.startswith("-")]
        if not set(flags) <= own.keys():
            _answer(project, usage, flags, words, {**FLAGS, **own})
        else:
            begin()
            _adopt()
            retain_freed_memory()
            importlib.import_module(module).main(project, words)
    except ConfigError as error:
        if os.environ.get("BOLTCUTTER_DEBUG") == "1":
            raise
        lost = isinstance(error.__cause__, platform.PlatformError)  # perhaps nobody takes itself for the first
        if is_rank_zero() or lost:
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        # A failure that tells what to do about it needs no traceback; any other is a fault in the code.
        if os.environ.get("BOLTCUTTER_DEBUG") == "1" or not getattr(error, "hide_traceback", False):
            raise
        rank = distributed_rank()
        print("error" if rank is None else f"error on rank {rank}", error, sep=": ", file=sys.stderr)
        sys.exit(1)


def expand_home(word: str) -> str:
    """A word whose value is a path below ``~``, as a shell would have expanded it by itself."""
    key, equals, value = word.partition("=")
    return f"{key}={os.path.expanduser(value)}" if equals and value.startswith("~/") else word


def _adopt() -> None:
    """Learn which of the run's processes this is, where somebody else has started it."""
    try:
        platform.export_torchrun_env()
        mpi.export_torchrun_env()
        slurm.prepare()
    except (platform.PlatformError, mpi.ProcessLayoutError) as error:
        raise ConfigError(str(error)) from error


def _answer(project: Project, usage: str, flags: list[str], words: list[str], known: Mapping[str, str]) -> None:
    flag = "--help" if flags[0] == "-h" else flags[0]
    at = words.index(flags[0])
    rest = words[:at] + words[at + 1 :]
    if flag == "--complete":
        print("".join(f"{word}\n" for word in complete(project, usage, *words[at + 1 :], flags=known)), end="")
        return
    for other in flags:
        if other not in (*known, "-h"):
            raise ConfigError(f"{other}: no such flag{hint(other, known)} (there are: {', '.join(known)})")
    if len(flags) > 1:
        raise ConfigError(f"{flags[1]}: cannot go with {flags[0]}; give one of them")
    if flag == "--help":
        print(_help(project, usage, known))
    elif flag == "--print":
        _adopt()
        print(_resolved(project, rest), end="")
    elif flag == "--check":
        from boltcutter import assemble

        _adopt()
        assemble.main(project, rest)
    elif flag == "--describe":
        from boltcutter.assemble import describe_overrides

        at_key = at < len(rest) and "=" not in rest[at] and not rest[at].startswith("~")
        prefix = rest.pop(at) if at_key else ""
        print("\n".join(describe_overrides(project, rest, prefix)))
    else:
        print(_completion(project.root.resolve() / "scripts"))


def _resolved(project: Project, words: list[str]) -> str:
    """The configuration as YAML, every reference followed."""
    from boltcutter.run import load_evaluation_config, read_overrides, split_overrides

    special, rest = split_overrides(words, "run", "ckpt", "split", "input", "output")
    cfg = load_evaluation_config(project, special, rest)[0] if "run" in special else read_overrides(project, words)
    if not cfg.get("folder"):
        # The name is given when the run begins, and the references for it may lead nowhere.
        cfg.folder = "${runs}/${name}/<id>"
    return as_yaml(redacted(cfg))


def _help(project: Project, usage: str, flags: Mapping[str, str]) -> str:
    lines = [usage.strip(), "", "Flags:", *(f"  {flag:14}{text}" for flag, text in flags.items()), ""]
    has_own = len(project.config_dirs) > 1
    for group, options in project.groups().items():
        lines.append(f"{group}=")
        for option, file in options.items():
            origin = " (of the project)" if has_own and project.origin(file) == "project" else ""
            lines.append(f"  {option:18}{summary(file)}{origin}")
    return "\n".join(lines)


def _completion(scripts: Path) -> str:
    """Shell code that completes the words of those scripts which are answered here."""
    names = [file.name for file in sorted(scripts.glob("*.py")) if "from boltcutter." in file.read_text()]
    return COMPLETION.strip() % {"python": sys.executable, "folder": scripts, "scripts": " | ".join(names)}


def complete(
    project: Project, usage: str, current: str = "", *given: str, flags: Mapping[str, str] = FLAGS
) -> list[str]:
    """Words that begin with ``current``: flags, groups, their options, and keys of what ``given`` words mean.

    Keys come one level at a time, so that a hundred of them do not fill the screen; none for what a file may be.
    """
    if current.startswith("-"):
        return [flag for flag in flags if flag.startswith(current)]
    key, equals, start = current.lstrip("+~").partition("=")
    sign = current[: len(current) - len(current.lstrip("+~"))]
    known = project.groups()
    if equals:
        opening, last = re.fullmatch(r"(\[(?:[^,\]]*,)*)?(.*)", start, re.S).groups(default="")  # type: ignore[union-attr]
        taken = opening.strip("[").split(",")
        options = [option for option in [*known.get(key, {}), "null"] if key in known and option not in taken]
        ends = ("]", ",") if opening else ("",)  # with two ways to go on, no shell takes the word for finished
        return [f"{sign}{key}={opening}{o}{end}" for o in options if o.startswith(last) for end in ends]
    own = [f"{word}=" for word in re.findall(r"(\w+)=", usage.partition("\n")[0]) if word not in ("group", "key")]
    everything = [*(f"{group}=" for group in known), *own, *(f"{path}=" for path in _keys(project, given))]
    found = [f"{sign}{word}" for word in everything if f"{sign}{word}".startswith(current)]
    depth = current.count(".")
    return list(dict.fromkeys(w if w.count(".") <= depth else ".".join(w.split(".")[: depth + 1]) + "." for w in found))


def _keys(project: Project, given: Sequence[str]) -> list[str]:
    """Every key that can be set, as far as the words given so far can be read."""
    for words in (given, ()):
        with suppress(ConfigError):
            cfg = compose(project, [word for word in words if not word.startswith("-")])
            found = [path for path in paths(cfg) if "_target_" not in path and path.partition(".")[0] != "choices"]
            return [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return []
