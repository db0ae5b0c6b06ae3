import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_command

from boltcutter.environment import identity
from boltcutter.environment.identity import RUN_ID_VARIABLE, RendezvousError, is_restarted, new_run_id, run_id

NEW = r"\d{8}-\d{6}-[0-9a-f]{8}"
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "1"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
CODE = """
import os, sys
from boltcutter.environment.identity import run_id
with run_id() as name:
    print(name, flush=True)
    sys.stdin.readline()  # rank 0 serves the store until it exits
"""
PRINT_ID = """
import os
from boltcutter.environment.identity import run_id
with run_id() as name:
    os.write(1, f"{name}\\n".encode())  # atomically
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        ours = name.startswith(("SLURM_", "TORCHELASTIC_", "BOLTCUTTER_", "MASTER_"))
        if ours or name.endswith("RANK"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        pytest.param({}, NEW, id="one process"),
        pytest.param({RUN_ID_VARIABLE: "given"}, "given", id="given by a launcher"),
        pytest.param(SRUN | {RUN_ID_VARIABLE: "given"}, "given", id="given by a launcher, under srun"),
        pytest.param(SRUN, r"slurm-7\.0-[0-9a-f]{8}", id="srun"),
        pytest.param(SRUN | {"SLURM_RESTART_COUNT": "2"}, r"slurm-7\.0-[0-9a-f]{8}", id="srun, after a requeue"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "1"}, r"slurm-7\.1-[0-9a-f]{8}", id="a second srun of one job"),
        pytest.param(SRUN | ARRAY, r"slurm-5_3\.0-[0-9a-f]{8}", id="srun in a job array"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, NEW, id="sbatch without srun"),
        pytest.param(SRUN | {"SLURM_JOB_NAME": "interactive"}, NEW, id="a shell in an allocation"),
        pytest.param({"TORCHELASTIC_RUN_ID": "mine"}, "torchrun-mine", id="torchrun with an ID"),
        pytest.param({"TORCHELASTIC_RUN_ID": "none"}, NEW, id="torchrun without an ID or a store"),
        pytest.param(SRUN | {"TORCHELASTIC_RUN_ID": "mine"}, r"slurm-7\.0-[0-9a-f]{8}", id="torchrun under srun"),
    ],
)
def test_run_id(env: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with run_id() as found:
        assert re.fullmatch(name, found)
        assert os.environ[RUN_ID_VARIABLE] == found
        with run_id() as inner:  # as in a child process
            assert inner == found
        assert os.environ[RUN_ID_VARIABLE] == found
    assert os.environ.get(RUN_ID_VARIABLE) == env.get(RUN_ID_VARIABLE)


def test_the_variable_is_removed_after_a_failure() -> None:
    with pytest.raises(RuntimeError), run_id():
        raise RuntimeError
    assert RUN_ID_VARIABLE not in os.environ


def test_new_ids_are_unique() -> None:
    assert len({new_run_id() for _ in range(100)}) == 100


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_manually_started_ranks_agree(port: str) -> None:
    rendezvous = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env=rendezvous | {"RANK": rank},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in ("1", "0")  # the client first
    ]
    try:
        lines = [process.stdout.readline().strip() for process in processes if process.stdout]
        for process in processes:
            _, err = process.communicate("\n", timeout=60)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert re.fullmatch(NEW, lines[0])
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("option", "name"), [("--standalone", "torchrun-.+"), pytest.param("--master-port", NEW, marks=pytest.mark.slow)]
)
def test_ranks_of_torchrun_agree(option: str, name: str, port: str, tmp_path: Path) -> None:
    script = tmp_path / "print_id.py"
    script.write_text(PRINT_ID)
    options = [option] if option == "--standalone" else [option, port]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert re.fullmatch(name, first)
    assert first == second


@pytest.mark.parametrize(("address", "rank"), [("127.0.0.1", "1"), ("nowhere.invalid", "1"), ("nowhere.invalid", "0")])
def test_an_unreachable_rank_zero_is_reported(
    address: str, rank: str, port: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(identity, "RENDEZVOUS_TIMEOUT", 0.4)
    monkeypatch.setattr(identity, "NOTE_AFTER", 0.0)
    with pytest.raises(RendezvousError, match=rf"MASTER_PORT={port}: rank 0") as error, run_id():
        pass
    assert "\n" not in str(error.value)
    (line,) = capfd.readouterr().err.splitlines()  # none of torch
    assert line.startswith(f"note: MASTER_ADDR={address}, MASTER_PORT={port}: ")


@pytest.mark.parametrize("is_here", [True, False])
def test_a_port_of_a_program_that_does_not_answer_is_reported(
    is_here: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A proxy may accept a connection to another machine before rank 0 has started there."""
    assert identity._is_here("127.0.0.1")
    assert not identity._is_here("192.0.2.1")  # of no machine
    if not is_here:
        monkeypatch.setattr(identity, "_is_here", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(identity, "SILENCE" if is_here else "RENDEZVOUS_TIMEOUT", 0.25)
        monkeypatch.setattr(identity, "NOTE_AFTER", 0.0)
        match = rf"MASTER_PORT={port}: rank 0 did not respond within 0 s .*another program"
        with pytest.raises(RendezvousError, match=match), run_id():
            pass
    assert f"note: MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: there is no answer yet; waiting" in capfd.readouterr().err


def test_an_exception_of_the_thread_that_connects_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.TCPStore", "no class")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NODE_RANK", "1")
        with pytest.raises(TypeError), run_id():
            pass


def test_commands_of_one_slurm_step_differ_and_a_requeue_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with run_id(["model=mlp"]) as first:
        pass
    with run_id(["model=mlp", "seed=2"]) as other:
        pass
    assert not is_restarted()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with run_id(["model=mlp"]) as requeued:
        pass
    assert is_restarted()
    assert first == requeued != other


def test_the_job_of_a_platform_and_the_overrides_give_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLTCUTTER_JOB", "vertex-8070")
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")  # not contacted
    monkeypatch.setenv("MASTER_PORT", "1")
    with run_id(["seed=1"]) as first:
        pass
    with run_id(["seed=1"]) as again, run_id(["seed=2"]) as inner:
        assert inner == again  # inherited by child processes
    with run_id(["seed=2"]) as other:
        pass
    assert first == again != other
    assert re.fullmatch(r"vertex-8070-[0-9a-f]{8}", first)


ADDRESS = """
import os, sys
import torch.distributed as dist
from boltcutter.environment.identity import isolate_attempts
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
