from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from browser import Browse

from boltcutter.report.template import format_duration, format_number, load_template, redact_command


def test_the_browser_reports_errors(browse: Browse, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<body><script>missing()</script></body>")
    assert any("missing is not defined" in line for line in browse(page).console)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98889, "0.9889"),
        (1.0, "1.000"),
        (47.38, "47.38"),
        (12345.6, "12,346"),
        (2.5e-7, "2.5e-07"),
        (12345, "12,345"),
        (0.0, "0.000"),
        (float("nan"), "nan"),
        (None, "–"),
        ("text", "text"),
    ],
)
def test_numbers_are_formatted(value: Any, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (5, "5 s"), (119.7, "2 min 0 s"), (3_600, "1 h 00 min"), (200_000, "55 h 33 min")],
)
def test_durations_are_formatted(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_template_includes_shared_files_and_escapes_values(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<style>{{ include_text('style.css') }}</style>{{ text }} {{ 0.5 | number }}")
    assert load_template(tmp_path / "page.html") is load_template(tmp_path / "page.html")  # compiled once
    page = load_template(tmp_path / "page.html").render(text="<b>")
    assert "--ink" in page
    assert page.endswith("</style>&lt;b&gt; 0.5000")


def test_secrets_in_a_command_are_redacted() -> None:
    assert redact_command("train.py logger.api_key=hush seed=1") == "train.py 'logger.api_key=***' seed=1"


@pytest.mark.timeout(60)
def test_a_long_command_of_somebody_else_takes_little_time() -> None:
    began = time.process_time()
    assert redact_command("\u0301" * 10**6) == "<1,000,000 characters>"
    assert redact_command("a 'b c' " * 10**4) == "<80,000 characters>"  # not cut within quotes
    assert time.process_time() - began < 10
