"""Images and videos in messages: each form gives the same medium, and bad ones one sentence."""

import base64
import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from streamrl.errors import RolloutError
from streamrl.types import Media
from streamrl.vision import parts
from streamrl.vision.parts import MAX_PIXELS, as_template_reads, decode, loaded, media_of, paths_in
from tests.tiny_vision import png

DATA = png(20, 12)
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()


def messages(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": DATA},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "image": {"bytes": DATA, "path": None}},
        {"type": "image", "image": {"bytes": None, "path": "a.png"}},
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png", "text": None},
        {"type": "image", "image": Media.image(DATA)},
        {"type": "image", "image": Image.open(io.BytesIO(DATA))},
    ],
)
def test_every_form_of_an_image_gives_the_same_medium(part, tmp_path):
    (tmp_path / "a.png").write_bytes(DATA)
    read = loaded(messages({"type": "text", "text": "?"}, part), "a row", tmp_path)
    (medium,) = media_of(read, "a row")
    assert decode(medium.parts[0], "").tobytes() == decode(DATA, "").tobytes()
    assert media_of(loaded(read, "a row", tmp_path), "a row") == (medium,)
    assert as_template_reads(read)[0]["content"] == [
        {"type": "text", "text": "?"},
        {"type": "image"},
    ]


def test_a_video_is_the_list_of_its_frames():
    video = {"type": "video", "video": [DATA, URL], "fps": 4}
    assert media_of(messages(video), "a row") == (Media.video([DATA, DATA], 4.0),)


def test_a_path_may_be_a_url_of_this_machine(tmp_path):
    """As Qwen's messages have them."""
    (tmp_path / "a.png").write_bytes(DATA)
    part = messages({"type": "image", "image": f"file://{tmp_path}/a.png"})
    assert media_of(loaded(part, "a row", Path("elsewhere")), "a row") == (Media.image(DATA),)
    assert all(Path("elsewhere", name).is_file() for name in paths_in(part, "a row"))


def test_a_path_is_read_for_the_prompts_of_data_alone(tmp_path):
    part = {"type": "image", "image": "a.png"}
    both = messages(part, {"type": "image", "image": URL})
    assert list(paths_in(both, "row 1")) == ["a.png"]
    with pytest.raises(RolloutError, match=r"^row 1: an image was the path 'a.png'; files"):
        media_of(messages(part), "row 1")
    with pytest.raises(RolloutError, match=r"^row 1: cannot read .*a\.png: No such file"):
        loaded(messages(part), "row 1", tmp_path)


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header announces so many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"GIF89a....", "is no image; PNG, JPEG, WEBP, BMP are read"),
        (b"", "is no image"),
        (bomb(20_000, 20_000), "an image"),
        (bomb(9_000, 9_000), rf"has 9000 x 9000 pixels; at most {MAX_PIXELS} are decoded"),
        (bomb(4000, 2), "its longer side may have 200 times its shorter one"),
        ("https://example.org/a.png", "was 'https://example.org/a.png'; it must be a path, bytes"),
        ("data:image/png,abc", "the data: URL 'data:image/png' is damaged: it is not base64"),
        ("data:image/png;base64,%%", "the data: URL .* is damaged"),
        (7, "an image was 7; it must be a path, bytes"),
        (None, "an image was None"),
    ],
)
def test_a_bad_image_is_one_sentence(value, sentence):
    with pytest.raises(RolloutError, match=f"^row 1: .*{sentence}") as raised:
        media_of(messages({"type": "image", "image": value}), "row 1")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"video": "a.mp4"}, "a video was 'a.mp4'; it must be the list of its frames"),
        ({"video": []}, r"a video was \[\]"),
        ({"video": [DATA], "fps": 0}, "the fps of a video was 0; it must be above 0"),
        ({"video": [DATA], "fps": "2"}, "the fps of a video was '2'"),
        ({"video": [DATA, b"x"]}, "is no image"),
    ],
)
def test_a_bad_video_is_one_sentence(part, sentence):
    with pytest.raises(RolloutError, match=f"^row 1: .*{sentence}"):
        media_of(messages({"type": "video", **part}), "row 1")


def test_a_cut_image_is_refused_when_it_is_decoded():
    with pytest.raises(RolloutError, match=r"^a row: an image is damaged"):
        decode(DATA[:-40], "a row")


def test_an_image_file_above_the_limit_is_not_decoded(monkeypatch):
    monkeypatch.setattr(parts, "MAX_BYTES", len(DATA) - 1)
    with pytest.raises(RolloutError, match=f"has {len(DATA)} bytes; at most {len(DATA) - 1}"):
        decode(DATA, "a row")
