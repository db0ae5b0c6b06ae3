import subprocess
import sys

import pytest


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["trian"], 2)])
def test_the_module_is_the_console_command(arguments: list[str], status: int) -> None:
    code = f"from boltcutter.cli.commands import main; main({arguments})"
    module, command = (
        subprocess.run([sys.executable, *start], capture_output=True, text=True, timeout=100)
        for start in (["-m", "boltcutter", *arguments], ["-c", code])
    )
    assert module.returncode == command.returncode == status
    assert (module.stdout, module.stderr) == (command.stdout, command.stderr)
    assert module.stdout + module.stderr
