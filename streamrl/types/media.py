"""Images and video frames that accompany token ids: encoded bytes, identified by their content.

A medium is kept as it came, not as pixels, which are a hundred times larger; generators and learner
decode the same bytes with the same function, see `streamrl.vision.parts`.

Invariant: `id` is a hash of everything else, so equal media have one id and are stored once.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from streamrl.types.ranges import Name, NotNegative

MediaKind = Literal["image", "video"]


class Media(Struct, frozen=True, kw_only=True):
    """One image, or the frames of one video in order.

    `parts` are encoded images (PNG, JPEG, WebP): one, or one per frame. `fps` is that of the
    frames of a video, 0 for an image.
    """

    id: Name
    kind: MediaKind
    parts: tuple[bytes, ...]
    fps: NotNegative = 0.0

    @classmethod
    def image(cls, data: bytes) -> "Media":
        return cls(id=content_id("image", (data,), 0.0), kind="image", parts=(data,))

    @classmethod
    def video(cls, frames: Sequence[bytes], fps: float) -> "Media":
        parts = tuple(frames)
        return cls(id=content_id("video", parts, fps), kind="video", parts=parts, fps=fps)

    def __post_init__(self) -> None:
        if not all(self.parts) or not self.parts:
            raise ValueError(f"media {self.id}: is empty")
        if self.kind == "image" and (len(self.parts) != 1 or self.fps):
            raise ValueError(f"media {self.id}: an image has one part and fps 0")
        if self.kind == "video" and not self.fps:
            raise ValueError(f"media {self.id}: a video has fps > 0")
        if self.id != content_id(self.kind, self.parts, self.fps):
            raise ValueError(f"media {self.id}: is not the hash of its content")

    def __repr__(self) -> str:
        return f"Media({self.kind} {self.id}, {self.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


def content_id(kind: MediaKind, parts: Sequence[bytes], fps: float) -> str:
    """A hash of 128 bits, as hexadecimal digits."""
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    digest.update(struct.pack("<d", fps))
    for part in parts:
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.hexdigest()


def check_media(named: Iterable[Sequence[str]], media: Sequence[Media]) -> None:
    """Check the media of a group, and the ids that its trajectories name.

    Raises:
        ValueError: one is missing, or stored twice.
    """
    known = {medium.id for medium in media}
    if len(known) < len(media):
        raise ValueError(f"media: {len(media)} are stored, and {len(known)} of them differ")
    if unknown := set().union(*named) - known:
        raise ValueError(f"media: a trajectory names {min(unknown)}, which its group lacks")


def distinct(media: Iterable[Media]) -> tuple[Media, ...]:
    """Each medium once, in order of first occurrence."""
    return tuple({medium.id: medium for medium in media}.values())
