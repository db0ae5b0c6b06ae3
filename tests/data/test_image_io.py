import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from boltcutter.data.image_io import check_image_shape, is_encoded_image, read_image, read_image_shape, read_images


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)
    return path


def test_pixels_are_unchanged_at_the_same_size(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    image = read_image(save(tmp_path / "a.png", pixels), (3, 5, 7))
    assert image.dtype == torch.uint8
    assert np.array_equal(image.permute(1, 2, 0), pixels)


def test_images_are_center_cropped(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 200
    assert (read_image(save(tmp_path / "a.png", pixels), (3, 10, 10)) == 200).all()
    assert (read_image(save(tmp_path / "b.png", pixels.transpose(1, 0, 2)), (1, 4, 4))[0, 1:3] == 200).all()


@pytest.mark.parametrize("size", [(1, 1), (3, 100), (100, 3), (8, 8), (401, 399)])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 9), (3, 16, 4)])
def test_images_of_any_size_are_resized_to_the_shape(
    tmp_path: Path, size: tuple[int, int], shape: tuple[int, int, int]
) -> None:
    image = read_image(save(tmp_path / "a.png", np.full((*size, 3), 77, np.uint8)), shape)
    assert image.shape == shape
    assert (image == 77).all()


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    pixels = np.array([[0, 256], [0x7F00, 0xFFFF]], np.uint16)
    assert read_image(save(tmp_path / "a.png", pixels), (1, 2, 2)).tolist() == [[[0, 1], [127, 255]]]


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16), np.uint8)
    pixels[:8] = 255
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    image = read_image(save(tmp_path / "a.jpg", pixels, exif=turned), (1, 16, 16))[0]
    assert image[:7].max() < 20
    assert image[9:].min() > 235


def test_a_large_jpeg_equals_the_same_png(tmp_path: Path) -> None:
    pixels = np.linspace(0, 255, 1200 * 800).reshape(800, 1200).astype(np.uint8)
    small = [read_image(save(tmp_path / name, pixels), (1, 20, 30)) for name in ("a.png", "a.jpg")]
    assert (small[0].int() - small[1].int()).abs().max() <= 3


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = save(tmp_path / "a.png", np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8))
    path.write_bytes(path.read_bytes()[:3000] if content is None else content)
    with pytest.raises(ValueError, match=r"^.*a.png: not a valid image \(.+\); remove or replace it$"):
        read_image(path, (3, 5, 5))


def test_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deeper").mkdir(parents=True)
    for number, name in enumerate(["b.png", "a.JPG", "sub/c.jpeg", "sub/deeper/d.png", ".hidden.png", "note.txt"]):
        if name == "note.txt":
            (tmp_path / name).write_text("no image")
        else:
            save(tmp_path / name, np.full((4, 4), number * 50, np.uint8), format="PNG")
    with pytest.warns(UserWarning, match=r"input=.*: not read: 1 \.txt"):
        inputs, names = read_images([tmp_path], (1, 4, 4))
    assert [Path(name).name for name in names] == ["a.JPG", "b.png", "c.jpeg", "d.png"]
    assert inputs[:, 0, 0, 0].tolist() == [50, 0, 100, 150]
    inputs, names = read_images([tmp_path / "sub", tmp_path / "b.png"], (3, 2, 2))
    assert inputs.shape == (3, 3, 2, 2)
    assert names[-1] == str(tmp_path / "b.png")


def test_invalid_settings_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"input=.*: no image \(.*\) there; give images or a folder"):
        read_images([tmp_path], (1, 4, 4))
    with pytest.raises(ValueError, match=r"input=.*gone: no such file or folder"):
        read_images([tmp_path / "gone"], (1, 4, 4))
    with pytest.raises(ValueError, match=r"data.shape=\[2, 8, 8\] must be channels"):
        check_image_shape((2, 8, 8))


