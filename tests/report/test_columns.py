from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from boltcutter.report.columns import concatenate, select_rows, to_columns
from boltcutter.report.csv_table import count_rows


def test_tables_are_joined_by_their_common_columns() -> None:
    first = {"a": np.array([1, 2]), "b": np.array([3, 4])}
    joined = concatenate([first, {"b": np.array([5]), "a": np.array([6])}, {"a": np.array([7])}])
    assert {name: column.tolist() for name, column in joined.items()} == {"a": [1, 2, 6, 7]}
    assert concatenate([]) == {}


def test_rows_are_counted_and_selected() -> None:
    table = {"a": np.array([1, 2, 3]), "b": np.array([4, 5, 6])}
    assert {name: column.tolist() for name, column in select_rows(table, [2, 0]).items()} == {"a": [3, 1], "b": [6, 4]}
    assert count_rows(table) == 3
    assert count_rows(select_rows(table, [])) == 0
    assert count_rows({}) == 0


CLASSES = torch.tensor([0, 2, 1])
SCORES = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.1, 0.7], [0.5, 0.3, 0.2]])


@pytest.mark.parametrize(
    ("outputs", "targets", "names", "skipped"),
    [
        ({"losses": torch.ones(3), "predictions": SCORES}, CLASSES, ["loss", "target", "prediction", "confidence"], []),
        ({"losses": torch.ones(3)}, CLASSES, ["loss"], []),
        (CLASSES, CLASSES, ["target", "prediction"], []),
        (SCORES[:, :1], torch.ones(3, 1), ["target", "prediction"], []),
        (
            {"predictions": SCORES},
            SCORES.round().long(),
            [f"{n}_{t}" for n in ("target", "prediction") for t in range(3)],
            [],
        ),
        (OrderedDict(loss=torch.tensor(1.0), logits=SCORES), None, ["logits_0", "logits_1", "logits_2"], ["loss"]),
        ({"mask": torch.ones(3, 8, 8), "iou": torch.ones(3)}, torch.ones(3, 8, 8), ["iou"], ["mask"]),
        ({"text": ["a", "b", "c"], "index": None}, None, [], ["text"]),
        ({"short": torch.ones(2)}, None, [], ["short"]),
        (torch.tensor(1.0), CLASSES, [], []),
        (None, CLASSES, [], []),
        ((SCORES, SCORES), None, [], ["prediction"]),
    ],
)
def test_one_number_per_sample_becomes_a_column(
    outputs: Any, targets: Any, names: list[str], skipped: list[str]
) -> None:
    found, rejected = to_columns(outputs, targets, 3)
    assert list(found) == names
    assert list(rejected) == skipped
    assert all(values.shape == (3,) for values in found.values())


def test_the_most_probable_class_is_returned_with_its_probability() -> None:
    found, _ = to_columns({"predictions": SCORES}, CLASSES, 3)
    assert found["prediction"].tolist() == [0, 2, 0]
    assert np.allclose(found["confidence"], [0.8, 0.7, 0.5])


def test_a_series_of_one_variable_is_a_column_for_each_position() -> None:
    outputs = {"predictions": torch.zeros(4, 3, 1), "targets": torch.ones(4, 3, 1)}
    table, skipped = to_columns(outputs, None, 4)
    assert list(table) == ["target_0", "target_1", "target_2", "prediction_0", "prediction_1", "prediction_2"]
    assert not skipped
