"""Content parts of chat messages that are images or videos, and their media.

    {"type": "image", "image": X}       {"type": "image_url", "image_url": {"url": X}}
    {"type": "video", "video": [X, ...], "fps": 2}

X is a path, bytes, a `data:` URL with base64, a Pillow image, {"bytes": ..., "path": ...} as in
parquet files of the `datasets` library, or a `Media`. A video is a list of its frames.

Invariant: a medium is read once, by `loaded`; afterwards messages contain `Media`, and paths from
elsewhere are refused, since a stranger may have written the conversation. Encoded images become
pixels within limits that a hostile file cannot exceed: at most MAX_PIXELS of an image are decoded,
whatever its header says, and only by decoders of still images.
"""

import base64
import binascii
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.data_files import shown
from streamrl.errors import RolloutError
from streamrl.extras import missing
from streamrl.types import Media

MAX_PIXELS = 2**26
"""The most pixels of one image: 64 million."""
MAX_BYTES = 2**26
"""The most bytes of one encoded image."""
MAX_ASPECT = 200
"""The largest ratio of an image's longer side to its shorter one."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


def pillow(place: str) -> Any:
    """Return Pillow's `Image` module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise missing(f"{place}: has images, which", error) from error
    return Image


def decode(data: bytes, place: str) -> Any:
    """Decode an image to a Pillow image, in RGB and upright; `place` says where it was found.

    Raises:
        RolloutError: it is no image in a supported format, or exceeds a limit.
    """
    image = opened(data, place)
    from PIL import ImageOps

    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise RolloutError(f"{place}: an image is damaged: {error}") from error


def opened(data: bytes, place: str) -> Any:
    """Open an image and check its limits: reads the header, not the pixels. Raises as `decode`
    does."""
    image_of = pillow(place)
    if len(data) > MAX_BYTES:
        raise RolloutError(f"{place}: an image has {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        # Silence Pillow's own warning about large images; our limit is below.
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


DEFAULT_FPS = 2.0
_KINDS = {"image": "image", "image_url": "image", "input_image": "image", "video": "video"}
_FORMS = "a path, bytes, a data: URL, a Pillow image or {'bytes': ..., 'path': ...}"


def is_medium(part: Any) -> bool:
    """Whether the content part is an image or a video."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def media_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the images and videos of a conversation, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            yield from (part for part in content if is_medium(part))


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the conversation holds images or videos."""
    return any(True for _ in media_parts(messages))


def media_of(messages: Sequence[Mapping[str, Any]], place: str) -> tuple[Media, ...]:
    """The media of a conversation, in order; no path is read.

    Raises:
        RolloutError: a medium is malformed, too large or a path; the message begins with `place`.
    """
    return tuple(_medium(part, place, None) for part in media_parts(messages))


def loaded(
    messages: Sequence[Mapping[str, Any]], place: str, folder: Path
) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation with its images and videos read to `Media`; paths are relative to
    `folder`.

    Raises:
        RolloutError: a file cannot be read, or holds no image within the limits.
    """
    return tuple(_loaded(message, place, folder) for message in messages)


def _loaded(message: Mapping[str, Any], place: str, folder: Path) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(map(is_medium, content)):
        return message
    parts = [_medium(part, place, folder) if is_medium(part) else part for part in content]
    named = ({"type": p.kind, p.kind: p} if isinstance(p, Media) else p for p in parts)
    return {**message, "content": tuple(named)}


def paths_in(messages: Sequence[Mapping[str, Any]], place: str) -> Iterator[str]:
    """The files that `loaded` will read.

    Raises:
        RolloutError: an image has none of the forms that are read.
    """
    for part in media_parts(messages):
        if isinstance(_value(part), Media):
            continue
        for image in _images(part, place):
            inner = _unwrapped(image, place)
            if isinstance(inner, str | Path) and not str(inner).startswith("data:"):
                yield str(inner).removeprefix("file:")


def as_template_reads(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as a chat template takes it: with the kinds of parts in their places,
    without the media themselves."""
    return [{**message, "content": _placed(message.get("content"))} for message in messages]


def _placed(content: Any) -> Any:
    if not isinstance(content, list | tuple):
        return content
    return [{"type": _KINDS[part["type"]]} if is_medium(part) else part for part in content]


def _medium(part: Mapping[str, Any], place: str, folder: Path | None) -> Media:
    value = _value(part)
    if isinstance(value, Media):
        return value
    images = [_read(image, place, folder) for image in _images(part, place)]
    for image in images:
        opened(image, place)
    if _KINDS[part["type"]] == "image":
        return Media.image(*images)
    fps = part.get("fps", DEFAULT_FPS)
    if not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise RolloutError(f"{place}: the fps of a video was {shown(fps)}; it must be above 0")
    return Media.video(images, float(fps))


def _images(part: Mapping[str, Any], place: str) -> Sequence[Any]:
    """The image, or the frames of the video."""
    value = _value(part)
    if _KINDS[part["type"]] == "image":
        return (value,)
    if not isinstance(value, list | tuple) or not value:
        raise RolloutError(
            f"{place}: a video was {shown(value)}; it must be the list of its frames, each {_FORMS}"
        )
    return value


def _value(part: Mapping[str, Any]) -> Any:
    keys = (_KINDS[part["type"]], part["type"], "url", "path")
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _read(value: Any, place: str, folder: Path | None) -> bytes:
    match _unwrapped(value, place):
        case bytes() as data:
            return data
        case str() as url if url.startswith("data:"):
            return _of_url(url, place)
        case str() | Path() as path:
            return _of_file(str(path), place, folder)
        case image:
            return encode_png(image)


def _unwrapped(value: Any, place: str) -> Any:
    """Unwrap an image to bytes, a data: URL, a path, or a Pillow image."""
    match value:
        case {"url": inner}:
            return _unwrapped(inner, place)
        case {"bytes": bytes() as data}:
            return data
        case {"path": str() as inner}:
            return _unwrapped(inner, place)
        case bytes():
            return value
        case str() if value.startswith("data:"):
            return value
        case str() | Path() if "://" not in str(value).removeprefix("file://"):
            return value
        case _ if hasattr(value, "convert") and hasattr(value, "save"):
            return value
    raise RolloutError(f"{place}: an image was {shown(value)}; it must be {_FORMS}")


def _of_url(url: str, place: str) -> bytes:
    header, _, body = url.partition(",")
    try:
        if not header.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise RolloutError(f"{place}: the data: URL {shown(header)} is damaged: {error}") from error


def _of_file(name: str, place: str, folder: Path | None) -> bytes:
    if folder is None:
        raise RolloutError(
            f"{place}: an image was the path {shown(name)}; files are read for the prompts of "
            "data alone: give its bytes"
        )
    path = folder / name.removeprefix("file:")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RolloutError(f"{place}: cannot read {path}: {error.strerror or error}") from error
