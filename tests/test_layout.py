"""Import rules between packages, and limits on the size of files and functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "boltcutter"
FILES = sorted(SRC.rglob("*.py"))
PACKAGES = {path.name for path in SRC.iterdir() if path.is_dir() and not path.name.startswith("__")}
# Modules that each package may import, besides its own.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "callback": {"environment", "batches"},  # the flag set by signals; the size of a batch
    "data": {"seeding", "stream"},  # seeds shared by ranks and resumed runs
    "launch": {
        *("atomic", "config", "redaction", "trust", "build", "describe", "run", "lineage", "assemble", "environment"),
        "project",
    },
    "bench": {"project"},
    "scaffold": {"config", "project"},
}
ALLOWED_IMPORTERS = {
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


def package_of(file: Path) -> str:
    """Return the name of a file's package, or of a top-level module."""
    return file.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", [f for f in FILES if package_of(f) in PACKAGES], ids=lambda f: str(f.relative_to(SRC)))
def test_a_package_imports_only_what_it_may(file: Path) -> None:
    own = package_of(file)
    for name in imports(file):
        if name.startswith("boltcutter."):
            assert name.split(".")[1] in {own} | ALLOWED_IMPORTS.get(own, set()), f"{file.name} imports {name}"


@pytest.mark.parametrize(
    "file", [f for f in FILES if package_of(f) not in PACKAGES], ids=lambda f: str(f.relative_to(SRC))
)
def test_the_core_imports_no_components(file: Path) -> None:
    for name in imports(file):
        if name.startswith("boltcutter."):
            assert name.split(".")[1] not in PACKAGES - {"environment"}, f"{file.name} imports {name}"


@pytest.mark.parametrize("library", ALLOWED_IMPORTERS)
def test_a_library_is_imported_only_where_allowed(library: str) -> None:
    importers = {package_of(file) for file in FILES if any(name.split(".")[0] == library for name in imports(file))}
    assert importers <= ALLOWED_IMPORTERS[library]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_files_have_at_most_400_lines(file: Path) -> None:
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


def test_packages_have_no_code_in_init() -> None:
    for file in SRC.rglob("__init__.py"):
        assert all(isinstance(node, ast.Expr) for node in ast.parse(file.read_text()).body), file


def test_each_source_file_has_a_test() -> None:
    sources = {file.relative_to(SRC) for file in FILES if file.name not in ("__init__.py", "__main__.py")}
    missing = [source for source in sources if not (ROOT / "tests" / source.parent / f"test_{source.name}").is_file()]
    assert not missing


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_each_option_begins_with_a_comment(file: Path) -> None:
    assert re.match(r"# \S.*[^ ]\n", file.read_text())


def test_scripts_are_short() -> None:
    for file in (ROOT / "scripts").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 25, file


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 300
    assert len(re.findall(r"^python3 -m venv .*\.venv/bin/pytest$", text, re.M)) == 1  # .ci/run takes it from here
    assert len(re.findall(r"^python3 -m venv .*scripts/train\.py$", text, re.M)) == 1


def test_links_exist() -> None:
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name}: {link}"
