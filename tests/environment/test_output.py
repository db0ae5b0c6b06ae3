import json
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
from conftest import QUICK, ROOT, environment

from boltcutter.environment.output import BOLD, ERASE, NORMAL, escaped

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


def frame_of(module: str) -> FrameType:
    """The frame of a function in a module of this name."""
    space: dict[str, FrameType] = {"__name__": module}  # type: ignore[dict-item]
    exec("import sys\ndef call():\n    return sys._getframe()\nfound = call()", space)
    return space["found"]


TITLE, CLIPBOARD, UP = "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJm\x07", "\x1b[1A"


@pytest.mark.parametrize(
    "text", [TITLE, CLIPBOARD, UP, "\r", "\b", "\x9b2J", "\u202e", "\x1b[2J", "\udc80", "\x1bc", "\v", "\u2028"]
)
@pytest.mark.parametrize("module", ["boltcutter.run.best", "warnings", "traceback", ""])
def test_text_of_files_cannot_control_the_terminal(text: str, module: str) -> None:
    """Whichever of the library's functions prints it, and where Python shows an error."""
    found = escaped(f"a{text}b", frame_of(module) if module else None)
    assert text not in found
    assert found.isprintable()


def test_lines_columns_and_letters_of_any_script_are_text() -> None:
    text = "naïve\tcafé\u00a0日本語 \u200c فارسی 👩\u200d🔬\n"
    assert escaped(text, frame_of("boltcutter.run.best")) == text
    own = f"{ERASE}epoch 1 {BOLD}val/loss{NORMAL} 0.1"
    assert escaped(own, frame_of("boltcutter.callback.progress")) == own


@pytest.mark.parametrize(
    "text", ["\x1b[38;5;12mred\x1b[0m", "\r 10%|#", UP, "\x1b[?25l", "\x1b]8;;file:///a\x1b\\a\x1b]8;;\x1b\\"]
)
def test_progress_bars_and_colors_of_others_work(text: str) -> None:
    assert escaped(text, frame_of("rich.console")) == text
    assert escaped(f"{UP}\x1b[31mred\x1b[0m", frame_of("logging")) == "\\x1b[1A\x1b[31mred\x1b[0m"
    assert "\x1b" not in escaped(f"{TITLE}\x1b[2J{CLIPBOARD}\x1bP1$\x1b\\\x1b[5n\x1b[2;4t", frame_of("rich.console"))


CONTROLS = """
import sys, types
from boltcutter.environment.output import Terminal, ignore_lost_readers
Terminal.hide = lambda text: text.replace("secret", "***")
ignore_lost_readers()
library = types.ModuleType("boltcutter.any")
exec("def say(text, file): print(text, file=file)", library.__dict__)
for stream in (sys.stdout, sys.stderr):
    library.say("a\x1b]0;t\x07\x1b[1msecret", stream)
raise RuntimeError("\x1b]52;c;a\x07")
"""


def test_all_that_a_command_prints_is_escaped() -> None:
    found = subprocess.run([sys.executable, "-c", CONTROLS], env=environment(), capture_output=True, text=True)
    assert found.stdout == "a\\x1b]0;t\\x07\x1b[1m***\n"
    assert found.stderr.startswith(found.stdout)
    assert found.stderr.endswith("RuntimeError: \\x1b]52;c;a\\x07\n")
