from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tries_runs import ENTRY

from boltcutter.tries import ledger
from boltcutter.tries.ledger import LEDGER


def test_the_newest_entry_of_each_try_is_read_and_torn_lines_are_not(tmp_path: Path) -> None:
    ledger.append(tmp_path, replace(ENTRY, is_stopped=True))
    ledger.append(tmp_path, replace(ENTRY, id="b"))
    with open(tmp_path / LEDGER, "a") as file:
        file.write('{"id": "c", "ti')  # its process was killed
    ledger.append(tmp_path, replace(ENTRY, verdict="accepted"))
    assert [(entry.id, entry.verdict, entry.is_stopped) for entry in ledger.read_entries(tmp_path)] == [
        ("a", "accepted", False),
        ("b", "", False),
    ]


def test_entries_of_somebody_else_are_left_out(tmp_path: Path) -> None:
    ledger.append(tmp_path, ENTRY)
    values = json.loads((tmp_path / LEDGER).read_text())
    (tmp_path / LEDGER).write_text(json.dumps(values | {"change_overrides": ["optimizer._target_=os.system"]}) + "\n")
    assert not ledger.read_entries(tmp_path)
    assert not ledger.read_entries(tmp_path / "nowhere")
