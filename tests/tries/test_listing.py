from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tries_runs import ENTRY

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.tries import ledger
from boltcutter.tries.listing import tries_command, unconfirmed


def test_tries_are_listed(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tries_command(project, [f"runs={tmp_path}"]) == []
    ledger.append(tmp_path, ENTRY)
    ledger.append(tmp_path, replace(ENTRY, id="b", verdict="accepted"))
    ledger.append(tmp_path, replace(ENTRY, id="c", verdict="accepted", question="other"))
    (tmp_path / "tries" / "d").mkdir(parents=True)
    (tmp_path / "tries" / "d" / "try.json").write_text('{"id": "d"}')
    assert [entry["id"] for entry in tries_command(project, [f"runs={tmp_path}"])] == ["a", "b", "c"]
    out = capsys.readouterr().out
    assert "asked 2 times" in out
    assert "not ended: d" in out
    assert "--confirm" in out
    with pytest.raises(ConfigError, match="model=mlp"):
        tries_command(project, ["model=mlp"])


def test_what_an_accepted_confirmation_has_confirmed_is_done() -> None:
    entries = [replace(ENTRY, id="a"), replace(ENTRY, id="b"), replace(ENTRY, id="c", confirms=("a",))]
    assert [entry.id for entry in unconfirmed(entries)] == ["a", "b"]
    entries[2] = replace(entries[2], verdict="accepted")
    assert [entry.id for entry in unconfirmed(entries)] == ["b"]
