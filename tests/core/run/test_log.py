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
