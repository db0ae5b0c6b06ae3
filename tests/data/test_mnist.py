import functools
import gzip
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from boltcutter.config.instantiate import build
from boltcutter.config.settings import Settings
from boltcutter.data.augment import Augment
from boltcutter.data.mnist import MNIST, read_idx

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
NAMES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def idx(array: np.ndarray) -> bytes:
    """The bytes of an IDX file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def write(folder: Path, part: str, count: int, pack: Callable[[bytes], bytes] = gzip.compress, **names: str) -> None:
    """A pair of files whose images tell their class in the first pixel and their number in the next two."""
    folder.mkdir(exist_ok=True)
    labels = np.arange(count) % 10
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, 0, 0], images[:, 0, 1], images[:, 0, 2] = labels, np.arange(count) // 256, np.arange(count) % 256
    (folder / names.get("images", f"{part}-images-idx3-ubyte.gz")).write_bytes(pack(idx(images)))
    (folder / names.get("labels", f"{part}-labels-idx1-ubyte.gz")).write_bytes(pack(idx(labels)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "all", "train", 400)
    write(tmp_path / "all", "t10k", 100)
    return tmp_path / "all"


def splits(data: MNIST) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    return [(split.inputs, split.targets) for split in data.splits]  # type: ignore[attr-defined]


def numbers(inputs: torch.Tensor) -> set[int]:
    return {256 * high + low for high, low in inputs[:, 0, 0, 1:3].tolist()}


def test_val_is_a_stratified_fraction_of_the_training_files(folder: Path) -> None:
    (train, train_labels), (val, val_labels), (test, test_labels) = splits(MNIST(folder=folder, val_fraction=0.2))
    assert (train.shape, train.dtype, train_labels.dtype) == ((320, 1, 28, 28), torch.uint8, torch.int64)
    assert numbers(train) | numbers(val) == set(range(400))
    assert numbers(test) == set(range(100))
    assert torch.bincount(val_labels).tolist() == [8] * 10
    for inputs, labels in ((train, train_labels), (val, val_labels), (test, test_labels)):
        assert torch.equal(inputs[:, 0, 0, 0].long(), labels)


def test_all_splits_can_come_from_one_pair_of_files(tmp_path: Path) -> None:
    write(tmp_path, "t10k", 300)
    parts = [numbers(inputs) for inputs, _ in splits(MNIST(folder=tmp_path, train="t10k"))]
    assert [len(part) for part in parts] == [240, 30, 30]
    assert set.union(*parts) == set(range(300))  # so no image is trained on and tested on


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_files_are_read_compressed_or_not(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    end = ".gz" if pack is gzip.compress else ""
    write(tmp_path, "t10k", 100, pack, images=f"t10k-images-idx3-ubyte{end}", labels=f"t10k-labels-idx1-ubyte{end}")
    assert len(splits(MNIST(folder=tmp_path, train="t10k"))[0][0]) == 80


def test_missing_files_are_reported(tmp_path: Path) -> None:
    data = MNIST(folder=tmp_path)
    with pytest.raises(ValueError, match=r"data.folder=.* has no train-images-idx3-ubyte.gz; put it there$"):
        data.setup("fit")
    with pytest.raises(ValueError, match=r"train-images.*data.mirrors is empty.* by hand$"):
        data.prepare_data()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/"
        httpd.shutdown()
        thread.join()


def test_missing_files_are_downloaded_and_verified(folder: Path, mirror: str, tmp_path: Path) -> None:
    sums = {name: f"sha256:{hashlib.sha256((folder / name).read_bytes()).hexdigest()}" for name in NAMES}
    data = MNIST(folder=tmp_path / "new", mirrors=[mirror], checksums=sums)
    parts = splits(data)
    assert sorted(file.name for file in data.folder.iterdir()) == sorted(NAMES)
    assert data.fingerprint() == MNIST(folder=folder).fingerprint()
    assert len(parts[2][0]) == 100
    (data.folder / NAMES[0]).unlink()
    wrong = MNIST(folder=data.folder, mirrors=[mirror], checksums=sums | {NAMES[0]: f"sha256:{'0' * 64}"})
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz: not downloaded .*it is sha256:"):
        wrong.prepare_data()
    assert not (data.folder / NAMES[0]).exists()


def spoil_crc(raw: bytes) -> bytes:
    packed = bytearray(gzip.compress(raw))
    packed[-8] ^= 1
    return bytes(packed)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (spoil_crc, "damaged gzip file"),
        (lambda raw: gzip.compress(raw)[:-9], "damaged gzip file"),
        (lambda raw: gzip.compress(raw[:-1]), r"78399 bytes of data, but its header says \[100, 28, 28\]"),
        (lambda raw: gzip.compress(raw + b"0"), "78401 bytes of data"),
        (
            lambda raw: gzip.compress(raw[:7]),
            "begins with 00000803, so it is truncated or not an IDX file of 3 dimensions",
        ),
        (lambda raw: gzip.compress(b"\0\0\x0d" + raw[3:]), "begins with 00000d03"),
        (lambda raw: b"<html>no such page</html>", "damaged gzip file"),
        (lambda raw: b"", "begins with nothing"),
        (lambda raw: gzip.compress(raw[:4] + bytes(4) + raw[8:16]), "0 bytes of data"),
    ],
)
def test_a_damaged_file_is_an_error(folder: Path, pack: Callable[[bytes], bytes], message: str) -> None:
    path = folder / NAMES[2]
    path.write_bytes(pack(gzip.decompress(path.read_bytes())))
    with pytest.raises(ValueError, match=rf"^.*t10k-images-idx3-ubyte.gz: {message}.*; delete it .*or replace it$"):
        MNIST(folder=folder).setup("fit")


def test_an_uncompressed_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.write_bytes(idx(np.arange(10)))
    assert read_idx(path, 1).tolist() == list(range(10))
    path.write_bytes(idx(np.arange(10))[:-1])
    with pytest.raises(ValueError, match="9 bytes of data"):
        read_idx(path, 1)


def test_settings_that_contradict_the_files_are_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data.shape=\[1, 32, 32\], but .*train-images.* has \[1, 28, 28\]; make"):
        MNIST(folder=folder, shape=(1, 32, 32)).setup("fit")
    with pytest.raises(ValueError, match=r"data.num_classes=9, but .*train-labels.* has class 9; increase it"):
        MNIST(folder=folder, num_classes=9).setup("fit")
    with pytest.raises(ValueError, match=r"data.classes=\[0,1,2,3,4,…\]: 10 names, but the data has 11 classes"):
        MNIST(folder=folder, num_classes=11, classes=list("0123456789")).setup("fit")
    with pytest.raises(ValueError, match=r"data.classes=\[a\]: 1 names, but the data has 10 classes; give as many"):
        MNIST(folder=folder, classes=["a"]).setup("fit")
    (folder / NAMES[1]).write_bytes((folder / NAMES[3]).read_bytes())
    with pytest.raises(
        ValueError, match=r"train-images.* has 400 images, but .*train-labels.* 100 labels; replace both"
    ):
        MNIST(folder=folder).setup("fit")
    with pytest.raises(ValueError, match=r"data.val_fraction=0.5 is not in"):
        MNIST(folder=folder, val_fraction=0.5)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create")
def test_only_training_images_are_augmented_on_any_worker(folder: Path) -> None:
    def epoch(num_workers: int, epoch: int, batch_size: int = 40) -> dict[int, torch.Tensor]:
        data = MNIST(
            folder=folder, augment=Augment(shift=2, brightness=0.5), num_workers=num_workers, batch_size=batch_size
        )
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        order = [i for batch in loader.sampler for i in batch]
        return dict(zip(order, torch.cat([inputs for inputs, _ in loader]), strict=True))

    alone = epoch(0, 1)
    for other in (epoch(2, 1), epoch(0, 1, 24)):
        assert all(torch.equal(alone[i], image) for i, image in other.items())
    assert any(not torch.equal(alone[i], image) for i, image in epoch(0, 2).items())
    plain, changed = MNIST(folder=folder), MNIST(folder=folder, augment=Augment(shift=2))
    for loader in ("val_dataloader", "test_dataloader"):
        for one, other in zip(getattr(plain, loader)(), getattr(changed, loader)(), strict=True):
            assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("option", ["mnist", "fashion_mnist"])
def test_options_build_and_have_all_checksums(option: str, folder: Path) -> None:
    cfg = Settings({"seed": 3, "data": OmegaConf.load(CONFIGS / f"{option}.yaml")})
    assert sorted(cfg.data["checksums"]) == sorted(NAMES)
    assert all(len(value) == len("sha256:") + 64 for value in cfg.data["checksums"].values())
    data = build(cfg.data, "data")
    assert (data.seed, data.folder, data.shape) == (3, Path(f"data/{option}"), (1, 28, 28))
    assert len(data.classes) == 10


@pytest.mark.parametrize(("test", "size"), [("t10k", 400), ("train", 360)])
def test_folds_divide_the_training_files(folder: Path, test: Any, size: int) -> None:
    tested = numbers(splits(MNIST(folder=folder, test=test))[2][0])
    vals: list[int] = []
    for fold in range(4):
        (train, _), (val, labels), (rest, _) = splits(MNIST(folder=folder, test=test, num_folds=4, fold=fold))
        assert torch.bincount(labels).tolist() == [size // 40] * 10
        assert not numbers(train) & numbers(val)
        assert (len(train), numbers(rest)) == (size * 3 // 4, tested)
        vals += sorted(numbers(val))
    assert len(set(vals)) == len(vals) == size


def test_a_gzip_file_that_expands_to_any_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = tmp_path / "train-images-idx3-ubyte.gz", 1 << 20
    raw = bytes((0, 0, 8, 3)) + struct.pack(">III", size, 1, 1) + bytes(size)
    path.write_bytes(gzip.compress(raw))
    assert len(read_idx(path, 3)) == size
    monkeypatch.setattr("boltcutter.files.ALWAYS_EXPANDED", 1 << 16)
    with pytest.raises(ValueError, match="expands to more than 100 times its size; decompress it yourself"):
        read_idx(path, 3)
    path.with_suffix("").write_bytes(raw)
    assert len(read_idx(path.with_suffix(""), 3)) == size
