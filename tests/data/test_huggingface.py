import io
import itertools
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import QUICK, Script
from PIL import Image

from boltcutter.data.augment import Augment
from boltcutter.data.huggingface import HuggingFace

COUNT = 120


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def samples() -> tuple[Any, Any]:
    """Inputs whose first number is their index, shape (120, 6); class indices."""
    inputs = np.random.default_rng(0).integers(0, 256, (COUNT, 6), np.uint8)
    inputs[:, 0] = np.arange(COUNT)
    return inputs, np.arange(COUNT) % 4


def write_parquet(folder: Path) -> dict[str, Any]:
    inputs, targets = samples()
    table = pa.table({"x": pa.array(inputs.tolist(), pa.list_(pa.uint8())), "y": targets})
    for number, (begin, length) in enumerate(((0, 50), (50, 70))):
        pq.write_table(table.slice(begin, length), folder / f"part-{number}.parquet", row_group_size=10)
    return {"path": "parquet", "data_files": f"{folder}/*.parquet", "input": "x", "target": "y"}


def write_bytes(folder: Path) -> dict[str, Any]:
    inputs, targets = samples()
    pq.write_table(pa.table({"x": [row.tobytes() for row in inputs], "y": targets}), folder / "a.parquet")
    return {"path": f"{folder}/a.parquet", "input": "x", "target": "y"}


def write_json(folder: Path) -> dict[str, Any]:
    inputs, targets = samples()
    table = pd.DataFrame({"x": inputs.tolist(), "y": [f"class {target}" for target in targets]})
    table.to_json(folder / "a.jsonl", orient="records", lines=True)
    return {"path": "json", "data_files": f"{folder}/a.jsonl", "input": "x", "target": "y"}


def write_csv(folder: Path) -> dict[str, Any]:
    inputs, targets = samples()
    table = pd.DataFrame(inputs, columns=list("abcdef")).assign(y=[f"class {target}" for target in targets])
    table.to_csv(folder / "a.csv", index=False)
    return {"path": "csv", "data_files": f"{folder}/a.csv", "input": list("abcdef"), "target": "y"}


def add(archive: tarfile.TarFile, name: str, contents: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(contents)
    archive.addfile(member, io.BytesIO(contents))


def write_tar(folder: Path) -> dict[str, Any]:
    inputs, targets = samples()
    for number, chosen in enumerate(np.array_split(np.arange(COUNT), 2)):
        with tarfile.open(folder / f"train-{number}.tar", "w") as archive:
            for index in chosen.tolist():
                saved = io.BytesIO()
                np.save(saved, inputs[index].reshape(2, 3))
                add(archive, f"{index:05}.npy", saved.getvalue())
                add(archive, f"{index:05}.cls", str(targets[index]).encode())
    return {"path": "webdataset", "data_files": f"{folder}/*.tar", "input": "npy", "target": "cls"}


def picture(index: int) -> bytes:
    """A PNG of one colour, whose red is the index."""
    saved = io.BytesIO()
    Image.new("RGB", (9, 7), (index, 0, 255)).save(saved, "png")
    return saved.getvalue()


def write_image_tar(folder: Path) -> dict[str, Any]:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for index in range(COUNT):
            add(archive, f"{index:03}.png", picture(index))
            add(archive, f"{index:03}.cls", str(index % 4).encode())
    return {"path": "webdataset", "data_dir": str(folder), "input": "png", "target": "cls"}


def write_images(folder: Path) -> dict[str, Any]:
    for index in range(COUNT):
        file = folder / f"class{index % 4}" / f"{index:03}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(picture(index))
    return {"path": "imagefolder", "data_dir": str(folder)}


NUMBERS = [write_parquet, write_bytes, write_json, write_csv, write_tar]
IMAGES = [write_images, write_image_tar]
Writer = Callable[[Path], dict[str, Any]]


def open_data(settings: dict[str, Any], **changes: Any) -> HuggingFace:
    data = HuggingFace(**{"batch_size": 8, "seed": 3, "split": (0.8, 0.1, 0.1)} | settings | changes)
    data.setup("fit")
    return data


def indices(loader: Any, count: int | None = None) -> list[list[int]]:
    """Indices of the samples in each batch, whose contents are checked."""
    inputs, targets = samples()
    found = []
    for x, y in itertools.islice(loader, count):
        chosen = x.flatten(1)[:, 0].long()
        if x.ndim == 4:
            assert (x[:, 0] == chosen[:, None, None]).all()
            assert (x[:, 1] == 0).all()
            assert (x[:, 2] == 255).all()
        else:
            assert np.array_equal(x.flatten(1), inputs[chosen])
        assert np.array_equal(y, targets[chosen])
        found.append(chosen.tolist())
    return found


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Writer], dict[str, Any]]:
    (tmp_path / "files").mkdir()
    return lambda writer: writer(tmp_path / "files") | {"cache_dir": tmp_path / "cache"}


