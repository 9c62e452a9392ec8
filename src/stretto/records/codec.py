"""Records to bytes and back: a msgpack header, then the arrays as raw buffers.

`encode` gives frames for a wire: one frame for all small arrays, and one per large array, which is not copied.
`encode_blob` gives one bytes object for a file (padded, with a crc). Both start with a fixed prefix that holds
`SCHEMA`, the number of the record layout, so that a reader of another version raises an error instead of misreading.
Decoded arrays are read-only views of the received buffers. An array that a record holds in several places (the pixels
of an image that several samples show) is sent once, and is one array again on the other side.

Decoding runs no code from the input: there is no pickle, dtypes come from a fixed list, and every length is checked, so
damaged or hostile input raises a `WireError` (frames) or `DataError` (blobs).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

from stretto.base.errors import DataError, WireError

SCHEMA = 4
"""Increase it whenever a record's meaning or layout changes so that an older reader would misread it."""

T = TypeVar("T")
BytesLike = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<4sH")  # magic, schema
_MAGIC = b"STRF"
_BLOB = struct.Struct("<4sHHIIQ")  # magic, schema, 0, number of frames, crc32 of the rest, bytes of the rest
_BLOB_MAGIC = b"STRB"
_ALIGN = 8
_SMALL = 4096  # bytes; copying this much costs less than sending and receiving one more frame
_ARRAY = 1  # msgpack extension code; its data is the array's index
_INTEGER = 2  # its data is an integer of more than 64 bits, of JSON that a user or a model wrote
_DTYPES = {np.dtype(c).newbyteorder("<").str: np.dtype(c).newbyteorder("<") for c in "?bBhHiIqQefd"}


_PLAIN = {dtype: name for name, dtype in _DTYPES.items()}
"""The text of each dtype; asking numpy for it takes as long as encoding a small array."""
_ZEROS = bytes(_ALIGN)


def _reference(index: int) -> msgspec.msgpack.Ext:
    """What stands in a record's body for its array `index`."""
    return msgspec.msgpack.Ext(_ARRAY, index.to_bytes(4, "little"))


_FIRST = tuple(map(_reference, range(64)))


class _Header(msgspec.Struct, array_like=True):
    type: str
    # dtype and shape; arrays over 4 KiB have a frame of their own, smaller ones share one.
    arrays: list[tuple[str, tuple[int, ...]]]
    body: msgspec.Raw


_HEADER_DECODER = msgspec.msgpack.Decoder(_Header)


def encode(obj: Any) -> list[BytesLike]:
    """Encode a record as frames: header, all small arrays (if any), then each large array.

    Contiguous large arrays are not copied.
    """
    arrays: list[np.ndarray] = []
    known: dict[int, msgspec.msgpack.Ext] = {}  # id of an array -> the reference to it

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if (reference := known.get(id(value))) is None:
                index = len(arrays)
                arrays.append(value if value.dtype in _PLAIN and value.flags.c_contiguous else _portable(value))
                reference = _FIRST[index] if index < len(_FIRST) else _reference(index)
                known[id(value)] = reference
            return reference
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a record cannot hold a {type(value).__name__}; use numbers, text, containers or numpy arrays")

    try:
        body = msgspec.msgpack.encode(obj, enc_hook=hook)
    except OverflowError:
        arrays.clear()
        known.clear()
        body = msgspec.msgpack.encode(_with_large_integers(obj), enc_hook=hook)
    kinds: list[tuple[str, tuple[int, ...]]] = []
    small, large = [], []
    for array in arrays:
        kinds.append((_PLAIN.get(array.dtype) or array.dtype.str, array.shape))
        if (size := array.nbytes) > _SMALL:
            large.append(array.reshape(-1).view(np.uint8).data)
            continue
        small.append(array.tobytes())
        if padding := -size % _ALIGN:
            small.append(_ZEROS[:padding])
    header = _Header(type(obj).__name__, kinds, msgspec.Raw(body))
    first = _PREFIX.pack(_MAGIC, SCHEMA) + msgspec.msgpack.encode(header)
    return [first, b"".join(small), *large] if len(large) < len(arrays) else [first, *large]


