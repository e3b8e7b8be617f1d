"""A medium as the vision tower takes it: patches and their grid, made by the model's image
processor.

The processor is transformers' own, in its Pillow version if there is one, which needs no
torchvision and gives generators and learner the same numbers. The patches of a video are made from
those of its frames, with the same result as transformers' video processor; if the frames do not
fill a patch in time, the last frame is repeated.

Invariant: equal media give equal patches. Safe to use from several threads.
Shapes: P patches, C channels, D values of a patch.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoImageProcessor

from streamrl.errors import ConfigError
from streamrl.types import Media
from streamrl.vision.families import has_vision
from streamrl.vision.parts import decode, pillow
from streamrl.vision.places import Size

_CACHE_BYTES = 2**28


class Patches(NamedTuple):
    """`values` [P, D] float32; `grid` is the number of patches in time, height and width."""

    values: NDArray[np.float32]
    grid: tuple[int, int, int]
    seconds_per_grid: float
    """Seconds between two patches in time; 1 for an image."""


class PatchReader:
    """Reads media to patches; the most recent ones are cached, up to `_CACHE_BYTES`."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._merged = processor.merge_size**2
        self._known: OrderedDict[str, Patches] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls, path: str, *, trust_remote_code: bool = False, setting: str = "model.path"
    ) -> "PatchReader | None":
        """Make the reader of the model in a folder, which `setting` names; None if it sees no
        images.

        Raises:
            ConfigError: there is no model, its image processor is missing, or Pillow is.
        """
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: no model at {path!r}: {error}") from error
        if not has_vision(config):
            return None
        pillow(f"{setting}: {path}")
        try:
            processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: no image processor at {path!r}: {error}") from error
        return cls(processor)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The processor's settings, by which pixels become patches."""
        settings: dict[str, Any] = self._processor.to_dict()
        return settings

    def size(self, medium: Media, place: str = "a medium") -> Size:
        """How many tokens a medium takes; raises as `read` does."""
        grid = self.read(medium, place).grid
        return Size(medium.kind, int(np.prod(grid)) // self._merged)

    def read(self, medium: Media, place: str = "a medium") -> Patches:
        """
        Raises:
            RolloutError: it is no image, is damaged or exceeds a limit; the message begins with
                `place`.
        """
        with self._lock:
            known = self._known.get(medium.id)
            if known is None:
                known = self._known[medium.id] = self._read(medium, place)
                self._num_bytes += known.values.nbytes
            self._known.move_to_end(medium.id)
            while len(self._known) > 1 and self._num_bytes > _CACHE_BYTES:
                _, oldest = self._known.popitem(last=False)
                self._num_bytes -= oldest.values.nbytes
            return known

    def _read(self, medium: Media, place: str) -> Patches:
        frames = [decode(part, place) for part in medium.parts]
        if len({frame.size for frame in frames}) > 1:
            # All frames of a video get the size of its first one.
            frames = [frame.resize(frames[0].size) for frame in frames]
        output = self._processor(images=frames, return_tensors="np")
        values = np.asarray(output["pixel_values"], dtype=np.float32)
        time, height, width = (int(n) for n in output["image_grid_thw"][0])
        if medium.kind == "image":
            return Patches(values, (time, height, width), 1.0)
        depth = self._processor.temporal_patch_size
        values = _in_time(values.reshape(len(frames), height * width, -1), depth)
        grid = (len(values) // (height * width), height, width)
        return Patches(values, grid, depth / medium.fps)


def _in_time(frames: NDArray[np.float32], depth: int) -> NDArray[np.float32]:
    """Patches of a video [P, D] from the patches of its frames [F, P of a frame, D]. Each of these
    contains its pixels `depth` times; in the result the i-th copy is that of a patch's i-th
    frame."""
    missing = -len(frames) % depth
    padded = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    num_patches = frames.shape[1]
    # [patches in time, frames of a patch, patches of a frame, C, copies, pixels]
    split = padded.reshape(len(padded) // depth, depth, num_patches, 3, depth, -1)
    chosen = np.stack([split[:, i, :, :, i] for i in range(depth)], axis=3)
    return np.ascontiguousarray(chosen.reshape(len(chosen) * num_patches, -1))
