from pathlib import Path
from typing import Any

import pytest
from compared_runs import write_group, write_search

from boltcutter import ConfigError
from boltcutter.analysis.caveats import find_caveats, measured_elsewhere
from boltcutter.analysis.groups import pair, read_group
from boltcutter.analysis.record import find_runs
from boltcutter.run import evaluations

VALUES = [0.7, 0.8, 0.9]
RESUMED = {"resumed_from": "last.ckpt", "reason": "completed", "devices": 1, "deterministic": True}


def warnings_of(root: Path, metric: str = "test/accuracy", texts: tuple[str, str] = ("model=a", "model=b")) -> str:
    first, second = (read_group(text, find_runs(root), metric) for text in texts)
    return "\n".join(find_caveats(first, second, pair(first, second), metric))


def write_both(root: Path, seed: int = 0, **options: Any) -> None:
    write_group(root, "a", VALUES)
    write_group(root, "b", VALUES, seed=seed, **options)


def test_a_fair_comparison_has_no_warnings(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_group(tmp_path, name, VALUES, data="the same")
    assert warnings_of(tmp_path) == ""


def test_different_data_are_refused(tmp_path: Path) -> None:
    write_both(tmp_path, data="other")
    with pytest.raises(ConfigError, match="--metric=test/accuracy: a-0 and b-0 have different data"):
        warnings_of(tmp_path)


def test_other_settings_of_the_data_are_refused_if_the_data_differ(tmp_path: Path) -> None:
    write_both(tmp_path, data="other", settings={"data": {"split": [0.5, 0.5]}})
    with pytest.raises(ConfigError, match=r"data\.split"):
        warnings_of(tmp_path)


def test_other_settings_of_equal_data_are_compared(tmp_path: Path) -> None:
    write_both(tmp_path, settings={"data": {"augmentation": "flips"}})
    assert "different data" not in warnings_of(tmp_path)


@pytest.mark.parametrize("seed", [0, 7])
def test_data_without_a_fingerprint_are_known_by_their_settings(tmp_path: Path, seed: int) -> None:
    write_both(tmp_path, data=None, seed=seed, settings={"data": {"split": [0.5, 0.5]}})
    with pytest.raises(ConfigError, match=r"data\.split"):
        warnings_of(tmp_path)


def test_the_same_test_samples_may_have_other_training_data(tmp_path: Path) -> None:
    for name, data in (("a", "half"), ("b", "all")):
        write_group(tmp_path, name, VALUES, data=data, right=[True] * 20)
    assert "targets of the test split are equal" in warnings_of(tmp_path)
    write_group(tmp_path, "b", VALUES, data="all", right=[True] * 21)
    with pytest.raises(ConfigError, match="different data"):
        warnings_of(tmp_path)


def test_unpaired_groups_of_the_same_data_are_compared(tmp_path: Path) -> None:
    write_both(tmp_path, seed=10)
    assert "different data" not in warnings_of(tmp_path)


def test_a_metric_that_is_computed_otherwise_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, settings={"task": {"metrics": {"accuracy": {"average": "macro"}}}})
    with pytest.raises(ConfigError, match=r"task\.metrics\.accuracy\.average is micro in model=a, and macro"):
        warnings_of(tmp_path)


def test_a_run_in_both_groups_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path)
    with pytest.raises(ConfigError, match="a-0, a-1, a-2 are in both groups"):
        warnings_of(tmp_path, texts=("model=a", "model!=b"))


def test_the_split_of_the_selection_is_named(tmp_path: Path) -> None:
    write_both(tmp_path, settings={"callback": {"best": {"monitor": "test/accuracy"}}})
    assert "test/accuracy has chosen weights or settings on the same split" in warnings_of(tmp_path)
    for name in ("a", "b"):
        write_group(tmp_path, name, VALUES, metric="val/accuracy")
    assert "val/loss has chosen" in warnings_of(tmp_path, "val/accuracy")


