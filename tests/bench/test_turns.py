from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from boltcutter.bench.harness import BenchmarkError, Process, cores
from boltcutter.bench.turns import Coordinator

GUEST = """
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
from boltcutter.bench.turns import Turns

turns = Turns(sys.argv[1], warm=3, lead=1, steps=2)
for number in range(1000):
    torch.manual_seed(number)
    turns.end_step(torch.tensor(float(number)), 0.5)
sys.exit(1)
"""


def guest(table: Coordinator, name: str, turns: int = 1000, code: int = 1) -> Process:
    """A process that takes so many turns, and then ends."""
    return Process(["-c", GUEST, table.address, name, str(turns), str(code)], cores(1))


def test_processes_take_turns_and_end_when_the_table_is_left(tmp_path: Path) -> None:
    with Coordinator(tmp_path) as table:
        both, alone = (guest(table, "a"), guest(table, "b")), guest(table, "c")
        heard: list[object] = [*table.register("all", *both, alone, ranks=3)]
        assert sorted(map(str, heard)) == ["('a', 0)", "('b', 0)", "('c', 0)"]
        other = guest(table, "d")
        assert table.register("other", other) == [("d", 0)]
        for turn in (1, 2):
            assert {str(found) for found in table.turn("all")} == {f"('{name}', {turn})" for name in "abc"}
            assert table.turn("other") == [("d", turn)]
        assert all(process.running for process in (*both, alone, other))
    assert not any(process.running for process in (*both, alone, other))


@pytest.mark.parametrize(
    ("turns", "code", "told"),
    [
        (0, 3, "a measured process ended with 3"),
        (2, 3, "a measured process ended with 3"),
        (2, 0, r"^steps: training was over before"),
    ],
)
def test_a_process_that_ends_before_its_turn_is_told(tmp_path: Path, turns: int, code: int, told: str) -> None:
    others: list[Process] = []

    def measure() -> None:
        with Coordinator(tmp_path) as table:
            others.append(guest(table, "other"))
            table.register("other", *others)
            table.register("early", guest(table, "early", turns, code))
            table.turn("early")
            table.turn("early")

    with pytest.raises(BenchmarkError, match=told):
        measure()
    assert not others[0].running


def test_a_process_works_only_in_its_turn_and_tells_of_its_steps(tmp_path: Path) -> None:
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
