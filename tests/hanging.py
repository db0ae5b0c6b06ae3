"""Processes that announce themselves as ranks, and then hang; without torch, so that they start at once."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import environment

from boltcutter.environment import hang

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from boltcutter.environment import announcement

def end_with_the_test():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, also if the test is killed

def wait_for_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # hangs here

def hold_the_lock_of_python():
    mutex = ctypes.create_string_buffer(64)  # as zeros, one of C, which a signal does not interrupt
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # hangs here

def compute():
    while True:
        pass  # hangs here

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)  # hangs here
    compute()

def fork():
    if not os.fork():
        end_with_the_test()
        compute()
    os.wait()  # hangs here

end_with_the_test()
with announcement.announce(Path(sys.argv[2]), float(sys.argv[3])):
    print("announced", flush=True)
    {**globals(), "end": lambda: None, "fail": lambda: 1 / 0}[sys.argv[1]]()
"""


@contextmanager
def hanging(folder: Path, *kinds: str, timeout: float = 1000.0) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a rank for each kind, in whose folder ``program.py`` is what they run; kill what is left of them."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    started = []
    for rank, kind in enumerate(kinds):
        variables = environment(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT="1")
        command = [sys.executable, str(program), kind, str(folder), str(timeout)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=variables, text=True, start_new_session=True, **pipes))  # type: ignore[call-overload]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "announced\n"
        yield started
    finally:
        for process in started:
            for found in hang.find(str(folder.resolve())):
                found.send(9)
                found.close()
            process.kill()
            process.communicate()


def places(folder: Path, count: int) -> list[str]:
    """Where the ranks are, with the processes that they have forked, as soon as all of them hang."""
    described = []
    for _ in range(100):
        found = hang.find(str(folder.resolve()))
        hang.ask(found, wakes=True)
        ranks = hang.describe(found)
        described = [f"{one['place']} {one['workers']}" for one in ranks]
        all_places = [each["place"] for one in ranks for each in (one, *one["workers"])]
        for process in found:
            process.close()
        if len(described) == count and all("hangs here" in place for place in all_places):
            return described
        time.sleep(0.1)
    raise AssertionError(described)
