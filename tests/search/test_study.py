from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import optuna
import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.environment import lease
from boltcutter.run.metrics import Mode
from boltcutter.search import study as module
from boltcutter.search.space import Space
from boltcutter.search.study import Study
from boltcutter.search.trial import Report, Sampled

SPACE = {"optimizer.lr": "loguniform(1e-4, 1e-1)", "data.batch_size": "choice(32, 64)"}
LOSS: list[tuple[str, Mode]] = [("loss", "min")]


def open_study(folder: Path, metrics: list[tuple[str, Mode]] = LOSS, **options: Any) -> Study:
    return Study(folder, Space(options.pop("space", SPACE)), metrics, **options)


def finish(study: Study, sampled: Sampled | None, loss: float) -> None:
    assert sampled
    study.tell(sampled.number, "complete", [Report(1, {"loss": loss})])


def values(folder: Path, *, reopen: bool, **options: Any) -> list[dict[str, Any]]:
    """Sample six trials in turn, if ``reopen`` by a new process each."""
    folder.mkdir()
    study, found = open_study(folder, **options), []
    for index in range(6):
        study = open_study(folder, **options) if reopen else study
        sampled = study.ask(6)
        assert sampled
        assert sampled.number == index
        found.append(sampled.values)
        study.report(index, 1, {"loss": index})
        finish(study, sampled, sampled.values["optimizer.lr"])
    assert study.ask(6) is None
    return found


@pytest.mark.parametrize("sampler", [None, lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=2)])
def test_a_seed_gives_the_same_values_also_after_interruptions(tmp_path: Path, sampler: Any) -> None:
    first = values(tmp_path / "a", reopen=False, sampler=sampler)
    assert values(tmp_path / "b", reopen=True, sampler=sampler) == first
    assert values(tmp_path / "c", reopen=False, sampler=sampler, seed=1) != first
    assert len({v["optimizer.lr"] for v in first}) == 6


DATE = "2026-01-01T00:00:00.000000+00:00"
CHOICES = json.dumps({"name": "CategoricalDistribution", "attributes": {"choices": ["x", "y"]}})
JOURNAL: list[tuple[int, dict[str, Any]]] = [  # code of Optuna's operation, and its arguments, of an earlier version
    (0, {"study_name": "search", "directions": [1]}),
    (
        4,
        {"datetime_start": None, "state": 4, "user_attrs": {"fixed": {"a": "x", "seed": 1}}, "intermediate_values": {}}
        | {"value": None, "values": None, "distributions": {}, "params": {}}
        | {"system_attrs": {"fixed_params": {"a": "x"}}},
    ),
    (6, {"trial_id": 0, "state": 0, "values": None, "datetime_start": DATE}),
    (8, {"trial_id": 0, "user_attr": {"worker": 0}}),
    (5, {"trial_id": 0, "param_name": "a", "param_value_internal": 0, "distribution": CHOICES}),
    (8, {"trial_id": 0, "user_attr": {"values": {"a": "x", "seed": 1}}}),
    (7, {"trial_id": 0, "step": 1, "intermediate_value": 1.0}),
    (7, {"trial_id": 0, "step": 2, "intermediate_value": 0.5}),
    (8, {"trial_id": 0, "user_attr": {"objectives": {"loss": 0.5}}}),
    (8, {"trial_id": 0, "user_attr": {"metrics": {"loss": 0.5, "f1": 0.2}}}),
    (8, {"trial_id": 0, "user_attr": {"steps": [5, 9]}}),
    (8, {"trial_id": 0, "user_attr": {"seconds": 3.5}}),
    (6, {"trial_id": 0, "state": 1, "values": [0.5], "datetime_complete": DATE}),
    (4, {"datetime_start": DATE}),
    (8, {"trial_id": 1, "user_attr": {"worker": 0}}),
    (8, {"trial_id": 1, "user_attr": {"values": {"a": "y"}}}),
    (7, {"trial_id": 1, "step": 1, "intermediate_value": 0.9}),
    (8, {"trial_id": 1, "user_attr": {"stopped": 2}}),
    (4, {"datetime_start": DATE}),
    (8, {"trial_id": 2, "user_attr": {"worker": 0}}),
    (8, {"trial_id": 2, "user_attr": {"values": {"a": "y"}}}),
    (8, {"trial_id": 2, "user_attr": {"error": "out of memory"}}),
    (6, {"trial_id": 2, "state": 3, "values": None, "datetime_complete": DATE}),
    (4, {"datetime_start": DATE}),
    (8, {"trial_id": 3, "user_attr": {"surplus": True}}),
    (6, {"trial_id": 3, "state": 3, "values": None, "datetime_complete": DATE}),
]


