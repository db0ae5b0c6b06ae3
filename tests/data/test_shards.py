import io
import itertools
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import QUICK, Script

from boltcutter.data.sampler import MIXED_BLOCKS
from boltcutter.data.shards import Shards

COUNT = 600


def samples() -> tuple[Any, Any]:
    """Inputs that tell which sample they are: (600, 2, 3) of bytes; classes."""
    inputs = np.random.default_rng(0).integers(0, 256, (COUNT, 2, 3), np.uint8)
    inputs[:, 0, 0], inputs[:, 0, 1] = np.arange(COUNT) // 256, np.arange(COUNT) % 256
    return inputs, np.arange(COUNT) % 4


def write_npy(folder: Path) -> None:
    for number, (inputs, targets) in enumerate(zip(*(np.split(part, [100, 350]) for part in samples()), strict=True)):
        np.save(folder / f"inputs-{number}.npy", inputs)
        np.save(folder / f"targets-{number}.npy", targets)


def write_tar(folder: Path) -> None:
    for number, chosen in enumerate(np.split(np.arange(COUNT), [100, 350])):
        with tarfile.open(folder / f"train-{number}.tar", "w") as archive:
            for index in chosen.tolist():
                inputs, targets = samples()
                saved = io.BytesIO()
                np.save(saved, inputs[index])
                for name, contents in (("npy", saved.getvalue()), ("cls", str(targets[index]).encode())):
                    member = tarfile.TarInfo(f"{index:05}.{name}")
                    member.size = len(contents)
                    archive.addfile(member, io.BytesIO(contents))


def write_parquet(folder: Path, form: str = "list") -> None:
    inputs, targets = samples()
    column: Any = {
        "list": lambda: pa.array(inputs.reshape(COUNT, -1).tolist(), pa.list_(pa.uint8())),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(pa.array(inputs.ravel()), 6),
        "binary": lambda: pa.array([row.tobytes() for row in inputs], pa.binary()),
        "fixed_binary": lambda: pa.array([row.tobytes() for row in inputs], pa.binary(6)),
    }[form]()
    table = pa.table({"input": column, "target": targets})
    for number, (begin, length) in enumerate(((0, 100), (100, 250), (350, 250))):
        pq.write_table(table.slice(begin, length), folder / f"part-{number}.parquet", row_group_size=10)


WRITERS: dict[str, Callable[[Path], None]] = {"npy": write_npy, "tar": write_tar, "parquet": write_parquet}


def shards(folder: Path | str, **settings: Any) -> Shards:
    cache_dir = Path(folder) / "index" if Path(folder).is_dir() else Path("/nowhere")
    data = Shards(
        path=str(folder), **{"shape": (2, 3), "num_classes": 4, "batch_size": 16, "cache_dir": cache_dir} | settings
    )
    data.setup("fit")
    return data


def numbers(loader: Any, count: int | None = None) -> list[list[int]]:
    """Which samples each batch has; their contents are looked at by the way."""
    inputs, targets = samples()
    found = []
    for x, y in itertools.islice(loader, count):
        chosen = (x[:, 0, 0].long() * 256 + x[:, 0, 1].long()).tolist()
        assert np.array_equal(x, inputs[chosen])
        assert np.array_equal(y, targets[chosen])
        found.append(chosen)
    return found


