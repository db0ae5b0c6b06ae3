from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Script, environment, saved_weights
from forkserver import ForkServer

from boltcutter.analysis.groups import read_group
from boltcutter.analysis.record import find_runs
from boltcutter.environment import lease, startup
from boltcutter.environment import stop_signals as signals
from boltcutter.project import Project
from boltcutter.search.command import open_study, search_command
from boltcutter.search.command import search as run_plan
from boltcutter.search.plan import Plan, planned, save
from boltcutter.search.results import Progress, Result
from boltcutter.search.trial import Sampled, Trial, is_completed

from .conftest import MakeTrial

TRAINING = ["model=mlp", "logger=null", "trainer.max_epochs=2", "data.num_workers=0"]
# A trial that fails, one that is best, and one that falls behind.
SPACE = [
    "search.space.optimizer.lr=grid(1e30, 0.01, 1e-07)",
    "search.space.model.hidden_sizes=choice([16, 8])",
    "search.space.data.batch_size=choice(32) if optimizer.lr == 0.01",
]
PRUNER = "search.scheduler={_target_: optuna.pruners.MedianPruner, n_startup_trials: 1}"


def record(folder: Path) -> Any:
    return json.loads((folder / "record.json").read_text())


def states(folder: Path) -> list[str]:
    return list(pd.read_csv(folder / "trials.csv")["state"])


def assert_equal_weights(one: Path, other: Path, which: str = "last") -> None:
    a, b = saved_weights(one, which), saved_weights(other, which)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def overrides(search: Path, number: int) -> list[str]:
    """The overrides of a trial, as a user would write them."""
    row = pd.read_csv(search / "trials.csv", dtype=str).iloc[number]
    values = [
        f"{key}={row[key]}"
        for key in row.index
        if key.startswith(("optimizer", "model.", "data.")) and row[key] == row[key]
    ]
    return ["test=false", "report=false", *json.loads((search / "search.json").read_text())["overrides"], *values]


