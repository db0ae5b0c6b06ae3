import torch

from boltcutter.diagnosis.rows import LIMITS, _holds


def test_rows_are_parts_of_a_sample() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    assert _holds((x[1], int(y[1])), [x[1], y[1]])
    assert _holds({"x": x[0].numpy(), "y": y[0]}, [x[0], y[0]])
    assert not _holds((x[0], y[1]), [x[1], y[1]])
    assert not _holds((x[1] * 2, y[1]), [x[1], y[1]])


def test_names_that_say_how_many_are_read() -> None:
    assert all(LIMITS.search(name) for name in ("length", "num_samples", "max_items", "indices", "subset"))
    assert not any(LIMITS.search(name) for name in ("transform", "root", "x"))
