import socket
from pathlib import Path

import pytest
from hanging import hanging, places

from boltcutter.analysis import hang
from boltcutter.config.errors import ConfigError
from boltcutter.environment import lease
from boltcutter.project import Project

PROJECT = Project.at(Path(__file__).parents[2])


def test_the_places_of_all_ranks_are_printed_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hanging(tmp_path / "run", "wait_for_lock", "compute") as started:
        places(tmp_path / "run", 2)
        found = hang.print_hang(PROJECT, [f"run={tmp_path}/run"])
        assert all(process.poll() is None for process in started)
    assert [(one["rank"], one["function"]) for one in found] == [(0, "wait_for_lock"), (1, "compute")]
    printed = capsys.readouterr().out
    for rank, name in enumerate(("wait_for_lock", "compute")):
        assert f"in {name}" in (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert f"program.py:{found[rank]['line']} in {name}" in printed


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "run: missing"),
        (["run={tmp_path}", "step=3"], "step=3"),
        (["run={tmp_path}/none"], "no such folder"),
        (["run={tmp_path}"], "no process trains in it"),
    ],
)
def test_what_cannot_be_asked_is_said(tmp_path: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        hang.print_hang(PROJECT, [override.format(tmp_path=tmp_path) for override in overrides])


def test_the_machine_of_a_run_elsewhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    with lease.hold(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "login")
        with pytest.raises(ConfigError, match="on login; ask on node-7"):
            hang.print_hang(PROJECT, [f"run={tmp_path}"])
