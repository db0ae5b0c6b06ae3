"""Begins a part of the project: its code, its YAML and its test, which work at once."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from project.git import ROOT, Refused

PARTS = Path(__file__).with_name("parts")
ORDER = ("model", "data", "task", "callback", "launch")
KINDS = [kind for kind in ORDER if (PARTS / kind).is_dir()]
NEVER = {"null", "none", "true", "false", "yes", "no", "on", "off", "default", "base", "module", "test", "conftest"}
LONGEST = 25


def generate(kind: str, name: str) -> str:
    """Write the three files; what to do next.

    Raises:
        Refused: There is no such kind, the name cannot be, or it is taken.
    """
    if kind not in KINDS:
        raise Refused(f"{kind}: no such kind of part (there are: {', '.join(KINDS)})")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)
        better = re.sub(r"^[0-9_]+", "", "_".join(words).lower()) or "mine"
        raise Refused(f"{name}: a name is made of lower-case words joined by underscores; try {better}")
    if keyword.iskeyword(name) or name in NEVER:
        raise Refused(f"{name}: this word means something else here; try {name}_{kind}")
    if len(name) > LONGEST:
        raise Refused(f"{name}: {len(name)} characters make lines too long; {LONGEST} will do")
    (package,) = (path.parent.name for path in (ROOT / "src").glob("*/train.py"))
    files = {
        "source.py": f"src/{package}/{kind}/{name}.py",
        "option.yaml": f"configs/{kind}/{name}.yaml",
        "test.py": f"tests/{kind}/test_{name}.py",
    }
    if there := [file for file in files.values() if (ROOT / file).exists()]:
        raise Refused(f"{name}: {there[0]} is there already; take another name")
    camel = "".join(word.capitalize() for word in name.split("_"))
    for part, file in files.items():
        text = (PARTS / kind / f"{part}.txt").read_text(encoding="utf-8")
        path = ROOT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_sorted(text.replace("CLASS", camel).replace("NAME", name)), encoding="utf-8")
    script, word = ("launch", f"launch={name}") if kind == "launch" else ("train", f"{kind}={name}")
    word = f"callback=[default,{name}]" if kind == "callback" else word
    lines = [*files.values(), "", f"Try it: python scripts/{script}.py {word} --check; pytest {files['test.py']}"]
    return "\n".join(lines)


def _sorted(text: str) -> str:
    """Imports in order, whatever the name."""
    block = re.compile(r"(?:^from \w+\.\S+ import .*\n){2,}", re.M)
    return block.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text)
