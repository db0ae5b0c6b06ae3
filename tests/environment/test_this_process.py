import ast

from sources import FILES, in_one_process, nodes


@in_one_process
def test_no_function_changes_a_variable_of_its_module() -> None:
    """State of the process is in ``this_process``, where it can be seen and restored as a whole."""
    assert [f"{file}:{node.lineno}" for file in FILES for node in nodes(file) if isinstance(node, ast.Global)] == []
