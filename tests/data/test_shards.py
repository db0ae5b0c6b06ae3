import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import QUICK, Script

from boltcutter.data.shards import Shards

COUNT = 600


def samples() -> tuple[Any, Any]:
    """Inputs whose first two bytes are their index, shape (600, 2, 3); class indices."""
    inputs = np.random.default_rng(0).integers(0, 256, (COUNT, 2, 3), np.uint8)
    inputs[:, 0, 0], inputs[:, 0, 1] = np.arange(COUNT) // 256, np.arange(COUNT) % 256
    return inputs, np.arange(COUNT) % 4


def write_npy(folder: Path) -> None:
    for number, (inputs, targets) in enumerate(zip(*(np.split(part, [100, 350]) for part in samples()), strict=True)):
        np.save(folder / f"inputs-{number}.npy", inputs)
        np.save(folder / f"targets-{number}.npy", targets)


def shards(folder: Path | str, **settings: Any) -> Shards:
    data = Shards(**{"path": str(folder), "shape": (2, 3), "num_classes": 4, "batch_size": 16} | settings)
    data.setup("fit")
    return data


def indices(loader: Any, count: int | None = None) -> list[list[int]]:
    """Indices of the samples in each batch, whose contents are checked."""
    inputs, targets = samples()
    found = []
    for x, y in itertools.islice(loader, count):
        chosen = (x[:, 0, 0].long() * 256 + x[:, 0, 1].long()).tolist()
        assert np.array_equal(x, inputs[chosen])
        assert np.array_equal(y.flatten(), targets[chosen])
        found.append(chosen)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_npy(tmp_path)
    return tmp_path


def test_each_sample_is_in_one_split(folder: Path) -> None:
    data = shards(folder, split=(0.8, 0.1, 0.1))
    assert data.splits is not None
    lengths = [len(split) for split in data.splits]
    assert lengths == [480, 60, 60]
    train = data.train_dataloader()
    parts = [indices(train), indices(data.val_dataloader()), indices(data.test_dataloader())]
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(COUNT))
    train.sampler.set_epoch(1)
    again = indices(train)
    assert again != parts[0]
    assert sorted(map(tuple, [sorted(i for b in again for i in b)])) == [tuple(sorted(i for b in parts[0] for i in b))]
    assert np.corrcoef(np.concatenate(parts[0]), np.arange(480))[0, 1] < 0.2  # mixed
    assert len({i // 10 for i in parts[0][0]}) > 5


def test_a_resumed_epoch_continues_at_the_next_sample(folder: Path) -> None:
    whole = indices(shards(folder).train_dataloader())
    before = shards(folder)
    assert indices(before.train_dataloader(), 9) == whole[:9]
    after = shards(folder)
    after.load_state_dict(before.state_dict())
    assert indices(after.train_dataloader()) == whole[9:]


def test_fingerprint_depends_on_the_contents_of_files(folder: Path) -> None:
    first = shards(folder).fingerprint()
    assert shards(folder).fingerprint() == first
    file = folder / "inputs-0.npy"
    contents = bytearray(file.read_bytes())
    contents[200] ^= 1
    file.write_bytes(contents)
    assert shards(folder).fingerprint() != first


def test_regression_targets_are_floats(tmp_path: Path) -> None:
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
        (lambda f: None, {"val": "none/*.npy"}, r"data.val=none/\*.npy: no such file"),
        (lambda f: None, {"val": __file__}, r"data.val=.*py is not a .npy file; data=huggingface reads other formats"),
    ],
)
def test_invalid_settings_are_one_line_errors(
    tmp_path: Path, change: Callable[[Path], Any], settings: dict[str, Any], message: str
) -> None:
    write_npy(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        indices(shards(tmp_path, **settings).train_dataloader())
    assert "\n" not in str(error.value)


def test_a_run_trains_on_shards(script: Script, tmp_path: Path) -> None:
    write_npy(tmp_path)
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


def test_a_file_of_several_samples_is_no_input(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", np.zeros((5, 3), np.float32))
    np.save(tmp_path / "targets.npy", np.arange(5) % 2)
    data = Shards(path=str(tmp_path / "inputs.npy"), shape=(3,), num_classes=2)
    with pytest.raises(ValueError, match=r"^input=.*inputs.npy: an array of shape \[5, 3\], but a sample has "):
        data.read([tmp_path / "inputs.npy"])
