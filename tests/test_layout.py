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
from sources import FILES, SRC, in_one_process, nodes, parsed

import boltcutter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]
# A name of the public API counts as an import of the module that defines it.
PUBLIC = {f"boltcutter.{name}": module for name, module in boltcutter._MODULES.items()}
ONLY_IN = {
    "omegaconf": {"config"},
    "wandb": {"analysis", "export", "logger"},
    "subprocess": {"environment", "run", "launch", "planning", "replay", "scaffold", "search", "export", "tries"},
}


@cache
def imports(file: Path, *, for_annotations: bool = True) -> tuple[str, ...]:
    return tuple(find_imports(file, for_annotations=for_annotations))


def find_imports(file: Path, *, for_annotations: bool) -> Iterator[str]:
    found = nodes(file)
    if not for_annotations:
        body = parsed(file).body
        kept = [node for node in body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
        found = [node for statement in kept for node in ast.walk(statement)]
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (PUBLIC.get(name, name) for name in names)


def package(file: Path) -> str:
    """Name of the package, or of the module beside the packages."""
    return file.relative_to(SRC).parts[1].removesuffix(".py")


def test_the_contracts_are_kept() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_one_package_and_the_guide_describes_its_parts() -> None:
    assert [file.parent.name for file in SRC.glob("*/__init__.py")] == ["boltcutter"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = {name for line in CONTRACTS[0]["layers"] for name in re.findall(r"\w+", line)}
    assert not [name for name in names if f"`{name}`" not in text]


@in_one_process
def test_no_module_has_the_name_of_one_of_the_standard_library() -> None:
    names = {file.stem for file in FILES} - {"__init__", "__main__"}
    assert not names & sys.stdlib_module_names


@in_one_process
def test_functions_are_named_by_what_they_act_on() -> None:
    """Exceptions: the console script, and what users import, ``boltcutter.load`` and ``boltcutter.diagnosis.check``."""
    names = {"main", "check", "read", "write", "render", "load"}
    found = [
        f"{file.relative_to(SRC / 'boltcutter')}: {node.name}"
        for file in FILES
        for node in parsed(file).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert sorted(found) == ["api/functions.py: load", "cli/commands.py: main", "diagnosis/checks.py: check"]


@in_one_process
def test_there_is_no_import_cycle() -> None:
    modules = {".".join(file.relative_to(SRC).with_suffix("").parts): file for file in FILES}
    graph = {
        module: set(imports(file, for_annotations=False)) & modules.keys() - {module}
        for module, file in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError


@in_one_process
@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    importers = {package(file) for file in FILES if any(name.split(".")[0] == library for name in imports(file))}
    assert importers <= ONLY_IN[library]


@in_one_process
def test_functions_are_short() -> None:
    lengths = [
        node.end_lineno - node.lineno
        for file in FILES
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    lengths.sort()
    assert lengths[int(0.95 * len(lengths))] <= 40


@in_one_process
def test_packages_hold_no_code() -> None:
    for file in SRC.glob("boltcutter/*/**/__init__.py"):
        if file.parent.name == "diagnosis":  # users of plain Lightning import from it
            continue
        assert all(isinstance(node, ast.Expr) for node in parsed(file).body), file


def mirrored(source: Path) -> Path:
    """``tests/run/test_trust.py`` for ``boltcutter/run/trust.py``."""
    return ROOT.joinpath("tests", *source.parts[1:-1], f"test_{source.name}")


def test_each_source_file_has_a_test_file() -> None:
    sources = {file.relative_to(SRC) for file in FILES if file.name not in ("__init__.py", "parts.py")}
    missing = [source for source in sources if not mirrored(source).is_file()]
    assert not missing


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_the_first_line_of_each_option_describes_it(file: Path) -> None:
    assert re.match(r"# \S.*[^ ]\n", file.read_text())


def test_scripts_are_thin() -> None:
    for file in (ROOT / "scripts").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 32, file


def test_readme_is_a_short_path() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    assert len(re.findall(r"^python3 -m venv .*\.venv/bin/pytest$", text, re.M)) == 1  # .ci/run reads it
    assert len(re.findall(r"^python3 -m venv .*scripts/train\.py$", text, re.M)) == 1


def test_links_lead_to_files() -> None:
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name}: {link}"


def test_the_table_of_layers_is_the_contract() -> None:
    contract = next(contract for contract in CONTRACTS if contract["type"] == "layers")["layers"]
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| layer |")[2].partition("\n\n")[0]
    rows: list[set[str]] = []
    for number, names in re.findall(r"^\| *(\d*) *\| (.*?) \|", table, re.M):
        rows += [set()] if number else []
        assert not number or int(number) == len(contract) - len(rows)
        rows[-1] |= set(re.findall(r"`(\w+)`", names))
    assert rows == [set(re.findall(r"\w+", layer)) for layer in contract]
