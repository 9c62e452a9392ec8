"""The protocol buffers of the Tinker API: reads the body of forward_backward, writes its results and those of sample.

A message is a sequence of fields, each a key (number << 3 | kind) and a value; kinds here are 0 (varint), 1 (8 bytes),
2 (length and bytes) and 5 (4 bytes). Unknown fields are skipped, as the format requires.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import DataError

if TYPE_CHECKING:
    from jaxtyping import Float32, Int32

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
_MAX_HEAD = 64
"""Largest number of fields before and between a request's model_id and seq_id."""
_MAX_CELLS = 1 << 26
"""Largest number of entries of a tensor, so that a small message with a large shape cannot take much memory."""


@dataclass
class Datum:
    """One sequence of a forward_backward request. inputs: arrays of its loss by name, 1 or 2 dims."""

    tokens: Int32[np.ndarray, " tokens"]
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    refused: str | None = None
    """Why this service cannot compute it; None if it can."""


@dataclass
class ForwardBackward:
    """A request for a pass. seq_id: its number among the requests of its model, from 1."""

    model_id: str = ""
    seq_id: int = 0
    data: list[Datum] = field(default_factory=list)
    loss_fn: str = ""
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass
class SampledSequence:
    """One sampled sequence. stop_reason: "stop" or "length"; topk: ids and logprobs [tokens, k]."""

    stop_reason: str
    tokens: Int32[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"]
    topk: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class Sampled:
    """The answer to a sample request; prompt logprobs are NaN where there are none."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Float32[np.ndarray, " prompt"] | None = None
    topk_prompt: tuple[np.ndarray, np.ndarray] | None = None
    target_prompt: Float32[np.ndarray, "positions targets"] | None = None
    cached_tokens: int = 0


# -- reading --


def read_forward_backward(data: bytes) -> ForwardBackward:
    """Read the request in a body. Raises: DataError if it is not such a message."""
    request = ForwardBackward()
    legacy: dict[str, float | str] = {}
    current: dict[str, float | str] = {}
    for number, value in _fields(data):
        match number:
            case 1:
                request.model_id = _text(value)
            case 2:
                request.seq_id = _int(value)
            case 3:
                request.data.append(_datum(_bytes(value)))
            case 4:
                request.loss_fn = _text(value)
            case 5:
                key, entry = _entry(value)
                legacy[key] = _double(entry)
            case 6:
                request.forward_only = bool(_int(value))
            case 7:
                key, entry = _entry(value)
                current[key] = _loss_value(entry)
    request.config = legacy | current
    return request


def read_head(data: bytes) -> tuple[str, int]:
    """model_id and seq_id of a request, which writers put before its sequences; "" and 0 if they are not there.

    Raises: DataError for a damaged message.
    """
    model_id, seq_id = "", 0
    for at, (number, value) in enumerate(_fields(data)):
        if number == 1:
            model_id = _text(value)
        elif number == 2:
            seq_id = _int(value)
        if (model_id and seq_id) or at >= _MAX_HEAD:
            break
    return model_id, seq_id


def _datum(data: memoryview) -> Datum:
    chunks, datum = [np.empty(0, np.int32)], Datum(np.empty(0, np.int32))
    for number, value in _fields(data):
        if number == 1:
            for kind, chunk in _fields(_bytes(value)):
                if kind == 1:
                    chunks += [_array(v, _INT32) for n, v in _fields(_bytes(chunk)) if n == 1]
                else:
                    datum.refused = "a chunk of an image or of audio: this service trains on tokens"
        elif number == 2:
            key, entry = _entry(value)
            datum.inputs[key] = _tensor(_bytes(entry))
    datum.tokens = np.concatenate(chunks)
    return datum


def _tensor(data: memoryview) -> np.ndarray:
    dense: memoryview | None = None
    sparse: memoryview | None = None
    dtype, shape = _FLOAT32, []
    for number, value in _fields(data):
        match number:
            case 1:
                dense = _bytes(value)
            case 2:
                sparse = _bytes(value)
            case 3:
                dtype = _int(value)
            case 4:
                shape += [_int(value)] if isinstance(value, int) else _varints(value)
    if any(size < 0 or size > _MAX_CELLS for size in shape) or np.prod(shape or [1], dtype=float) > _MAX_CELLS:
        raise DataError(f"a tensor of shape {shape} is larger than this service accepts")
    if sparse is not None:
        return _dense(sparse, dtype, shape)
    array = _array(dense if dense is not None else memoryview(b""), dtype)
    if not shape:
        return array
    if int(np.prod(shape)) != array.size:
        raise DataError(f"a tensor of shape {shape} has {array.size} entries")
    return array.reshape(shape)


def _dense(data: memoryview, dtype: int, shape: list[int]) -> np.ndarray:
    """A matrix from compressed rows, with zeros where it has no entry."""
    parts = {number: _bytes(value) for number, value in _fields(data)}
    values = _array(parts.get(1, memoryview(b"")), dtype)
    rows, columns = (_array(parts.get(number, memoryview(b"")), _INT64) for number in (2, 3))
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(values) != len(columns):
        raise DataError(f"a sparse tensor of shape {shape} has {len(rows)} row and {len(columns)} column indices")
    counts = np.diff(rows)
    if (counts < 0).any() or rows[0] != 0 or rows[-1] != len(values):
        raise DataError("a sparse tensor has row indices that do not grow from 0 to its number of entries")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise DataError(f"a sparse tensor of shape {shape} has a column index that is outside")
    out = np.zeros(shape, values.dtype)
    out[np.repeat(np.arange(shape[0]), counts), columns] = values
    return out


def _array(data: memoryview | int, dtype: int) -> np.ndarray:
    """Little-endian bytes as a native array: float32, int64 or int32."""
    raw = _bytes(data)
    if dtype == _BFLOAT16:
        if len(raw) % 2:
            raise DataError("a tensor of bfloat16 has an odd number of bytes")
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise DataError(f"a tensor has the dtype {dtype}; 1 (float32) and 2 (int64) are known")
    if len(raw) % kind.itemsize:
        raise DataError(f"a tensor of {kind.name} has {len(raw)} bytes")
    return np.frombuffer(raw, kind).astype(kind.newbyteorder("="))


def _entry(value: memoryview | int) -> tuple[str, memoryview | int]:
    """Key and value of a map's entry."""
    fields = dict(_fields(_bytes(value)))
    return _text(fields.get(1, memoryview(b""))), fields.get(2, memoryview(b""))


def _loss_value(value: memoryview | int) -> float | str:
    fields = dict(_fields(_bytes(value)))
    return _text(fields[2]) if 2 in fields else _double(fields.get(1, memoryview(bytes(8))))


def _fields(data: bytes | memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and value of each field: an int for varints, else bytes. Raises: DataError for a damaged message."""
    view, at = memoryview(data), 0
    while at < len(view):
        key, at = _varint(view, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(view, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(view, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise DataError(f"the body is not this message: kind {kind} of a field at byte {at}")
        if at + size > len(view):
            raise DataError(f"the body ends within a field, at byte {len(view)}")
        yield key >> 3, view[at : at + size]
        at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise DataError(f"the body is not this message: no number at byte {at}")
        byte = view[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value - (1 << 64) if value >= 1 << 63 else value), at


def _varints(value: memoryview) -> list[int]:
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(number)
    return numbers


def _bytes(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise DataError("the body is not this message: a number where bytes belong")
    return value


def _int(value: memoryview | int) -> int:
    if not isinstance(value, int):
        raise DataError("the body is not this message: bytes where a number belongs")
    return value


def _text(value: memoryview | int) -> str:
    try:
        return str(_bytes(value), "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the body has a text that is not UTF-8: {error}") from error


def _double(value: memoryview | int) -> float:
    raw = _bytes(value)
    if len(raw) != 8:
        return 0.0  # the default, which writers leave out
    return float(struct.unpack("<d", raw)[0])


# -- writing --


def write_forward_backward(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """The result of forward_backward: arrays of each datum, float32 or int64; metrics are called `name:reduction`."""
    fields = b""
    for name in outputs[0] if outputs else {}:
        arrays = [np.ascontiguousarray(output[name]) for output in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
        kind = _INT64 if arrays[0].dtype == np.int64 else _FLOAT32
        batched = _field(1, b"".join(array.tobytes() for array in arrays)) + _field(2, offsets.tobytes())
        fields += _field(2, _field(1, name.encode()) + _field(2, batched + _number(3, kind)))
    record = fields + _number(3, len(outputs))
    body = _field(1, b"ArrayRecord") + _field(2, record)
    for name, value in metrics.items():
        body += _field(3, _field(1, name.encode()) + b"\x11" + struct.pack("<d", value))
    return body


def write_sampled(sampled: Sampled) -> bytes:
    """The result of sample."""
    body = b""
    for sequence in sampled.sequences:
        one = _number(1, int(sequence.stop_reason == "length")) + _field(2, sequence.tokens.astype("<i4").tobytes())
        one += _field(3, sequence.logprobs.astype("<f4").tobytes())
        if sequence.topk is not None:
            one += _field(4, _topk(*sequence.topk))
        body += _field(1, one)
    if sampled.prompt_logprobs is not None:
        body += _field(2, sampled.prompt_logprobs.astype("<f4").tobytes())
    if sampled.topk_prompt is not None:
        body += _field(3, _topk(*sampled.topk_prompt))
    body += _number(4, sampled.cached_tokens)
    if sampled.target_prompt is not None:
        shape = b"".join(_encode(4 << 3) + _encode(size) for size in sampled.target_prompt.shape)
        dense = _field(1, sampled.target_prompt.astype("<f4").tobytes())
        body += _field(5, dense + _number(3, _FLOAT32) + shape)
    return body


def _topk(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    length, k = ids.shape
    rows = _field(1, ids.astype("<i4").tobytes()) + _field(2, logprobs.astype("<f4").tobytes())
    return rows + _number(3, k) + _number(4, length)


def _field(number: int, value: bytes) -> bytes:
    return _encode(number << 3 | 2) + _encode(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _encode(number << 3) + _encode(value) if value else b""


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
