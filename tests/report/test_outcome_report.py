import resource
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_files import (
    first_picture,
    page_data,
    write_classification,
    write_regression,
    write_run,
)

from boltcutter.analysis import page
from boltcutter.analysis.record import find_runs
from boltcutter.report import outcome_report
from boltcutter.report import page as report


def test_class_names_are_kept_unchanged(tmp_path: Path) -> None:
    data = page_data(report.write_page(write_classification(tmp_path / "run", names=("NA", "01", "01"))))
    assert data["confusion"]["names"] == ["NA", "01", "01"]


def test_many_classes_list_misclassifications_without_a_matrix(tmp_path: Path) -> None:
    names = tuple(f"class {number}" for number in range(outcome_report.MAX_MATRIX_CLASSES + 1))
    page = report.write_page(write_classification(tmp_path / "run", names=names))
    assert page_data(page)["confusion"]["cells"] == []
    assert "too many for a matrix" in page.read_text()


@pytest.mark.parametrize(
    "content", ["t,a\na,-1\n", "t,a\na,9999999999999999\n", f"t,a\na,{10**20}\n", "\n\n", "t\n" * 70000]
)
def test_a_confusion_matrix_of_somebody_else_hides_nothing_else(content: str, tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "runs" / "run")
    (folder / "evaluation" / "test" / "confusion.csv").write_text(content)
    assert "Confusion matrix: cannot be read" in report.write_page(folder).read_text()
    assert page.collect(find_runs(tmp_path / "runs"), [None])["confusion"] == [None]


def test_the_most_frequent_misclassifications_come_first(tmp_path: Path) -> None:
    file = tmp_path / "confusion.csv"
    file.write_text("target,a,b,c\na,5,1,0\nb,3,0,1\nc,0,0,2\n")
    found = outcome_report.read_confusion(file)
    assert found["pairs"] == [("b", "a", 3, 0.75), ("a", "b", 1, 1 / 6), ("b", "c", 1, 0.25)]
    assert found["cells"] == [[0, 0, 5], [0, 1, 1], [1, 0, 3], [1, 2, 1], [2, 2, 2]]
    assert found["sums"] == [6, 4, 2]


def test_thousands_of_classes_and_millions_of_rows_take_little_memory(tmp_path: Path) -> None:
    names = [str(number) for number in range(2000)]
    file = tmp_path / "confusion.csv"
    file.write_text(
        "\n".join([",".join(["target", *names]), *(",".join([name, *"1" * 2000]) for name in names)]) + "\n"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(outcome_report.read_confusion(file)["pairs"]) == 8
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 400  # MB; a list of each cell: 700
    folder = write_classification(tmp_path / "run")
    test = folder / "evaluation" / "test"
    (test / "classes.csv").write_text("class\n" + "a\n" * 70000)
    np.savez_compressed(test / "worst.npz", inputs=np.zeros(1001, np.uint8))
    (test / "predictions.csv").write_text("index\n" + "1\n" * 10)
    text = report.write_page(folder).read_text()
    assert "Classes: cannot be read: ValueError: more than 65536 rows" in text
    assert "Worst errors: cannot be read: ValueError: more than 1000 inputs" in text


def test_many_samples_are_subsampled(tmp_path: Path) -> None:
    page = report.write_page(write_regression(tmp_path / "run", samples=5000))
    (scatter,) = page_data(page)["scatters"]
    assert len(scatter["truth"]) == outcome_report.MAX_SCATTER_POINTS
    assert "2,000 of 5,000 samples" in page.read_text()


def test_multiple_targets_have_a_plot_each(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    columns = {f"{what}_{t}": [0.0, 1.0, 2.0] for what in ("target", "prediction") for t in range(2)}
    test = folder / "evaluation" / "test"
    pd.DataFrame({"index": range(3), "loss": 0.5, **columns}).to_csv(test / "predictions.csv", index=False)
    assert [scatter["target"] for scatter in page_data(report.write_page(folder))["scatters"]] == ["0", "1"]


def test_small_images_are_lossless(tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    with np.load(folder / "evaluation" / "test" / "worst.npz") as worst:
        expected = worst["inputs"][0]
    assert (np.moveaxis(np.asarray(first_picture(report.write_page(folder))), -1, 0) == expected).all()


def test_large_images_are_downscaled(tmp_path: Path) -> None:
    picture = first_picture(report.write_page(write_classification(tmp_path / "run", side=300)))
    assert picture.size == (100, 100)  # a third of 300
