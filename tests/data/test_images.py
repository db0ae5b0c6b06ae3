from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.data.augment import Augment
from boltcutter.data.images import Images

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
SHAPE = (3, 6, 8)


def fill(folder: Path, count: int, grey: int, suffix: str = ".png") -> None:
    """``count`` images of different sizes; green is the index."""
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.full((6 + number % 5, 8 + number % 3, 3), grey, np.uint8)
        pixels[..., 1] = number
        Image.fromarray(pixels).save(folder / f"{number}{suffix}")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    fill(tmp_path / "pets" / "cat", 20, 100)
    fill(tmp_path / "pets" / "dog", 40, 200)
    return tmp_path / "pets"


def contents(data: Images) -> list[set[tuple[int, int]]]:
    """(grey, number) of each image of each split."""
    data.setup("fit")
    found = []
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        batches = list(loader)
        for inputs, targets in batches:
            assert (inputs.dtype, inputs.shape[1:]) == (torch.uint8, SHAPE)
            assert torch.equal(inputs[:, 0, 0, 0], 100 * (targets + 1))
        found.append({tuple(p) for inputs, _ in batches for p in inputs[:, :2, 0, 0].tolist()})
    return found


@pytest.mark.parametrize("names", [None, ["Felis", "Canis"]])
def test_class_folders_are_split_and_stratified(flat: Path, names: list[str] | None) -> None:
    data = Images(folder=flat, shape=SHAPE, batch_size=6, classes=names)
    train, val, test = contents(data)
    assert [len(train), len(val), len(test)] == [42, 9, 9]
    assert len(train | val | test) == 60
    assert [sum(grey == 100 for grey, _ in split) for split in (train, val, test)] == [14, 3, 3]
    assert data.classes == (names or ["cat", "dog"])
    assert data.infer_settings() == {"num_classes": 2}


@pytest.mark.parametrize(
    ("own", "lengths"),
    [(["val", "test"], [60, 4, 4]), (["val"], [50, 4, 10]), (["test"], [50, 10, 4]), ([], [42, 9, 9])],
)
def test_folders_of_splits_are_used_unchanged(flat: Path, own: list[str], lengths: list[int]) -> None:
    flat.rename(flat.with_name("train"))
    for split in own:
        fill(flat.parent / split / "dog", 4, 200, ".jpg")
    data = Images(folder=flat.parent, shape=SHAPE, batch_size=1)
    data.setup("fit")
    assert data.splits is not None
    found = {s: getattr(data.splits, s) for s in ("train", "val", "test")}
    assert [len(samples) for samples in found.values()] == pytest.approx(lengths, abs=1)
    for split, samples in found.items():
        assert {name.split("/")[0] for name in samples.names} == {split if split in own else "train"}
    names = [name for samples in found.values() for name in samples.names]
    assert len(set(names)) == len(names) == 60 + 4 * len(own)
    assert data.classes == ["cat", "dog"]
    assert found["test"].targets.max() == 1  # a dog, also where there is no folder of cats


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    fill(tmp_path / "train", 20, 100)
    fill(tmp_path / "tram", 20, 200)
    data = Images(folder=tmp_path, shape=SHAPE, batch_size=1)
    contents(data)
    assert data.classes == ["train", "tram"]


def test_hidden_files_are_skipped(flat: Path) -> None:
    (flat / ".cache").mkdir()
    (flat / "cat" / "._0.png").write_text("what macOS leaves behind")
    fill(flat / "cat" / ".ipynb_checkpoints", 2, 100)
    assert sum(map(len, contents(Images(folder=flat, shape=SHAPE, batch_size=6)))) == 60


def test_files_that_are_not_read_are_counted(flat: Path) -> None:
    for name in ("a.heic", "b.HEIC", "notes.txt"):
        (flat / "cat" / name).write_text("no image")
    with pytest.warns(UserWarning, match=r"data.folder=.*pets: not read: 1 \.heic, 1 \.HEIC, 1 \.txt; images are .png"):
        assert sum(map(len, contents(Images(folder=flat, shape=SHAPE, batch_size=6)))) == 60


@pytest.mark.parametrize("place", ["valid/cat", "", "train"])
def test_images_outside_of_class_folders_are_counted(flat: Path, place: str) -> None:
    if place:
        (flat.parent / "all").mkdir()
        flat = flat.rename(flat.parent / "all" / "train").parent
    fill(flat.parent / "more", 3, 100)
    (flat / place).mkdir(parents=True, exist_ok=True)
    for file in (flat.parent / "more").iterdir():
        file.rename(flat / place / f"more{file.name}")
    with pytest.warns(UserWarning, match=r"data.folder=.*: 3 images are not in .*<class>, so they are not read"):
        Images(folder=flat, shape=SHAPE).setup("fit")


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".jpg", ".JPEG", ".webp", ".bmp", ".gif", ".tif", ".TIFF", ".ppm"])
def test_images_of_all_formats_are_read_also_in_folders_below(flat: Path, suffix: str) -> None:
    fill(flat / "cat" / "more" / "and more", 8, 100, suffix)
    fill(flat / "linked" / "dog", 8, 200, suffix)
    (flat / "linked").rename(flat.parent / "linked")
    (flat / "dog" / "link").symlink_to(flat.parent / "linked")
    (flat / "dog" / "loop").symlink_to(flat / "dog")
    data = Images(folder=flat, shape=SHAPE, batch_size=1)
    data.setup("fit")
    assert data.splits is not None
    targets = torch.cat([getattr(data.splits, split).targets for split in ("train", "val", "test")])
    assert [int((targets == 0).sum()), int((targets == 1).sum())] == [28, 48]
    images, names = data.read([flat / "cat"])
    assert len(images) == len(names) == 28
    assert (images[:, 0].float() - 100).abs().max() <= 8  # GIF has 256 colours


