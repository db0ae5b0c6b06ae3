from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import QUICK, run_forked
from forkserver import ForkServer

from boltcutter.callback.trial_callback import TrialReporter, trial_reporter
from boltcutter.config.settings import Settings
from boltcutter.environment.startup import TRIAL_FD


def reporting(*answers: str) -> tuple[TrialReporter, socket.socket]:
    """A callback and the other end of its socket, which has answered already."""
    ours, theirs = socket.socketpair()
    ours.sendall("".join(f"{answer}\n" for answer in answers).encode())
    return TrialReporter(theirs), ours


def trainer(**changed: Any) -> Any:
    facts = {"sanity_checking": False, "global_step": 9, "callback_metrics": {"loss": 0.5}, "should_stop": False}
    facts |= {"state": SimpleNamespace(fn="fit"), "is_global_zero": True, "accumulate_grad_batches": 1}
    facts |= {"strategy": SimpleNamespace(broadcast=lambda answer: answer)}
    return SimpleNamespace(**facts | changed)


def validate(callback: TrialReporter, trainer: Any) -> bool:
    """Validate once, and return whether training stops."""
    callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
    return bool(trainer.should_stop)


def close(callback: TrialReporter, connection: socket.socket) -> None:
    for opened in (callback._lines, callback._connection, connection):
        if opened:
            opened.close()


def test_only_a_process_that_a_search_started_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRIAL_FD, raising=False)
    assert trial_reporter(Settings({})) == []


def test_a_validation_is_reported_and_training_continues_or_stops() -> None:
    callback, search = reporting("continue", "stop")
    assert not validate(callback, trainer())
    assert validate(callback, trainer(global_step=18))
    lines = search.recv(4096).splitlines()
    assert [json.loads(line) for line in lines] == [{"step": step, "metrics": {"loss": 0.5}} for step in (9, 18)]
    close(callback, search)


@pytest.mark.parametrize("changed", [{"sanity_checking": True}, {"state": SimpleNamespace(fn="validate")}])
def test_only_validations_while_training_are_reported(changed: dict[str, Any]) -> None:
    callback, search = reporting("stop")
    assert not validate(callback, trainer(**changed))
    close(callback, search)


def test_other_ranks_follow_the_first() -> None:
    broadcast = SimpleNamespace(broadcast=lambda answer: "stop")
    assert validate(TrialReporter(None), trainer(is_global_zero=False, strategy=broadcast))


def test_the_end_of_the_search_is_a_sigterm() -> None:
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        callback, search = reporting()
        search.close()
        assert not validate(callback, trainer())
        assert not validate(callback, trainer())
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM]
    close(callback, search)


def test_a_trial_whose_search_was_killed_while_it_started_trains_nothing(forks: ForkServer, tmp_path: Path) -> None:
    code = tmp_path / "trial.py"
    code.write_text(
        "import os, socket, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "ours.close()\n"
        f"os.environ[{TRIAL_FD!r}] = str(theirs.detach())\n"
        "from boltcutter.cli.commands import main\n"
        f"main(['train', *{[*QUICK, 'model=linear', f'folder={tmp_path}/run']}])\n"
    )
    done = run_forked(forks, [str(code)])
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
