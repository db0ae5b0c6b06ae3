import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import run_command

from boltcutter.config.errors import ConfigError
from boltcutter.extend import NegativeResult
from boltcutter.planning import device_test
from boltcutter.planning.device_test import CheckError, Devices, Row


class Faulty(Devices):
    """Checks that crash, hang and succeed."""

    def checks(self) -> dict[str, Callable[[], str]]:
        (self.folder / "crash.py").write_text("import os; os.kill(os.getpid(), 9)")
        (self.folder / "mistake.py").write_text("print('error: no such device; try another', 1 / 0)")
        (self.folder / "hang.py").write_text(
            "import os, time, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(100)"
        )
        (self.folder / "good.py").write_text("print('first')\nprint('2 GB/s')")
        names = ("crash", "mistake", "hang", "good")
        return {name: lambda name=name: self.run(name) for name in names} | {  # type: ignore[misc]
            "gpu": lambda: self.run("good", needs_gpu=True)
        }


@pytest.mark.slow
def test_a_crash_or_a_hang_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    crash, mistake, hang, good, gpu = Faulty(tmp_path, check_time=5.0).rows()
    assert crash == Row("crash", "fails", f"exit status {-signal.SIGKILL}; to repeat: python -m crash")
    assert mistake.result == "fails"
    assert "ZeroDivisionError" in mistake.detail
    assert hang == Row("hang", "fails", "did not end in time; to repeat: python -m hang")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert good == Row("good", "works", "2 GB/s")
    assert gpu.result == "not tried"
    assert "nvidia-smi" in gpu.detail


def test_no_check_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert {row.result for row in Faulty(tmp_path, total_time=0.0).rows()} == {"not tried"}


def test_the_exit_status_and_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        raise CheckError("no driver; install one")

    monkeypatch.setattr(Devices, "checks", lambda self: {"one": lambda: "fast", "two": fail})
    with pytest.raises(SystemExit) as end:
        device_test.run_device_test(["--test"])
    assert end.value.code == 1
    assert isinstance(end.value, NegativeResult)
    assert end.value.result == [
        {"check": "one", "result": "works", "detail": "fast"},
        {"check": "two", "result": "fails", "detail": "no driver; install one"},
    ]
    capsys.readouterr()
    monkeypatch.setattr(Devices, "checks", lambda self: {"one": lambda: "fast"})
    device_test.run_device_test(["--test"])
    assert capsys.readouterr().out.split() == ["one", "works", "fast", "1", "works"]
    with pytest.raises(ConfigError):
        device_test.run_device_test(["--test", "devices=8"])


def test_steps_that_are_not_captured_fail_the_check(tmp_path: Path) -> None:
    """On a machine with a GPU, something forbids captures; here, it is that there is none."""
    devices = Devices(tmp_path)
    devices.gpus = 1
    with pytest.raises(CheckError, match=r"task\.compile=cuda-graph"):
        devices.capture_steps()


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_all_checks_on_the_cpu() -> None:
    command = [sys.executable, "-m", "boltcutter", "doctor", "--test", "--json"]
    done = run_command(command, timeout=660, env={"CUDA_VISIBLE_DEVICES": ""})
    rows = {row["check"]: row for row in json.loads(done.stdout)["result"]}
    assert done.returncode == 0, done.stdout
    not_tried = {name for name, row in rows.items() if row["result"] == "not tried"}
    assert not_tried == {"step on cuda", "precision float8", "all-reduce (nccl)", "cuda-graph"}
    assert {"ddp", "fsdp2", "kill and resume", "compile"} <= rows.keys()


@pytest.mark.gpu
@pytest.mark.timeout(700)
def test_all_checks_on_gpus(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip(device_test.NO_GPU)
    rows = list(Devices(tmp_path).rows())
    assert not [row for row in rows if row.result == "fails"]
    assert f"step on cuda:{torch.cuda.device_count() - 1}" in {row.check for row in rows}