@pytest.mark.parametrize("writer", [*NUMBERS, *IMAGES])
def test_each_sample_is_in_one_split(write: Any, writer: Writer) -> None:
    settings = write(writer) | ({"shape": (3, 4, 5)} if writer in IMAGES else {})
    data = open_data(settings)
    train = data.train_dataloader()
    found = [indices(train), indices(data.val_dataloader()), indices(data.test_dataloader())]
    assert [sum(map(len, split)) for split in found] == [96, 12, 12]
    assert sorted(i for split in found for batch in split for i in batch) == list(range(COUNT))
    train.sampler.set_epoch(1)
    assert indices(train) != found[0]
    assert data.infer_settings()["num_classes"] == len(data.classes) == 4
    x, _ = next(iter(data.val_dataloader()))
    assert x.dtype == (torch.uint8 if writer not in (write_csv, write_json) else torch.float32)


@pytest.mark.parametrize("writer", [write_parquet, write_images])
def test_order_is_the_same_on_any_number_of_ranks_and_after_a_resume(write: Any, writer: Writer) -> None:
    settings = write(writer) | ({"shape": (3, 4, 5)} if writer in IMAGES else {})
    whole = indices(open_data(settings).train_dataloader())
    before = open_data(settings)
    assert indices(before.train_dataloader(), 5) == whole[:5]
    after = open_data(settings)
    after.load_state_dict(before.state_dict())
    assert indices(after.train_dataloader()) == whole[5:]
    shards = []
    for rank in range(2):
        loader = open_data(settings).train_dataloader()
        loader.epoch_sampler.rank, loader.epoch_sampler.world_size = rank, 2
        shards.append(indices(loader))
    assert [one + other for one, other in zip(*shards, strict=True)] == whole


def test_existing_splits_are_used(write: Any, tmp_path: Path) -> None:
    write(write_parquet)
    first, second = (f"{tmp_path}/files/part-{number}.parquet" for number in range(2))
    settings = {"path": "parquet", "input": "x", "target": "y", "cache_dir": tmp_path / "cache"}
    data = open_data(settings, data_files={"train": second, "validation": first})
    assert sorted(i for batch in indices(data.val_dataloader()) for i in batch) == list(range(50))
    assert data.splits is not None
    assert [len(split or ()) for split in data.splits] == [62, 50, 8]
    files = {"a": second, "b": first, "test": first}
    data = open_data(settings, data_files=files, train="a", val="b", split=(0.8, 0.2, 0))
    assert [len(split or ()) for split in data.splits or ()] == [70, 50, 0]


def test_fingerprint_depends_on_contents_only(write: Any, tmp_path: Path) -> None:
    settings = write(write_csv)
    first = open_data(settings).fingerprint()
    assert open_data(settings, cache_dir=tmp_path / "other").fingerprint() == first
    file = tmp_path / "files" / "a.csv"
    moved = file.rename(tmp_path / "b.csv")
    assert open_data(settings, data_files=str(moved)).fingerprint() == first
    moved.write_text(moved.read_text().replace("class 3", "class 2", 1))
    assert open_data(settings, data_files=str(moved)).fingerprint() != first


