"""Media on the wire: named by content, stored once, refused when they do not belong together."""

import msgspec
import numpy as np
import pytest

from streamrl import wire
from streamrl.errors import CorruptMessageError
from streamrl.types import FinishReason, Media, PackedGroup, Trajectory, TrajectoryGroup, pack
from streamrl.types.media import distinct
from tests.tiny_vision import image, png


def trajectory(*media: Media) -> Trajectory:
    return Trajectory(
        token_ids=np.array([5, 6], np.int32),
        response_mask=np.array([False, True]),
        behavior_logprobs=np.array([0.0, -1.0], np.float32),
        policy_versions=np.array([-1, 3], np.int32),
        reward=1.0,
        finish_reason=FinishReason.STOP,
        media=tuple(medium.id for medium in media),
    )


def group(trajectories: list[Trajectory], media: tuple[Media, ...]) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id="a",
        prompt_index=0,
        environment="e",
        trajectories=tuple(trajectories),
        media=media,
    )


def test_equal_bytes_have_one_id_and_other_content_another():
    data = png(20, 20)
    media = [
        Media.image(data),
        Media.image(png(20, 20, 1)),
        Media.video([data], 2.0),
        Media.video([data], 4.0),
        Media.video([data, data], 2.0),
        Media.video([data[:9], data[9:]], 2.0),
    ]
    assert len({medium.id for medium in media}) == len(media)
    assert distinct([*media, Media.image(data), media[2]]) == tuple(media)


def test_an_image_that_eight_siblings_share_is_stored_once():
    shared, own = image(90, 90), image(20, 20, 1)
    siblings = [trajectory(shared) for _ in range(7)] + [trajectory(own, shared)]
    sent = group(siblings, distinct([shared] * 7 + [own, shared]))
    data = wire.encode(pack(sent))
    without = wire.encode(pack(group([trajectory() for _ in range(8)], ())))
    assert shared.num_bytes < len(data) - len(without) < shared.num_bytes + own.num_bytes + 1024
    packed = wire.decode(data, PackedGroup)
    received = packed.group()
    assert received.media == (shared, own)
    assert [t.media for t in received.trajectories] == [t.media for t in siblings]
    assert packed.header(len(data)).num_bytes == len(data)
    assert received.media[0].parts == shared.parts


@pytest.mark.parametrize(
    ("trajectories", "media", "sentence"),
    [
        ([trajectory(image(20, 20))], (), "a trajectory names .* which its group lacks"),
        ([trajectory()], (image(20, 20),) * 2, "2 are stored, and 1 of them differ"),
    ],
)
def test_media_that_do_not_belong_together_are_refused(trajectories, media, sentence):
    with pytest.raises(ValueError, match=sentence):
        group(trajectories, media)


def test_a_medium_whose_bytes_were_exchanged_is_refused_on_decode():
    mine, other = image(20, 20), image(20, 20, 1)
    sent = group([trajectory(mine)], (mine,))
    fields = list(pack(sent))
    fields[PackedGroup.__struct_fields__.index("media")] = [
        {**msgspec.structs.asdict(mine), "parts": other.parts}
    ]
    with pytest.raises(CorruptMessageError, match="is not the hash of its content"):
        wire.decode(wire.encode(tuple(fields)), PackedGroup)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parts": ()}, "is empty"),
        ({"parts": (b"",)}, "is empty"),
        ({"parts": (b"a", b"b")}, "an image has one part"),
        ({"kind": "video"}, "a video has fps > 0"),
    ],
)
def test_a_malformed_medium_is_refused(change, sentence):
    fields = {"id": "0", "kind": "image", "parts": (b"a",), "fps": 0.0}
    with pytest.raises(ValueError, match=sentence):
        Media(**{**fields, **change})
