from pathlib import Path

import pytest
import torch
from PIL import Image

from boltcutter.data.digits import Digits


def test_digits_are_uint8_in_stratified_splits() -> None:
    data = Digits()
    data.setup("fit")
    assert data.splits is not None
    assert [len(split) for split in data.splits] == [1257, 270, 270]
    inputs, targets = next(iter(data.train_dataloader()))
    assert (inputs.dtype, inputs.shape) == (torch.uint8, (64, 1, 8, 8))
    assert (targets.dtype, targets.shape) == (torch.int64, (64,))
    assert inputs.max() == 255
    assert data.classes == list("0123456789")
    shares = [torch.bincount(split.targets) / len(split) for split in data.splits]  # type: ignore[attr-defined]
    assert torch.allclose(shares[0], shares[2], atol=0.01)
    assert torch.allclose(shares[0], shares[1], atol=0.01)


def test_split_depends_on_the_seed() -> None:
    assert Digits().fingerprint() == Digits().fingerprint() != Digits(seed=1).fingerprint()


def test_other_shapes_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"data.shape=\(1, 28, 28\), data.num_classes=10: digits have"):
        Digits(shape=(1, 28, 28))
    for num_classes in (9, 11):
        with pytest.raises(ValueError, match=rf"data.num_classes={num_classes}: digits have .* and 10; keep"):
            Digits(num_classes=num_classes)


def test_new_images_are_resized(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), (255, 255, 255)).save(tmp_path / "a.png")
    inputs, names = Digits().read([tmp_path])
    assert inputs.shape == (1, 1, 8, 8)
    assert inputs.min() == 255
    assert names == [str(tmp_path / "a.png")]


def test_folds_are_stratified_and_keep_the_test_split() -> None:
    whole = Digits()
    whole.setup("fit")
    assert whole.splits is not None
    found = [Digits(num_folds=5, fold=fold) for fold in range(5)]
    for data in found:
        data.setup("fit")
        assert data.splits is not None
        train, val, test = data.splits
        assert torch.equal(test.inputs, whole.splits.test.inputs)  # type: ignore[union-attr]
        assert (len(train) + len(val), len(test)) == (1527, 270)  # type: ignore[arg-type]
        assert torch.bincount(val.targets).min() >= 29  # type: ignore[union-attr]
    assert sum(len(data.splits.val) for data in found if data.splits) == 1527  # type: ignore[arg-type]
    assert len({data.fingerprint() for data in (whole, *found)}) == 6
    assert Digits(num_folds=5, fold=2).fingerprint() == found[2].fingerprint()
