from pathlib import Path

import numpy as np
import pandas as pd
from report_files import (
    first_picture,
    page_data,
    write_classification,
    write_regression,
    write_run,
)

from boltcutter.report import html as report
from boltcutter_logging import outcome_report


def test_class_names_are_kept_unchanged(tmp_path: Path) -> None:
    data = page_data(report.write(write_classification(tmp_path / "run", names=("NA", "01", "01"))))
    assert data["confusion"]["names"] == ["NA", "01", "01"]


def test_many_classes_list_misclassifications_without_a_matrix(tmp_path: Path) -> None:
    names = tuple(f"class {number}" for number in range(outcome_report.MAX_MATRIX_CLASSES + 1))
    page = report.write(write_classification(tmp_path / "run", names=names))
    assert page_data(page)["confusion"]["cells"] == []
    assert "too many for a matrix" in page.read_text()


def test_many_samples_are_subsampled(tmp_path: Path) -> None:
    page = report.write(write_regression(tmp_path / "run", samples=5000))
    (scatter,) = page_data(page)["scatters"]
    assert len(scatter["truth"]) == outcome_report.MAX_SCATTER_POINTS
    assert "2,000 of 5,000 samples" in page.read_text()


def test_multiple_targets_have_a_plot_each(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    columns = {f"{what}_{t}": [0.0, 1.0, 2.0] for what in ("target", "prediction") for t in range(2)}
    test = folder / "evaluation" / "test"
    pd.DataFrame({"index": range(3), "loss": 0.5, **columns}).to_csv(test / "predictions.csv", index=False)
    assert [scatter["target"] for scatter in page_data(report.write(folder))["scatters"]] == ["0", "1"]


def test_small_images_are_lossless(tmp_path: Path) -> None:
    folder = write_classification(tmp_path / "run")
    with np.load(folder / "evaluation" / "test" / "worst.npz") as worst:
        expected = worst["inputs"][0]
    assert (np.moveaxis(np.asarray(first_picture(report.write(folder))), -1, 0) == expected).all()


def test_large_images_are_downscaled(tmp_path: Path) -> None:
    picture = first_picture(report.write(write_classification(tmp_path / "run", side=300)))
    assert picture.size == (100, 100)  # a third of 300
