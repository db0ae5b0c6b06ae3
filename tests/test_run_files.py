import ast
from pathlib import Path

import boltcutter
from boltcutter import run_files

SOURCES = Path(boltcutter.__file__).parent
OTHERS = {"port_lht.py", "port_cli.py"}  # files of other templates
OWN = {"report.html"}  # also the name of templates in the package


def test_no_other_module_repeats_the_name_of_a_file() -> None:
    names = {value for value in vars(run_files).values() if isinstance(value, str) and "." in value[:-1]} - OWN
    assert "record.json" in names
    found = [
        f"{file.relative_to(SOURCES)}:{node.lineno}"
        for file in SOURCES.rglob("*.py")
        if file.name not in OTHERS | {"run_files.py"}
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []
