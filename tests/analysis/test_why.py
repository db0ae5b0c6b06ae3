from pathlib import Path

import pytest

from boltcutter.analysis import why
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

PROJECT = Project.at(Path(__file__).parents[2])


def test_what_is_not_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hang"):
        why.why_command(PROJECT, [f"run={tmp_path}"])
    with pytest.raises(ConfigError, match="no process trains in it"):
        why.why_command(PROJECT, [f"run={tmp_path}", "--hang"])
