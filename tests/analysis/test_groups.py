from pathlib import Path

import pytest
from compared_runs import write_group, write_run, write_search

from boltcutter import ConfigError
from boltcutter.analysis.groups import pair, read_group
from boltcutter.analysis.record import find_runs

ACCURACY = "test/accuracy"


def test_a_filter_and_a_folder_select_the_same_runs(tmp_path: Path) -> None:
    folder = write_group(tmp_path, "mlp", [0.8, 0.7, 0.9])
    write_group(tmp_path, "resnet", [0.6])
    by_filter = read_group("model=mlp", find_runs(tmp_path), ACCURACY)
    by_folder = read_group(str(folder), find_runs(tmp_path / "elsewhere"), ACCURACY)
    assert by_filter.values == by_folder.values == [0.8, 0.7, 0.9]
    assert [result.key for result in by_filter.results] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert read_group(str(folder / "mlp-1"), find_runs(tmp_path), ACCURACY).values == [0.7]
    assert read_group("mlp-1", find_runs(tmp_path), ACCURACY).values == [0.7]


def test_a_search_stands_for_its_best_trial_and_repeated_seeds_for_all(tmp_path: Path) -> None:
    best = read_group(str(write_search(tmp_path / "tuned", [0.3, 0.1, 0.2])), find_runs(tmp_path), ACCURACY)
    assert best.values == [0.9]
    assert best.trials == 3
    seeds = write_search(tmp_path / "seeds", [], seeds=3)
    for seed in range(3):
        write_run(seeds / "trials" / f"{seed:04d}", 0.5, seed=seed)
    found = read_group(str(seeds), find_runs(tmp_path), ACCURACY)
    assert len(found.values) == 3
    assert found.trials == 0
    filtered = read_group("kind=seed", find_runs(tmp_path), ACCURACY)
    assert (len(filtered.values), filtered.warnings) == (3, [])


def test_a_run_of_the_best_trial_has_the_budget_of_its_search(tmp_path: Path) -> None:
    search = write_search(tmp_path / "tuned", [0.3, 0.1, 0.2])
    command = f"/usr/bin/boltcutter train seed=1 experiment={search / 'best.yaml'}"
    run = write_run(tmp_path / "again", 0.9, settings={"choices": {"experiment": "best"}}, command=command)
    assert read_group(str(run), find_runs(tmp_path), ACCURACY).trials == 3


def test_trials_of_searches_are_no_repetitions(tmp_path: Path) -> None:
    write_search(tmp_path / "tuned", [0.3, 0.1])
    write_run(tmp_path / "one", 0.7, seed=5)
    found = read_group("model=mlp", find_runs(tmp_path), ACCURACY)
    assert found.values == [0.7]
    assert "2 trials" in found.warnings[0]


@pytest.mark.parametrize(
    ("value", "reason", "named"),
    [
        (0.5, "ValueError: a bug", "failed"),
        (0.5, "killed", "killed"),
        (0.5, "preempted", "interrupted"),
        (None, "completed", "without test/accuracy"),
        (float("nan"), "completed", "test/accuracy=nan"),
    ],
)
def test_runs_without_a_result_are_left_out_and_named(
    tmp_path: Path, value: float | None, reason: str, named: str
) -> None:
    write_group(tmp_path, "mlp", [0.8, 0.7])
    write_run(tmp_path / "mlp" / "other", value, seed=9, reason=reason, settings={"choices": {"model": "mlp"}})
    found = read_group("model=mlp", find_runs(tmp_path), ACCURACY)
    assert found.values == [0.8, 0.7]
    assert len(found.warnings) == 1
    assert named in found.warnings[0]
    assert "other" in found.warnings[0]


def test_the_newest_of_equal_runs_is_used(tmp_path: Path) -> None:
    attempt = {"start": "2026-01-02T12:00:00+00:00", "reason": "completed"}
    write_run(tmp_path / "second", 0.7, attempts=[attempt])
    write_run(tmp_path / "first", 0.8)
    found = read_group(str(tmp_path), find_runs(tmp_path), ACCURACY)
    assert found.values == [0.7]
    assert "first is left out" in found.warnings[0]


def test_different_runs_of_a_seed_are_no_group(tmp_path: Path) -> None:
    write_run(tmp_path / "first", 0.8)
    write_run(tmp_path / "second", 0.7, settings={"optimizer": {"lr": 0.2}})
    with pytest.raises(
        ConfigError, match=r"in optimizer\.lr; add 'and optimizer\.lr=0\.[12]' or 'and optimizer\.lr=0\.[12]' to"
    ):
        read_group(str(tmp_path), find_runs(tmp_path), ACCURACY)
    other = {"model": {"_target_": "boltcutter.model.linear.Linear"}, "choices": {"data": "digits", "model": "linear"}}
    write_run(tmp_path / "second", 0.7, settings=other)
    with pytest.raises(ConfigError, match=r"in model; add 'and model=(mlp|linear)' or 'and model=(mlp|linear)' to"):
        read_group(str(tmp_path), find_runs(tmp_path), ACCURACY)


@pytest.mark.parametrize(
    ("text", "metric", "message"),
    [
        ("model=mlp", "test/acc", "--metric=test/acc: .*did you mean test/accuracy"),
        ("model=resnet", ACCURACY, "model=resnet: no completed runs"),
        ("nothing", ACCURACY, "group=nothing: no run with this id"),
        ("modle=mlp", ACCURACY, "modle"),
    ],
)
def test_a_group_without_runs_is_a_mistake(tmp_path: Path, text: str, metric: str, message: str) -> None:
    write_group(tmp_path, "mlp", [0.8])
    with pytest.raises(ConfigError, match=message):
        read_group(text, find_runs(tmp_path), metric)


def test_runs_of_the_same_seed_are_pairs(tmp_path: Path) -> None:
    write_group(tmp_path, "mlp", [0.1, 0.2, 0.3, 0.4])
    write_group(tmp_path, "resnet", [0.5, 0.6, 0.7], seed=2)
    first, second = (read_group(f"model={name}", find_runs(tmp_path), ACCURACY) for name in ("mlp", "resnet"))
    assert [(a.value, b.value) for a, b in pair(first, second)] == [(0.3, 0.5), (0.4, 0.6)]
    write_group(tmp_path, "convnet", [0.5, 0.6, 0.7], seed=3)
    third = read_group("model=convnet", find_runs(tmp_path), ACCURACY)
    assert pair(first, third) == []  # one of three


def test_folds_of_the_same_seed_are_pairs(tmp_path: Path) -> None:
    for name in ("mlp", "resnet"):
        for fold in range(3):
            data = {"num_folds": 3, "fold": fold}
            write_group(tmp_path / name, str(fold), [fold / 10, fold / 10], settings={"data": data})
    first, second = (read_group(str(tmp_path / name), find_runs(tmp_path), ACCURACY) for name in ("mlp", "resnet"))
    assert len(first.results) == 6
    assert [a.key for a, _ in pair(first, second)] == [(s, 3, f) for s in range(2) for f in range(3)]
    assert all(a.key == b.key for a, b in pair(first, second))


@pytest.mark.parametrize("seed", ["one", None, {"a": 1}, 1.5])
def test_a_record_of_somebody_else_cannot_break_it(tmp_path: Path, seed: object) -> None:
    write_run(tmp_path / "one", 0.5, seed=seed, data=3, measured_after=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"record\.json is damaged \(an entry"):
        read_group(str(tmp_path / "one"), find_runs(tmp_path), ACCURACY)
