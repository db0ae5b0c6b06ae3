"""Make the pictures of README, by `python docs/pictures/make.py`, from a training with all defaults.

It needs Chromium, and the extras `images` and `runs` (Pillow and Rich). The training has one thread, as several
would be reported on a busy machine.
"""

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COMMAND = "python scripts/train.py"
COLUMNS, ROWS = 124, 40  # of the terminal
WIDTH, HEIGHT = 1200, 960  # of the browser window, in pixels


def train(runs: Path) -> str:
    """Train in a pseudo-terminal; return what was written to it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        environment = {**os.environ, "TERM": "xterm-256color", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "scripts/train.py", f"runs={runs}"], environment)  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # the process has ended
            break
        written += chunk
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(written.decode(errors="replace"))
    return written.decode().replace(f"{runs}/", "runs/")


def draw_terminal(written: str, file: Path) -> None:
    """Write the text of a terminal as SVG; of a line that was rewritten, the last state."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}"))
    for line in written.replace("\r\n", "\n").rstrip().split("\n"):
        states = [state for state in re.split(r"\r|\x1b\[\d*[ABJK]", line) if re.sub(r"\x1b\[\d*m|\s", "", state)]
        bars = [state for state in states if "━" in state]
        for state in ([bars[-1]] if bars and bars[-1] != states[-1] else []) + states[-1:]:
            console.print(Text.from_ansi(state), soft_wrap=False)
    svg = console.export_svg(title=COMMAND)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # which a browser would load from elsewhere
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    file.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.M))


def draw_report(report: Path, file: Path) -> None:
    """Write the first page of a report as PNG with 256 colors."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is not installed; apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "report.png")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
        flags += [f"--user-data-dir={folder}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}"]
        subprocess.run([browser, *flags, report.as_uri()], check=True, capture_output=True, timeout=90)
        Image.open(shot).convert("RGB").quantize(256).save(file, optimize=True)


def main() -> None:
    """Train, and make both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        written = train(Path(folder))
        (report,) = Path(folder).glob("*/*/report.html")
        draw_terminal(written, FOLDER / "terminal.svg")
        draw_report(report, FOLDER / "report.png")


if __name__ == "__main__":
    main()
