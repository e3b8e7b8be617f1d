"""Images in the rows of data files and in rendered conversations."""

import base64
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from actors.prompts import open_prompts
from actors.rendering.renderer import ChatRenderer, PromptTooLongError, PromptVision, load_media
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Prompt
from streamrl.types import Media
from streamrl.vision.places import Placeholders
from tests.tiny_model import VOCAB_SIZE
from tests.tiny_vision import END, IMAGE, START, TOKENIZER, make_qwen, png, reader

DATA, OTHER = png(16, 16), png(40, 24, 1)


def settings(source: Path, **overrides: object) -> DataSettings:
    given = {"image_key": "images", **overrides}
    return DataSettings(source=str(source), shuffle=False, **given)


def renderer(**overrides: object) -> ChatRenderer:
    data = DataSettings(source="addition", **overrides)
    vision = PromptVision(reader(), Placeholders.of(make_qwen().config))
    return ChatRenderer(TOKENIZER, data, vision)


def jsonl(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"answer": "x", **row}) + "\n" for row in rows))
    return path


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def test_images_of_a_column_stand_at_their_markers_or_before_the_text(tmp_path):
    (tmp_path / "a.png").write_bytes(DATA)
    url = "data:image/png;base64," + base64.b64encode(OTHER).decode()
    path = jsonl(
        tmp_path,
        {"prompt": "ab<image>c<image>?", "images": ["a.png", url]},
        {"prompt": "ab?", "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": "<image>d"}], "images": [{"path": "a.png"}]},
        {"prompt": "ab?", "images": "a.png"},
        {"prompt": "ab?", "images": {"path": "a.png"}},
        {"prompt": "ab?", "images": []},
        {"prompt": "ab?", "images": None},
    )
    prompts = open_prompts(settings(path, system_prompt="g"), 0)
    own = renderer()
    one, four = [START, IMAGE, END], [START, *[IMAGE] * 4, END]
    expected = [
        [*ids("gab"), *one, *ids("c"), *four, *ids("?")],
        [*ids("g"), *one, *ids("ab?")],
        [*one, *ids("d")],
        [*ids("g"), *one, *ids("ab?")],
        [*ids("g"), *one, *ids("ab?")],
    ]
    for i, token_ids in enumerate(expected):
        prompt = load_media(prompts[i])
        assert list(own.encode(prompt)) == token_ids
    first = own.media_of(load_media(prompts[0]))
    assert first == (Media.image(DATA), Media.image(OTHER))
    assert prompts[5].content == prompts[6].content == "ab?"


def test_a_dot_reaches_into_the_column_of_the_images(tmp_path):
    (tmp_path / "a.png").write_bytes(DATA)
    path = jsonl(tmp_path, {"prompt": "ab<image>", "extra": {"images": ["a.png"]}})
    prompt = load_media(open_prompts(settings(path, image_key="extra.images"), 0)[0])
    assert renderer().media_of(prompt) == (Media.image(DATA),)


def test_parts_of_parquet_rows_are_read_as_datasets_writes_them(tmp_path):
    part = {"type": "image", "text": None, "image": {"bytes": DATA, "path": None}}
    text = {"type": "text", "text": "ab", "image": None}
    row = {"prompt": [{"role": "user", "content": [part, text]}], "answer": "x"}
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    prompt = open_prompts(DataSettings(source=str(path)), 0)[0]
    assert list(renderer().encode(load_media(prompt))) == [START, IMAGE, END, *ids("ab")]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "<image><image>", "images": ["a.png"]}, "line 1 .* has 2 markers <image> and"),
        ({"prompt": "a", "images": ["b.png"]}, r"line 1 .*: there is no file .*b\.png"),
        ({"prompt": "a", "images": 3}, "line 1 .*: an image was 3; it must be a path, bytes"),
        ({"prompt": "a", "images": [{}]}, "line 1 .*: an image was {}; it must be a path, bytes"),
        ({"prompt": "a", "images": ["iVBORw0KGgo" * 500]}, "line 1 .*: there is no file .*iVBOR"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "line 1 .*: an image was None; it must be a path, bytes",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "x"}]}]}, "line 1 .*: prompt was "),
    ],
)
def test_a_row_that_cannot_be_used_is_named_when_the_file_is_opened(tmp_path, row, sentence):
    (tmp_path / "a.png").write_bytes(DATA)
    with pytest.raises(ConfigError, match=sentence):
        open_prompts(settings(jsonl(tmp_path, {"images": [], **row})), 0)


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.image_key: .* has no column 'images'"):
        open_prompts(settings(jsonl(tmp_path, {"prompt": "a", "image": []})), 0)


def prompt_of(*parts: object) -> Prompt:
    return Prompt(({"role": "user", "content": list(parts)},), "x", origin="row 1")


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def picture(data: bytes) -> dict[str, object]:
    return {"type": "image", "image": data}


def test_a_placeholder_in_a_text_is_refused():
    prompt = prompt_of(picture(DATA), text("a<|image_pad|>"))
    with pytest.raises(RolloutError, match=r"^row 1: the chat template wrote 2 placeholders for 1"):
        renderer().encode(prompt)


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_an_image_is_not_cut(truncation):
    with pytest.raises(ConfigError, match=rf"^data\.truncation {truncation}: row 1 has 6 tokens"):
        renderer(truncation=truncation, max_prompt_length=5).encode(prompt_of(picture(OTHER)))
    with pytest.raises(PromptTooLongError):
        renderer(truncation="drop", max_prompt_length=5).encode(prompt_of(picture(OTHER)))


def test_a_model_that_sees_none_is_named():
    blind = ChatRenderer(TOKENIZER, DataSettings(source="addition"))
    with pytest.raises(ConfigError, match=r"^model\.path: row 1 has images, and the model sees"):
        blind.encode(prompt_of(picture(DATA)))


@pytest.mark.parametrize(
    ("generator", "key", "sentence"),
    [
        ({"engine": "sglang"}, "image_key", "data.image_key with generator.sglang"),
        (
            {"engine": "vllm", "vllm": {"url": "http://127.0.0.1:1"}},
            "image_key",
            "data.image_key with generator.vllm.url",
        ),
        ({"engine": "vllm"}, "video_key", "data.video_key with generator.engine vllm"),
    ],
)
def test_engines_that_take_no_media_are_refused_by_the_configuration(generator, key, sentence):
    config = {"model": {"path": "m"}, "data": {"source": "a.jsonl", key: "x"}}
    with pytest.raises(ValueError, match=sentence):
        RunConfig.model_validate({**config, "generator": generator})


def test_the_alphabet_of_the_tiny_models_is_apart():
    assert max(START, END, IMAGE) < VOCAB_SIZE