def test_the_journal_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    lines = [json.dumps({"op_code": code, "worker_id": "w", "study_id": 0, **entry}) for code, entry in JOURNAL]
    (tmp_path / "study.log").write_text("".join(f"{line}\n" for line in lines))
    study = open_study(tmp_path, space={"a": "grid(x, y)", "b": "uniform(0, 1)"})
    first, second, third = study.results()
    assert (first.number, first.state, first.values, first.seconds) == (0, "complete", {"a": "x", "seed": 1}, 3.5)
    assert (first.objectives, first.metrics) == ({"loss": 0.5}, {"loss": 0.5, "f1": 0.2})
    assert first.curve == [(5, 1.0), (9, 0.5)]
    assert (second.number, second.state, second.values) == (1, "running", {"a": "y"})
    assert (third.number, third.state, third.error) == (2, "failed", "out of memory")
    assert study.interrupted() == [Sampled(1, {"a": "y"})]
    assert study.report(1, 2, {"loss": 0.1})  # it was stopped there
    study.enqueue([{"a": "x", "seed": 1}, {"a": "y", "seed": 2}])
    found = study.ask(4)
    assert found
    assert (found.number, found.values["a"], found.values["seed"]) == (4, "y", 2)
    assert study.ask(4) is None


def test_the_sampled_values_of_a_seed_stay_the_same(tmp_path: Path) -> None:
    found = []
    for worker in (0, 1):
        folder = tmp_path / str(worker)
        folder.mkdir()
        study = open_study(folder, space={"b": "uniform(0, 1)"}, seed=3, worker=worker, workers=2)
        found += [sampled.values["b"] for sampled in (study.ask(2), study.ask(2)) if sampled]
    assert found == pytest.approx([0.5359545576, 0.8515963721, 0.0057512443, 0.3976881028], abs=1e-9)


