import sys
from pathlib import Path

import pytest
from conftest import run_command

LOADER = """
import os, signal, subprocess, sys, time
import torch.utils.data as data
from boltcutter.environment import stop_signals as signals
from boltcutter.environment.workers import protect_workers

class Numbers(data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index == 7:
            with subprocess.Popen(["sleep", "60"]) as program:
                program.terminate()  # it does not ignore the signals that the worker ignores
        if index == 150:
            time.sleep(60)
        return index

def initialize(worker):
    data.get_worker_info().dataset.initialized = True

def main():
    data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    signals.install_handlers()
    protect_workers()
    protect_workers()  # a second call has no effect
    loader = data.DataLoader(Numbers(), num_workers=4, worker_init_fn=initialize, multiprocessing_context=sys.argv[1])
    iterator = iter(loader)
    os.killpg(0, signal.SIGTERM)  # before most workers execute their first line
    found = []
    for batch in iterator:
        found += batch.tolist()
        os.killpg(0, signals.SIGNALS[len(found) % len(signals.SIGNALS)])
        if len(found) == 100:
            break
    assert found == list(range(100)), found
    assert signals.received_signal()
    assert loader.worker_init_fn is initialize
    print("read", flush=True)
    for index in range(100, 149):
        next(iterator)
    del iterator  # terminates its workers, of which one is blocked

if __name__ == "__main__":
    main()
    print("ended")
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_survive_signals_to_the_process_group(method: str, tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    done = run_command([sys.executable, str(tmp_path / "loader.py"), method], timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["read", "ended"]), done.stderr
