"""The page of a comparison, with pictures of the samples on which models differ."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browse
from compared_runs import write_run
from PIL import Image

from boltcutter.analysis.comparison import MAX_PICTURES, read_pictures
from boltcutter.cli import commands
from boltcutter.config.compose import compose
from boltcutter.config.errors import ConfigError
from boltcutter.data.digits import Digits
from boltcutter.project import Project

ROOT = Path(__file__).parents[2]
METRIC = ["--metric", "test/accuracy"]


@pytest.fixture(scope="module")
def digits() -> Any:
    data = Digits(batch_size=64, seed=0)
    data.setup("test")
    assert data.splits is not None
    return data.splits.test


def write(folder: Path, digits: Any, wrong: range, **settings: Any) -> Path:
    """A run on the digits that answers zero or one, wrongly, for some samples of the test split."""
    config = compose(Project.find(ROOT), ["logger=csv", f"folder={folder}", "trainer.accelerator=cpu"]).written
    config["data"] |= settings.pop("data", {})
    targets = digits.targets.tolist()
    write_run(folder, 1 - len(wrong) / len(targets), config=config | settings)
    answers = [int(target == 0) if place in wrong else target for place, target in enumerate(targets)]
    rows = [f"{i},0.5,{target},{answer}" for i, (target, answer) in enumerate(zip(targets, answers, strict=True))]
    file = folder / "evaluation" / "test" / "predictions.csv"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(["index,loss,target,prediction", *rows, ""]))
    return folder


def compare(*arguments: str) -> None:
    commands.main(["compare", *METRIC, *arguments])


@pytest.mark.slow
def test_samples_that_changed_sides_have_their_pictures(browse: Browse, tmp_path: Path, digits: Any) -> None:
    write(tmp_path / "a", digits, range(3, 6))
    write(tmp_path / "b", digits, range(5, 7), seed=1)
    compare(str(tmp_path / "a"), str(tmp_path / "b"), f"--html={tmp_path / 'page.html'}")
    seen = browse(tmp_path / "page.html")
    assert seen.console == []
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)"[^>]*alt="Sample (\d+), target (\d+)"', seen.dom)
    assert sorted(int(index) for _, index, _ in found) == [3, 4, 6]  # both are wrong on sample 5
    for data, index, target in found:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        assert np.array_equal(pixels, digits.inputs[int(index), 0].numpy())
        assert digits.targets[int(index)] == int(target)
    assert "3 of 3 samples" in seen.dom
    assert seen.count('class="true"') == seen.count('class="false"') == 3


def test_pictures_are_limited_and_damaged_data_are_named(tmp_path: Path, digits: Any) -> None:
    write(tmp_path / "a", digits, range(0))
    write(tmp_path / "b", digits, range(100), seed=1)
    page = tmp_path / "page.html"
    compare(str(tmp_path / "a"), str(tmp_path / "b"), f"--html={page}")
    assert page.read_text().count("<img ") == MAX_PICTURES
    write(tmp_path / "c", digits, range(100), data={"split": [0.5, 0.2, 0.3]})
    with pytest.raises(ConfigError, match="its data have other targets now"):
        read_pictures(Project.find(ROOT), tmp_path / "c", dict.fromkeys(range(9), 11.0))
    write(tmp_path / "d", digits, range(9), data={"_target_": "os.system"})
    compare(str(tmp_path / "d"), str(tmp_path / "a"), f"--html={page}")
    text = page.read_text()
    assert text.count("<img ") == 0
    assert "Without pictures: " in text
    assert "9 of 9 samples" in text


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, digits: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["boltcutter"])
    write(tmp_path / "a", digits, range(1))
    write(tmp_path / "b", digits, range(2), seed=1)
    with pytest.raises(SystemExit) as ended:
        compare(str(tmp_path / "a"), str(tmp_path / "b"), f"--html={tmp_path}/none/page.html")
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.fullmatch(r"error: --html=.*none/page.html: cannot be written \(.*\); choose another file", lines[0])
