from pathlib import Path
from typing import Any

from boltcutter.run.differences import record_differences

PATCH = "diff --git a/{0} b/{0}\nindex 1..2\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-x\n+{1}\n"


def test_code_packages_and_hardware_that_differ_are_named(tmp_path: Path) -> None:
    common: dict[str, Any] = {"python": "3.11.0", "library": {"version": "1.0"}}
    first: dict[str, Any] = {
        "git": {"commit": "a", "changes": "1"},
        "packages": {"x": "1.0", "y": "2"},
        "hardware": {"threads": 1},
    }
    second: dict[str, Any] = {
        "git": {"commit": "b", "changes": "2"},
        "packages": {"x": "2.0", "z": "3"},
        "hardware": {"threads": 2},
    }
    first["hardware"], second["hardware"] = {"threads": 1}, {"threads": 2}
    folders = tmp_path / "a", tmp_path / "b"
    for folder, text in zip(folders, "12", strict=True):
        folder.mkdir()
        (folder / "code.patch").write_text(PATCH.format("same.py", "0") + PATCH.format("other.py", text))
    assert list(record_differences(folders, (first | common, second | common), tmp_path)) == [
        "code      commit a → b",
        "code      uncommitted changes differ: other.py",
        "package   x 1.0 → 2.0",
        "package   y 2 → absent",
        "package   z absent → 3",
        "hardware  threads 1 → 2",
    ]
    assert list(record_differences((folders[0],) * 2, (first, first), tmp_path)) == []
    unchanged = folders[0], tmp_path  # without a patch
    records = first, first | {"git": {"commit": "a", "changes": None}}
    expected = ["code      uncommitted changes differ: other.py, same.py"]
    assert list(record_differences(unchanged, records, tmp_path)) == expected


def test_the_first_batch_of_another_content_is_named(tmp_path: Path) -> None:
    records = (
        {"batches": {"1": "a", "2": "b", "9": "c", "?": "d"}},
        {"batches": {"1": "a", "2": "x", "9": "y", "?": "z"}},
    )
    assert list(record_differences((tmp_path, tmp_path), records, tmp_path)) == [
        "data      batch 2 has another content"
    ]
    assert not list(record_differences((tmp_path, tmp_path), (records[0], {}), tmp_path))