@pytest.fixture(params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    WRITERS[request.param](tmp_path)
    return tmp_path


def test_each_sample_is_in_one_split_and_comes_once(folder: Path) -> None:
    data = shards(folder, split=(0.8, 0.1, 0.1))
    assert data.splits is not None
    lengths = [len(split) for split in data.splits]
    assert lengths == [480, 60, 60]
    train = data.train_dataloader()
    parts = [numbers(train), numbers(data.val_dataloader()), numbers(data.test_dataloader())]
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(COUNT))
    train.sampler.set_epoch(1)
    again = numbers(train)
    assert again != parts[0]
    assert sorted(map(tuple, [sorted(i for b in again for i in b)])) == [tuple(sorted(i for b in parts[0] for i in b))]
    assert np.corrcoef(np.concatenate(parts[0]), np.arange(480))[0, 1] < 0.2  # mixed
    assert len({i // 10 for i in parts[0][0]}) > 5


def test_ranks_share_and_a_resumed_epoch_goes_on(folder: Path) -> None:
    whole = numbers(shards(folder).train_dataloader())
    before = shards(folder)
    assert numbers(before.train_dataloader(), 9) == whole[:9]
    after = shards(folder)
    after.load_state_dict(before.state_dict())
    assert numbers(after.train_dataloader()) == whole[9:]


def test_a_fingerprint_follows_the_files(folder: Path) -> None:
    first = shards(folder).fingerprint()
    assert shards(folder).fingerprint() == first
    file = min(f for f in folder.iterdir() if f.is_file())
    contents = bytearray(file.read_bytes())
    contents[200] ^= 1
    file.with_name("other").write_bytes(contents)
    file.with_name("other").replace(file)
    if file.suffix == ".npy":
        assert shards(folder).fingerprint() != first


@pytest.mark.parametrize("form", ["list", "fixed", "binary", "fixed_binary"])
def test_columns_of_several_kinds_are_the_same(tmp_path: Path, form: str) -> None:
    write_parquet(tmp_path, form)
    data = shards(tmp_path, val=str(tmp_path / "part-0.parquet"), test=str(tmp_path / "part-0.parquet"))
    assert [i for batch in numbers(data.val_dataloader()) for i in batch] == list(range(100))
    numbers(data.train_dataloader())


def test_row_groups_are_read_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from boltcutter.data.table import RowGroup

    write_parquet(tmp_path)
    data, read = shards(tmp_path, split=(0.9, 0.05, 0.05)), list[tuple[Path, int]]()
    plain = RowGroup.read
    monkeypatch.setattr(RowGroup, "read", lambda group: read.append((group.path, group.number)) or plain(group))
    numbers(data.train_dataloader())
    assert len(read) == len(set(read)) == 54 > 3 * MIXED_BLOCKS


def test_images_in_a_tar_file_are_decoded(tmp_path: Path) -> None:
    from PIL import Image

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for index in range(20):
            saved = io.BytesIO()
            Image.new("RGB", (9, 9), (index, 0, 255)).save(saved, "png")
            for name, contents in (("png", saved.getvalue()), ("cls", b"1\n")):
                member = tarfile.TarInfo(f"train/{index}.{name}")
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))
    data = shards(tmp_path, shape=(3, 4, 4), split=(0.6, 0.2, 0.2), batch_size=4)
    reds = [x[:, 0, 0, 0].tolist() for x, _ in (*data.train_dataloader(), *data.val_dataloader())]
    assert len({red for batch in reds for red in batch}) == 16
    (known,) = (tmp_path / "index").iterdir()
    before = known.stat().st_mtime_ns
    shards(tmp_path, shape=(3, 4, 4), split=(0.6, 0.2, 0.2), batch_size=4)
    assert known.stat().st_mtime_ns == before  # looked up once


def test_numbers_are_targets_too(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", np.zeros((50, 6), np.float32))
    np.save(tmp_path / "targets.npy", np.ones((50, 2)))
    x, y = next(iter(shards(tmp_path, kind="regression", num_classes=2).train_dataloader()))
    assert (x.dtype, y.dtype, x.shape[1:], y.shape[1:]) == (torch.float32, torch.float32, (2, 3), (2,))


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            lambda f: (f / "targets-1.npy").unlink(),
            {},
            r"targets-1.npy: no such file; each inputs",
        ),
        (lambda f: np.save(f / "targets-1.npy", np.zeros(3)), {}, r"250 inputs, but 3 targets in targets-1.npy; write"),
        (lambda f: (f / "inputs-0.npy").write_bytes(b"\x93NUMPY"), {}, r"inputs-0.npy: not a valid .npy file"),
        (lambda f: None, {"shape": (3, 3)}, r"npy: inputs of shape \[2, 3\], but data.shape=\[3, 3\]"),
        (lambda f: None, {"num_classes": 2}, r"npy: class [23], but data.num_classes=2; correct it"),
        (
            lambda f: None,
            {"split": (0.9985, 0.0005, 0.001)},
            r"data.split=.*: the val split is empty; set data.val",
        ),
        (lambda f: None, {"val": "none/*.tar"}, r"data.val=none/\*.tar: no such file"),
        (lambda f: None, {"dtype": "uint7"}, r"data.dtype=uint7 is not a dtype"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, change: Callable[[Path], Any], settings: dict[str, Any], message: str
) -> None:
    write_npy(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        numbers(shards(tmp_path, **settings).train_dataloader())
    assert "\n" not in str(error.value)


def test_a_run_trains_on_shards(script: Script, tmp_path: Path) -> None:
    write_parquet(tmp_path)
    words = [
        "data=shards",
        f"data.path={tmp_path}",
        "data.shape=[1,2,3]",
        "data.num_classes=4",
        "model=mlp",
        "data.num_workers=2",
    ]
    done = script("train", *QUICK, *words, "data.num_workers=2", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "evaluation" / "test" / "confusion.svg").is_file()
