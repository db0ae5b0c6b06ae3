"""Make the pictures of README, by `python docs/pictures/make.py`, from a training with all defaults.

`python docs/pictures/make.py gan vae` makes those of examples of the gallery, from the command on each page, and
`gallery` those of all. It needs Chromium, and the extras `images` and `runs` (Pillow and Rich). Trainings have one
thread, as several would be reported on a busy machine.
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

from PIL import Image, ImageChops
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COMMAND = "python scripts/train.py"
COLUMNS, ROWS = 124, 40  # of the terminal
WIDTH, HEIGHT = 1200, 960  # of the browser window, in pixels
GALLERY = ROOT / "docs" / "gallery"
SECTIONS = {  # of the reports of examples that are shown from there; the others from their top
    **dict.fromkeys(("gan", "vae", "diffusion", "segmentation", "fcn"), "pictures-and-tables"),
    "graph": "confusion",
    "forecast": "predictions",
}


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


def draw_report(report: Path, file: Path, section: str = "", colors: int = 256) -> None:
    """Write a part of a report as PNG: its first page, or what begins with a section."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is not installed; apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "report.html"), Path(folder, "report.png")
        hidden = f"<style>section:not(#{section}), header, nav, footer {{ display: none }}</style>" if section else ""
        page.write_text(report.read_text().replace("</head>", f"{hidden}</head>"))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=9000"]
        flags += [f"--user-data-dir={folder}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=90)
        picture = Image.open(shot).convert("RGB")
        ground = Image.new("RGB", picture.size, picture.getpixel((0, HEIGHT - 1)))
        box = ImageChops.difference(picture, ground).getbbox()  # without empty space above and below
        picture = picture.crop((0, max(0, box[1] - 24), WIDTH, min(HEIGHT, box[3] + 24))) if box else picture
        picture.quantize(colors).save(file, optimize=True)


def train_example(name: str) -> None:
    """Run the commands on the page of an example, and write the picture of the last one's report."""
    commands = re.findall(r"^cd docs/gallery && (.*)$", (GALLERY / f"{name}.md").read_text(), re.M)
    command = next(command for command in reversed(commands) if command.endswith(f"experiment={name}"))
    with tempfile.TemporaryDirectory() as runs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(["bash", "-c", f"{command} runs={runs}"], cwd=GALLERY, env=environment, check=True, timeout=1200)
        report = min(Path(runs).rglob("report.html"), key=lambda file: len(file.parts))  # of a search, not of its runs
        draw_report(report, GALLERY / f"{name}.png", SECTIONS.get(name, ""), 64)


def main() -> None:
    """Train, and make both pictures, or those of the examples that are named."""
    names = sorted(file.stem for file in GALLERY.glob("*.py")) if sys.argv[1:] == ["gallery"] else sys.argv[1:]
    for name in names:
        train_example(name)
    if names:
        return
    with tempfile.TemporaryDirectory() as folder:
        written = train(Path(folder))
        (report,) = Path(folder).glob("*/*/report.html")
        draw_terminal(written, FOLDER / "terminal.svg")
        draw_report(report, FOLDER / "report.png")


if __name__ == "__main__":
    main()
