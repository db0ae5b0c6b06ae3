import re
from pathlib import Path

import numpy as np

from boltcutter_logging.plots import draw_series


def test_series_have_a_line_for_target_and_prediction(tmp_path: Path) -> None:
    targets = np.arange(24.0).reshape(2, 12)
    targets[1, 3] = np.nan
    draw_series(tmp_path / "series.svg", targets, targets + 1, ["index 0", "index 7"])
    text = (tmp_path / "series.svg").read_text()
    lines = [line.split() for line in re.findall(r'points="(.*?)"', text)]
    assert [len(line) for line in lines] == [12, 12, 11, 11]
    assert "index 7" in text
    numbers = [float(number) for line in lines for point in line for number in point.split(",")]
    assert 0 < min(numbers) < max(numbers) < float(re.findall(r'width="([\d.]+)"', text)[0])
