"""The patches of images and videos, beside transformers' own formulas."""

import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from streamrl.errors import ConfigError
from streamrl.types import Media
from streamrl.vision import parts, patches
from streamrl.vision.patches import PatchReader
from tests.tiny_model import save_llama
from tests.tiny_vision import image, make_qwen, png, reader, save_qwen

PATCH, MERGE, DEPTH = 8, 2, 2


def test_patches_of_an_image_are_those_of_transformers():
    medium = image(70, 41)
    opened = Image.open(io.BytesIO(medium.parts[0]))
    expected = Qwen2VLImageProcessorPil(
        patch_size=PATCH, size={"shortest_edge": 256, "longest_edge": 16384}
    )(images=[opened], return_tensors="np")
    read = reader().read(medium)
    np.testing.assert_array_equal(read.values, expected["pixel_values"])
    assert read.grid == tuple(expected["image_grid_thw"][0]) == (1, 6, 8)
    assert reader().size(medium) == ("image", 12)


def video_patches(frames: torch.Tensor) -> torch.Tensor:
    """[P, D] of normalized frames [F, C, H, W], as Qwen2VLVideoProcessor.patchify does it."""
    frames = torch.cat([frames, frames[-1:].expand(-len(frames) % DEPTH, -1, -1, -1)])
    _, channels, height, width = frames.shape
    rows, columns = height // PATCH, width // PATCH
    split = frames.view(
        len(frames) // DEPTH,
        DEPTH,
        channels,
        rows // MERGE,
        MERGE,
        PATCH,
        columns // MERGE,
        MERGE,
        PATCH,
    )
    order = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return order.reshape(-1, channels * DEPTH * PATCH * PATCH)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_patches_of_a_video_are_those_of_transformers(num_frames):
    video = Media.video([png(48, 32, seed) for seed in range(num_frames)], fps=4.0)
    read = reader().read(video)
    normalized = []
    processor = Qwen2VLImageProcessorPil()
    for part in video.parts:
        pixels_of = np.asarray(Image.open(io.BytesIO(part))).transpose(2, 0, 1)
        scaled = processor.rescale(pixels_of, 1 / 255)
        normalized.append(processor.normalize(scaled, processor.image_mean, processor.image_std))
    expected = video_patches(torch.from_numpy(np.stack(normalized)))
    np.testing.assert_allclose(read.values, expected.numpy(), atol=1e-6)
    assert read.grid == (-(-num_frames // DEPTH), 4, 6)
    assert read.seconds_per_grid == DEPTH / 4.0


def test_frames_of_other_sizes_get_that_of_the_first():
    video = Media.video([png(48, 32), png(80, 64)], fps=2.0)
    assert reader().read(video).grid == (1, 4, 6)


def test_a_medium_is_decoded_once_and_forgotten_when_memory_is_short(monkeypatch):
    decoded = []

    def counting(data: bytes, place: str) -> object:
        decoded.append(data)
        return parts.decode(data, place)

    monkeypatch.setattr(patches, "decode", counting)
    own, first, second = reader(), image(64, 64), image(64, 64, 1)
    for _ in range(3):
        own.read(first)
    assert len(decoded) == 1
    monkeypatch.setattr(patches, "_CACHE_BYTES", own.read(first).values.nbytes)
    own.read(second)
    own.read(first)
    assert len(decoded) == 3


def test_only_a_model_that_sees_has_a_reader(tmp_path, monkeypatch):
    assert PatchReader.of(str(save_llama(tmp_path / "llama"))) is None
    folder = save_qwen(tmp_path / "qwen")
    read = PatchReader.of(str(folder))
    assert read is not None
    assert read.read(image(40, 40)).grid == reader().read(image(40, 40)).grid
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"^model\.path: no image processor at"):
        PatchReader.of(str(folder))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"PIL, which is not .*: pip install 'streamrl\[vis"):
        PatchReader.of(str(folder))


def test_positions_are_those_of_the_model():
    from streamrl.vision.tower import VisionTower
    from tests.tiny_vision import END, START, VIDEO

    model = make_qwen()
    tower = VisionTower(model, reader())
    video = Media.video([png(48, 32, seed) for seed in range(4)], fps=1.0)
    ids = tower.placeholders.expand([5, START, VIDEO, END, 6], [tower.reader.size(video)], "a test")
    positions = tower.positions(ids, [video])
    assert positions.shape == (3, len(ids))
    # Two patches in time, two seconds apart, at 4 positions a second.
    assert positions[0, 2:14].tolist() == [2] * 6 + [10] * 6
    assert positions[1, 2:8].tolist() == [2, 2, 2, 3, 3, 3]
    assert positions[2, 2:8].tolist() == [2, 3, 4, 2, 3, 4]
    assert tower.offset(ids, [video]) == int(positions.max()) + 1 - len(ids)
