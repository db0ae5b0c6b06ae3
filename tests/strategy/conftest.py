"""The reference run that tests of strategies compare with."""

from pathlib import Path

import pytest
from conftest import Script


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the module's ``OVERRIDES`` in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = script("train", *request.module.OVERRIDES, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder
