import ast

from sources import FILES, SRC, in_one_process, nodes

from boltcutter import run_files

OTHERS = {"port_lht.py", "port_cli.py"}  # files of other templates
OWN = {"report.html"}  # also the name of templates in the package


@in_one_process
def test_no_other_module_repeats_the_name_of_a_file() -> None:
    names = {value for value in vars(run_files).values() if isinstance(value, str) and "." in value[:-1]} - OWN
    assert "record.json" in names
    found = [
        f"{file.relative_to(SRC)}:{node.lineno}"
        for file in FILES
        if file.name not in OTHERS | {"run_files.py"}
        for node in nodes(file)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []
