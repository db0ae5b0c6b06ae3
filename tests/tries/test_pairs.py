from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tries_runs import write_baseline

from boltcutter.analysis.record import find_runs
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.tries.pairs import BASELINE, CHANGE, Pairs, append_line, fresh_seeds, read_lines
from boltcutter.tries.sides import Side, Version

CODE = {"commit": "c0ffee", "changes": None, "library_commit": None, "library_changes": None}


@pytest.fixture
def pairs(project: Project, tmp_path: Path) -> Pairs:
    baseline = Side("baseline", ("model=mlp",), Version(), project, CODE)
    (folder := tmp_path / "runs" / "tries" / "abc").mkdir(parents=True)
    change = replace(baseline, label="change", overrides=("model=mlp", "optimizer.lr=0.1"))
    return Pairs(folder, baseline, change, [3, 4, 5, 6, 7, 8, 9], "val/loss")


def test_runs_of_the_baseline_are_reused_if_all_that_matters_is_the_same(pairs: Pairs, tmp_path: Path) -> None:
    project, runs = pairs.baseline.project, tmp_path / "runs" / "mlp"
    same = write_baseline(project, runs / "same", 3)
    write_baseline(project, runs / "code", 4, git={"commit": "c0ffee", "changes": "1"})
    write_baseline(project, runs / "packages", 5, packages={"torch": "1.0"})
    write_baseline(project, runs / "hardware", 6, hardware={"cpu": "another"})
    write_baseline(project, runs / "failed", 7, attempts=[{"reason": "ValueError: x"}])
    config = compose(project, ["model=mlp", "seed=8", "optimizer.lr=0.5"]).written
    write_baseline(project, runs / "config", 8, config=config)
    write_baseline(project, runs / "metric", 9, metrics={"val/loss": None})
    found = replace(pairs, known=find_runs(tmp_path / "runs"))
    assert found.num_reusable() == 1
    assert [asked.number for _ in range(2) if (asked := found.ask(14))] == [1, 2]
    assert found.outcomes[0, BASELINE].folder == str(same)
    assert found.outcomes[0, BASELINE].is_reused


def test_a_reused_run_of_other_data_is_trained_again(pairs: Pairs, tmp_path: Path) -> None:
    project = pairs.baseline.project
    write_baseline(project, tmp_path / "runs" / "mlp" / "old", 3, data="other data")
    found = replace(pairs, known=find_runs(tmp_path / "runs"))
    assert found.ask(14)
    assert found.ask(14)
    write_baseline(project, found.folder_of(0, CHANGE), 3)
    found.tell(1, "complete", [])
    assert (0, BASELINE) not in found.outcomes
    for again in (found, replace(found, outcomes={})):  # also after the process was killed
        asked = again.ask(14)
        assert asked
        assert asked.number == 0
        assert not again.num_reusable()


def test_pairs_count_in_their_order_not_as_they_end(pairs: Pairs) -> None:
    project = pairs.baseline.project
    numbers = [asked.number for _ in range(12) if (asked := pairs.ask(14))]
    assert numbers == [1, 0, *range(2, 10)]  # of five pairs; there is no verdict before
    for number in (2, 3, 0):
        pair, side = divmod(number, 2)
        write_baseline(project, pairs.folder_of(pair, (BASELINE, CHANGE)[side]), pair + 3)
        pairs.tell(number, "complete", [])
        assert not pairs.complete()
    write_baseline(project, pairs.folder_of(0, CHANGE), 3)
    pairs.tell(1, "complete", [])
    assert len(pairs.complete()) == 2


def test_what_is_measured_is_never_reused_and_the_order_is_drawn(pairs: Pairs, tmp_path: Path) -> None:
    write_baseline(pairs.baseline.project, tmp_path / "runs" / "mlp" / "same", 3)
    first = set[str]()
    for name in ("abc", "abd", "abe", "abf", "abg", "abh"):
        found = replace(
            pairs, folder=tmp_path / name, known=find_runs(tmp_path / "runs"), constraints=["time/step"], outcomes={}
        )
        numbers = [asked.number for _ in range(10) if (asked := found.ask(14))]
        again = replace(found, outcomes={})  # after an interruption
        repeated = [asked.number for _ in range(10) if (asked := again.ask(14))]
        assert numbers == repeated
        assert not found.num_reusable()
        first |= {(BASELINE, CHANGE)[number % 2] for number in numbers[::2]}
    assert first == {BASELINE, CHANGE}


def test_a_run_needs_all_metrics(pairs: Pairs) -> None:
    write_baseline(pairs.baseline.project, folder := pairs.folder_of(0, CHANGE), 3)
    timed = replace(pairs, constraints=["time/step"])
    with pytest.raises(ConfigError, match=r"not_worse=time/step.*callback\.throughput"):
        timed.tell(1, "complete", [])
    (folder / "metrics.csv").write_text("step,throughput/samples_per_second_epoch\n9,100\n19,1000\n29,1280\n39,3200\n")
    timed.tell(1, "complete", [])
    outcome = timed.outcomes[0, CHANGE]
    assert outcome.others == {"time/step": pytest.approx(0.05)}  # 64 samples at the median rate after the first epoch
    assert replace(timed, outcomes={}).outcomes[0, CHANGE] == outcome


def test_a_failure_is_found_in_the_record_of_a_run(pairs: Pairs) -> None:
    write_baseline(pairs.baseline.project, pairs.folder_of(0, BASELINE), 3, attempts=[{"reason": "ValueError: bad"}])
    assert [asked.number for _ in range(2) if (asked := pairs.ask(14))] == [1, 2]
    outcome = pairs.outcomes[0, BASELINE]
    assert outcome.is_lost
    assert math.isnan(outcome.value)
    assert "bad" in outcome.error


def test_torn_lines_are_ignored_and_not_continued(tmp_path: Path) -> None:
    append_line(file := tmp_path / "x.jsonl", {"a": 1})
    with open(file, "a") as opened:
        opened.write('{"a": ')
    append_line(file, {"a": 2})
    assert [entry["a"] for entry in read_lines(file)] == [1, 2]


def test_seeds_that_were_used_are_left_out() -> None:
    assert fresh_seeds(3, 3, {4, 5}.__contains__) == [3, 6, 7]


def test_the_spread_is_known_from_earlier_pairs_and_runs_of_the_baseline(pairs: Pairs, tmp_path: Path) -> None:
    project = pairs.baseline.project
    for seed, loss in ((20, 0.4), (21, 0.6)):
        write_baseline(project, tmp_path / "runs" / "mlp" / str(seed), seed, metrics={"val/loss": loss})
    other = replace(pairs, folder=tmp_path / "runs" / "tries" / "def", outcomes={})
    for pair, loss in ((0, 0.7), (1, 0.8)):
        for number, value in ((2 * pair, 0.5), (2 * pair + 1, loss)):
            place = other.folder_of(pair, (BASELINE, CHANGE)[number % 2])
            write_baseline(project, place, 3 + pair, metrics={"val/loss": value})
            other.tell(number, "complete", [])
    found = replace(pairs, known=find_runs(tmp_path / "runs"), outcomes={})
    assert found.earlier_differences() == pytest.approx([0.2, 0.3])
    assert {0.4, 0.6} <= {*found.baseline_values()}
    another = replace(found, baseline=found.change, outcomes={})
    assert another.earlier_differences() == another.baseline_values() == []


@pytest.mark.parametrize("seed", [[1], {"a": 1}, "x", 10**400, None])
def test_a_run_with_an_odd_seed_is_no_baseline(pairs: Pairs, tmp_path: Path, seed: Any) -> None:
    config = compose(pairs.baseline.project, ["model=mlp"]).written | {"seed": seed}
    write_baseline(pairs.baseline.project, tmp_path / "runs" / "mlp" / "odd", 3, config=config)
    assert replace(pairs, known=find_runs(tmp_path / "runs")).num_reusable() == 0
