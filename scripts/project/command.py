"""The command line of scripts/new.py."""

from __future__ import annotations

import argparse
import sys

# >>> template
from project import creation

# <<< template
from project.generate import KINDS, generate
from project.git import Refused
from project.update import update

EXAMPLES = """
  python scripts/new.py model tiny                            code, YAML and test of a model; or data, task, callback
  python scripts/new.py --update                              in a project: bring in what the template has learnt
  python scripts/new.py --diff                                show that, and change nothing
"""


def main() -> None:
    """Do what the words say; end with 2 for a mistake of the user, 1 for a failure."""
    if sys.version_info < (3, 10):  # noqa: UP036  # nothing is installed yet that would have said so
        sys.exit("error: this needs Python 3.10 or later")
    try:
        _do(_parser().parse_args())
    except (Refused, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, Refused) else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.description = EXAMPLES
    parser.add_argument("words", nargs="*", metavar="word", help=f"{', '.join(KINDS)}, and its name")
    parser.add_argument("--update", action="store_true", help="merge the template's news into this project")
    parser.add_argument("--diff", action="store_true", help="show what --update would change")
    parser.add_argument("--from", dest="source", metavar="URL", help="where the template is, if not where it was")
    parser.add_argument("--version", metavar="TAG", help="of the template, or a branch or commit; else its newest")
    # >>> template
    parser.description = creation.EXAMPLES.rstrip() + EXAMPLES
    creation.add_arguments(parser)
    # <<< template
    return parser


def _do(words: argparse.Namespace) -> None:
    given: list[str] = words.words
    if words.update or words.diff:
        if given:
            raise Refused(f"{given[0]}: --update and --diff take no name")
        print(update(words.source, words.version, show=words.diff))
        return
    # >>> template
    if creation.begin(words):
        return
    # <<< template
    if len(given) != 2:
        raise Refused(f"{' '.join(given) or 'no word'}: give a kind and a name: python scripts/new.py model tiny")
    print(generate(*given))
