"""A forked command is as good as a fresh one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import environment, run_command, run_forked
from forkserver import ForkServer

ENDS = {
    "by itself": "",
    "with a status": "import sys; sys.exit(3)",
    "with a text": "import sys; sys.exit('told')",
    "with an exception": "raise ValueError('no')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "raise KeyboardInterrupt",
    "after its threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
}
SCENE = """
import atexit, json, multiprocessing, os, random, signal, sys, threading, warnings
names = "SIGINT", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGHUP"
print(json.dumps({
    "argv": sys.argv, "path": [sys.path[0], os.getcwd()], "file": [__file__, sys.modules["__main__"].__file__],
    "environment": dict(os.environ), "threads": threading.active_count(), "signals": [
        str(signal.getsignal(getattr(signal, name))) for name in names
    ], "files": len(os.listdir("/proc/self/fd")), "session": os.getsid(0) == os.getpid(), "input": sys.stdin.read(),
    "leader": os.getpgid(0) == os.getpid(), "buffered": sys.stdout.line_buffering, "warn": sys.warnoptions,
}))
warnings.warn("shown")
atexit.register(print, "at exit")
"""


def both(forks: ForkServer, file: Path, **env: str) -> list[tuple[int, str, list[str]]]:
    """Status, standard output and the lines of standard error, forked and fresh."""
    found = [run_forked(forks, [str(file), "a", "b"], env=env)]
    found.append(run_command([sys.executable, str(file), "a", "b"], env=env))
    of_server = re.compile(r"forkserver\.py|exec\(code, scope\)|^ *~+\^+$|^  warnings\.warn")
    return [
        (done.returncode, done.stdout, [line for line in done.stderr.splitlines() if not of_server.search(line)])
        for done in found
    ]


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_a_fork_ends_as_a_new_process(forks: ForkServer, tmp_path: Path, code: str) -> None:
    file = tmp_path / "command.py"
    file.write_text(f"import atexit\natexit.register(print, 'at exit')\n{code}\n")
    forked, fresh = both(forks, file)
    assert forked == fresh


def test_a_fork_has_the_same_environment(forks: ForkServer, tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text(SCENE)
    forked, fresh = both(forks, file, RANK="1", PYTHONPATH=str(tmp_path))
    assert forked == fresh


def test_a_rank_knows_that_it_is_not_the_first(forks: ForkServer, tmp_path: Path) -> None:
    file = tmp_path / "command.py"
    file.write_text("from lightning.pytorch.utilities import rank_zero_only\nprint(rank_zero_only.rank)")
    assert sorted(run_forked(forks, [str(file)], ranks=3).stdout.split()) == ["0", "1", "2"]


def test_variables_read_by_imports_need_a_new_process(forks: ForkServer) -> None:
    assert forks.fits(environment(RANK="0", TORCHELASTIC_RUN_ID="none", PYTHONPATH="/"))
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONWARNINGS", "WANDB_DIR", "TORCH_LOGS"):
        assert not forks.fits(environment(**{name: "7"}))


HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from conftest import environment
from forkserver import ForkServer
server = ForkServer(environment())
child = server.start([sys.argv[2]], environment(), 1, 2)
print(server._process.pid, child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_children_end_when_the_tests_are_killed(tmp_path: Path) -> None:
    file = tmp_path / "sleeps.py"
    file.write_text("import time\ntime.sleep(60)")
    command = [sys.executable, "-c", HOLDER, str(Path(__file__).parent), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(alive(pid) for pid in pids)
        os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)
