"""The architecture: which package may import which, and how large a file may grow."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import boltcutter

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "boltcutter"
FILES = sorted(SRC.rglob("*.py"))

# A package or module imports only those of lower layers.
LAYERS = {
    **dict.fromkeys(("api",), 8),
    **dict.fromkeys(("training", "launch"), 7),
    **dict.fromkeys(("cli", "scaffold", "evaluation", "planning", "search", "serving"), 6),
    **dict.fromkeys(("export",), 5),
    **dict.fromkeys(("assembly", "report"), 4),
    **dict.fromkeys(("run",), 3),
    **dict.fromkeys(("checkpoint", "callback"), 2),
    **dict.fromkeys(("config", "environment"), 1),
    **dict.fromkeys(("project", "formatting", "lightning_alias", "data"), 0),
    **dict.fromkeys(("protocols",), -1),
}
# Components that only YAML connects to the rest: they import only protocols, and nothing of ours imports them.
COMPONENTS = {"model", "task", "strategy", "logger"}
# A name of the public API counts as an import of the module that defines it.
PUBLIC = {f"boltcutter.{name}": module for name, module in boltcutter._MODULES.items()}
ONLY_IN = {
    "omegaconf": {"config"},
    "wandb": {"logger"},
    "subprocess": {"run", "launch", "planning", "scaffold", "search", "export"},
}


def imports(file: Path, *, for_annotations: bool = True) -> Iterator[str]:
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
    """Name of the package, or of the module beside the packages."""
    return file.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_imports_point_downwards(file: Path) -> None:
    own = package(file)
    if own.startswith("__"):  # the entry points of the package
        return
    allowed = {own, "protocols"} | {name for name, layer in LAYERS.items() if own in LAYERS and layer < LAYERS[own]}
    for name in imports(file):
        if name.startswith("boltcutter."):
            assert name.split(".")[1] in allowed, f"{file.relative_to(SRC)} imports {name}"


def test_every_package_has_a_layer() -> None:
    assert {name for file in FILES if not (name := package(file)).startswith("__")} == LAYERS.keys() | COMPONENTS


def test_there_is_no_import_cycle() -> None:
    modules = {".".join(("boltcutter", *file.relative_to(SRC).with_suffix("").parts)): file for file in FILES}
    graph = {
        module: set(imports(file, for_annotations=False)) & modules.keys() - {module}
        for module, file in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    importers = {package(file) for file in FILES if any(name.split(".")[0] == library for name in imports(file))}
    assert importers <= ONLY_IN[library]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_a_file_has_at_most_400_lines(file: Path) -> None:
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
    for file in SRC.glob("*/__init__.py"):
        assert all(isinstance(node, ast.Expr) for node in ast.parse(file.read_text()).body), file


def test_each_source_file_has_a_test_file() -> None:
    sources = {file.relative_to(SRC) for file in FILES if file.name != "__init__.py"}
    missing = [source for source in sources if not (ROOT / "tests" / source.parent / f"test_{source.name}").is_file()]
    assert not missing


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_the_first_line_of_each_option_describes_it(file: Path) -> None:
    assert re.match(r"# \S.*[^ ]\n", file.read_text())


def test_scripts_are_thin() -> None:
    for file in (ROOT / "scripts").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 25, file


def test_readme_is_a_short_path() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 300
    assert len(re.findall(r"^python3 -m venv .*\.venv/bin/pytest$", text, re.M)) == 1  # .ci/run reads it
    assert len(re.findall(r"^python3 -m venv .*scripts/train\.py$", text, re.M)) == 1


def test_links_lead_to_files() -> None:
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name}: {link}"
