import json
import os
from pathlib import Path

import pytest

from boltcutter.run import evaluations

BEST = {"split": "test", "checkpoint": "best.ckpt", "written": "2026-01-01"}


def test_evaluations_of_the_test_split_are_counted(tmp_path: Path) -> None:
    assert evaluations.of_test(tmp_path) == []
    for entry in (BEST, BEST | {"split": "val"}, BEST):
        evaluations.append(tmp_path, entry)
    found = evaluations.of_test(tmp_path)
    assert [entry["checkpoint"] for entry in found] == ["best.ckpt"] * 2
    assert evaluations.describe(found[:1]) == "once"
    assert evaluations.describe(found) == "2 times"
    evaluations.append(tmp_path, BEST | {"checkpoint": "last.ckpt"})
    assert evaluations.describe(evaluations.of_test(tmp_path)) == "3 times, at 2 checkpoints (best.ckpt, last.ckpt)"


def test_a_folder_that_cannot_be_written_is_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "evaluation").write_text("a file")
    evaluations.append(tmp_path, BEST)
    assert evaluations.of_test(tmp_path) == []


def test_what_is_no_entry_ends_the_log(tmp_path: Path) -> None:
    evaluations.append(tmp_path, BEST)
    with open(tmp_path / evaluations.FILE, "a") as file:
        file.write(json.dumps({"split": ["test"], "checkpoint": {}}) + "\n" + '{"split": "test", "check')  # killed
    assert evaluations.describe(evaluations.of_test(tmp_path)) == "once"


@pytest.mark.timeout(60)
def test_a_fifo_in_place_of_the_log_does_not_block(tmp_path: Path) -> None:
    (tmp_path / evaluations.FILE).parent.mkdir()
    os.mkfifo(tmp_path / evaluations.FILE)
    evaluations.append(tmp_path, BEST)
    assert evaluations.of_test(tmp_path) == []


def test_the_reads_of_a_project_and_the_luck_of_the_best(tmp_path: Path) -> None:
    for folder, written in (("a/1", "1"), ("a/1", "2"), ("a/1", "2"), ("tries/x/x-01-change", "1")):
        evaluations.append(tmp_path / folder, {"split": "test", "checkpoint": "best.ckpt", "written": written})
    evaluations.append(tmp_path / "a" / "2", {"split": "val", "checkpoint": "best.ckpt", "written": "1"})
    assert evaluations.count_tests(evaluations.folders_of(tmp_path)) == (4, 3)
    known = {2: 0.56, 5: 1.16, 10: 1.54, 20: 1.87, 50: 2.25}  # exact expected maxima
    assert all(abs(evaluations.luck_of_best(count) - value) < 0.03 for count, value in known.items())
    assert evaluations.luck_of_best(1) == 0
