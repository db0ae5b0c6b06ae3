import base64
import io
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from boltcutter.report.pixels import MAX_PIXELS, arrange, encode_image, encode_png, to_pixels

RGB = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)  # (H, W, C)
CHW = np.moveaxis(RGB, -1, 0)


@pytest.mark.parametrize(
    "image",
    [
        RGB,
        torch.from_numpy(RGB),
        torch.from_numpy(CHW.copy()),
        torch.from_numpy(CHW / 255.0).requires_grad_(),
        CHW.astype(np.int64),
        RGB.astype(np.float32) / 255,
        Image.fromarray(RGB),
    ],
)
def test_each_form_of_a_picture_has_the_same_pixels(image: Any) -> None:
    (found,) = to_pixels(image)
    assert (found == CHW).all()


def test_files_and_w_and_b_images_are_read(tmp_path: Path) -> None:
    import wandb

    Image.fromarray(RGB).save(tmp_path / "a.png")
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), wandb.Image(RGB)):
        assert (to_pixels(image)[0] == CHW).all()


def test_a_figure_is_drawn_and_keeps_its_canvas() -> None:
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    canvas = figure.canvas
    for image in (figure, figure.axes[0]):
        assert to_pixels(image)[0].shape == (4, 50, 100)
    assert figure.canvas is canvas


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[True, False]], [255, 0]),
        ([[-1.0, 0.0, 1.0]], [0, 128, 255]),
        ([[0.0, 127.5, 255.0]], [0, 128, 255]),
        ([[0.25, float("nan"), float("inf")]], [64, 0, 255]),
        ([[300, -5, 9]], [255, 0, 9]),
    ],
)
def test_values_of_any_range_are_shown(values: Any, expected: list[int]) -> None:
    assert to_pixels(torch.tensor(values))[0].ravel().tolist() == expected
    assert to_pixels(torch.tensor(values).bfloat16())[0].shape == (1, 1, len(expected))


def test_channels_are_found_where_both_ends_could_be() -> None:
    assert (to_pixels(torch.eye(3).repeat(3, 1, 1))[0].shape, to_pixels(np.zeros((3, 9, 1)))[0].shape) == (
        (3, 3, 3),
        (1, 3, 9),
    )


def test_a_batch_is_a_grid() -> None:
    pictures = to_pixels(torch.ones(5, 1, 4, 6))
    assert arrange(pictures).shape == (1, 2 * 4 + 2, 3 * 6 + 2 * 2)
    assert arrange([*pictures, CHW]).shape[0] == 4  # grey and color
    assert arrange(pictures[:1]) is pictures[0]


@pytest.mark.parametrize("image", [3, "no-such-file.txt", torch.zeros(2, 5, 5), np.zeros((0, 3)), np.array(["a"])])
def test_what_is_no_picture_is_refused(image: Any) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"is not a picture|no-such-file"):
        to_pixels(image)


def decode(url: str) -> npt.NDArray[np.uint8]:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.atleast_3d(np.asarray(image))


@pytest.mark.parametrize("channels", [1, 3])
def test_small_images_are_lossless(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (channels, 8, 5), dtype=np.uint8)
    encoded = encode_image(pixels)
    assert encoded["small"]
    assert (decode(encoded["url"]) == np.moveaxis(pixels, 0, -1)).all()


@pytest.mark.parametrize("shape", [(3, 300, 500), (1, 129, 129), (1, 1, 1000)])
def test_large_images_are_downscaled(shape: tuple[int, int, int]) -> None:
    gradient = np.linspace(0, 255, shape[2]).astype(np.uint8)
    encoded = encode_image(np.broadcast_to(gradient, shape))
    found = decode(encoded["url"])
    assert not encoded["small"]
    assert max(found.shape) <= MAX_PIXELS
    assert (np.diff(found[0, :, 0].astype(int)) > 0).all()  # pixels are averages of neighbours
    assert abs(float(found.mean()) - 127) < 3


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_is_lossless(channels: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (channels, 6, 9), dtype=np.uint8)
    with Image.open(io.BytesIO(encode_png(pixels))) as image:
        assert (np.moveaxis(np.atleast_3d(np.asarray(image)), -1, 0) == pixels).all()


def test_a_file_is_not_opened_by_decoders_that_run_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of EPS would start Ghostscript, whatever the name of the file."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/touched\n")
    (tmp_path / "gs").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(OSError, match="cannot identify"):
        to_pixels(tmp_path / "a.png")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("as_pil", [True, False])
def test_integers_above_eight_bits_are_stretched(as_pil: bool) -> None:
    values = np.array([[0, 32768], [65535, 65535]], np.uint16)
    (pixels,) = to_pixels(Image.fromarray(values) if as_pil else values)
    assert pixels[0].tolist() == [[0, 128], [255, 255]]
