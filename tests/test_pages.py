"""Pages show before they tell: each begins with something to run, paragraphs and cells of tables are short."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
LOOKED_UP = {"glossary.md", "threat_model.md"}  # not read from the top
BY_TABLE = {"security.md"}  # begins with what is promised, in a table
WORDS, CHARACTERS = 66, 170  # of a paragraph, and of a cell: two lines of a table at 1,280 pixels


def as_shown(text: str) -> str:
    """Markdown without the targets of links and the marks of code."""
    return re.sub(r"[`*]", "", re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text))


def prose(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs, list items among them, and the cells of tables."""
    text = re.sub(r"^ *```.*?^ *```$", "\n", text, flags=re.M | re.S)
    rows = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|(?=(?:[^`]*`[^`]*`)*[^`]*$)", row)]
    text = re.sub(r"^ *(?:\||#).*$", "", text, flags=re.M)
    text = re.sub(r"^( *(?:[-*]|\d+\.) )", r"\n\1", text, flags=re.M)
    return [as_shown(part) for part in re.split(r"\n\s*\n", text)], [as_shown(cell.strip()) for cell in cells]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in LOOKED_UP], ids=lambda page: page.stem)
def test_a_page_shows_before_it_tells(page: Path) -> None:
    text = re.sub(r"<!--.*?-->\n*", "", page.read_text(), flags=re.S)
    before = text.partition("\n")[2].partition("\n|" if page.name in BY_TABLE else "```")[0]
    assert len(before.split()) < WORDS
    assert not re.search(r"^(?:#|\|)", before, re.M)
    paragraphs, cells = prose(text)
    assert not [part for part in paragraphs if len(part.split()) > WORDS]
    assert not [cell for cell in cells if len(cell) > CHARACTERS]
