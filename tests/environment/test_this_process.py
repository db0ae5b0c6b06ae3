import ast
from pathlib import Path

import boltcutter


def test_no_function_changes_a_variable_of_its_module() -> None:
    """State of the process is in ``this_process``, where it can be seen and restored as a whole."""
    files = Path(boltcutter.__file__).parent.rglob("*.py")
    nodes = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    assert [f"{file}:{node.lineno}" for file, node in nodes if isinstance(node, ast.Global)] == []