@pytest.fixture(scope="module")
def searched(script: Script, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a search of three trials. Do not modify."""
    folder = tmp_path_factory.mktemp("search") / "lr"
    done = script("search", "search=grid", PRUNER, *SPACE, *TRAINING, f"folder={folder}")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_ends_with_an_error(script: Script, tmp_path: Path) -> None:
    failing = ["search.space.optimizer.lr=grid(1e30)", "optimizer=sgd", "model=mlp", "logger=null"]
    done = script("search", "search=grid", *failing, f"folder={tmp_path / 'search'}")
    assert done.returncode == 1
    assert "2 trials: 2 failed" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_a_failing_trial_is_shown_and_the_others_go_on(searched: tuple[Path, str]) -> None:
    folder, output = searched
    assert states(folder) == ["failed", "complete", "pruned"]
    lines = output.splitlines()
    assert lines[1].startswith("[1/3] trial 0 failed: ")
    assert "optimizer.lr=1e30" in lines[1]
    assert lines[2].startswith("[2/3] trial 1 complete: val/loss=")
    assert lines[3].startswith("[3/3] trial 2 pruned: val/loss=")


def test_each_trial_is_an_ordinary_run(searched: tuple[Path, str], script: Script, tmp_path: Path) -> None:
    folder = searched[0]
    done = script("train", *overrides(folder, 1), f"folder={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    for which in ("last", "best"):
        assert_equal_weights(folder / "trials" / "0001", tmp_path / "run", which)
    assert record(folder / "trials" / "0001")["attempts"][-1]["reason"] == "completed"
    done = script("compare", f"run={folder / 'trials' / '0001'}", f"with={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout


def test_a_pruned_trial_ends_like_early_stopping(searched: tuple[Path, str]) -> None:
    trial = searched[0] / "trials" / "0002"
    assert record(trial)["attempts"][-1]["reason"] == "completed"
    assert (trial / "checkpoints" / "best.ckpt").is_file()
    assert torch.load(trial / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 0
    values = pd.read_csv(searched[0] / "trials.csv", dtype=str)
    assert "data.batch_size" in values
    assert values["data.batch_size"].isna().tolist() == [True, False, True]  # its condition does not hold


def test_the_best_trial_is_an_experiment(searched: tuple[Path, str], script: Script, tmp_path: Path) -> None:
    folder = searched[0]
    done = script("train", f"experiment={folder / 'best.yaml'}", "test=false", "report=false", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert_equal_weights(folder / "trials" / "0001", tmp_path / "run")


def test_a_finished_search_is_not_repeated(searched: tuple[Path, str], script: Script) -> None:
    folder = searched[0]
    done = script("search", f"resume={folder}")
    assert done.returncode == 0, done.stderr
    assert "[" not in done.stdout.split("trial  val/loss")[0]
    with lease.hold(folder):
        done = script("search", f"resume={folder}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: resume={folder}: ")
    assert f"process {os.getpid()} on" in done.stderr


def trial_pids(folder: Path, trials: int) -> list[int]:
    """Wait until that many trials have validated, and return their process IDs."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        found = [f for f in sorted(folder.glob("trials/*")) if (f / "checkpoints" / "last.ckpt").exists()]
        holders = [lease.read_holder(trial) for trial in found]
        alive = [holder.pid for holder in holders if holder and holder.is_alive()]
        if len(alive) == trials:
            return alive
        time.sleep(0.05)
    pytest.fail("the trials did not start")


def assert_ended(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "a trial did not end"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_search_continues(forks: ForkServer, script: Script, tmp_path: Path) -> None:
    folder, output = tmp_path / "search", os.open(os.devnull, os.O_WRONLY)
    options = ["search=random", "search.num_trials=2", "search.max_parallel=2", f"folder={folder}", "model=linear"]
    options += ["logger=null", "trainer.max_epochs=60", "data.num_workers=0", "~search.space.data.batch_size"]
    with forks.start(["scripts/search.py", *options], environment(), output, output) as search:
        pids = trial_pids(folder, 2)
        os.kill(pids[0], signal.SIGKILL)  # a trial, which starts again
        time.sleep(0.2)
        search.send_signal(signal.SIGKILL)
        search.wait(20)
    assert_ended(pids)
    with forks.start(["scripts/search.py", f"resume={folder}"], environment(), output, output) as search:
        pids = trial_pids(folder, 2)
        search.send_signal(signal.SIGTERM)
        assert search.wait(60) == 128 + signal.SIGTERM
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    os.close(output)
    done = script("search", f"resume={folder}")
    assert done.returncode == 0, done.stderr
    assert states(folder) == ["complete", "complete"]
    for number in range(2):
        assert record(folder / "trials" / f"{number:04d}")["attempts"][-1]["reason"] == "completed"
        done = script("train", *overrides(folder, number), f"folder={tmp_path}/{number}")
        assert done.returncode == 0, done.stderr
        assert_equal_weights(folder / "trials" / f"{number:04d}", tmp_path / str(number))
        steps = pd.read_csv(folder / "trials" / f"{number:04d}" / "metrics.csv")["val/loss"].count()
        assert steps == 60


def test_a_search_that_a_signal_ends_between_two_trials_is_no_completed_one(
    tmp_path: Path, make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(plan: Plan, sampled: Sampled, environment: Mapping[str, str]) -> Trial:
        return make_trial(Sampled(sampled.number, {"do": "2 1"}), environment)

    def end_search(progress: Progress, result: Result) -> None:
        statuses.append(find_runs(plan.folder)[0].status)
        if len(statuses) == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Plan, "make_trial", make)
    monkeypatch.setattr(Progress, "ended", end_search)
    options = ["search=seeds", "search.seeds=2", f"folder={tmp_path / 'search'}", *TRAINING]
    plan, statuses = replace(planned(Project.find(__file__), options), metrics=[("loss", "min")]), list[str]()
    save(plan)
    for status, count in (("interrupted", 1), ("completed", 2)):
        with startup.restored_signals(), lease.hold(plan.folder):
            signals.install_handlers()
            run_plan(plan)
            signals.restore_handlers()
        assert statuses == ["running"] * count  # also where the results of an earlier attempt are there
        assert states(plan.folder) == ["complete"] * count
        assert find_runs(plan.folder)[0].status == status


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_budgeted_search_that_is_killed_three_times_loses_and_repeats_no_trial(
    forks: ForkServer, tmp_path: Path
) -> None:
    folder, log, total, draw = tmp_path / "search", tmp_path / "log.txt", 100, random.Random(0)
    space = ["search=random", f"search.num_trials={total}", "search.max_parallel=2", "budget=5h"]
    options = [*space, "model=linear", "logger=null", "trainer.max_epochs=3", "data.num_workers=0", f"folder={folder}"]
    trials = folder / "trials"

    def completed() -> dict[int, bytes]:
        """The records of trials that are complete, by number."""
        found = {int(trial.name): trial / "record.json" for trial in trials.glob("*") if is_completed(trial)}
        return {number: path.read_bytes() for number, path in found.items()}

    before: dict[int, bytes] = {}
    with open(log, "wb") as output:
        for share in (0.2, 0.5, 0.8, 1):
            argv = [f"resume={folder}"] if (folder / "search.json").is_file() else options
            with forks.start(["scripts/search.py", *argv], environment(), output.fileno(), output.fileno()) as search:
                while share < 1 and len(completed()) < share * total:
                    assert search.poll() is None, log.read_text()
                    time.sleep(0.2)
                if share < 1:
                    time.sleep(draw.uniform(0, 3))
                    search.send_signal(signal.SIGKILL)
                assert search.wait(3600) == (-signal.SIGKILL if share < 1 else 0), log.read_text()
            done = completed()
            assert before.items() <= done.items()  # none that was complete has been touched
            before = done
    table = pd.read_csv(folder / "trials.csv")
    assert list(table["trial"]) == list(range(total))
    assert set(table["state"]) == {"complete"}
    assert {trial.name for trial in trials.iterdir()} == {f"{number:04d}" for number in range(total)}
    plan = planned(Project.find(__file__), [*options[:-1], f"folder={tmp_path / 'uninterrupted'}"])
    plan.folder.mkdir()
    uninterrupted = open_study(plan)
    for number in range(total):
        sampled = uninterrupted.ask(total)
        assert sampled
        assert all(table.loc[number, key] == pytest.approx(float(value)) for key, value in sampled.values.items())
        reasons = [attempt["reason"] for attempt in record(trials / f"{number:04d}")["attempts"]]
        assert reasons.count("completed") == 1, reasons
        steps = pd.read_csv(trials / f"{number:04d}" / "metrics.csv").dropna(subset="val/loss")["step"]
        assert (len(steps), steps.is_unique) == (3, True)


def test_a_search_is_checked_and_completed(script: Script) -> None:
    done = script("search", "search=seeds", "search.seeds=3", *TRAINING, "--check")
    assert (done.returncode, done.stdout) == (0, "ok: 3 trials\n")
    done = script("search", "--help")
    assert done.stdout.startswith("Search hyperparameters")
    assert "resume=" in done.stdout
    done = script("search", "--complete", "search=op")
    assert done.stdout.split("\t")[0] == "search=optuna"
    done = script("search", "search=optuna", "search.space.optimizer.lrr=uniform(0, 1)", *TRAINING)
    assert done.returncode == 2
    assert done.stderr.startswith("error: search.space.optimizer.lrr=uniform(0, 1): optimizer.lrr: ")
    assert done.stderr.count("\n") == 1


def run_search(script: Script, folder: Path, *options: str, **environment: Any) -> str:
    common = ["model=linear", "logger=null", "data.num_workers=0", f"folder={folder}"]
    done = script("search", *common, *options, **environment)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.slow
def test_cross_validation(script: Script, tmp_path: Path) -> None:
    output = run_search(
        script, tmp_path / "folds", "search=kfold", "search.folds=2", "search.max_parallel=2", "trainer.max_epochs=1"
    )
    losses = pd.read_csv(tmp_path / "folds" / "trials.csv")["val/loss"]
    assert losses.nunique() == 2  # each fold has samples of its own
    search, *folds = find_runs(tmp_path)
    assert search.metrics["val/loss"] == pytest.approx(losses.mean())  # not that of the better fold
    assert [run.kind for run in folds] == ["fold", "fold"]
    assert "fold 0" in output
    assert f"{losses.std():.5g}" in output
    assert not (tmp_path / "folds" / "best.yaml").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seeds(script: Script, tmp_path: Path) -> None:
    run_search(script, tmp_path / "seeds", "search=seeds", "search.seeds=2", "seed=5", "trainer.max_epochs=1")
    trials = pd.read_csv(tmp_path / "seeds" / "trials.csv")
    assert list(trials["seed"]) == [5, 6]
    group = read_group(str(tmp_path / "seeds"), find_runs(tmp_path), "test/accuracy")
    assert [result.key[0] for result in group.results] == [5, 6]  # both, not the better one


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_limits(script: Script, tmp_path: Path) -> None:
    options = ["search=random", "search.num_trials=3", "trainer.max_epochs=1"]
    run_search(script, tmp_path / "target", *options, "search.target=100")
    assert states(tmp_path / "target") == ["complete"]
    repeats = ["search=seeds", "search.seeds=2", "trainer.max_epochs=1", "test=false"]
    run_search(script, tmp_path / "repeated", *repeats, "search.target=100")
    assert states(tmp_path / "repeated") == ["complete", "complete"]  # the target is of the mean
    options[-1] = "trainer.max_epochs=2000"
    begin = time.monotonic()
    output = run_search(script, tmp_path / "time", *options, "search.max_time=0:00:15")
    assert re.search(r"^search\.max_time=0:00:15 is used up; continue with: .* resume=\S+/time ", output, re.M)
    assert time.monotonic() < begin + 60
    assert "running" in states(tmp_path / "time")
    assert "complete" not in states(tmp_path / "time")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_objectives(script: Script, tmp_path: Path) -> None:
    metrics = ["search.metric=[val/accuracy,val/loss]", "search.mode=[max,min]", "search.num_trials=3"]
    sampler = "search.sampler={_target_: optuna.samplers.NSGAIISampler, _partial_: true, population_size: 2}"
    run_search(script, tmp_path / "front", "search=random", sampler, *metrics, "trainer.max_epochs=1")
    trials = pd.read_csv(tmp_path / "front" / "trials.csv")
    assert list(trials["state"]) == ["complete"] * 3
    assert trials[["val/accuracy", "val/loss"]].notna().all(axis=None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_in_a_trial(script: Script, tmp_path: Path) -> None:
    ddp = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=3"]
    pruner = "search.scheduler={_target_: optuna.pruners.ThresholdPruner, upper: 1e-6, n_warmup_steps: 2}"
    run_search(script, tmp_path / "ddp", "search=random", "search.num_trials=1", pruner, *ddp)
    trial = tmp_path / "ddp" / "trials" / "0000"
    assert states(tmp_path / "ddp") == ["pruned"]  # after two of three validations
    assert len(list((trial / "logs").glob("rank-*.log"))) == 2
    assert record(trial)["attempts"][-1]["reason"] == "completed"
    assert torch.load(trial / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 1


def test_a_search_that_lost_its_folder_writes_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "search"

    def lose(*args: Any, **options: Any) -> None:  # as in a process that was suspended
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        later.append(lease.Lease(folder))
        later[0].acquire()
        signals.handle_signal(signals.LEASE_LOST)

    monkeypatch.setattr(lease, "INTERVAL", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("boltcutter.search.local.run_trials", lose)
    later: list[lease.Lease] = []
    with pytest.raises(lease.LeaseLostError):
        search_command(Project.find(__file__), ["search=grid", *SPACE, *TRAINING, f"folder={folder}"])
    later[0].release()
    assert not (folder / "trials.csv").exists()
