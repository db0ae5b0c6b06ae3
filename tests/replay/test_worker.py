from pathlib import Path

from replay.conftest import Replayed

from boltcutter.project import Project
from boltcutter.replay.job import Job
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
