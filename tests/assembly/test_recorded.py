from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from boltcutter.assembly.recorded import RecordedLogger, describe, within
from boltcutter.logger.csv_logger import CSVLogger

TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"


def names(logger: Any) -> list[Any]:
    return [logger.name, logger.version, Path(logger.save_dir), Path(logger.log_dir)]


def test_names_and_folders_are_those_of_the_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    used = [TensorBoardLogger(tmp_path, "tensorboard", ""), CSVLogger(tmp_path / "metrics.csv")]
    for logger, recorded in zip(used, describe(used, tmp_path), strict=True):
        assert names(RecordedLogger(TENSORBOARD, within(recorded, tmp_path, [tmp_path]))) == names(logger)


def test_a_moved_run_has_its_folders(tmp_path: Path) -> None:
    (recorded,) = describe([CSVLogger(tmp_path / "old" / "metrics.csv")], tmp_path / "old")
    assert within(recorded, tmp_path / "new", [tmp_path / "new"])["log_dir"] == str(tmp_path / "new")


@pytest.mark.parametrize("path", ["/elsewhere", "../other", "a/../../other"])
def test_a_record_cannot_name_a_folder_that_the_configuration_does_not(tmp_path: Path, path: str) -> None:
    run = tmp_path / "run"
    assert within({"log_dir": path}, run, [run, None])["log_dir"] == str(run)
    assert within({"log_dir": str(tmp_path / "logs" / "a")}, run, [run, tmp_path / "logs"])["log_dir"].endswith("/a")
    assert within("damaged", run, [run]) == {}


def test_it_has_the_class_of_the_logger_and_takes_any_call(tmp_path: Path) -> None:
    logger: Any = RecordedLogger("boltcutter.logger.csv_logger.CSVLogger", {})
    assert isinstance(logger, CSVLogger)
    assert isinstance(logger, Logger)
    assert logger.log_image("key", images=[]) is None
    assert logger.experiment.add_image("key") is None
    for missing in ("no_such_package.Logger", "os.path.join"):
        assert not isinstance(RecordedLogger(missing, {}), CSVLogger)
