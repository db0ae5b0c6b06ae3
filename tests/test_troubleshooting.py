"""Messages that docs/troubleshooting.md quotes are those of the library."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, in_one_process, nodes

from boltcutter.cli.main import dispatch_command
from boltcutter.extend import Command
from boltcutter.project import Project

ROOT = Path(__file__).parents[1]
ROWS = [
    re.findall(r"(?<!`)`([^`]+)`(?!`)", line)
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| `")
]
COMMANDS = [(row[0], row[1]) for row in ROWS if row[0].startswith("boltcutter ")]
QUOTED = [row[0] for row in ROWS if not row[0].startswith("boltcutter ")]


@cache
def messages() -> list[str]:
    """All strings of the source, with ``…`` in place of values."""
    found = []
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_a_quoted_message_is_that_of_its_command(
    command: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOLTCUTTER_DEBUG", raising=False)
    _, name, *arguments = shlex.split(command)
    assert name == "check"
    with pytest.raises(SystemExit):
        dispatch_command(Project.find(ROOT), Command("boltcutter.planning.check:check_command", ""), None, arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message.removesuffix('…')}")
    assert message.endswith("…") or line == f"error: {message}"


@in_one_process
@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    """Its words occur in this order in one string of the source."""
    pattern = re.compile(".*?".join(re.escape(part) for part in message.split("…")))
    assert any(len(text) > 20 and pattern.search(text) for text in messages())


def test_the_page_quotes_messages() -> None:
    assert len(COMMANDS) >= 20
    assert len(QUOTED) >= 20