def test_unequal_tuning_is_named(tmp_path: Path) -> None:
    for name, count in (("tuned", 20), ("hardly", 2)):
        write_search(tmp_path / name, [0.5 - i / 100 for i in range(count)], searched="test/accuracy")
    found = warnings_of(tmp_path, texts=(str(tmp_path / "tuned"), str(tmp_path / "hardly")))
    assert "tuned is the best of 20 trials" in found
    assert "hardly of 2" in found
    assert "test/accuracy has chosen weights or settings" in found


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"attempts": [RESUMED | {"changed": ["optimizer.lr"]}]}, "with another optimizer.lr"),
        ({"attempts": [RESUMED | {"deterministic": False}]}, "without trainer.deterministic=true"),
        ({"attempts": [{"devices": 2}, RESUMED]}, "on another number of devices"),
        ({"attempts": [RESUMED], "settings": {"resume_exact": False}}, "resume_exact=false"),
        ({"attempts": [RESUMED], "settings": {"callback": {"reseed": None}}}, "without callback.reseed"),
        ({"reason": "completed, but nothing is trained: loss is constant"}, "b-0 completed, but nothing is trained"),
        ({"settings": {"optimizer": {"lr": 0.2}}}, ""),
    ],
)
def test_an_unusual_run_is_named(tmp_path: Path, facts: dict[str, Any], named: str) -> None:
    write_both(tmp_path, **facts)
    assert named in warnings_of(tmp_path)


def test_an_exact_resume_is_none(tmp_path: Path) -> None:
    write_both(tmp_path, attempts=[{"devices": 1}, RESUMED])
    assert "resumed" not in warnings_of(tmp_path)


def test_runs_that_differ_are_named(tmp_path: Path) -> None:
    write_both(tmp_path)
    write_group(tmp_path, "b", [0.5], seed=3, settings={"optimizer": {"lr": 0.3}}, measured_after={"val/loss": 40})
    found = warnings_of(tmp_path)
    assert "model=b: runs differ in optimizer.lr" in found
    assert "stopped early: b-3 (40 of 100 steps)" in found
    assert "no run of the same seed and fold: b-3" in found


def test_equal_settings_and_splits_of_each_seed_are_named(tmp_path: Path) -> None:
    write_group(tmp_path, "a", VALUES)
    for run in (tmp_path / "a").iterdir():
        copy = tmp_path / "b" / run.name.replace("a", "b")
        copy.mkdir(parents=True)
        (copy / "record.json").write_bytes((run / "record.json").read_bytes())
    found = warnings_of(tmp_path, texts=(str(tmp_path / "a"), str(tmp_path / "b")))
    assert "both groups have the same settings" in found
    assert "each seed has its own split" in found


def test_other_trainings_whose_test_metric_is_known_are_counted(tmp_path: Path) -> None:
    write_both(tmp_path)
    known = find_runs(tmp_path)
    groups = [read_group(text, known, "test/accuracy") for text in ("model=a", "model=b")]
    assert measured_elsewhere(groups, known, "test/accuracy") == []
    assert len(measured_elsewhere(groups[:1], known, "test/accuracy")) == 1
    write_group(tmp_path, "c", VALUES)
    write_group(tmp_path, "d", VALUES, settings={"data": {"split": [0.5, 0.5]}})
    write_group(tmp_path, "e", VALUES, metric="val/accuracy")
    (line,) = measured_elsewhere(groups, find_runs(tmp_path), "test/accuracy")
    assert "with other settings (c-2)" in line
    assert measured_elsewhere(groups, find_runs(tmp_path), "val/accuracy") == []


def test_a_run_that_was_tested_at_several_checkpoints_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_group(tmp_path, name, VALUES, data="the same")
    tested = {"split": "test", "checkpoint": "best.ckpt", "written": "2026-01-01"}
    for _ in range(2):  # the same weights: nothing can be chosen
        evaluations.append(tmp_path / "a" / "a-1", tested)
    evaluations.append(tmp_path / "a" / "a-1", tested | {"split": "val", "checkpoint": "last.ckpt"})
    assert warnings_of(tmp_path) == ""
    evaluations.append(tmp_path / "a" / "a-1", tested | {"checkpoint": "last.ckpt"})
    evaluations.append(tmp_path / "a" / "a-2", tested)
    evaluations.append(tmp_path / "a" / "a-2", tested | {"written": "2026-01-02"})
    (line,) = warnings_of(tmp_path).splitlines()
    assert line.startswith("model=a: the test split was evaluated 5 times for 3 runs, ")
    assert "a-1 3 times, at 2 checkpoints (best.ckpt, last.ckpt), a-2 2 times, at 2 checkpoints (best.ckpt)" in line
    assert warnings_of(tmp_path, "val/loss").count("evaluated") == 0
