"""Expected job files: the first of a launcher as a whole, others as their differences from it."""

from difflib import unified_diff
from pathlib import Path

JOBS = Path(__file__).with_name("jobs")


def check_job_file(text: str, name: str, base: str | None = None) -> None:
    """Compare a rendered job file with ``jobs/<name>``, or what differs from ``jobs/<base>`` with ``<name>.diff``."""
    if base is None:
        assert text == (JOBS / name).read_text()
        return
    lines = (JOBS / base).read_text().splitlines(keepends=True), text.splitlines(keepends=True)
    assert "".join(unified_diff(*lines, base, name, n=0)) == (JOBS / f"{name}.diff").read_text()
