from pathlib import Path

from replay.conftest import Replayed

from boltcutter.config.settings import Settings
from boltcutter.project import Project
from boltcutter.replay.job import Job, taken, with_values
from boltcutter.replay.worker import settings
from boltcutter.run.folder import read_run_config
from boltcutter.run.ledger import first_difference, read_ledger


def test_a_replay_is_equal_and_leaves_the_run_as_it_is(replayed: Replayed) -> None:
    ours, theirs = (read_ledger(folder / "steps.ledger") for folder in (replayed.folder, replayed.run))
    assert ours is not None
    assert theirs is not None
    assert ours.last == theirs.last == 8
    assert first_difference(ours, theirs) is None
    assert ours.rows["weights"].all()  # of each step, so that any of the run can be compared
    assert not list(replayed.run.rglob("job.json"))
    assert not list((replayed.run / "checkpoints").iterdir())


def test_a_replay_writes_elsewhere_and_logs_nothing(replayed: Replayed) -> None:
    recorded = read_run_config(Project.at(replayed.run.parent / "project"), replayed.run, instantiates=False)
    cfg = settings(recorded, Job(run=str(replayed.run), folder="/elsewhere", last=9, devices=2, double=True))
    assert (str(cfg.folder), str((cfg.callback["ledger"] or {})["folder"])) == ("/elsewhere", "/elsewhere")
    assert Path(cfg.place.checkpoints).parent == Path("/elsewhere")
    assert (cfg.trainer["devices"], cfg.trainer["precision"]) == (2, "64-true")
    assert not any(cfg.logger.values())
    assert not cfg.test
    assert str(recorded.folder) == str(replayed.run)


def test_settings_are_taken_from_another_run() -> None:
    own = Settings({"task": {"lr": 1, "old": 2}, "model": {"_target_": "a", "width": 3}, "seed": "${task.lr}"})
    other = Settings({"task": {"lr": 5, "new": {"x": 1}}, "model": {"_target_": "b"}, "seed": 7})
    found = with_values(own, *taken(other, ["task.lr", "task.old", "task.new.x", "model", "callback.ema"]))
    assert found.written == {
        "task": {"lr": 5, "new": {"x": 1}},
        "model": {"_target_": "b"},
        "seed": "${task.lr}",
        "callback": {},
    }
    assert own.written["task"] == {"lr": 1, "old": 2}
