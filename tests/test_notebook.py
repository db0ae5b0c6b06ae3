import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_command


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    execute = str(Path(sys.executable).with_name("jupyter-execute"))
    env = {
        "IPYTHONDIR": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
        "MPLBACKEND": "agg",
        "TMPDIR": str(tmp_path),
    }
    done = run_command([execute, str(ROOT / "docs" / "notebook.ipynb")], env=env, timeout=150)
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("*/*/*/record.json")
    assert '"reason": "completed"' in record.read_text()


def test_the_notebook_is_committed_without_outputs() -> None:
    assert '"outputs": []' in (ROOT / "docs" / "notebook.ipynb").read_text()
    assert '"output_type"' not in (ROOT / "docs" / "notebook.ipynb").read_text()
