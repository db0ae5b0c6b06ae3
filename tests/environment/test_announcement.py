import os
import signal
import subprocess
import threading
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hanging import hanging

from boltcutter.checkpoint.load import save
from boltcutter.environment import announcement, hang
from boltcutter.environment.this_process import this_process

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux names memory files in /proc")


def facts(folder: Path) -> list[dict[str, object]]:
    found = hang.find(str(folder.resolve()))
    for process in found:
        process.close()
    return [process.facts for process in found]


def test_a_process_announces_its_rank_and_how_it_ends(tmp_path: Path) -> None:
    with announcement.announce(tmp_path, 60):
        (found,) = facts(tmp_path)
        assert (found["rank"], found["state"], found["pid"]) == (0, "running", os.getpid())
    assert [found["state"] for found in facts(tmp_path)] == ["done"]
    with pytest.raises(ZeroDivisionError), announcement.announce(tmp_path, 60):
        raise ZeroDivisionError
    assert [found["state"] for found in facts(tmp_path)] == ["failed"]
    announcement.withdraw()
    assert not facts(tmp_path)


def test_counters_of_a_trainer_are_announced(tmp_path: Path) -> None:
    counters = SimpleNamespace(current=SimpleNamespace(ready=5), total=SimpleNamespace(completed=14))
    loop = SimpleNamespace(batch_progress=counters, val_loop=SimpleNamespace(batch_progress=counters))
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop),
        **dict.fromkeys(("validate_loop", "test_loop", "predict_loop"), loop.val_loop),
        state=SimpleNamespace(stage=SimpleNamespace(value="train")),
        current_epoch=1,
        global_step=14,
        global_rank=3,
    )
    with announcement.announce(tmp_path, 60):
        announcement.follow(trainer)
        announcement.CountedFile(BytesIO()).write(b"x")
        announcement.set_state("running")
        (found,) = facts(tmp_path)
        assert (found["rank"], hang.where(found)) == (3, "step 14, epoch 1, batch 5")
        trainer.global_step = 15
        end = time.monotonic() + 60
        while facts(tmp_path)[0]["step"] != 15 and time.monotonic() < end:
            time.sleep(0.05)
        assert facts(tmp_path)[0]["step"] == 15, "the thread writes what has changed"
    announcement.withdraw()


def watching(folder: Path) -> list[int]:
    """The processes that watch a run."""
    words = {str(announcement.SCRIPT), str(folder.resolve())}
    return [p.pid for p in psutil.process_iter(["cmdline"]) if words <= set(p.info["cmdline"] or ())]


def wait_for(number: int, folder: Path) -> None:
    """Wait until as many processes watch a run."""
    end = time.monotonic() + 60
    while (found := len(watching(folder))) != number and time.monotonic() < end:
        time.sleep(0.05)
    assert found == number


def test_the_watching_process_ends_with_the_run(tmp_path: Path) -> None:
    with hanging(tmp_path / "run", "wait_for_lock", "wait_for_lock") as started:
        try:
            wait_for(1, tmp_path / "run")  # it starts, and forks
        except AssertionError:
            found = facts(tmp_path / "run")
            raise AssertionError(f"no process watches; ranks: {[p.poll() for p in started]}, facts: {found}") from None
        time.sleep(0.2)
        wait_for(1, tmp_path / "run")  # on each node, as soon as the process that has forked it has ended
        for process in started:
            process.kill()
            process.wait()
        wait_for(0, tmp_path / "run")


def test_a_watching_process_waits_for_the_rank_that_has_started_it(tmp_path: Path) -> None:
    watch = hang.Watch(str(tmp_path.resolve()), 60, os.getpid())
    thread = threading.Thread(target=watch.run)
    thread.start()
    time.sleep(1)
    assert thread.is_alive()
    with announcement.announce(tmp_path, 60):
        end = time.monotonic() + 30
        while os.getpid() not in watch.members and time.monotonic() < end:
            time.sleep(0.05)
        assert os.getpid() in watch.members
    announcement.withdraw()
    thread.join(30)
    assert not thread.is_alive()


def test_the_watching_process_ends_when_a_process_withdraws_while_it_runs(tmp_path: Path) -> None:
    with announcement.announce(tmp_path, 60):
        wait_for(1, tmp_path)
        time.sleep(1.5)  # in which it has found this process
        announcement.withdraw()
        wait_for(0, tmp_path)  # else this process would be ended later
        assert announcement.joined(tmp_path, 60, 1)
    announcement.withdraw()


def test_a_forked_process_announces_itself_as_another_rank(tmp_path: Path) -> None:
    with announcement.announce(tmp_path, 60):
        assert not announcement.joined(tmp_path, 60, 1), "it is announced already"
    announcement.withdraw()
    assert announcement.joined(tmp_path, 60, 1)
    try:
        assert [(found["rank"], found["joined"]) for found in facts(tmp_path)] == [(1, True)]
    finally:
        announcement.withdraw()


def test_only_a_handler_of_this_library_has_stacks_printed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with announcement.announce(tmp_path, 60, "evaluate"):
        (found,) = facts(tmp_path)
        assert found["answers"], "the process would end otherwise"
        os.kill(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, own := lambda number, frame: None)
        announcement.set_state("running")
        (found,) = facts(tmp_path)
        assert not found["answers"]
    announcement.withdraw()
    assert signal.getsignal(signal.SIGUSR2) is own, "it stays the user's"
    signal.signal(signal.SIGUSR2, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_commands_on_the_same_run_are_told_apart(tmp_path: Path) -> None:
    attempts = []
    for command in ("train", "evaluate", "predict"):
        with announcement.announce(tmp_path, 60, command):
            attempts += [found["attempt"] for found in facts(tmp_path)]
        announcement.withdraw()
    assert [attempt[0] for attempt in attempts] == ["train", "evaluate", "predict"]
    assert all(attempt[1:] for attempt in attempts)


def test_writes_to_a_checkpoint_are_progress(tmp_path: Path) -> None:
    before = this_process.written_parts
    with open(tmp_path / "file", "w+b") as file:
        save({"state_dict": {"weight": torch.ones(3)}}, file)
    assert this_process.written_parts > before
    assert torch.load(tmp_path / "file", weights_only=True)["state_dict"]["weight"].sum() == 3


def test_the_command_for_which_a_thread_waits_is_ended() -> None:
    command, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    before = signal.signal(signal.SIGUSR1, lambda _, frame: announcement.end_awaited(frame))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        assert command.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
        for each in (command, other):
            each.kill()
            each.wait()
