"""What stays of a text when other files are dropped."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator

from project.code import prune_code
from project.mentions import SRC, Gone
from project.names import WIDTH

EDGE = re.compile(r"^[ \t]*(?:#|<!--) (>>>|<<<) (\w+)")
OTHERWISE = re.compile(r"^([ \t]*)(?:#|<!--) \|\|\| ?(.*?)(?: -->)?$")
BLOCK = re.compile(r"^```.*?^```[^\n]*\n|(?:^(?!```)[^\n]+\n)+|^\n", re.M | re.S)


def prune(file: str, text: str, gone: Gone, without: Collection[str]) -> str:
    """The text of a file that stays; ``without`` names the rooms that are dropped."""
    whole, text = text, unmark(text, without)
    if file.startswith("scripts/") and file.count("/") == 1:  # what --help says, up to the end of the first text
        head, end, rest = text.partition('"""\n\n')
        lines = [line for line in head.split("\n") if not gone.mention.search(line)]
        text = "\n".join(lines) + end + rest
    if file.endswith(".md"):
        return prune_markdown(text, gone)
    if file.endswith(".py") and (text != whole or gone.mention.search(text)):
        return prune_code(text, gone, tests=file.startswith("tests/"), whole=whole)
    return text


def unmark(text: str, without: Collection[str]) -> str:
    """Leave out what stands between ``# >>> room`` and ``# <<< room``; then say what ``# |||`` has instead."""
    if ">>> " not in text:
        return text
    out: list[str] = []
    within: list[bool] = []  # whether each room that we are in is dropped
    for line in text.splitlines(keepends=True):
        if edge := EDGE.match(line):
            within = [*within, edge[2] in without] if edge[1] == ">>>" else within[:-1]
        elif within and (other := OTHERWISE.match(line)):
            if within[-1] and not any(within[:-1]):
                out.append(f"{other[1]}{other[2]}\n")
        elif not any(within):
            out.append(line)
    return "".join(out)


def prune_markdown(text: str, gone: Gone) -> str:
    """Commands, rows, items and sentences that tell of what is dropped go, and sections that are empty then."""
    if not gone.telling.search(text):
        return text
    out: list[str] = []
    level = 0  # of the heading whose section goes: that names what is dropped, or whose first block does
    blocks = BLOCK.findall(text)
    for at, block in enumerate(blocks):
        depth = len(block) - len(block.lstrip("#"))
        if depth and depth <= level:
            level = 0
        if depth and not level:
            first = next((other for other in blocks[at + 1 :] if other.strip()), "")
            level = depth if gone.headings.search(block) or (first and not _block(first, gone)) else 0
        if level:
            continue
        kept = _block(block, gone)
        if kept or not block.strip():
            out.append(kept)
        elif out and out[-1] == "\n":
            out.pop()  # the blank line before what went
            if out and out[-1].rstrip().endswith(":"):  # it led up to what went
                out[-1] = _wrapped(_sentences(out[-1])[:-1], out[-1])
        if depth == 0 and not kept:
            continue
    return re.sub(r"\n{3,}", "\n\n", "".join(_with_something_below(out))).rstrip("\n") + "\n"


def _with_something_below(blocks: list[str]) -> Iterator[str]:
    for at, block in enumerate(blocks):
        depth = len(block) - len(block.lstrip("#"))
        below = next((other for other in blocks[at + 1 :] if other.strip()), "# end")
        deeper = len(below) - len(below.lstrip("#"))
        if not depth or not deeper or deeper > depth:
            yield block


def _block(block: str, gone: Gone) -> str:
    lines = block.splitlines(keepends=True)
    if not gone.telling.search(block) and not block.startswith("|"):
        tree = block.startswith("```") and any(_is_gone_folder(line, gone) for line in lines)
        if not tree:
            return block
    if block.startswith("```"):
        kept = [line for line in lines if not gone.telling.search(line) and not _is_gone_folder(line, gone)]
        return "".join(kept) if len(kept) > 2 else ""
    if block.startswith("|"):
        group = (re.match(r"\| *`(\w+)=`", block) or ["", ""])[1]
        rows = [row for line in lines[2:] if (row := _row(line, group, gone))]
        return "".join(lines[:2] + rows) if rows else ""
    if re.match(r"- |\d+\. ", block):
        items = re.split(r"^(?=- |\d+\. )", block, flags=re.M)
        return "".join(_wrapped(_told(item, gone), item) for item in items if item)
    if block.startswith("#") or block.startswith("<!--"):
        return block
    return _wrapped(_told(block, gone), block)


def _is_gone_folder(line: str, gone: Gone) -> bool:
    """Whether a line of a drawn tree begins with a room that is dropped."""
    found = re.match(r" +(\w+)/ ", line)
    return bool(found and gone.empties(f"{SRC}/{found[1]}"))


def _row(line: str, group: str, gone: Gone) -> str:
    if gone.telling.search(line):
        return ""
    if not group:
        return line
    first, cell, rest = line.split("|", 2)
    options = re.findall(r"`(\w+)`", cell)
    kept = [option for option in options if f"configs/{group}/{option}.yaml" not in gone.files]
    if options and not kept:
        return ""
    return line if kept == options else f"{first}| {', '.join(f'`{option}`' for option in kept)} |{rest}"


def _sentences(block: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(block.split()))


def _told(block: str, gone: Gone) -> list[str] | None:
    """Sentences that stay; None for all."""
    before = _sentences(block)
    after = [sentence for sentence in before if not gone.telling.search(sentence)]
    return None if after == before else after


def _wrapped(sentences: list[str] | None, block: str) -> str:
    if sentences is None:
        return block
    if not sentences:
        return ""
    bullet = re.match(r"- |\d+\. ", block)
    text = " ".join(sentences)
    text = f"{bullet[0]}{text}" if bullet and not text.startswith(bullet[0]) else text
    indent = " " * len(bullet[0]) if bullet else ""
    options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
    return textwrap.fill(text, WIDTH, **options) + "\n"  # type: ignore[arg-type]
