import os
import sys
import time
from pathlib import Path

from conftest import require

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")
from boltcutter.launch.ray_worker import Node  # noqa: E402

RANK = """
import os, sys, time
# In one write, as both ranks write to the same file.
print(" ".join((os.environ["RANK"], os.getcwd(), os.environ["BOLTCUTTER_PARENT_PID"])) + "\\n", end="", flush=True)
time.sleep(60 if os.environ["RANK"] == "1" else 0)
sys.exit(3)
"""


def test_a_node_starts_its_ranks_and_signals_those_that_run(tmp_path: Path) -> None:
    node, log = Node(), tmp_path / "ray.log"
    node.start([sys.executable, "-c", RANK], [{"RANK": "0"}, {"RANK": "1"}], str(tmp_path), str(log))
    end = time.monotonic() + 30
    while (node.poll()[0] is None or len(log.read_text().splitlines()) < 2) and time.monotonic() < end:
        time.sleep(0.05)
    assert node.poll() == [3, None]
    assert sorted(log.read_text().splitlines()) == [f"{rank} {tmp_path} {os.getpid()}" for rank in range(2)]
    node.send(15)
    while None in node.poll() and time.monotonic() < end:
        time.sleep(0.05)
    assert node.poll() == [3, -15]
