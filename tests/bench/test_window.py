from multiprocessing.connection import Listener
from pathlib import Path

from boltcutter.bench.harness import Process, cores

STEPS = """
import sys
import torch
from boltcutter.bench.window import Turns

turns = Turns(sys.argv[1], warm=3, lead=1, steps=2)
for number in range(1000):
    torch.manual_seed(number)
    turns.end_step(torch.tensor(float(number)))
sys.exit(1)
"""


def test_a_process_works_only_in_its_turn_and_leaves_when_all_are_over(tmp_path: Path) -> None:
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
        connection.close()
        process.wait(20)
