import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICK, ROOT, environment

PRINTS = """
import os, sys
from boltcutter.environment.output import LenientFile, ignore_lost_readers
ignore_lost_readers()
ignore_lost_readers()
for stream, file in ((sys.stdout, 1), (sys.stderr, 2)):
    print("text", file=stream, flush=True)
    os.write(file, b"from native code")
assert sys.stdout.fileno() == 1
with open(sys.argv[1], "w") as file:
    print(LenientFile.is_lost, file=file)
"""


def run(argv: list[str], lost: str) -> int:
    """Run a command whose standard output, error or both have no reader."""
    read, write = os.pipe()
    os.close(read)
    streams = {name: write if name in lost else subprocess.DEVNULL for name in ("stdout", "stderr")}
    try:
        with subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=environment(), **streams) as process:
            return process.wait(60)
    finally:
        os.close(write)


@pytest.mark.parametrize("lost", ["stdout", "stderr", "stdout stderr", ""])
def test_printing_without_a_reader_is_no_error(lost: str, tmp_path: Path) -> None:
    assert run(["-c", PRINTS, str(tmp_path / "lost")], lost) == 0
    assert (tmp_path / "lost").read_text() == f"{bool(lost)}\n"


def test_text_is_written_as_before(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", PRINTS, tmp_path / "lost"], env=environment(), capture_output=True)
    assert (found.stdout, found.stderr) == (b"text\nfrom native code", b"text\nfrom native code")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]])
def test_training_goes_on_without_a_reader(kind: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = [*QUICK[:2], *kind, "model=linear", "trainer.max_epochs=1", f"folder={folder}"]
    assert run(["scripts/train.py", *overrides], "stdout stderr") == 0
    assert json.loads((folder / "record.json").read_text())["attempts"][0]["reason"] == "completed"
    assert "epoch 1/1" in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.slow
def test_a_mistake_without_a_reader_keeps_its_status() -> None:
    assert run(["scripts/train.py", "nothing=1"], "stdout stderr") == 2


CLOSED = """
import sys
from boltcutter.environment.output import ignore_lost_readers
ignore_lost_readers()
with open(sys.argv[1], "w") as file:
    print("text", flush=True)
    print("text", file=sys.stderr, flush=True)
    print(file.fileno(), sys.stdout.isatty(), file=file)
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    """No file of the run gets the descriptor of the standard output, to which native code may write."""
    command = ["bash", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, CLOSED, str(tmp_path / "file")]
    subprocess.run(command, env=environment(), check=True, timeout=60)
    number, is_terminal = (tmp_path / "file").read_text().split()
    assert (int(number) > 2, is_terminal) == (True, "False") or "<&-" in closed


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"?? 100 %"), ("latin-1", b"?? 100 %"), ("utf-8", None)])
def test_characters_that_the_encoding_lacks_are_replaced(encoding: str, shown: bytes | None) -> None:
    text = "日本 100 %"
    code = f"from boltcutter.environment.output import *\nignore_lost_readers()\nprint({text!r}, end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(PYTHONIOENCODING=encoding), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, shown or text.encode())
