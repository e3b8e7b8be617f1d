"""What is encoded comes back the same, and nothing else does harm."""

import dataclasses
import resource

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from actors.episode_record import Rollout, Segment, Span
from actors.episodes.group import unbuffered_lease
from streamrl import wire
from streamrl.errors import (
    CorruptMessageError,
    MessageTooLargeError,
    SchemaVersionError,
    WireError,
)
from streamrl.types import (
    BroadcastEndpoint,
    BufferStats,
    CudaMemory,
    FilesEndpoint,
    FinishReason,
    GroupHeader,
    HostMemory,
    PackedGroup,
    SharedEndpoint,
    TensorSpec,
    TrajectoryGroup,
    WeightUpdate,
    pack,
)
from streamrl.types.packed import narrowed, widened
from tests.records import damaged, groups, make_group
from tests.rollouts import trajectories_of
from tests.unit.episodes.environments import SubAgent, Summarizing
from tests.unit.test_generator import Run

HOST = HostMemory(socket="/dev/shm/a", inode=2**40, num_bytes=3)


def assert_same(a: object, b: object) -> None:
    """Structs with arrays, field by field."""
    assert isinstance(b, type(a))
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    elif isinstance(a, msgspec.Struct):
        for name in a.__struct_fields__:
            assert_same(getattr(a, name), getattr(b, name))
    elif isinstance(a, tuple):
        assert isinstance(b, tuple)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@given(groups)
def test_a_group_comes_back_the_same_and_read_only(group):
    decoded = wire.decode(wire.encode(group), TrajectoryGroup)
    assert_same(group, decoded)
    assert not decoded.trajectories[0].token_ids.flags.writeable


@given(groups)
def test_a_packed_group_is_the_group_and_has_its_header(group):
    message = wire.encode(pack(group))
    packed = wire.decode(message, PackedGroup)
    back = packed.group()
    assert_same(group, back)
    assert packed.header(7) == GroupHeader.of(group, num_bytes=7)
    assert wire.encode(pack(back)) == message
    one = back.trajectories[0]
    for column in (one.token_ids, one.response_mask, one.policy_versions):
        assert not column.flags.writeable


@pytest.mark.parametrize("environment", [Summarizing, SubAgent])
async def test_episodes_of_several_segments_are_packed_as_they_were_sampled(environment):
    runner = dataclasses.replace(Run().runner, make_environment=environment)
    group = await runner.run(unbuffered_lease("a", 0))
    assert len(group.trajectories) > 2
    assert all(trajectory.turns for trajectory in group.trajectories)
    packed = wire.decode(wire.encode(pack(group)), PackedGroup)
    assert_same(group, packed.group())
    assert packed.header(7) == GroupHeader.of(group, num_bytes=7)


def test_headers_do_not_grow_with_the_payload():
    """Only the numbers themselves take more digits: two lengths and two response lengths."""
    headers = (GroupHeader.of(make_group(0, num_response=length)) for length in (10, 100_000))
    short, long = (len(wire.encode(header)) for header in headers)
    assert long - short <= 4 * 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"behavior_logprobs": np.zeros(3, np.float32)}, "differ in length"),
        ({"behavior_logprobs": np.full(7, np.nan, np.float32)}, "NaN"),
        ({"behavior_logprobs": np.full(7, -1.0, np.float32)}, "must be 0 where"),
        ({"policy_versions": np.full(7, -2, np.int32)}, "policy_versions: must be >= 0"),
        ({"token_ids": np.full(7, -1, np.int32)}, "negative id"),
        ({"reward": float("nan")}, "reward: is nan"),
        ({"loss_mask": np.ones(7, np.bool_)}, "loss_mask: must be off"),
    ],
)
def test_a_packed_group_is_checked_as_its_members_are(changes, sentence):
    message = wire.encode(pack(damaged(make_group(0), **changes)))
    with pytest.raises(CorruptMessageError, match=sentence):
        wire.decode(message, PackedGroup)


@pytest.mark.parametrize(
    ("versions", "lengths"),
    [
        ([], []),
        ([-1, 0], [3]),
        ([-1, 0], [15, -1]),
        ([-1, 0, -1], [14, 0, 0]),
        ([-1, 0, 0], [2**31 - 1, 2**31 - 1, 2**31 - 1]),
    ],
)
def test_runs_of_versions_that_are_not_those_of_the_tokens_are_refused(versions, lengths):
    group = list(pack(make_group(0)))
    group[6] = (np.array(versions, np.int32), np.array(lengths, np.int32))
    with pytest.raises(CorruptMessageError, match="version_runs"):
        wire.decode(wire.encode(group), PackedGroup)


