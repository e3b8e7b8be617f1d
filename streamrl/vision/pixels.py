"""Encoded images to pixels, under limits that a hostile file cannot exceed.

Invariant: no more than MAX_PIXELS are decoded of one image, whatever its header says, and only by
decoders of still images.
"""

import io
import warnings
from typing import Any

from streamrl.errors import RolloutError
from streamrl.extras import missing

MAX_PIXELS = 2**26
"""Of one image: 64 million."""
MAX_BYTES = 2**26
"""Of one encoded image."""
MAX_ASPECT = 200
"""The longer side of an image in lengths of the shorter one."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


def pillow(place: str) -> Any:
    """Pillow's `Image` module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise missing(f"{place}: has images, which", error) from error
    return Image


def decode(data: bytes, place: str) -> Any:
    """The image in `data` as Pillow's, in RGB and upright; `place` is where it was found.

    Raises:
        RolloutError: it is no image that is read here, or exceeds a limit.
    """
    image = opened(data, place)
    from PIL import ImageOps

    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise RolloutError(f"{place}: an image is damaged: {error}") from error


def opened(data: bytes, place: str) -> Any:
    """The image with its header read and its pixels not, within the limits.

    Raises:
        RolloutError: as `decode`.
    """
    image_of = pillow(place)
    if len(data) > MAX_BYTES:
        raise RolloutError(f"{place}: an image has {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        # Pillow's own warning of large images; the limit below is ours.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image_of.DecompressionBombWarning)
            image = image_of.open(io.BytesIO(data), formats=FORMATS)
    except image_of.DecompressionBombError as error:
        raise RolloutError(f"{place}: an image is too large: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise RolloutError(
            f"{place}: {data[:8]!r}... is no image; {', '.join(FORMATS)} are read"
        ) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RolloutError(
            f"{place}: an image has {width} x {height} pixels; at most {MAX_PIXELS} are decoded"
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise RolloutError(
            f"{place}: an image has {width} x {height} pixels; its longer side may have "
            f"{MAX_ASPECT} times its shorter one"
        )
    return image


def encode_png(image: Any) -> bytes:
    """A Pillow image as PNG: the same bytes for the same pixels."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
