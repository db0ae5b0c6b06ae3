import base64
import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from boltcutter_logging.image import MAX_PIXELS, encode_image, encode_png


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
