"""The command line that all scripts share: words, help, completion, and errors of one line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from boltcutter.config import ConfigError, compose, groups, hint, paths
from boltcutter.environment.process import is_first

FLAGS = {
    "--help": "this text",
    "--print": "show the resolved configuration and leave",
    "--check": "look for mistakes and leave",
    "--describe": "list every key that can be set below the next word, with type, value and documentation",
    "--completion": 'complete words in bash and zsh: eval "$(python scripts/train.py --completion)"',
}
COMPLETION = """\
_boltcutter() {
    local script="" word
    for word in "${COMP_WORDS[@]}"; do [[ "$word" == *scripts/*.py ]] && script="$word" && break; done
    [[ -z "$script" ]] && return 0
    local line="${COMP_LINE:0:COMP_POINT}"
    local current="${line##* }"
    local IFS=$'\\n'
    COMPREPLY=($("%(python)s" "$script" --complete "$current" 2>/dev/null))
    # Readline replaces only what stands after the last = or :, so give no more than that.
    local kept="${current%%"${current##*[=:]}"}" i
    if [[ -n "$kept" && "$COMP_WORDBREAKS" == *=* ]]; then
        for i in "${!COMPREPLY[@]}"; do COMPREPLY[$i]="${COMPREPLY[$i]#"$kept"}"; done
    fi
    [[ "${COMPREPLY[0]}" == *= || "${COMPREPLY[0]}" == *. ]] && compopt -o nospace 2>/dev/null
    return 0
}
[[ -n "${ZSH_VERSION:-}" ]] && autoload -Uz compinit bashcompinit && compinit -u && bashcompinit
complete -o default -F _boltcutter python python3 train.py evaluate.py predict.py check.py
"""


def main(configs: Path, module: str, usage: str, arguments: Sequence[str] | None = None) -> None:
    """Answer what needs no training, else call ``module``'s own main; end with 2 for a mistake, 1 for a failure.

    Args:
        configs: Folder of the configuration.
        module: Imported only once the words ask for what is heavy; its ``main`` takes ``configs`` and the words.
        usage: What --help says first.
        arguments: Instead of those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        flag = next((word for word in words if word.startswith("-")), None)
        if flag is None:
            importlib.import_module(module).main(configs, words)
        else:
            _answer(configs, usage, "--help" if flag == "-h" else flag, words)
    except ConfigError as error:
        if os.environ.get("BOLTCUTTER_DEBUG") == "1":
            raise
        if is_first():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _answer(configs: Path, usage: str, flag: str, words: list[str]) -> None:
    at = words.index(flag if flag in words else "-h")
    rest = words[:at] + words[at + 1 :]
    if flag == "--help":
        print(_help(configs, usage))
    elif flag == "--print":
        from omegaconf import OmegaConf

        from boltcutter.run import public, read_words

        print(OmegaConf.to_yaml(public(read_words(configs, rest))), end="")
    elif flag == "--check":
        from boltcutter import assemble

        assemble.main(configs, rest)
    elif flag == "--describe":
        from boltcutter.assemble import describe_words

        at_key = at < len(rest) and "=" not in rest[at]
        prefix = rest.pop(at) if at_key else ""
        print("\n".join(describe_words(configs, rest, prefix)))
    elif flag == "--completion":
        print(COMPLETION % {"python": sys.executable})
    elif flag == "--complete":
        print("\n".join(complete(configs, words[at + 1] if at + 1 < len(words) else "")))
    else:
        raise ConfigError(f"{flag}: no such flag{hint(flag, FLAGS)} (there are: {', '.join(FLAGS)})")


def _help(configs: Path, usage: str) -> str:
    lines = [usage.strip(), "", "Flags:", *(f"  {flag:14}{text}" for flag, text in FLAGS.items()), ""]
    for group, options in groups(configs).items():
        lines.append(f"{group}=")
        lines += [f"  {option:18}{text}" for option, text in options.items()]
    return "\n".join(lines)


def complete(configs: Path, current: str) -> list[str]:
    """Words that begin with ``current``: groups, their options, and keys of the default configuration."""
    key, equals, start = current.partition("=")
    known = groups(configs)
    if equals:
        return [
            f"{key}={option}" for option in [*known.get(key, {}), "null"] if option.startswith(start) and key in known
        ]
    with suppress(ConfigError):
        keys = [f"{path}=" for path in paths(compose(configs)) if "_target_" not in path and path not in known]
        found = [
            word
            for word in [*(f"{group}=" for group in known), "resume=", "reproduce=", *keys]
            if word.startswith(current)
        ]
        # One level at a time, so that a hundred keys do not fill the screen.
        depth = current.count(".")
        return list(
            dict.fromkeys(w if w.count(".") <= depth else ".".join(w.split(".")[: depth + 1]) + "." for w in found)
        )
    return []
