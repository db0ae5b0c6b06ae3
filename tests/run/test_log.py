import os
import sys
from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.run.log import capture_output


def test_the_log_has_output_and_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def go() -> None:
        with capture_output(tmp_path, 3):
            print("hello")
            print("oh", file=sys.stderr)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        go()
    log = (tmp_path / "logs" / "rank-3.log").read_text()
    assert "hello\noh\n" in log
    assert "RuntimeError: broken" in log
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.timeout(60)
def test_a_fifo_in_place_of_the_log_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "rank-0.log")
    with (
        pytest.raises(ConfigError, match=r"^folder=.*: rank-0\.log in logs cannot be written"),
        capture_output(tmp_path, 0),
    ):
        pass


def test_values_of_secret_variables_are_masked_in_the_log_and_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever prints them, such as a library that quotes its request in a warning."""
    monkeypatch.setenv("CANARY", "hunter2-canary")
    monkeypatch.setattr("boltcutter.config.redaction.private_variables", {"CANARY"})

    def go() -> None:
        with capture_output(tmp_path, 0):
            print("refused hunter2-canary")
            print("for", "hunter2-canary", file=sys.stderr)
            raise RuntimeError("hunter2-canary")

    with pytest.raises(RuntimeError):
        go()
    shown = capsys.readouterr()
    for text in ((tmp_path / "logs" / "rank-0.log").read_text(), shown.out, shown.err):
        assert "hunter2" not in text
        assert "***" in text


def test_text_of_files_cannot_control_the_terminal_that_shows_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go() -> None:
        with capture_output(tmp_path, 0):
            print("class cat\x1b]0;title\x07 é")
            raise RuntimeError("\x1b]52;c;a\x07")

    with pytest.raises(RuntimeError):
        go()
    shown = capsys.readouterr()
    for text in ((tmp_path / "logs" / "rank-0.log").read_text(), shown.out + shown.err):
        assert "\x1b" not in text
        assert "class cat" in text
        assert "é" in text
