import os
from pathlib import Path

import pytest

from boltcutter.run import metrics
from boltcutter.run.metrics import MAX_NAMES, MetricsReader, final_metrics, infer_mode, last_values, parse_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("val/loss", ("loss", "val", False)),
        ("val_loss_epoch", ("loss", "val", True)),
        ("valid_dataset_iou", ("dataset_iou", "val", False)),
        ("train/accuracy", ("accuracy", "train", False)),
        ("test_loss", ("loss", "test", False)),
        ("accuracy", ("accuracy", "", False)),
        ("valley", ("valley", "", False)),
    ],
)
def test_the_parts_of_a_name(name: str, expected: tuple[str, str, bool]) -> None:
    assert parse_name(name) == expected


@pytest.mark.parametrize(("name", "expected"), [("val_acc", "max"), ("val/rmse", "min"), ("dice", "max"), ("lr", None)])
def test_which_way_a_metric_is_to_go(name: str, expected: str | None) -> None:
    assert infer_mode(name) == expected


def test_the_last_value_of_each_metric_and_its_step(tmp_path: Path) -> None:
    assert final_metrics(tmp_path) == {}
    rows = [
        "step,epoch,train/loss,val/loss,test/loss,throughput/samples",
        "0,0,3.5,,,9",
        "4,1,2.5,2.0,,",
        "5,1,,,1.0,8",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert final_metrics(tmp_path) == {"train/loss": (2.5, 5), "val/loss": (2.0, 5)}


def test_columns_are_read_as_far_as_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text('step,epoch,val/loss,"a,b"\n9,0,0.5,\n19,1,x,1e400,more\n29\n39,2,1,2\n49,2,1')
    found = {name: [list(column) for column in columns] for name, columns in MetricsReader(path).read().items()}
    assert repr(found) == repr(
        {
            "val/loss": [[10, 20, 40], [0, 1, 2], [0.5, float("nan"), 1.0]],
            "a,b": [[20, 40], [1, 2], [float("inf"), 2.0]],
        }
    )


def test_a_table_that_grows_is_read_from_its_last_row_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    reader = MetricsReader(path)

    def added(text: str) -> None:
        with path.open("r+") as file:
            file.seek(0, 2)
            file.write(text)
        assert reader.read() == MetricsReader(path).read()

    path.write_text("step,epoch,a,b\n0,0,1,\n")
    reader.read()
    added("1,0,2,5\n2,0,3")  # a row that is being written
    added(",\n")
    path.write_bytes(path.read_bytes().replace(b"2,0,3,\n", b"2,0,3,7\n"))  # a metric that is added to the last row
    added("3,1,4,\n")
    assert reader.read()["b"][2].tolist() == [5, 7]
    added("3,1,,6\n")  # rows of the same step
    added("3,1,,8\n")
    path.write_text(path.read_text().replace("0,0,1,", "0,0,9,"))  # which is not read again
    assert reader.read()["a"][2].tolist() == [1, 2, 3, 4]
    with path.open("ab") as file:
        file.write(b"\xff\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="decode"):
            reader.read()
    path.unlink()
    path.write_text("step,epoch,b\n0,0,2\n")  # replaced, as by a resumed run
    added("")
    path.write_text("step,epoch,b\n")
    added("")


def test_a_large_table_is_read_if_it_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,epoch,train/loss,val/loss\n" + "".join(f"{n},0,1,{n % 2 or ''}\n" for n in range(20_000)))
    monkeypatch.setattr(metrics, "MAX_TABLE", 1 << 10)
    monkeypatch.setattr(metrics, "MAX_END", 1 << 10)
    steps, _, values = MetricsReader(path).read()["val/loss"]
    assert steps.tolist() == list(range(2, 20_002, 2))
    assert set(values) == {1.0}
    assert last_values(tmp_path) == {"train/loss": "1", "val/loss": "1"}
    assert last_values(tmp_path, step=4) == {"train/loss": "1"}
    path.chmod(0o666)
    with pytest.raises(ValueError, match="of somebody else"):
        MetricsReader(path).read()
    assert last_values(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("step,epoch,a", "more names than can be read"),
        (",".join(map(str, range(MAX_NAMES))) + "\n1,2\n", "more names than can be read"),
    ],
    ids=["empty", "incomplete", "wide"],
)
def test_a_table_of_somebody_else_is_limited(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        MetricsReader(tmp_path / "metrics.csv").read()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (f"step,epoch,val/loss\n{'9' * 5000},0,1\n0,0,0.5\n", {"val/loss": (0.5, 1)}),
        ("step,epoch,val/loss\n\N{SUPERSCRIPT TWO},0,1\n1,0,0.5,7,8\n2\n", {"val/loss": (0.5, 2)}),
        (f"step,val/loss\n0,1\n1,{'1' * 10**6}\n", {"val/loss": (1.0, 1)}),
        ("val/loss\n1\n", {}),
        ('"' + "[" * (64 << 20), {}),
        (b"\xff\x00\n\x00", {}),
        ("", {}),
    ],
    ids=range(7),
)
def test_rows_that_are_not_as_they_are_written_are_left_out(
    tmp_path: Path, content: str | bytes, found: dict[str, tuple[float, int]]
) -> None:
    text = content.encode() if isinstance(content, str) else content
    (tmp_path / "metrics.csv").write_bytes(text)
    assert final_metrics(tmp_path) == found


def test_a_table_that_is_no_file_is_none(tmp_path: Path) -> None:
    assert final_metrics(tmp_path) == {}
    path = tmp_path / "metrics.csv"
    for replace in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to(path)):
        replace()
        assert final_metrics(tmp_path) == {}
        path.unlink()