@pytest.mark.parametrize(("mode", "worse"), [("min", 2.0), ("max", -2.0)])
def test_a_pruner_knows_the_mode(tmp_path: Path, mode: Mode, worse: float) -> None:
    study = open_study(tmp_path, [("loss", mode)], pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    for _ in range(3):
        study.ask(3)
    assert not study.report(0, 1, {"loss": 0.0})
    finish(study, Sampled(0, {}), 0.0)
    assert study.report(1, 1, {"loss": worse})
    assert not study.report(2, 1, {"loss": -worse})


def test_a_trial_that_was_just_started_belongs_to_the_worker_that_samples_it(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    study._study.ask()  # by another worker, which is about to store that it is its own
    assert study.interrupted() == []
    assert open_study(tmp_path, worker=1, workers=2).interrupted() == []


def test_given_values_are_combined_with_sampled_ones(tmp_path: Path) -> None:
    space = {"a": "grid(x, y)", "b": "uniform(0, 1)"}
    fixed = [{"a": "x", "seed": 1}, {"a": "y", "seed": 2}] * 2
    study = open_study(tmp_path, space=space)
    study.enqueue(fixed[:3])  # killed before the last
    found = [study.ask(4)]
    study = open_study(tmp_path, space=space)
    study.enqueue(fixed)
    found += [study.ask(4) for _ in range(3)]
    assert [(s.number, s.values["a"], s.values["seed"]) for s in found if s] == [
        (0, "x", 1),
        (1, "y", 2),
        (2, "x", 1),
        (3, "y", 2),
    ]
    assert len({s.values["b"] for s in found if s}) == 4
    assert study.ask(4) is None


def test_interrupted_trials_keep_their_number_and_values(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    sampled = [study.ask(3) for _ in range(3)]
    finish(study, sampled[1], 0.5)
    assert open_study(tmp_path).interrupted() == [sampled[0], sampled[2]]
    assert open_study(tmp_path, worker=1, workers=2).interrupted() == []
    assert open_study(tmp_path).ended() == [sampled[1]]


def test_a_process_killed_while_it_sampled_loses_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    expected = [open_study(tmp_path / "whole").ask(2) for _ in range(2)]

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    for attribute in ("_sample", "_seed_sampler"):  # before the trial has a worker, and before it has values
        folder = tmp_path / attribute
        folder.mkdir()
        study = open_study(folder)
        study.ask(2)
        if attribute == "_seed_sampler":
            study._study.ask()
            study._set(1, "worker", 0)
        else:
            monkeypatch.setattr(study, attribute, killed)
            with pytest.raises(KeyboardInterrupt):
                study.ask(2)
        monkeypatch.setattr(module, "UNCLAIMED", 0.0)
        assert open_study(folder).interrupted() == expected
        assert open_study(folder).ask(2) is None


def test_two_workers_share_the_last_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = open_study(tmp_path), open_study(tmp_path, worker=1, workers=2)
    first, second = one.ask(3), other.ask(3)
    assert first
    assert second
    assert first.values != second.values
    with monkeypatch.context() as patch:  # the other worker asks between the two steps of this one
        patch.setattr(one, "_seed_sampler", lambda number: other.ask(3))
        assert one.ask(3) is None
    assert [r.number for r in one.results()] == [0, 1, 2]
    found = [one.ask(5) for _ in range(3)]  # the search was continued with two more
    assert [s and s.number for s in found] == [4, 5, None]


def test_a_pruner_stops_a_trial_that_falls_behind_also_after_a_restart(tmp_path: Path) -> None:
    options = {"pruner": optuna.pruners.MedianPruner(n_startup_trials=1)}
    study = open_study(tmp_path, **options)
    for _ in range(2):
        study.ask(2)
    assert not study.report(0, 1, {"loss": 1.0})
    assert not study.report(0, 2, {"loss": 0.5})
    finish(study, Sampled(0, {}), 0.5)
    assert not study.report(1, 1, {"loss": 0.9})
    assert study.report(1, 2, {"loss": 0.8})
    study = open_study(tmp_path, **options)  # killed before the trial stopped, which repeats both validations
    assert not study.report(1, 1, {"loss": 0.9})
    assert study.report(1, 2, {"loss": 0.8})
    assert study.report(1, 3, {"loss": 0.1})
    result = study.tell(1, "pruned", [Report(10, {"loss": 0.9}), Report(20, {"loss": 0.8})])
    assert (result.state, result.curve, result.objectives) == ("pruned", [(10, 0.9), (20, 0.8)], {"loss": 0.8})


def test_validations_without_the_metric_or_of_several_metrics_stop_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"pruner": optuna.pruners.MedianPruner(n_startup_trials=0)}
    for number, metrics in enumerate([LOSS, [("loss", "min"), ("f1", "max")]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        study = open_study(folder, metrics, **options)  # type: ignore[arg-type]
        study.ask(1)
        written = (folder / module.LOG).read_bytes()
        assert study.report(0, 1, {"other": 1.0} if number == 0 else {"loss": 1.0, "f1": 0.5}) is False
        assert study.ask(1) is None
        assert (folder / module.LOG).read_bytes() == written


def test_results(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for _ in range(4):
        study.ask(4)
    study.report(0, 1, {"loss": 2.0})
    study.report(0, 2, {"loss": 3.0})
    study.tell(0, "complete", [Report(5, {"loss": 2.0, "f1": 0.1}), Report(9, {"loss": 3.0, "f1": 0.2})])
    study.tell(1, "failed", [], "out of memory")
    study.tell(2, "complete", [Report(5, {"f1": 0.1})])
    results = open_study(tmp_path).results()
    assert [r.state for r in results] == ["complete", "failed", "failed", "running"]
    assert [r.error for r in results] == ["", "out of memory", "loss was never logged, or is NaN", ""]
    assert results[0].objectives == {"loss": 2.0}  # of the best checkpoint
    assert results[0].metrics == {"loss": 2.0, "f1": 0.1}
    assert results[0].curve == [(5, 2.0), (9, 3.0)]
    assert results[0].folder == tmp_path / "trials" / "0000"


def test_nan_and_infinity(tmp_path: Path) -> None:
    study = open_study(tmp_path, [("loss", "min"), ("f1", "max")])
    for number, loss in enumerate((math.nan, math.inf)):
        study.ask(2)
        result = study.tell(number, "complete", [Report(1, {"loss": loss, "f1": 0.5})])
        assert result.state == ("failed" if math.isnan(loss) else "complete")


@pytest.mark.parametrize(("mode", "expected"), [("min", 0), ("max", 1)])
def test_all_metrics_are_of_the_epoch_of_the_objective(tmp_path: Path, mode: Mode, expected: int) -> None:
    study = open_study(tmp_path, [("loss", mode)])
    study.ask(1)
    epochs = [{"loss": 0.5, "accuracy": 0.9}, {"loss": 0.9, "accuracy": 0.8}, {"loss": math.nan, "accuracy": 0.7}]
    result = study.tell(0, "complete", [Report(step, metrics) for step, metrics in enumerate(epochs)])
    assert result.metrics == epochs[expected]
    assert result.objectives == {"loss": epochs[expected]["loss"]}


def test_several_metrics(tmp_path: Path) -> None:
    metrics: list[tuple[str, Mode]] = [("loss", "min"), ("f1", "max")]
    sampler = optuna.samplers.NSGAIISampler
    study = open_study(tmp_path, metrics, sampler=lambda seed: sampler(seed=seed, population_size=2))
    for number in range(6):
        sampled = study.ask(6)
        assert sampled
        assert not study.report(number, 1, {"loss": 1.0, "f1": 0.5})
        reports = [Report(1, {"loss": 0.0, "f1": 1.0}), Report(2, {"loss": number, "f1": 0.5})]
        assert study.tell(number, "complete", reports).objectives == {"loss": number, "f1": 0.5}  # of the last
    generations = [
        value
        for trial in study._study.get_trials()
        for key, value in trial.system_attrs.items()
        if key.endswith("generation")
    ]
    assert generations == [0, 0, 1, 1, 2, 2]


def test_a_line_that_a_full_disk_cut_off_is_removed(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    sampled = study.ask(3)
    with open(tmp_path / "study.log", "ab") as file:
        file.write(b'{"op_code":8,"trial_id":0,"user_')
    study = open_study(tmp_path)
    assert study.interrupted() == [sampled]
    study.ask(3)
    assert len(open_study(tmp_path).results()) == 2
    assert all(json.loads(line) for line in (tmp_path / "study.log").read_text().splitlines())
    assert not (tmp_path / "study.log.lock").is_symlink()


def test_nothing_is_written_once_another_process_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "INTERVAL", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    study = open_study(tmp_path)
    sampled = study.ask(2)
    assert sampled
    written = (tmp_path / module.LOG).read_bytes()
    with lease.hold(tmp_path):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        later = lease.Lease(tmp_path)
        later.acquire()
        for write in (
            lambda: study.ask(2),
            lambda: study.report(0, 1, {"loss": 1.0}),
            lambda: finish(study, sampled, 1),
        ):
            with pytest.raises(lease.LeaseLostError):
                write()
    later.release()
    assert (tmp_path / module.LOG).read_bytes() == written


def test_a_damaged_journal_ends_in_one_line(tmp_path: Path) -> None:
    finish(study := open_study(tmp_path), study.ask(1), 1.0)
    lines = (tmp_path / module.LOG).read_text()
    for before, after in (("study_name", "other"), ('"values"', '"other"'), ('"trial_id"', '"x"')):
        (tmp_path / module.LOG).write_text(lines.replace(before, after))
        with pytest.raises(ConfigError, match=r"study\.log is damaged \(.*\); restore it from a copy") as error:
            open_study(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / module.LOG).write_text("[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=r"study\.log is damaged \(RecursionError.*\); restore it from a copy"):
        open_study(tmp_path)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_value_that_decides_is_the_most_important(tmp_path: Path, mode: Mode) -> None:
    space = {
        "lr": "loguniform(1e-5, 1e-1)",
        "optimizer": "choice(adamw, sgd)",
        "size": "int(1, 100)",
        "fixed": "choice(1)",
        "momentum": "uniform(0, 1) if optimizer == sgd",
    }
    study = open_study(tmp_path, [("other", "min"), ("loss", mode)], space=space)
    for _ in range(50):
        sampled = study.ask(50)
        assert sampled
        loss = (math.log10(sampled.values["lr"]) + 3) ** 2 + 0.2 * (sampled.values["optimizer"] == "sgd")
        metrics = {"other": random.random(), "loss": loss if mode == "min" else -loss}
        study.tell(sampled.number, "complete", [Report(1, metrics)])
    name, shares = study.importances()[1]
    assert name == "loss"
    assert next(iter(shares)) == "lr"
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["fixed"] == 0


@pytest.mark.parametrize(
    ("space", "loss", "count"), [({"lr": "uniform(0, 1)"}, 1.0, 9), ({"lr": "uniform(0, 1)"}, 0.0, 10), ({}, 1.0, 10)]
)
def test_there_may_be_no_importances(tmp_path: Path, space: dict[str, str], loss: float, count: int) -> None:
    study = open_study(tmp_path, space=space)
    for number in range(count):
        finish(study, study.ask(count), loss * number)
    assert study.importances() == [("loss", {})]
