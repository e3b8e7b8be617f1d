"""Records to bytes and back: a msgpack envelope with a schema version, arrays as raw bytes.

    envelope = [schema version, xxh3-64 of the body, body]      body = msgpack of one record

Invariant: for any bytes, `decode` returns a well-formed record or raises a `WireError`. It never
allocates more than a small multiple of the message, since the envelope is read to its end before
the body, and never executes anything (no pickle). Arrays are msgpack extensions with little-endian
bytes, decoded as read-only views into the message. Arrays sent in a narrower type than the record's
(`streamrl.types.packed`) are widened, to at most twice the bytes. No other module encodes what is
sent between processes.
"""

from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import xxhash

from streamrl.errors import CorruptMessageError, MessageTooLargeError, SchemaVersionError
from streamrl.types.packed import THREE_BYTES, widened

SCHEMA_VERSION = 13
MAX_MESSAGE_BYTES = 256 * 2**20

_ARRAY_CODES: dict[np.dtype[Any], int] = {
    np.dtype("<i4"): 1,
    np.dtype("<f4"): 2,
    np.dtype("?"): 3,
    np.dtype("u1"): 4,
    np.dtype("<f2"): 5,
    np.dtype("<u2"): 6,
    THREE_BYTES: 7,
}
_BOOL = _ARRAY_CODES[np.dtype("?")]
_ARRAY_DTYPES = {code: dtype for dtype, code in _ARRAY_CODES.items()}

Record = TypeVar("Record")
Buffer = bytes | bytearray | memoryview


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    schema_version: int
    checksum: int
    body: msgspec.Raw


def encode(record: Any) -> bytes:
    """The record's envelope as bytes.

    Raises:
        CorruptMessageError: it holds a value that no message can, which user code or a policy may
            produce: an integer beyond 64 bits, half a surrogate pair, an object of another type.
    """
    try:
        body = _encoder.encode(record)
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        name = type(record).__name__
        raise CorruptMessageError(f"{name} cannot be encoded: {error}") from error
    envelope = _Envelope(SCHEMA_VERSION, xxhash.xxh3_64_intdigest(body), msgspec.Raw(body))
    return _encoder.encode(envelope)


def decode(data: Buffer, kind: type[Record], *, max_bytes: int = MAX_MESSAGE_BYTES) -> Record:
    """Decode the record of type `kind` (a Struct, or a union of tagged ones) in `data`.

    Raises:
        MessageTooLargeError: `data` is longer than `max_bytes`.
        SchemaVersionError: it was written with another schema version.
        CorruptMessageError: truncation, wrong checksum or type, or a broken invariant.
    """
    if len(data) > max_bytes:
        raise MessageTooLargeError(f"message of {len(data)} bytes; at most {max_bytes} are read")
    try:
        envelope = _envelope_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptMessageError(f"not a StreamRL message: {error}") from error
    if envelope.schema_version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"message of schema version {envelope.schema_version}; this process reads "
            f"{SCHEMA_VERSION}: bring both ends to one StreamRL release"
        )
    body = memoryview(envelope.body)
    if xxhash.xxh3_64_intdigest(body) != envelope.checksum:
        raise CorruptMessageError("checksum mismatch: the message was damaged on its way")
    try:
        record: Record = _decoder(kind).decode(body)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptMessageError(f"not a valid {_name(kind)}: {error}") from error
    return record


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} does not cross a process")
    code = _ARRAY_CODES.get(value.dtype)
    if code is None or value.ndim != 1 or not value.flags.c_contiguous:
        value = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
        code = _ARRAY_CODES.get(value.dtype)
    if code is None or value.ndim != 1:
        raise NotImplementedError(f"array of {value.dtype}, {value.ndim} dimensions")
    return msgspec.msgpack.Ext(code, value.view(np.uint8).data)


def _decode_extension(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    dtype = _ARRAY_DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"unknown array code {code}")
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype} values")
    array = np.frombuffer(data, dtype)
    if code == _BOOL and np.count_nonzero(array.view(np.uint8) > 1):
        raise ValueError("a boolean array holds other bytes than 0 and 1")
    return widened(array)


def _check_array(kind: Any, value: Any) -> Any:
    """msgspec's hook for fields of a type it does not know, here `NDArray[dtype]`."""
    if not isinstance(value, np.ndarray):
        raise ValueError(f"expected an array, got {type(value).__name__}")
    if value.dtype != (expected := _dtype_of(kind)):
        raise ValueError(f"expected an array of {expected}, got {value.dtype}")
    return value


@cache
def _dtype_of(kind: Any) -> Any:
    return np.dtype(get_args(get_args(kind)[1])[0])


@cache
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(
        kind, dec_hook=_check_array, ext_hook=_decode_extension, strict=True
    )


def _name(kind: Any) -> str:
    kinds = get_args(kind) or (kind,)
    return kinds[0].__name__ if len(kinds) == 1 else f"one of {len(kinds)} records"


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
