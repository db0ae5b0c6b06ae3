import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from boltcutter.environment.claim import identity_of, lock, remove_abandoned


def test_the_claim_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    code = "import sys, time; from pathlib import Path; from boltcutter.environment.claim import lock\n"
    code += (
        "path = Path(sys.argv[1]); file = path.open('w'); print(lock(file.fileno(), path), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, claim], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "True\n"
        assert not remove_abandoned(claim, timeout=0.5)
        assert claim.exists()
        process.send_signal(signal.SIGKILL)
    assert remove_abandoned(claim, timeout=10)
    assert not claim.exists()


def test_a_claim_that_is_finished_in_the_meantime_is_left_alone(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    claim.touch()

    def replace_it() -> None:
        time.sleep(0.3)
        claim.with_name("new").touch()
        claim.with_name("new").replace(claim)

    thread = threading.Thread(target=replace_it)
    thread.start()
    assert remove_abandoned(claim, timeout=10)
    thread.join()
    assert claim.exists()


@pytest.mark.parametrize("wait", [False, True])
def test_a_file_that_was_replaced_is_not_locked(tmp_path: Path, wait: bool) -> None:
    path = tmp_path / "claim"
    with path.open("w") as file:
        assert lock(file.fileno(), path, wait=wait)
        with path.open("r") as other:
            assert not lock(other.fileno(), path, wait=False)
        os.rename(path, tmp_path / "old")
        assert not lock(file.fileno(), path, wait=wait)
        path.touch()
        assert not lock(file.fileno(), path, wait=wait)
        assert identity_of(path) != identity_of(file.fileno()) == identity_of(tmp_path / "old")
    assert identity_of(tmp_path / "none") is None
