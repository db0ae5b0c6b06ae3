import os
import sys
import time
from pathlib import Path

import pytest

from boltcutter.launch.job import Job
from boltcutter.launch.local import LocalLauncher


def job(folder: Path, **facts: int) -> Job:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return Job("digits", folder, Path("/p/train.py"), **facts)


def test_the_script_is_one_command(tmp_path: Path) -> None:
    text = LocalLauncher(python="/v/python", environment={"A": "b c"}).render(job(tmp_path))
    assert text == f"#!/bin/bash\nexport A='b c'\nexec /v/python /p/train.py resume={tmp_path}\n"
    assert "-m torch.distributed.run --standalone --nproc-per-node 2 /p/train.py" in (
        LocalLauncher(torchrun=True).render(job(tmp_path, devices=2))
    )
    with pytest.raises(ValueError, match=r"trainer\.num_nodes=2: launch=local uses one machine"):
        LocalLauncher().check(job(tmp_path, nodes=2))


def test_a_background_run_is_followed_and_cancelled(tmp_path: Path) -> None:
    launcher, file = LocalLauncher(), tmp_path / "job.sh"
    code = "import signal, sys, time; signal.signal(15, lambda *_: (print('saved'), sys.exit()))"
    file.write_text(f"exec {sys.executable} -c \"{code}; print('begun', flush=True); time.sleep(60)\"\n")
    (job_id,) = launcher.submit(job(tmp_path / "run"), file)
    assert launcher.status(job_id).state == "running"
    end = time.monotonic() + 20
    while "begun" not in "".join(launcher.logs(job_id, tmp_path / "run", follow=False)):
        assert time.monotonic() < end
        time.sleep(0.01)
    launcher.cancel(job_id)
    assert "".join(launcher.logs(job_id, tmp_path / "run", follow=True)) == "begun\nsaved\n"
    assert launcher.status(job_id).state == "ended"
    launcher.cancel(job_id)  # cancelling again has no effect
    os.waitpid(int(job_id.split()[0]), 0)


def test_a_run_on_another_host_is_unknown(tmp_path: Path) -> None:
    assert LocalLauncher().status("7 on elsewhere since 3").state == "unknown"
    with pytest.raises(ValueError, match="process 7 on elsewhere since 3 can be cancelled only on that host"):
        LocalLauncher().cancel("7 on elsewhere since 3")


def test_a_project_without_a_script_is_trained_by_the_module(tmp_path: Path) -> None:
    text = LocalLauncher(torchrun=True, python="python").render(Job("digits", tmp_path, None))
    assert f" -m boltcutter train resume={tmp_path}\n" in text
