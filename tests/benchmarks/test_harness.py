import json
import os
from pathlib import Path

import pytest
from benchmarks import harness
from benchmarks.harness import BenchmarkError, Process, ratio, ratio_of_turns


def test_ratio_of_medians_with_spread_over_rounds() -> None:
    found = ratio("a", [1.0, 2.0, 9.0], "b", [2.0, 2.0, 3.0], 1.5)
    assert (found.value, found.spread, found.met) == (1.0, (0.5, 3.0), True)
    assert not ratio("a", [2.0], "b", [1.0], 1.5).met
    assert ratio("a", [2.0], "b", [1.0], 1.5, least=True).met


def test_ratio_of_consecutive_turns() -> None:
    mine, theirs = [[1.0, 20.0, 3.0], [4.0]], [[2.0, 10.0, 2.0], [1.0]]
    found = ratio_of_turns("a", mine, "b", theirs, 1.8)
    assert (found.value, found.spread, found.met) == (1.75, (1.5, 4.0), True)


def test_a_failed_process_is_reported_with_its_last_line() -> None:
    for terminal in (False, True):
        with pytest.raises(BenchmarkError, match=r"ended with 3: so it is$"):
            Process(["-c", "print('first'); print('so it is'); exit(3)"], harness.cores(1), terminal=terminal).wait()
    with pytest.raises(BenchmarkError, match="did not end in 0 s"):
        Process(["-c", "import time; time.sleep(60)"], harness.cores(1)).wait(0.3)


def test_a_process_has_its_cores_its_threads_and_a_terminal(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.isatty(1), sorted(os.sched_getaffinity(0)))"
    process = Process(["-c", code], harness.cores(1), terminal=True, threads=3)
    process.wait()
    assert process.output.decode().split() == ["3", "True", str(harness.cores(1))]


def test_invalid_options() -> None:
    with pytest.raises(BenchmarkError, match=r"^wrong: unknown option; choose from: rounds$"):
        harness.parse_options(["wrong=1"], {"rounds": "1"})
    for override in ("rounds=", "rounds=few", "rounds=0", "rounds=-1", "threads=1,x"):
        with pytest.raises(BenchmarkError, match=rf"^{override}: not a positive integer; try 2$"):
            harness.parse_options([override], {"rounds": "2", "threads": ""})
    with pytest.raises(BenchmarkError, match=r"^threads=\d+, but there are \d+ cores"):
        harness.cores(1 + (os.cpu_count() or 1))
    with pytest.raises(BenchmarkError, match=r"^mode: no such argument; did you mean model\?"):
        harness.resolved(["mode=mlp"])


def test_a_report_is_a_table_a_file_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness.report("some", tmp_path, [ratio("ours", [1.0], "theirs", [2.0], 0.4)], {"ours": [1.0]})
    assert capsys.readouterr().out.splitlines()[1] == "ours  / theirs   0.500  (0.500–0.500)  ≤ 0.40 missed"
    (found,) = json.loads((tmp_path / "some.json").read_text())["ratios"]
    assert (found["value"], found["met"]) == (0.5, False)
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
