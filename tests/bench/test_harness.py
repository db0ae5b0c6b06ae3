import json
import os
from pathlib import Path

import pytest

from boltcutter.bench import harness
from boltcutter.bench.harness import Failed, Process, Table, ratio, ratio_of_turns


def test_a_ratio_is_of_medians_and_its_spread_of_rounds() -> None:
    found = ratio("a", [1.0, 2.0, 9.0], "b", [2.0, 2.0, 3.0], 1.5)
    assert (found.value, found.spread, found.met) == (1.0, (0.5, 3.0), True)
    assert not ratio("a", [2.0], "b", [1.0], 1.5).met
    assert ratio("a", [2.0], "b", [1.0], 1.5, least=True).met


def test_turns_are_compared_with_those_beside_them() -> None:
    mine, theirs = [[1.0, 20.0, 3.0], [4.0]], [[2.0, 10.0, 2.0], [1.0]]
    found = ratio_of_turns("a", mine, "b", theirs, 1.8)
    assert (found.value, found.spread, found.met) == (1.75, (1.5, 4.0), True)


def test_a_process_that_fails_is_told_by_its_last_line() -> None:
    for terminal in (False, True):
        with pytest.raises(Failed, match=r"ended with 3: so it is$"):
            Process(["-c", "print('first'); print('so it is'); exit(3)"], harness.cores(1), terminal=terminal).wait()
    with pytest.raises(Failed, match="did not end in 0 s"):
        Process(["-c", "import time; time.sleep(60)"], harness.cores(1)).wait(0.3)


def test_a_process_has_its_cores_its_threads_and_a_terminal(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.isatty(1), sorted(os.sched_getaffinity(0)))"
    process = Process(["-c", code], harness.cores(1), terminal=True, threads=3)
    process.wait()
    assert process.output.decode().split() == ["3", "True", str(harness.cores(1))]


def test_mistakes_are_told_on_one_line() -> None:
    with pytest.raises(Failed, match=r"^wrong: no such setting here; there are: rounds$"):
        harness.options(["wrong=1"], {"rounds": "1"})
    with pytest.raises(Failed, match=r"^threads=\d+, but there are \d+ cores"):
        harness.cores(1 + (os.cpu_count() or 1))
    with pytest.raises(Failed, match=r"^mode: no such key"):
        harness.resolved(["mode=mlp"])


GUEST = """
import sys, time
from boltcutter.bench.window import Turns

turns = Turns(sys.argv[1], warm=1, lead=0, steps=1)
for number in range(int(sys.argv[2])):
    time.sleep(0.01)
    turns.end_step(number)
sys.exit(int(sys.argv[3]))
"""


def guest(table: Table, steps: int = 1000, code: int = 1) -> Process:
    """A process that takes turns, for so many steps, and then ends."""
    return Process(["-c", GUEST, table.address, str(steps), str(code)], harness.cores(1))


def test_processes_take_turns_and_end_when_the_table_is_left(tmp_path: Path) -> None:
    with Table(tmp_path) as table:
        both = guest(table), guest(table)
        assert [found["losses"] for found in table.seat("both", *both, ranks=2)] == [(0.0,), (0.0,)]
        alone = guest(table)
        (ready,) = table.seat("alone", alone)
        assert ready["losses"] == (0.0,)
        for number in (2, 3):
            assert [len(found["losses"]) for found in table.turn("both")] == [number, number]
            (found,) = table.turn("alone")
            assert len(found["losses"]) == number
            assert 0.01 <= found["wall"] < 5
        assert all(process.running for process in (*both, alone))
    assert not any(process.running for process in (*both, alone))


@pytest.mark.parametrize(
    ("steps", "code", "told"),
    [
        (0, 3, "a measured process ended with 3"),
        (2, 3, "a measured process ended with 3"),
        (2, 0, r"^steps: training was over before"),
    ],
)
def test_a_process_that_ends_before_its_turn_is_told(tmp_path: Path, steps: int, code: int, told: str) -> None:
    others: list[Process] = []

    def measure() -> None:
        with Table(tmp_path) as table:
            others.append(guest(table))
            table.seat("other", *others)
            table.seat("early", guest(table, steps, code))
            table.turn("early")
            table.turn("early")

    with pytest.raises(Failed, match=told):
        measure()
    assert not others[0].running


def test_a_report_is_a_table_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness.report("some", tmp_path, [ratio("ours", [1.0], "theirs", [2.0], 0.4)], {"ours": [1.0]})
    assert capsys.readouterr().out.splitlines()[1] == "ours  / theirs   0.500  (0.500–0.500)  ≤ 0.40 missed"
    (found,) = json.loads((tmp_path / "some.json").read_text())["ratios"]
    assert (found["value"], found["met"]) == (0.5, False)
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
