import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from boltcutter.report.plots import draw_confusion, draw_series

NAMESPACE = "{http://www.w3.org/2000/svg}"


def elements(file: Path, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.parse(file).iter(f"{NAMESPACE}{kind}"))


def test_a_confusion_matrix_has_its_counts_and_names(tmp_path: Path) -> None:
    draw_confusion(tmp_path / "a.svg", np.array([[3, 1], [0, 5]]), ["cat & dog", "<owl>"])
    texts = [element.text for element in elements(tmp_path / "a.svg", "text")]
    assert {"3", "1", "5", "cat & dog", "<owl>", "target", "prediction"} == set(texts)
    assert "0" not in texts
    opacity = [element.get("fill-opacity") for element in elements(tmp_path / "a.svg", "rect")]
    assert [value for value in opacity if value] == ["0.750", "0.250", "1.000"]


@pytest.mark.parametrize("count", [1, 41, 500])
def test_all_cells_are_inside_the_picture(count: int, tmp_path: Path) -> None:
    draw_confusion(tmp_path / "a.svg", np.eye(count, dtype=int), [f"class {number}" for number in range(count)])
    size = float(ElementTree.parse(tmp_path / "a.svg").getroot().get("width", 0))
    for cell in elements(tmp_path / "a.svg", "rect"):
        if cell.get("x"):
            assert float(cell.get("x", 0)) + float(cell.get("width", 0)) <= size < 2000


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
