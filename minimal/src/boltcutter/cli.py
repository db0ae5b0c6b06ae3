"""The command line: words, help, and errors of one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from boltcutter.config import ConfigError, as_yaml, groups, hint, plain
from boltcutter.run import is_first, read_words

FLAGS = {"--help": "this text", "--print": "show the resolved configuration", "--check": "look for mistakes and leave"}


def main(configs: Path, usage: str, given: list[str] | None = None) -> None:
    """Train as the given words say, or answer a flag; end with 2 for a mistake, 1 for a failure."""
    given = sys.argv[1:] if given is None else given
    words = [word for word in given if not word.startswith("-")]
    flags = ["--help" if word == "-h" else word for word in given if word.startswith("-")]
    try:
        if unknown := [flag for flag in flags if flag not in FLAGS]:
            raise ConfigError(f"{unknown[0]}: no such flag{hint(unknown[0], FLAGS)} (there are: {', '.join(FLAGS)})")
        if "--help" in flags:
            print(usage.strip(), "", *(f"{flag:10}{text}" for flag, text in FLAGS.items()), sep="\n")
            for group, options in groups(configs).items():
                print("", f"{group}=", *(f"  {option:16}{text}" for option, text in options.items()), sep="\n")
        elif "--print" in flags:
            print(as_yaml(plain(read_words(configs, words), resolve=True)), end="")
        else:
            from boltcutter import train  # imports torch and Lightning

            train.main(configs, words, only_check="--check" in flags)
    except Exception as error:
        # What explains itself needs no traceback; all else is a fault in the code.
        mistake = isinstance(error, ConfigError)
        shown = os.environ.get("BOLTCUTTER_DEBUG") == "1"
        if shown or not (mistake or getattr(error, "explains_itself", False)):
            raise
        if is_first():
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2 if mistake else 1)
