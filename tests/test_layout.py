"""The architecture: which package may import which, and how large a file may grow."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import boltcutter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.py"))

CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]
PART_PATH = re.compile(r"\bboltcutter_[a-z]+\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A name of the public API counts as an import of the module that defines it.
PUBLIC = {f"boltcutter.{name}": module for name, module in boltcutter._MODULES.items()}
ONLY_IN = {
    "omegaconf": {"config"},
    "wandb": {"boltcutter_export", "boltcutter_logging"},
    "subprocess": {"run", *(f"boltcutter_{part}" for part in ("launch", "planning", "scaffold", "search", "export"))},
}


@cache
def imports(file: Path, *, for_annotations: bool = True) -> tuple[str, ...]:
    return tuple(find_imports(file, for_annotations=for_annotations))


def find_imports(file: Path, *, for_annotations: bool) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    if not for_annotations:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (PUBLIC.get(name, name) for name in names)


def package(file: Path) -> str:
    """Name of the part, or of the core's package or module."""
    top, inner, *_ = file.relative_to(SRC).parts
    return inner.removesuffix(".py") if top == "boltcutter" else top


def test_the_contracts_are_kept() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_strings_of_the_core_name_no_part() -> None:
    """Class paths and lazy imports in strings, which import-linter does not see."""
    for file in (SRC / "boltcutter").rglob("*.py"):
        tree = ast.parse(file.read_text())
        documentation = {
            ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in documentation:
                assert not PART_PATH.search(node.value), f"{file.relative_to(SRC)}:{node.lineno}: {node.value}"


def test_strings_of_a_part_name_only_parts_that_it_may_import() -> None:
    for file in SRC.glob("boltcutter_*/**/*.py"):
        own = package(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and PART_PATH.match(node.value):
                named = node.value.partition(".")[0]
                allowed = any(
                    line.startswith(f"{own}.") and f"-> {named}." in line for line in CONTRACTS[-1]["ignore_imports"]
                )
                assert named == own or allowed, f"{file.relative_to(SRC)}:{node.lineno}: {node.value}"


def test_each_part_is_declared_and_described() -> None:
    folders = {file.parent.name for file in SRC.glob("boltcutter_*/__init__.py")}
    declared = PYPROJECT["project"]["entry-points"]["boltcutter.parts"]
    assert declared == {name.removeprefix("boltcutter_"): f"{name}.part:PART" for name in folders}
    assert set(PYPROJECT["tool"]["importlinter"]["root_packages"]) == {"boltcutter", *folders}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    core = {name for line in CONTRACTS[0]["layers"] for name in re.findall(r"\w+", line)}
    assert not [name for name in folders | core if f"`{name}`" not in text]


def test_there_is_no_import_cycle() -> None:
    modules = {".".join(file.relative_to(SRC).with_suffix("").parts): file for file in FILES}
    graph = {
        module: set(imports(file, for_annotations=False)) & modules.keys() - {module}
        for module, file in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    importers = {package(file) for file in FILES if any(name.split(".")[0] == library for name in imports(file))}
    assert importers <= ONLY_IN[library]


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
    for file in (*SRC.glob("boltcutter/*/__init__.py"), *SRC.glob("boltcutter_*/**/__init__.py")):
        if file.parent.name == "diagnosis":  # users of plain Lightning import from it
            continue
        assert all(isinstance(node, ast.Expr) for node in ast.parse(file.read_text()).body), file


def mirrored(source: Path) -> Path:
    """``tests/core/run/test_trust.py`` for ``boltcutter/run/trust.py``, ``tests/launch/test_slurm.py`` for a part."""
    top, *folders = source.parts[:-1]
    first = top.removeprefix("boltcutter_") if top != "boltcutter" else "core"
    return ROOT.joinpath("tests", first, *folders, f"test_{source.name}")


def test_each_source_file_has_a_test_file() -> None:
    sources = {file.relative_to(SRC) for file in FILES if file.name not in ("__init__.py", "part.py")}
    missing = [source for source in sources if not mirrored(source).is_file()]
    assert not missing


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_the_first_line_of_each_option_describes_it(file: Path) -> None:
    assert re.match(r"# \S.*[^ ]\n", file.read_text())


def test_scripts_are_thin() -> None:
    for file in (ROOT / "scripts").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 30, file


def test_readme_is_a_short_path() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    assert len(re.findall(r"^python3 -m venv .*\.venv/bin/pytest$", text, re.M)) == 1  # .ci/run reads it
    assert len(re.findall(r"^python3 -m venv .*scripts/train\.py$", text, re.M)) == 1


def test_links_lead_to_files() -> None:
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name}: {link}"