def test_images_have_the_given_or_the_first_shape_and_are_augmented_in_training(write: Any) -> None:
    settings = write(write_images)
    assert open_data(settings).infer_settings() == {"shape": [3, 7, 9], "num_classes": 4}
    data = open_data(settings, shape=(1, 4, 4), augment=Augment(shift=1))
    x, _ = next(iter(data.train_dataloader()))
    assert x.shape == (8, 1, 4, 4)
    assert data.classes == ["class0", "class1", "class2", "class3"]
    assert data.splits is not None
    assert [getattr(split, "augment", None) is None for split in data.splits] == [False, True, True]


def test_encoded_images_in_bytes_are_decoded(tmp_path: Path) -> None:
    table = pa.table({"image": [picture(index) for index in range(COUNT)], "label": samples()[1]})
    pq.write_table(table, tmp_path / "a.parquet")
    data = open_data({"path": f"{tmp_path}/a.parquet", "cache_dir": tmp_path}, shape=(3, 4, 5))
    assert len(indices(data.train_dataloader())) == 12


def test_regression_targets_are_columns_of_numbers(write: Any) -> None:
    data = open_data(write(write_csv), kind="regression", input=["a", "b"], target=["c", "d", "e"])
    assert data.infer_settings() == {"shape": [2], "num_classes": 3}
    x, y = next(iter(data.train_dataloader()))
    chosen = x[:, 0].long()
    assert np.array_equal(y, samples()[0][chosen][:, 2:5].astype(np.float32))
    assert y.dtype == torch.float32


def test_new_files_are_read_for_prediction(write: Any, tmp_path: Path) -> None:
    data = open_data(write(write_csv))
    inputs, names = data.read([tmp_path / "files" / "a.csv"])
    assert np.array_equal(inputs, samples()[0])
    assert names[-1].endswith("a.csv:120")
    folder = tmp_path / "images"
    folder.mkdir()
    pictures = open_data(write_images(folder) | {"cache_dir": tmp_path / "cache"})
    inputs, names = pictures.read([folder / "class1"])
    assert inputs.shape == (30, 3, 7, 9)