@pytest.mark.parametrize(
    ("mode", "suffix", "colour"),
    [
        ("L", ".png", 60),
        ("LA", ".png", (60, 0)),
        ("RGBA", ".png", (60, 60, 60, 0)),
        ("RGBA", ".webp", (60, 60, 60, 255)),
        ("P", ".gif", 60),
        ("CMYK", ".jpg", (195, 195, 195, 0)),
        ("CMYK", ".tif", (195, 195, 195, 0)),
        ("I;16", ".tif", 60 * 256),
        ("I;16", ".png", 60 * 256),
        ("RGB", ".bmp", (60, 60, 60)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_all_modes_become_eight_bits(tmp_path: Path, mode: str, suffix: str, colour: object, channels: int) -> None:
    path = tmp_path / f"a{suffix}"
    image = Image.new(mode, (6, 5), colour)  # type: ignore[arg-type]
    if mode == "P":
        image.putpalette([value for value in range(256) for _ in range(3)])
    image.save(path, lossless=True)
    pixels = read_image(path, (channels, 5, 6))
    assert (pixels.int() - 60).abs().max() <= 1
    assert read_image_shape(path)[1:] == (5, 6)
    assert is_encoded_image(path.read_bytes())


def test_a_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 60, 70, 80])
    image.save(tmp_path / "a.png", transparency=bytes([255, 0]))
    assert read_image(tmp_path / "a.png", (3, 4, 4))[:, 0, 0].tolist() == [60, 70, 80]


@pytest.mark.parametrize(("value", "kind"), [(0.5, "floating point"), (70_000, "32 bits"), (-1, "32 bits"), (60, "32")])
def test_pixels_without_a_known_range_are_refused(tmp_path: Path, value: float, kind: str) -> None:
    mode = "F" if isinstance(value, float) else "I"
    Image.new(mode, (4, 4), value).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=rf"a\.tif: .*of {kind}.* from .* range is not known; save it with 8 or 16"):
        read_image(tmp_path / "a.tif", (1, 4, 4))


def write_tiff(path: Path, contents: bytes, bits: int, photometric: int, sample_format: int) -> Path:
    """Write 4 x 4 pixels in a form that Pillow does not write."""
    tags = {256: 4, 257: 4, 258: bits, 259: 1, 262: photometric, 273: 134, 277: 1, 278: 4, 279: len(contents)}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in (tags | {339: sample_format}).items()]
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4) + contents)
    return path


def test_twelve_bits_and_inverted_ones_are_scaled(tmp_path: Path) -> None:
    twelve = write_tiff(tmp_path / "a.tif", b"\x3c\x03\xc0" * 8, 12, 1, 1)
    assert read_image(twelve, (1, 4, 4)).unique().tolist() == [60]
    inverted = write_tiff(tmp_path / "b.tif", np.full(16, 0xFFFF - 60 * 257, "<u2").tobytes(), 16, 0, 1)
    assert read_image(inverted, (3, 4, 4)).unique().tolist() == [60]
    signed = write_tiff(tmp_path / "c.tif", np.full(16, 60, "<i2").tobytes(), 16, 1, 2)
    with pytest.raises(ValueError, match=r"c\.tif: .*16 bits with a sign from 60 to 60, whose range is not known"):
        read_image(signed, (1, 4, 4))


def test_values_of_twelve_bits_in_sixteen_are_reported(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.full((4, 4), 60 * 16, np.uint16))
    with pytest.warns(UserWarning, match=r"16 bits whose values are all below 4,096.*multiply them by 16"):
        assert read_image(path, (1, 4, 4)).unique().tolist() == [3]
    pixels = b"".join(b"\0" + struct.pack(">12H", *[value] * 12) for value in [60 * 16] * 4)
    parts = ((b"IHDR", struct.pack(">2I5B", 4, 4, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part)) for name, part in parts
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))  # of three channels, which Pillow does not write
    with pytest.warns(UserWarning, match="16 bits whose values are all below 4,096"):
        assert read_image(path, (3, 4, 4)).unique().tolist() == [3]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_the_shape_is_that_of_the_upright_image(tmp_path: Path, suffix: str) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    path = save(tmp_path / f"a{suffix}", np.zeros((8, 16, 3), np.uint8), exif=turned)
    assert read_image_shape(path) == (3, 16, 8)


def test_a_picture_in_lab_has_three_channels(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    Image.new("LAB", (4, 4), (128, 0, 0)).save(path)
    assert read_image_shape(path)[0] == 3
    assert read_image(path, (1, 4, 4)).shape == (1, 4, 4)


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".webp"])
def test_several_frames_are_reported(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 4), (level,) * 3) for level in (50, 200)]
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:])
    with pytest.warns(UserWarning, match="several frames or pages, of which the first is read"):
        assert (read_image(tmp_path / f"a{suffix}", (1, 4, 4)).int() - 50).abs().max() <= 2


def test_only_the_listed_formats_are_decoded(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png: not a valid image"):
        read_image(tmp_path / "a.png", (1, 4, 4))


@pytest.mark.parametrize("contents", [b"BM0123456789", b"RIFFxxxxWAVE", b"P5 is a text", b""])
def test_bytes_that_are_no_image(contents: bytes) -> None:
    assert not is_encoded_image(contents)