def test_fingerprint_depends_on_names_sizes_and_shape(flat: Path) -> None:
    def fingerprint(shape: tuple[int, int, int] = SHAPE) -> str:
        return Images(folder=flat, shape=shape).fingerprint()

    first = fingerprint()
    assert first == fingerprint() != fingerprint((3, 6, 7))
    (flat / "cat" / "0.png").write_bytes((flat / "cat" / "0.png").read_bytes() + b"0")
    second = fingerprint()
    (flat / "cat" / "0.png").rename(flat / "cat" / "00.png")
    assert len({first, second, fingerprint()}) == 3
    (flat / "dog" / "gone.png").symlink_to(flat / "nowhere.png")
    with pytest.raises(ValueError, match=r"gone\.png: no such file; remove this link"):
        fingerprint()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create")
def test_augmentation_does_not_depend_on_workers(flat: Path) -> None:
    def first(num_workers: int, augment: Augment | None) -> torch.Tensor:
        data = Images(folder=flat, shape=SHAPE, batch_size=42, num_workers=num_workers, augment=augment)
        return torch.cat([inputs for inputs, _ in data.train_dataloader()])

    augment = Augment(shift=2, brightness=0.5)
    assert torch.equal(first(0, augment), first(2, augment))
    assert not torch.equal(first(0, augment), first(0, None))
    plain, changed = (Images(folder=flat, shape=SHAPE, augment=a) for a in (None, augment))
    assert torch.equal(next(iter(plain.val_dataloader()))[0], next(iter(changed.val_dataloader()))[0])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_image_is_named(flat: Path, num_workers: int) -> None:
    for file in flat.glob("dog/*"):
        file.write_bytes(b"\x89PNG\r\n\x1a\n rest is lost")
    loader = Images(folder=flat, shape=SHAPE, batch_size=30, num_workers=num_workers).train_dataloader()
    with pytest.raises(ValueError, match=r"^.*dog/\d+.png: not a valid image \(.*\); remove or replace it$"):
        list(loader)
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # left to the garbage collector it takes 5 s


def test_invalid_folders_are_one_line_errors(tmp_path: Path, flat: Path) -> None:
    def check(message: str, folder: Path = flat, **settings: Any) -> None:
        with pytest.raises(ValueError, match=message):
            Images(folder=folder, **settings).setup("fit")

    check(r"data.folder=.*gone: no such folder; give one", tmp_path / "gone")
    for classes in (1, 3):
        check(rf"data.num_classes={classes}, but .*pets has 2 class folders; set it to null", num_classes=classes)
    check(r"data.shape=\[4, 8, 8\] must be channels \(1 or 3\)", shape=(4, 8, 8))
    check(r"data.split=\[1.0, 0.0, 0.0\] must be three", split=(1.0, 0.0, 0.0))
    check(r"data.folder=.*: only the class pets in .*; at least two", tmp_path)
    check(r"data.folder=.*: no class folder in .*cat; at least two", flat / "cat")
    (flat / "bird").mkdir()
    check(r"data.folder=.*: no image \(.*\) in the class folder bird; add some or remove it")
    (flat / "bird").rmdir()
    (flat / "bird").symlink_to(flat / "dog")
    check(r"data.folder=.*: .*dog: the same folder as .*bird, by a link; remove one of them")
    (flat / "bird").unlink()
    flat.rename(tmp_path / "train")
    fill(tmp_path / "test" / "bird", 3, 100)
    check(r"test/bird: not a class of .*train; add it there or remove it here", tmp_path)


def test_the_option_builds(flat: Path) -> None:
    cfg = Settings({"seed": 3, "data": OmegaConf.load(CONFIGS / "images.yaml")})
    cfg = cfg.changed({"data": {"folder": str(flat), "num_workers": 0}})
    data = build(cfg.data, "data")
    assert data.augment == Augment(flip=0.5, shift=4, brightness=0.2, contrast=0.2)
    assert data.infer_settings() == {"num_classes": 2}
    assert next(iter(data.val_dataloader()))[0].shape == (9, 3, 64, 64)
    assert data.read([flat / "cat"])[0].shape == (20, 3, 64, 64)


@pytest.mark.parametrize("own", [[], ["val"], ["val", "test"], ["test"]])
def test_folds_divide_train_and_val_images(flat: Path, own: list[str]) -> None:
    (flat.parent / "all").mkdir()
    folder = flat.rename(flat.parent / "all" / "train").parent
    for number, name in enumerate(own, 1):
        fill(folder / name / "cat", 2, 100)
        fill(folder / name / "dog", 2, 200)
        for file in (folder / name).glob("*/*.png"):
            with Image.open(file) as image:
                pixels = np.asarray(image).copy()
            pixels[..., 1] += 60 + 10 * number
            Image.fromarray(pixels).save(file)
    test = contents(Images(folder=folder, shape=SHAPE, batch_size=4))[2]
    found = [contents(Images(folder=folder, shape=SHAPE, batch_size=1, num_folds=3, fold=fold)) for fold in range(3)]
    assert all(parts[2] == test for parts in found)
    count = 60 + 4 * len(own)
    for train, val, _ in found:
        assert not train & val
        assert len(train | val) == count - len(test)
        assert sum(grey == 100 for grey, _ in val) == pytest.approx(len(val) / 3, abs=1)
    assert len(set.union(*(val for _, val, _ in found))) == sum(len(val) for _, val, _ in found) == count - len(test)