@overload
def decode(frames: Sequence[BytesLike], kind: type[T]) -> T: ...
@overload
def decode(frames: Sequence[BytesLike], kind: Any) -> Any: ...
def decode(frames: Sequence[BytesLike], kind: Any) -> Any:
    """Decode the record in these frames; its arrays are read-only views of them.

    Raises: WireError if the frames have another schema or type, or are damaged.
    """
    if not frames:
        raise WireError("empty message: expected the header of a record.")
    views = [memoryview(frame).toreadonly().cast("B") for frame in frames]
    if len(views[0]) < _PREFIX.size:
        raise WireError(f"message header of {len(views[0])} bytes is shorter than its prefix; it is cut off.")
    magic, schema = _PREFIX.unpack_from(views[0])
    if magic != _MAGIC:
        raise WireError(f"message starts with {bytes(magic)!r}, not {_MAGIC!r}; the peer is not a stretto process.")
    check_schema(schema, "message")
    try:
        header = _HEADER_DECODER.decode(views[0][_PREFIX.size :])
        if isinstance(kind, _StructMeta) and header.type != kind.__name__:
            raise WireError(f"expected a {kind.__name__}, received a {header.type}.")
        return _decode_body(header.body, kind, _arrays(header, views[1:]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError, TypeError) as cause:
        raise WireError(f"damaged message: {cause}") from cause


def encode_blob(obj: Any) -> bytes:
    """Encode a record as bytes for a file: length and crc32 first, arrays aligned to 8 bytes."""
    frames = encode(obj)
    sizes = [len(frame) for frame in frames]
    parts: list[BytesLike] = [struct.pack(f"<{len(frames)}Q", *sizes)]
    for frame, length in zip(frames, sizes):
        parts.append(frame)
        if padding := -length % _ALIGN:
            parts.append(_ZEROS[:padding])
    crc = size = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
        size += len(part)
    return b"".join((_BLOB.pack(_BLOB_MAGIC, SCHEMA, 0, len(frames), crc, size), *parts))


def decode_blob(blob: BytesLike, kind: type[T], *, where: str = "blob") -> T:
    """Decode the record in a blob; `where` names the file in error messages.

    Raises: DataError if the blob is damaged, WireError if it has another schema or type.
    """
    view = memoryview(blob).toreadonly().cast("B")
    if len(view) < _BLOB.size:
        raise DataError(f"{where}: {len(view)} bytes are fewer than a header; it is cut off.")
    magic, schema, zero, num_frames, crc, length = _BLOB.unpack_from(view)
    if magic != _BLOB_MAGIC:
        raise DataError(
            f"{where}: starts with {bytes(magic)!r}, not {_BLOB_MAGIC!r}; it is not a record or is damaged."
        )
    check_schema(schema, where)
    rest = view[_BLOB.size :]
    if len(rest) != length:
        raise DataError(f"{where}: holds {len(rest)} bytes where its header says {length}; it is cut off or damaged.")
    if zero or zlib.crc32(rest) != crc:
        raise DataError(f"{where}: checksum mismatch; it is damaged.")
    if num_frames * 8 > length:
        raise DataError(f"{where}: says it has {num_frames} frames in {length} bytes; it is damaged.")
    start, frames = num_frames * 8, []
    for size in struct.unpack_from(f"<{num_frames}Q", rest):
        if start + size > length:
            raise DataError(f"{where}: a frame ends beyond the end; it is damaged.")
        frames.append(rest[start : start + size])
        start += size + -size % _ALIGN
    return decode(frames, kind)


def blob_bytes(head: BytesLike) -> int:
    """Size of the blob that begins with `head`, which has at least `BLOB_HEAD_BYTES` bytes."""
    return _BLOB.size + int(_BLOB.unpack_from(head)[-1])


BLOB_HEAD_BYTES = _BLOB.size


def split_blobs(buffer: BytesLike) -> Iterator[memoryview]:
    """Split a buffer of concatenated blobs.

    If the buffer is damaged, `decode_blob` fails for at least one of them.
    """
    view = memoryview(buffer)
    while len(view) > _BLOB.size:
        size = blob_bytes(view)
        yield view[:size]
        view = view[size:]
    if len(view):
        yield view


def check_schema(schema: int, what: str) -> None:
    """Raises: WireError if `schema` is not ours; the message says which side is older."""
    if schema != SCHEMA:
        older = "the writer" if schema < SCHEMA else "this process"
        raise WireError(
            f"{what}: written with record schema {schema}, this process reads schema {SCHEMA}; {older} is "
            "older. Run the same version of stretto on both sides."
        )


_StructMeta = type(msgspec.Struct)


def _with_large_integers(value: Any) -> Any:
    """The value with extensions in place of the integers that msgpack has no type for."""
    if isinstance(value, msgspec.Struct):
        fields = {name: _with_large_integers(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {key: _with_large_integers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_large_integers(each) for each in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    return value


def _portable(array: np.ndarray) -> np.ndarray:
    """The array in C order and little-endian; copied only if necessary."""
    if array.dtype.str in _DTYPES and array.flags.c_contiguous:
        return array
    little = array.dtype.newbyteorder("<")
    if little.str not in _DTYPES:
        raise TypeError(f"a record cannot hold an array of dtype {array.dtype}; known: {', '.join(_DTYPES)}")
    return np.array(array, dtype=little, order="C")


def _arrays(header: _Header, views: Sequence[memoryview]) -> list[np.ndarray]:
    """The arrays of a message; views: its frames after the header."""
    sizes = [_nbytes(*each) for each in header.arrays]
    num_large = sum(size > _SMALL for size in sizes)
    if len(views) != num_large + (num_large < len(sizes)):
        raise WireError(
            f"{header.type} says it has {len(sizes)} arrays, {num_large} of them in frames of their own; "
            f"received {len(views)} frames."
        )
    rest, start, arrays = iter(views), 0, []
    small = next(rest) if num_large < len(sizes) else memoryview(b"")
    for (dtype, shape), size in zip(header.arrays, sizes):
        if size > _SMALL:
            arrays.append(_array(next(rest), dtype, shape, size))
        else:
            arrays.append(_array(small[start : start + size], dtype, shape, size))
            start += size + -size % _ALIGN
    if start != len(small):
        raise WireError(f"the small arrays of {header.type} take {start} bytes, received {len(small)}.")
    return arrays


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    known = _DTYPES.get(dtype)
    if known is None:
        raise WireError(f"array of unknown dtype {dtype!r}.")
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise WireError(f"array of impossible shape {list(shape)}.")
    return math.prod(shape) * known.itemsize


def _array(view: memoryview, dtype: str, shape: tuple[int, ...], size: int) -> np.ndarray:
    if size != len(view):
        raise WireError(f"array {dtype}{list(shape)} does not fit its {len(view)} bytes.")
    array = np.frombuffer(view, dtype=_DTYPES[dtype])
    if not array.flags.aligned:  # small frames may be at any address of a socket's buffer
        array = array.copy()
        array.flags.writeable = False
    return array.reshape(shape)


def _decode_body(body: msgspec.Raw, kind: Any, arrays: list[np.ndarray]) -> Any:
    def ext_hook(code: int, data: memoryview) -> Any:
        if code == _INTEGER:
            return int.from_bytes(data, "little", signed=True)
        index = int.from_bytes(data, "little")
        if code != _ARRAY or index >= len(arrays):
            raise WireError(f"reference to array {index} (extension {code}) of {len(arrays)}.")
        return arrays[index]

    return msgspec.msgpack.decode(body, type=kind, ext_hook=ext_hook)