def test_worker_processes_open_the_files_themselves(write: Any) -> None:
    data = open_data(write(write_parquet))
    loader = data.val_dataloader()
    expected = indices(loader)
    copied = pickle.loads(pickle.dumps(loader.dataset))
    assert torch.equal(copied.read_all(), loader.dataset.read_all())
    assert indices(loader) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "z"}, r"^data.input=z: no such column; the dataset has a, b, c, d, e, f, y$"),
        ({"target": "z"}, r"^data.target=z: no such column"),
        ({"target": "a"}, r"cannot be split off"),
        ({"input": "y"}, r"^data: column y: a column of (large_)?string; images, numbers"),
        ({"val": "dev"}, r"^data.val=dev: no such split; the dataset has train$"),
        ({"num_classes": 3}, r"^data.num_classes=3, but data.target=y has 4 classes; set it to null$"),
        ({"num_classes": 5}, r"^data.num_classes=5, but data.target=y has 4 classes; set it to null$"),
        ({"shape": (2, 2)}, r"^data.shape=\[2, 2\], but data.input=a,b,c,d,e,f has 6 numbers"),
        ({"kind": "regression"}, r"^data: column y: a column of (large_)?string"),
        ({"target": ["y", "a"]}, r"classification needs one column"),
        ({"data_files": "none.csv"}, r"^data.path=csv with data_files=none.csv cannot be loaded: .*none.csv"),
        pytest.param(
            *({"path": "none/none", "data_files": None}, r"^data.path=none/none cannot be loaded: "),
            marks=pytest.mark.slow,  # which waits for the network
        ),
        ({"path": "parquet"}, r"^data.path=parquet .* cannot be loaded: "),
        ({"dtype": "uint7"}, r"^data.dtype=uint7 is not a dtype"),
    ],
)
def test_invalid_settings_are_one_line_errors(write: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        next(iter(open_data(write(write_csv), **changes).train_dataloader()))
    assert "\n" not in str(error.value)


def test_missing_values_and_unknown_classes_are_reported(tmp_path: Path) -> None:
    table = pd.DataFrame({"x": [1.0, 2.0] * 30, "y": ["a", "b"] * 30})
    other = table.assign(y="c")
    table.to_csv(tmp_path / "a.csv", index=False)
    other.to_csv(tmp_path / "b.csv", index=False)
    settings = {"path": "csv", "input": "x", "target": "y", "cache_dir": tmp_path}
    with pytest.raises(ValueError, match=r"^data.target=y: 60 samples have an unknown class \(c\)"):
        open_data(settings, data_files={"train": f"{tmp_path}/a.csv", "validation": f"{tmp_path}/b.csv"})
    table.loc[3, "y"] = None
    table.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(ValueError, match=r"^data.target=y: 1 samples have an unknown class \(None\)"):
        open_data(settings, data_files=f"{tmp_path}/a.csv")


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'boltcutter\[datasets\]'$"):
        open_data({"path": "csv"})


@pytest.mark.slow
def test_a_run_trains_and_predicts(script: Script, write: Any, tmp_path: Path) -> None:
    settings = write(write_parquet)
    overrides = [f"data.{name}={value}" for name, value in settings.items()]
    done = script("train", *QUICK, "data=huggingface", *overrides, "model=mlp", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "evaluation" / "test" / "confusion.svg").is_file()
    file = tmp_path / "files" / "part-0.parquet"
    done = script("predict", f"run={tmp_path}/run", f"input={file}", f"output={tmp_path}/out.csv")
    assert done.returncode == 0, done.stderr


def split_rows(data: HuggingFace) -> list[list[int]]:
    assert data.splits is not None
    return [sorted(i for batch in indices(data.loader(split)) for i in batch) for split in ("train", "val", "test")]


@pytest.mark.parametrize("own", [False, True])
def test_folds_divide_train_and_val_samples(write: Any, tmp_path: Path, own: bool) -> None:
    settings = write(write_parquet)
    if own:
        files = [f"{tmp_path}/files/part-{number}.parquet" for number in range(2)]
        settings["data_files"] = {"train": files[1], "validation": files[0]}
    test = split_rows(open_data(settings))[2]
    found = [split_rows(open_data(settings, num_folds=3, fold=fold)) for fold in range(3)]
    assert all(rows[2] == test for rows in found)
    for train, val, _ in found:
        assert not set(train) & set(val)
        assert np.ptp(np.bincount(np.array(val) % 4)) <= 1
    assert sorted([row for _, val, _ in found for row in val] + test) == list(range(COUNT))


def test_samples_of_a_group_stay_together(write: Any, tmp_path: Path) -> None:
    settings = write(write_csv)
    file = tmp_path / "files" / "a.csv"
    pd.read_csv(file).assign(patient=[f"p{row // 4}" for row in range(COUNT)]).to_csv(file, index=False)
    for folds in ({}, {"num_folds": 3, "fold": 1}):
        found = split_rows(open_data(settings, group="patient", **folds))
        groups = [{row // 4 for row in rows} for rows in found]
        assert sum(map(len, groups)) == len(set.union(*groups)) == 30
    with pytest.raises(ValueError, match=r"^data.group=hospital: no such column; the dataset has a, b"):
        open_data(settings, group="hospital")
    pd.read_csv(file).assign(patient=[None, *range(COUNT - 1)]).to_csv(file, index=False)
    with pytest.raises(ValueError, match=r"^data.group=patient: 1 rows have no group; remove them$"):
        open_data(settings, group="patient")
