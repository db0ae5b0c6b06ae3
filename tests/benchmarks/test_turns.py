import gc
import json
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
from benchmarks.harness import BenchmarkError, Process, cores
from benchmarks.turns import BytecodeCounter, Coordinator, package_of

CLIENT = """
import sys
from multiprocessing.connection import Client

address, name, turns, code = sys.argv[1:]
connection = Client(address, "AF_UNIX") if int(turns) else None
for turn in range(int(turns)):
    connection.send((name, turn))
    try:
        connection.recv()
    except EOFError:
        sys.exit()
sys.exit(int(code))
"""
STEPS = """
import sys
import torch
from benchmarks.turns import StepTimer

turns = StepTimer(sys.argv[1], warm=3, lead=1, steps=2)
for number in range(1000):
    torch.manual_seed(number)
    turns.end_step(torch.tensor(float(number)), 0.5)
sys.exit(1)
"""


def client(coordinator: Coordinator, name: str, turns: int = 1000, code: int = 1) -> Process:
    """Start a process that ends after a number of turns."""
    return Process(["-c", CLIENT, coordinator.address, name, str(turns), str(code)], cores(1))


def test_processes_run_in_turns_and_end_with_the_coordinator(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as coordinator:
        both, alone = (client(coordinator, "a"), client(coordinator, "b")), client(coordinator, "c")
        received: list[object] = [*coordinator.register("all", *both, alone, ranks=3)]
        assert sorted(map(str, received)) == ["('a', 0)", "('b', 0)", "('c', 0)"]
        other = client(coordinator, "d")
        assert coordinator.register("other", other) == [("d", 0)]
        for turn in (1, 2):
            assert {str(found) for found in coordinator.turn("all")} == {f"('{name}', {turn})" for name in "abc"}
            assert coordinator.turn("other") == [("d", turn)]
        assert all(process.running for process in (*both, alone, other))
    assert not any(process.running for process in (*both, alone, other))


@pytest.mark.parametrize(
    ("turns", "code", "message"),
    [
        (0, 3, "a measured process ended with 3"),
        (2, 3, "a measured process ended with 3"),
        (2, 0, r"^steps: training ended before"),
    ],
)
def test_a_process_that_ends_before_its_turn_is_reported(tmp_path: Path, turns: int, code: int, message: str) -> None:
    others: list[Process] = []

    def measure() -> None:
        with Coordinator(tmp_path) as coordinator:
            others.append(client(coordinator, "other"))
            coordinator.register("other", *others)
            coordinator.register("early", client(coordinator, "early", turns, code))
            coordinator.turn("early")
            coordinator.turn("early")

    with pytest.raises(BenchmarkError, match=message):
        measure()
    assert not others[0].running


def test_a_process_runs_only_in_its_turn_and_reports_its_steps(tmp_path: Path) -> None:
    with Listener(str(tmp_path / "turns"), "AF_UNIX") as listener:
        process = Process(["-c", STEPS, str(listener.address)], cores(1))
        connection = listener.accept()
        ready = connection.recv()
        assert (ready["losses"], ready["seeds"]) == ((0.0, 1.0, 2.0), (0, 1, 2))
        for _ in range(2):
            assert not connection.poll(0.2)
            connection.send(None)
            found = connection.recv()
            assert len(found["each"]) == 2
            assert found["wall"] == sum(found["each"]) / 2 > 0
            assert (found["losses"], found["seeds"]) == ((0.0, 1.0, 2.0, 3.0, 4.0), (0, 1, 2, 3, 4))
            assert found["mib"] > 1
            assert found["least"] == 0.5
        connection.close()
        process.wait(20)


def test_bytecode_is_counted_exactly_by_package() -> None:
    def count(steps: int) -> dict[str, int]:
        counter = BytecodeCounter()
        gc.disable()  # JAX, where other tests have imported it, is called by the garbage collector
        counter.start()
        for _ in range(steps):
            json.dumps([1], indent=1)
        found = dict(counter.stop())
        gc.enable()
        return found

    few, more, most = count(1), count(2), count(3)
    assert few["python"] > 100
    assert [name for name in few if most[name] - more[name] != more[name] - few[name]] == []
    assert count(3) == most


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("/a/site-packages/lightning/pytorch/loops/fit_loop.py", "lightning.pytorch.loops"),
        ("/a/site-packages/torch/nn/modules/module.py", "torch"),
        ("/a/site-packages/typing_extensions.py", "typing_extensions"),
        ("/a/src/boltcutter/task/base.py", "boltcutter.task"),
        ("/a/scripts/benchmarks/window.py", "benchmarks"),
        ("/usr/lib/python3.11/enum.py", "python"),
    ],
)
def test_a_file_belongs_to_a_package(file: str, package: str) -> None:
    assert package_of(Path(file)) == package
