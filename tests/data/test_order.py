"""The order of samples is that of earlier versions, so that their runs can be resumed and reproduced."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boltcutter.data.digits import Digits
from boltcutter.data.module import DataModule
from boltcutter.data.text import Text

FOLDS: list[dict[str, Any]] = [{}, {"num_folds": 3, "fold": 0}, {"num_folds": 3, "fold": 2}]


def digits(folder: Path, **settings: Any) -> DataModule:
    return Digits(batch_size=100, **settings)


def text(folder: Path, **settings: Any) -> DataModule:
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number:02}\n" * (20 + number))
    return Text(path=str(folder), cache_dir=folder / ".cache", shape=(32,), batch_size=20, **settings)


def hash_batches(data: DataModule) -> bytes:
    """Hash of the batches of two epochs."""
    data.prepare_data()
    data.setup("fit")
    digest, epochs = hashlib.sha256(), set()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for epoch in range(2):
            loader.epoch_sampler.set_epoch(epoch)
            found = b"".join(tensor.numpy().tobytes() for batch in loader for tensor in batch)
            digest.update(found)
            epochs.add(found)
    assert len(epochs) == 3  # only train differs from epoch to epoch
    return digest.digest()


@pytest.mark.parametrize(
    ("make", "seed", "expected"),
    [
        (digits, 0, "8c574a025cd911d9"),
        (digits, 1, "6bb0ab196a37d900"),
        (digits, 2, "d67d24ad55a22bd9"),
        (text, 0, "19919994b117f3d2"),
        (text, 1, "26fc6c21b4d24882"),
        (text, 2, "696fbf30cf294bbe"),
    ],
)
def test_the_order_of_samples_stays_the_same(
    make: Callable[..., DataModule], seed: int, expected: str, tmp_path: Path
) -> None:
    found = [hash_batches(make(tmp_path, seed=seed, **fold)) for fold in FOLDS]
    assert hashlib.sha256(b"".join(found)).hexdigest()[:16] == expected
