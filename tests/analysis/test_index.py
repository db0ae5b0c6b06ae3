"""The index is only a cache: without it, or with a damaged one, the same runs are found."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter.analysis import facts, index
from boltcutter.analysis.record import Run, find_runs
from boltcutter.environment import user_key

from .conftest import CONFIG, Write


def fill(root: Path, write: Write, count: int = 6) -> Path:
    for number in range(count):
        settings = {"seed": number % 3, "flag": [1, True, 1.0][number % 3], "model": {"depth": number}}
        folder = write(
            root / "digits" / f"{number:04}", day=number + 1, settings=settings, test={"test/loss": number / 7}
        )
        if number % 2:
            (folder / "labels.json").write_text(json.dumps({"tags": ["odd"], "note": f"ü {number}"}))
    write(root / "digits" / "bad", metrics={"val/loss": float("nan")})
    (root / "digits" / "bad" / "record.json").write_text("[")
    return root / index.FOLDER / index.FILE


def shown(runs: list[Run]) -> str:
    return repr(runs)  # in which 1, 1.0 and True differ


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that were read, not taken from the index."""
    found: list[str] = []
    original = facts.read_facts

    def read(place: facts.Place) -> facts.Facts:
        found.append(Path(place.folder).name)
        return original(place)

    monkeypatch.setattr(index, "read_facts", read)
    return found


def test_only_folders_that_have_changed_are_read_again(tmp_path: Path, write: Write, reads: list[str]) -> None:
    fill(tmp_path, write)
    first = shown(find_runs(tmp_path))
    assert len(reads) == 7
    assert shown(find_runs(tmp_path)) == first
    assert len(reads) == 7
    (tmp_path / "digits/0001/labels.json").write_text('{"note": "new"}')
    (tmp_path / "digits/0002/metrics.csv").write_text("step,val/loss\n1,3\n")
    write(tmp_path / "digits/0003", day=4, settings={"seed": 9})
    write(tmp_path / "digits/new", day=30)
    again = find_runs(tmp_path)
    assert reads[7:] == ["0001", "0002", "0003", "new"]
    assert [run.note for run in again if run.id == "0001"] == ["new"]
    assert [run.settings["seed"] for run in again if run.id == "0003"] == [9]
    os.rename(tmp_path / "digits/0000", tmp_path / "digits/moved")
    assert {run.id for run in find_runs(tmp_path)} == {"0001", "0002", "0003", "0004", "0005", "bad", "new", "moved"}


def damage(text: bytes) -> dict[str, bytes]:
    body = b'{"bases": [], "names": [], "runs": [1]}'
    return {
        "empty": b"",
        "cut": text[: len(text) // 2],
        "flipped": text.replace(b'"odd"', b'"even"'),
        "binary": bytes(range(256)) * 9,
        "of somebody else": b"0" * 64 + text[64:],
        "other content": f"{user_key.sign(index._digest(body))}\n".encode() + body,
        "deep": b"[" * 200_000,
    }


@pytest.mark.parametrize("kind", damage(b""))
def test_a_damaged_index_is_rebuilt_identically(tmp_path: Path, write: Write, reads: list[str], kind: str) -> None:
    path = fill(tmp_path, write)
    expected = shown(find_runs(tmp_path))
    before = path.read_bytes()
    path.write_bytes(damage(before)[kind])
    assert shown(find_runs(tmp_path)) == expected
    assert len(reads) == 14
    assert path.read_bytes() == before
    path.unlink()
    assert shown(find_runs(tmp_path)) == expected
    assert path.read_bytes() == before
    os.unlink(path)
    os.mkfifo(path)
    assert shown(find_runs(tmp_path)) == expected


def test_an_index_that_cannot_be_written_is_not_needed(tmp_path: Path, write: Write) -> None:
    fill(tmp_path, write)
    (tmp_path / index.FOLDER).write_text("a file")
    assert len(find_runs(tmp_path)) == 7


def test_a_process_that_is_killed_leaves_an_index_that_works(tmp_path: Path, write: Write) -> None:
    path = fill(tmp_path, write, 200)
    code = (
        f"from pathlib import Path\nfrom boltcutter.analysis.record import find_runs\nroot = Path({str(tmp_path)!r})\n"
    )
    code += "while True:\n    (root / 'digits/bad/record.json').write_text('[')\n"
    code += f"    Path({str(path)!r}).unlink(missing_ok=True)\n    print(len(find_runs(root)), flush=True)\n"
    expected = shown([run for run in find_runs(tmp_path) if run.id != "bad"])
    for delay in (0.0, 0.01, 0.02, 0.03, 0.05):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout
        assert process.stdout.readline() == b"201\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for _ in range(2):
            assert shown([run for run in find_runs(tmp_path) if run.id != "bad"]) == expected


@pytest.mark.slow
def test_ten_thousand_runs_are_listed(tmp_path: Path) -> None:
    """Cold and warm, relative to parsing each record once by the standard library; the command, from start to end."""
    pads = {
        f"section{n}": {f"key{m}": [n, m, "text"] for m in range(5)} for n in range(15)
    }  # as many as a real run has
    for number in range(10_000):
        folder = tmp_path / f"name-{number % 10}" / f"20260101-000000-{number:08x}"
        folder.mkdir(parents=True)
        config = CONFIG | pads | {"seed": number % 100, "optimizer": {"lr": 0.001 * (number % 7 + 1)}}
        packages = {f"package-{n}": "1.2.3" for n in range(300)}
        attempt = {"start": "2026-01-01T12:00:00+00:00", "reason": "completed", "seconds": 9.0, "device": "cpu"}
        record = {"config": config, "name": "x", "attempts": [attempt], "packages": packages, "best_after": 20}
        record |= {"metrics": {"val/accuracy": number / 1e4}, "test": {"test/accuracy": number / 1e4}}
        (folder / "record.json").write_text(json.dumps(record, indent=2))
        (folder / "metrics.csv").write_text("step,val/accuracy,val/loss\n" + "".join(f"{n},1,2\n" for n in range(50)))
    code = "import json, pathlib, sys; [json.loads(f.read_bytes()) for f in pathlib.Path(sys.argv[1]).rglob('*.json')]"
    listing = ["-m", "boltcutter", "runs", f"runs={tmp_path}", "val/accuracy>0.5 and seed=3"]
    seconds = []  # of CPU time, as tests share the processors
    for command in (["-c", code, str(tmp_path)], listing, listing):
        before = os.times()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if command is listing:
            assert "of 50 runs" not in done.stdout
            assert done.stdout.count("completed") == 50
    print("parsing {:.2f} s, cold {:.1f} s, warm {:.2f} s".format(*seconds))
    assert seconds[1] < 2.5 * seconds[0]
    assert seconds[2] < 0.35 * seconds[0]


def test_the_index_is_not_written_through_a_link_of_somebody_else(
    tmp_path: Path, write: Write, hand_over: Callable[[Path], None]
) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    elsewhere.mkdir()
    runs.mkdir()
    (runs / index.FOLDER).symlink_to(elsewhere)
    hand_over(runs / index.FOLDER)
    write(runs / "digits" / "0001", day=1)
    assert len(find_runs(runs)) == 1
    assert list(elsewhere.iterdir()) == []