def test_an_episode_without_a_token_is_refused():
    nothing = Span(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
    rollout = Rollout((Segment((nothing,), ()),), {}, FinishReason.STOP, ())
    with pytest.raises(ValueError, match="token_ids: is empty"):
        trajectories_of(rollout)


@pytest.mark.parametrize("lengths", [(3, 4), (8, 7), (14, 0), (-1, 15), ()])
def test_siblings_that_do_not_share_out_the_tokens_are_refused(lengths):
    name, prompt_index, environment, facts, *arrays = pack(make_group(0))
    told = [(length, *facts[0][1:]) for length in lengths]
    with pytest.raises(CorruptMessageError, match=r"token_ids|trajectories|>= 0"):
        wire.decode(wire.encode((name, prompt_index, environment, told, *arrays)), PackedGroup)


@pytest.mark.parametrize(
    "endpoint",
    [
        FilesEndpoint(path="/weights"),
        BroadcastEndpoint(
            host="h", port=1, group="g", rank=1, world_size=2, backend="gloo", bucket_bytes=1,
            timeout_s=1.0,
        ),
        *(
            SharedEndpoint(
                memory=memory, start=4096, stamps=HOST, stamp_at=8, stamp=2**63 - 1, bucket_bytes=1,
                checksums=b"12345678",
            )
            for memory in (
                HOST,
                CudaMemory(
                    gpu="A", handle=b"\0\xff", num_bytes=2**40, offset=512, counter=b"/torch",
                    counter_offset=2**63, event=b"", waits_for_event=True,
                ),
            )
        ),
    ],
)  # fmt: skip
def test_a_tagged_union_comes_back_as_the_member_it_was(endpoint):
    update = WeightUpdate(
        policy_version=3,
        learner_id="h",
        manifest=(TensorSpec("w", "float32", (2, 3)),),
        endpoint=endpoint,
        key=b"k" * 40,
    )
    assert wire.decode(wire.encode(update), WeightUpdate) == update


@given(groups, st.data())
@settings(max_examples=200)
def test_a_damaged_message_is_a_typed_error_or_the_same_message(group, data):
    message = bytearray(wire.encode(group))
    place = data.draw(st.integers(0, len(message) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            message[place] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del message[place:]
        case "insert":
            message[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        decoded = wire.decode(bytes(message), TrajectoryGroup)
    except WireError:
        return
    # MessagePack has several forms of one number, as of the schema version.
    assert wire.encode(decoded) == wire.encode(group)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_typed_error(data):
    with pytest.raises(WireError):
        wire.decode(data, TrajectoryGroup)


def envelope(body: bytes, version: int = wire.SCHEMA_VERSION) -> bytes:
    return msgspec.msgpack.encode([version, xxhash.xxh3_64_intdigest(body), msgspec.Raw(body)])


def test_another_schema_version_is_named():
    with pytest.raises(SchemaVersionError, match="version 999; this process reads 13"):
        wire.decode(envelope(b"\xc0", version=999), TrajectoryGroup)


NUMBERS = {
    np.int32: st.one_of(st.integers(0, 2**16), st.integers(0, 2**25), st.integers(-(2**31), -1)),
    np.float32: st.one_of(
        st.floats(width=16), st.floats(width=32), st.sampled_from([-0.0, 6e-8, 65504.0, 65536.0])
    ),
}


@pytest.mark.parametrize("kind", NUMBERS)
@given(data=st.data())
def test_narrowed_numbers_are_widened_to_the_same_bits(kind, data):
    array = np.array(data.draw(st.lists(NUMBERS[kind], max_size=8)), kind)
    wide = widened(narrowed(array))
    assert wide.dtype == array.dtype
    assert wide.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("numbers", "num_bytes"),
    [
        (np.array([0, 2**16 - 1], np.int32), 2),
        (np.array([0, 2**16], np.int32), 3),
        (np.array([2**24 - 1, 5, 7], np.int32), 3),
        (np.array([2**24], np.int32), 4),
        (np.array([-1, 1], np.int32), 4),
        (np.array([-0.5, -9.765625e-4], np.float32), 2),
        (np.array([-0.5, -0.1], np.float32), 4),
        (np.array([-65536.0], np.float32), 4),
        (np.array([2.0**-30], np.float32), 4),
    ],
)
def test_candidates_cross_in_the_fewest_bytes_that_hold_each(numbers, num_bytes):
    assert narrowed(numbers).nbytes == num_bytes * len(numbers)


@pytest.mark.parametrize("code", [5, 6, 7])
def test_half_a_narrow_number_is_refused(code):
    group = list(pack(make_group(0)))
    group[4] = msgspec.msgpack.Ext(code, b"\0" * 7 * (3 if code == 7 else 2) + b"\0")
    with pytest.raises(CorruptMessageError, match="no whole number of"):
        wire.decode(envelope(wire._encoder.encode(group)), PackedGroup)


def test_a_message_above_the_limit_is_refused_before_it_is_read():
    message = wire.encode(make_group(0))
    with pytest.raises(MessageTooLargeError, match=f"{len(message)} bytes; at most 10"):
        wire.decode(message, TrajectoryGroup, max_bytes=10)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdb\xff\xff\xff\xff",
        b"\x84\xa8group_id\xa1x\xactrajectories\xdd\x7f\xff\xff\xff",
    ],
)
def test_a_claimed_size_allocates_nothing(body):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for message in (body, envelope(body)):
        with pytest.raises(WireError):
            wire.decode(message, TrajectoryGroup)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"behavior_logprobs": np.zeros(3, np.float32)}, "differ in length"),
        ({"behavior_logprobs": np.full(7, np.nan, np.float32)}, "NaN"),
        ({"behavior_logprobs": np.full(7, -1.0, np.float32)}, "must be 0 where"),
        ({"policy_versions": np.full(7, -2, np.int32)}, "policy_versions: must be >= 0"),
        ({"token_ids": np.arange(7, dtype=np.float32)}, "dtype float32"),
        ({"token_ids": np.full(7, -1, np.int32)}, "negative id"),
        ({"token_ids": np.zeros((7, 1), np.int32)}, r"shape \(7, 1\); .* one-dimensional"),
        ({"token_ids": [0] * 7}, "is a list; .* one-dimensional"),
        ({"reward": float("inf")}, "must be finite"),
        ({"loss_mask": np.ones(7, np.bool_)}, "loss_mask: must be off"),
        ({"loss_mask": np.zeros(6, np.bool_)}, "differ in length"),
    ],
)
def test_a_record_that_breaks_its_rules_cannot_be_made(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        msgspec.structs.replace(make_group(0).trajectories[0], **change)


@pytest.mark.parametrize("indices", [(0,), (1, 1), (0, 2), (1, 0)])
def test_episodes_that_do_not_share_out_the_trajectories_are_refused(indices):
    with pytest.raises(ValueError, match="episode_indices: is"):
        msgspec.structs.replace(make_group(0), episode_indices=indices)


def test_a_rule_broken_by_a_foreign_writer_is_found_on_decode():
    trajectory = msgspec.to_builtins(make_group(0), builtin_types=(np.ndarray,))
    trajectory["trajectories"][0]["reward"] = float("nan")
    body = wire._encoder.encode(trajectory)
    with pytest.raises(CorruptMessageError, match="reward: is nan"):
        wire.decode(envelope(body), TrajectoryGroup)


def test_arrays_of_the_wrong_kind_are_refused():
    group = msgspec.to_builtins(make_group(0), builtin_types=(np.ndarray,))
    group["trajectories"][0]["token_ids"] = np.zeros(7, np.float32)
    with pytest.raises(CorruptMessageError, match="expected an array of int32, got float32"):
        wire.decode(envelope(wire._encoder.encode(group)), TrajectoryGroup)
    with pytest.raises(CorruptMessageError, match="BufferStats"):
        wire.decode(wire.encode(make_group(0)), BufferStats)


@pytest.mark.parametrize("value", [2**64, "\ud83d", object(), np.zeros(2, np.float64)])
def test_what_no_message_can_hold_is_an_error_of_the_wire(value):
    with pytest.raises(CorruptMessageError, match="dict cannot be encoded: "):
        wire.encode({"a": value})
