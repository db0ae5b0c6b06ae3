"""The order of all callbacks of a training."""

from pathlib import Path

from lightning.pytorch.callbacks import Callback

from boltcutter.assembly.assemble import read_config
from boltcutter.callback.ema import EMA
from boltcutter.diagnosis.ledger import StepLedger
from boltcutter.project import Project
from boltcutter.run.changes import SettingChanges
from boltcutter.training.callbacks import in_order
from boltcutter.training.ending import EndOfTraining

PROJECT = Project.find(__file__)


class First(Callback):
    pass


class Second(Callback):
    pass


def test_callbacks_of_the_configuration_stand_between_those_of_every_training(tmp_path: Path) -> None:
    cfg = read_config(PROJECT, [f"folder={tmp_path}"])
    ending, changes = EndOfTraining(cfg), SettingChanges(cfg)
    names = [type(callback).__name__ for callback in in_order(cfg, {"b": Second(), "a": First()}, changes, ending)]
    first = ["Announced", "LostRankReport", "MonitorCheck", "EvaluationSeeds", "SeparateMetrics", "Second", "First"]
    assert names[: len(first)] == first
    # The metrics of an unfinished epoch are logged before they are recorded.
    assert names.index("ResumeState") < names.index("Recorder")
    assert names.index("EndOfTraining") < names.index("CheckpointRecorder")
    assert names.index("SettingChanges") < names.index("ExactnessCheck")
    assert names[-1] == "MediaLogging"
    assert len(set(names)) == len(names)


def test_the_ledger_notes_what_other_callbacks_have_made_of_averages(tmp_path: Path) -> None:
    cfg = read_config(PROJECT, [f"folder={tmp_path}"])
    configured = {"ledger": StepLedger(tmp_path), "ema": EMA()}
    found = [type(callback).__name__ for callback in in_order(cfg, configured, SettingChanges(cfg), EndOfTraining(cfg))]
    assert found.index("EMA") < found.index("StepLedger") < found.index("ResumeState")


def test_a_user_removes_and_adds_callbacks(tmp_path: Path) -> None:
    cfg = read_config(PROJECT, [f"folder={tmp_path}"])
    found = in_order(cfg, {}, SettingChanges(cfg), EndOfTraining(cfg))
    assert not any(type(callback).__module__.startswith("lightning") for callback in found)
    added = First()
    assert added in in_order(cfg, {"own": added}, SettingChanges(cfg), EndOfTraining(cfg))
