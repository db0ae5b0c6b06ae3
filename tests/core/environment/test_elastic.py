import json
import sys
from pathlib import Path

import pytest
from conftest import run_command

ADDRESS = """
import os, sys
import torch.distributed as dist
from boltcutter.environment.elastic import isolate_attempts
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"}
agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
for attempt in "012":
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    isolate_attempts()
    store, _, _ = next(dist.rendezvous("env://"))
    print(store.check(["address"]))
    store.set("address", "of a rank")
"""


def test_a_restarted_rank_does_not_read_the_address_of_an_earlier_attempt() -> None:
    done = run_command([sys.executable, "-c", ADDRESS])
    assert (done.stdout.split(), done.stderr) == (["False"] * 3, "")


FAILS_ONCE = """
import os, runpy, sys
sys.path[:0] = ["tests", "scripts"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    import faulty
    faulty.main("SIGKILL", "test")
sys.argv[0] = "scripts/train.py"
runpy.run_path("scripts/train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_killed_rank_is_restarted_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS_ONCE)
    folder = tmp_path / "run"
    overrides = [f"folder={folder}", "logger=null", "report=false", "model=linear", "trainer.max_epochs=1"]
    overrides += ["trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job"]
    done = run_command([*command, str(tmp_path / "script.py"), *overrides])
    assert done.returncode == 0, done.stderr
    attempts = json.loads((folder / "record.json").read_text())["attempts"]
    assert [attempt["reason"] == "completed" for attempt in attempts] == [False, True]
    assert attempts[1]["resumed_from"]
