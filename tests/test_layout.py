"""The walls of the house: who may import whom, and how large a file may grow."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "boltcutter"
FILES = sorted(SRC.rglob("*.py"))
ROOMS = {path.name for path in SRC.iterdir() if path.is_dir() and not path.name.startswith("__")}
# A room's own folder apart, what it may import of the project.
OPEN_TO_ROOMS: dict[str, set[str]] = {
    "callback": {"environment", "batches"},  # the flag that a signal sets; how many samples a batch has
    # It composes, checks and freezes as train does.
    "data": {"seeding", "stream"},  # randomness that ranks and resumed runs share
    "launch": {
        *("atomic", "config", "redaction", "trust", "build", "describe", "run", "lineage", "assemble", "environment"),
        "project",
    },
    "bench": {"project"},
    "scaffold": {"config", "project"},
}
SOLE_KNOWERS = {
    "omegaconf": {"config", "build"},
    "wandb": {"logger"},
    "subprocess": {"lineage", "bench", "launch", "doctor", "scaffold"},
}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(file: Path) -> str:
    """A room's name, or that of a module beside the rooms."""
    return file.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", [f for f in FILES if place(f) in ROOMS], ids=lambda f: str(f.relative_to(SRC)))
def test_a_room_knows_no_other_room(file: Path) -> None:
    own = place(file)
    for name in imports(file):
        if name.startswith("boltcutter."):
            assert name.split(".")[1] in {own} | OPEN_TO_ROOMS.get(own, set()), f"{file.name} imports {name}"


@pytest.mark.parametrize("file", [f for f in FILES if place(f) not in ROOMS], ids=lambda f: str(f.relative_to(SRC)))
def test_the_core_meets_rooms_only_through_yaml(file: Path) -> None:
    for name in imports(file):
        if name.startswith("boltcutter."):
            assert name.split(".")[1] not in ROOMS - {"environment"}, f"{file.name} imports {name}"


@pytest.mark.parametrize("library", SOLE_KNOWERS)
def test_a_library_is_known_where_it_belongs(library: str) -> None:
    knowers = {place(file) for file in FILES if any(name.split(".")[0] == library for name in imports(file))}
    assert knowers <= SOLE_KNOWERS[library]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_a_file_can_be_read_in_one_sitting(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400


def test_functions_are_short() -> None:
    lengths = [
        node.end_lineno - node.lineno
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    lengths.sort()
    assert lengths[int(0.95 * len(lengths))] <= 40


def test_packages_hold_no_code() -> None:
    for file in SRC.rglob("__init__.py"):
        assert all(isinstance(node, ast.Expr) for node in ast.parse(file.read_text()).body), file


def test_each_source_has_a_test() -> None:
    sources = {file.relative_to(SRC) for file in FILES if file.name not in ("__init__.py", "__main__.py")}
    missing = [source for source in sources if not (ROOT / "tests" / source.parent / f"test_{source.name}").is_file()]
    assert not missing


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_each_option_says_in_its_first_line_what_it_is(file: Path) -> None:
    assert re.match(r"# \S.*[^ ]\n", file.read_text())


def test_scripts_do_not_think() -> None:
    for file in (ROOT / "scripts").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 25, file


def test_readme_is_a_short_path() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 300
    assert len(re.findall(r"^python3 -m venv .*\.venv/bin/pytest$", text, re.M)) == 1  # .ci/run takes it from here
    assert len(re.findall(r"^python3 -m venv .*scripts/train\.py$", text, re.M)) == 1


def test_links_lead_somewhere() -> None:
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name}: {link}"
