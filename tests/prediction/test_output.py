from pathlib import Path

import numpy as np
import pytest
import torch

from boltcutter.config.errors import ConfigError
from boltcutter.prediction.output import write_predictions


def test_tables_and_batches_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_predictions(tmp_path / "deep" / "out.csv", {"input": np.array(["a", "b"]), "prediction": np.array([1, 2])})
    assert (tmp_path / "deep" / "out.csv").read_text().splitlines() == ["input,prediction", "a,1", "b,2"]
    write_predictions(tmp_path / "out.csv", [torch.ones(2)])
    assert torch.equal(torch.load(tmp_path / "out.pt")[0], torch.ones(2))
    assert capsys.readouterr().out.splitlines()[0].startswith("2 predictions: ")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output=.*out\.csv: cannot be written \("):
        write_predictions(tmp_path / "file" / "out.csv", {"input": np.array(["a"])})
