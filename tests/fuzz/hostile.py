"""Messages that no client of ours sends: hypothesis strategies made from the types of the records.

`messages(kind)` gives the frames after a request id. About half are of the right shape with a few
hostile values, so that they reach the code behind the decoder; the others have fields missing or
added, bytes changed, cut or nested, or are noise. The fuzzer of each port uses it.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import xxhash
from hypothesis import HealthCheck, Phase, given, seed as with_seed, settings

from streamrl import wire

Frames = list[bytes]
NAMES = ("s/1", "s/2", "s/3", "s", "t/1", "t", "g", "h")
SPECIAL_INTEGERS = (-(2**63), -1, 0, 1, 2**20, 2**31 - 1, 2**31, 2**52, 2**53, 2**63 - 1, 2**64 - 1)
SPECIAL_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 5e-324)
SPECIAL_TEXTS = ("", "\0", "a\nb", "../../x", "\U0010ffff", "s" * 300, "s" * 10_000)
DEPTHS = (10, 900, 1_100, 20_000)

hostile: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(SPECIAL_INTEGERS),
    st.sampled_from(SPECIAL_FLOATS),
    st.sampled_from(SPECIAL_TEXTS),
    st.sampled_from((None, True, b"", b"\xff" * 100, [], {}, [[]] * 50, {"type": "take"})),
    st.sampled_from(DEPTHS).map(lambda depth: msgspec.Raw(b"\x91" * depth + b"\xc0")),
    st.integers(-128, 127).map(lambda code: msgspec.msgpack.Ext(code, b"\0" * 12)),
    st.sampled_from((b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1")).map(msgspec.Raw),
)


def mostly(
    usual: st.SearchStrategy[Any], rare: st.SearchStrategy[Any], parts: int
) -> st.SearchStrategy[Any]:
    """One of `parts` is rare; `one_of` would weigh all branches alike."""
    choice = st.sampled_from([False] * (parts - 1) + [True])
    return choice.flatmap(lambda is_rare: rare if is_rare else usual)


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """What msgpack may hold where a value of `kind` stands: mostly one that is right."""
    return mostly(plausible(kind), hostile, 25)


def plausible(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values of the right type, few of each, so that they meet what is there already."""
    match kind:
        case msgspec.inspect.IntType():
            return mostly(
                st.integers(max(0, kind.ge or 0), 3), st.sampled_from(SPECIAL_INTEGERS), 10
            )
        case msgspec.inspect.FloatType():
            return mostly(st.sampled_from((0.0, 0.01)), st.sampled_from(SPECIAL_FLOATS), 10)
        case msgspec.inspect.StrType():
            return mostly(st.sampled_from(NAMES), st.sampled_from(SPECIAL_TEXTS), 20)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BytesType():
            return st.binary(max_size=20)
        case msgspec.inspect.EnumType():
            return st.sampled_from([member.value for member in kind.cls])
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return st.lists(values(kind.item_type), max_size=4)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(values, kind.item_types)).map(list)
        case msgspec.inspect.DictType():
            return st.dictionaries(plausible(kind.key_type), values(kind.value_type), max_size=3)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(plausible, kind.types))
        case msgspec.inspect.StructType():
            return records(kind)
        case _:
            return hostile


def records(kind: msgspec.inspect.StructType) -> st.SearchStrategy[Any]:
    """The fields of a record; now and then some are missing, or one is added."""
    fields = [values(field.type) for field in kind.fields]
    if kind.array_like:
        tags = [] if kind.tag is None else [st.just(kind.tag)]
        return st.tuples(*tags, *fields).map(list)
    names = [field.encode_name for field in kind.fields]
    whole = st.fixed_dictionaries(dict(zip(names, fields, strict=True)))
    some = st.fixed_dictionaries({}, optional=dict(zip(names, fields, strict=True)))
    more = st.builds(lambda one, other: {**one, "unknown": other}, whole, hostile)
    tag = {} if kind.tag is None else {kind.tag_field: kind.tag}
    return mostly(whole, st.one_of(some, more), 8).map(lambda known: {**tag, **known})


def enveloped(body: bytes) -> bytes:
    """Any body, under a checksum that is right."""
    checksum = xxhash.xxh3_64_intdigest(body)
    return msgspec.msgpack.encode((wire.SCHEMA_VERSION, checksum, msgspec.Raw(body)))


def messages(kind: Any, payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[Frames]:
    """The frames of a request of type `kind`, and of what may follow it."""
    bodies = plausible(msgspec.inspect.type_info(kind)).map(msgspec.msgpack.encode)
    whole = bodies.map(enveloped)
    damaged = st.builds(mutated, st.one_of(bodies, whole), st.integers(0, 2**32))
    noise = st.one_of(damaged.map(enveloped), damaged, st.binary(max_size=60))
    first = mostly(whole, noise, 4)
    many = st.integers(3, 200).map(lambda count: [b"x"] * count)
    rest = mostly(st.lists(payloads, min_size=1, max_size=2), many, 20)
    return st.builds(lambda frame, frames: [frame, *frames], first, rest)


def mutated(data: bytes, seed: int) -> bytes:
    """Some bytes changed, inserted, cut or repeated."""
    draw = random.Random(seed)
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                changed[at:at] = draw.randbytes(draw.randint(1, 8))
            case 2:
                del changed[at : at + draw.randint(1, 8)]
            case _:
                changed[at:at] = changed[at : at + 16] * draw.randint(1, 20)
    return bytes(changed)


def corpus(strategy: st.SearchStrategy[Frames], count: int, seed: int) -> list[Frames]:
    """At least `count` messages, the same ones for a seed where the same modules are imported:
    hypothesis draws their constants, too."""
    found: list[Frames] = []

    @with_seed(seed)
    @settings(
        max_examples=count // 50 + 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(strategy, min_size=50, max_size=50))
    def collect(drawn: list[Frames]) -> None:
        found.extend(drawn)

    collect()
    return found


def endless(
    drawn: list[Frames], seed: int, change: Callable[[bytes, int], bytes] = mutated
) -> Iterator[Frames]:
    """The drawn messages in random order, every other one with changed bytes; never ends."""
    draw = random.Random(seed)
    while True:
        frames = draw.choice(drawn)
        if draw.random() < 0.5:
            body = frames[0]
            where = draw.randrange(len(frames))
            # A body that is changed under a right checksum reaches the decoder of its record.
            if where == 0 and draw.random() < 0.7 and len(body) > 12:
                changed = enveloped(change(body[11:], draw.getrandbits(32)))
            else:
                changed = change(frames[where], draw.getrandbits(32))
            frames = [*frames[:where], changed, *frames[where + 1 :]]
        yield frames


def parse(description: str | None) -> argparse.Namespace:
    """The arguments of a fuzzer; prints its seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--drawn", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    return arguments
