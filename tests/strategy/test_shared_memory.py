import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import QUICK, Script, max_difference
from torch import nn

from boltcutter.strategy import shared_memory
from boltcutter.strategy.shared_memory import CHUNK, FOLDER, SharedMemory

SECONDS = 60
RANK = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from boltcutter.strategy.shared_memory import SharedMemory
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
"""
JOIN = """
memory = SharedMemory.create(rank, world, timedelta(seconds=2))
"""
AVERAGE = (
    JOIN
    + """
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for length in (1, 5, 1001, 700_000):
        mine = torch.randn(length).to(dtype)
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        memory.average(mine)
        expected = torch.stack(parts).double().mean(0)
        assert torch.allclose(mine.double(), expected, rtol=0, atol=torch.finfo(dtype).eps * 8), (dtype, length)
        dist.all_gather(parts, mine)
        assert all(part.equal(mine) for part in parts)
for number in range(100):
    assert memory.all_reduce_max(number * 10 + (rank * number) % world) == number * 10 + max(
        (other * number) % world for other in range(world)
    )
memory.close()
dist.destroy_process_group()
"""
)
LOST = (
    JOIN
    + """
memory.all_reduce_max(1)
print("there", flush=True)
if rank == 1:
    time.sleep(60)
try:
    memory.all_reduce_max(2)
except RuntimeError as error:
    print(error, flush=True)
"""
)


@contextmanager
def ranks(world: int, code: str) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK + code],
            env=os.environ | rendezvous | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_averages_are_bitwise_identical_on_all_ranks(world: int) -> None:
    with ranks(world, AVERAGE) as started:
        for process in started:
            _, stderr = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, stderr
    assert not list(FOLDER.glob("boltcutter-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "Connection closed by peer"), (signal.SIGSTOP, "Timed out waiting 2 s")]
)
def test_a_rank_that_is_killed_or_stopped_is_not_awaited(number: int, message: str) -> None:
    with ranks(2, LOST) as (first, second):
        assert second.stdout
        assert second.stdout.readline() == "there\n"
        second.send_signal(number)
        stdout, stderr = first.communicate(timeout=SECONDS)
        assert stdout.splitlines()[1:] == [
            f"shared memory: {message}{' for another rank' * (number == signal.SIGSTOP)}"
        ], stderr


@pytest.mark.slow
def test_ranks_that_call_different_operations_raise_an_error() -> None:
    code = JOIN + "memory.average(torch.ones(3)) if rank else memory.all_reduce_max(1)"
    with ranks(2, code) as started:
        errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    for rank, error in enumerate(errors):
        assert f"shared memory: rank {1 - rank} calls another operation" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "blind",
    [
        pytest.param(
            "if rank == 1: shared_memory.open = lambda *_: pathlib.Path('/nowhere/at/all').open()", id="other"
        ),
        pytest.param("if rank == 0: shared_memory.FOLDER = pathlib.Path('/nowhere')", id="first"),
    ],
)
def test_memory_is_not_shared_if_one_rank_cannot_open_it(blind: str) -> None:
    code = f"import pathlib\nfrom boltcutter.strategy import shared_memory\n{blind}\n{JOIN}assert memory is None\n"
    with ranks(2, code + "dist.destroy_process_group()") as started:
        for process in started:
            _, stderr = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, stderr


def test_no_file_is_created_without_enough_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory._create_file(1 << 60) == (None, "")
    assert not list(FOLDER.glob("boltcutter-*"))
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "nowhere")
    assert shared_memory._create_file(CHUNK) == (None, "")


@pytest.mark.slow
def test_training_is_bitwise_identical_to_that_with_the_process_group(script: Script, tmp_path: Path) -> None:
    overrides = [*QUICK, "model=mlp", "test=false", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    for name in ("true", "false"):
        done = script(
            "train", *overrides, f"trainer.strategy.shared_memory={name}", f"folder={tmp_path}/{name}", ranks=2
        )
        assert done.returncode == 0, done.stderr
    assert max_difference(tmp_path / "true", tmp_path / "false") == 0


def test_sparse_gradients_are_averaged_by_the_process_group() -> None:
    assert not SharedMemory.supports(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    assert SharedMemory.supports(nn.Embedding(3, 2))
