"""Records survive the wire and the disk; whatever is not one of ours ends in an error of ours."""

from __future__ import annotations

import importlib
import pkgutil
import struct
import types
import typing
from enum import Enum

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto.records
from stretto.base.errors import DataError, WireError
from stretto.records import codec
from stretto.records.codec import decode, decode_blob, encode, encode_blob, split_blobs
from stretto.records.generate import Completion
from stretto.records.rollout import Branch, Rollout, RolloutStatus, Task
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.records.trained_tokens import TrainedSample

DTYPES = ["?", "i1", "u1", "<i2", "<i4", "<i8", "<u4", "<f2", "<f4", "<f8"]


def every_record() -> list[type]:
    """All structs of records/*.py that are sent: one that is added later is tested without anybody thinking of it."""
    found = []
    for module in pkgutil.iter_modules(stretto.records.__path__):
        names = vars(importlib.import_module(f"stretto.records.{module.name}"))
        found += [c for name, c in names.items() if isinstance(c, type(msgspec.Struct)) and name[0] != "_"]
    return sorted({c for c in found if c not in (msgspec.Struct, TrainedSample)}, key=lambda c: c.__name__)


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    raw = draw(st.binary(min_size=0, max_size=64))
    size = int(np.prod(shape)) * dtype.itemsize
    data = (raw * (size // max(len(raw), 1) + 1))[:size] if raw else bytes(size)
    values = np.frombuffer(data, dtype=dtype).reshape(shape)
    return np.asarray(values.view(np.uint8) % 2 == 0) if dtype.kind == "b" else values


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def values_of(hint: typing.Any) -> st.SearchStrategy:
    """Any value of an annotation that a record may have."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    simple = {
        int: st.integers(-(2**63), 2**63 - 1), float: st.floats(allow_nan=False), str: st.text(max_size=8),
        bool: st.booleans(), np.ndarray: arrays(), typing.Any: JSON, type(None): st.none(),
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(arg) for arg in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[1] is not ...:
        return st.tuples(*map(values_of, args))
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=2).map(tuple)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    return records_of(hint)


def records_of(kind: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field: values_of(hints[field]) for field in kind.__struct_fields__})


def assert_same(a: typing.Any, b: typing.Any) -> None:
    """Equal in type and value, arrays in dtype, shape and every bit."""
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, msgspec.Struct):
        assert type(a) is type(b)
        for field in a.__struct_fields__:
            assert_same(getattr(a, field), getattr(b, field))
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert type(a) is type(b) and a == b


@pytest.mark.heavy
@pytest.mark.parametrize("kind", every_record(), ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_every_record_survives_wire_and_file(kind: type, data: st.DataObject) -> None:
    record = data.draw(records_of(kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_SMALL", data.draw(st.sampled_from((-1, 16, codec._SMALL))))
        frames = [bytes(frame) for frame in encode(record)]
        assert_same(record, decode(frames, kind))
        assert_same(record, decode_blob(encode_blob(record), kind))


def micro_batch(num_tokens: int = 5) -> MicroBatch:
    floats = np.linspace(0, 1, num_tokens, dtype=np.float32)
    return MicroBatch(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        cu_seqlens=np.array([0, num_tokens], np.int32),
        loss_mask=np.ones(num_tokens, bool),
        logprobs=-floats,
        advantages=floats,
        temperatures=floats + 1,
        sample_ids=("g0.0/0",),
        envs=("e",),
    )


def batch(num_tokens: int = 5) -> TrainBatch:
    return TrainBatch(step=1, rank=0, world_size=1, micro_batches=(micro_batch(num_tokens), micro_batch(0)))


def test_large_arrays_are_not_copied_either_way_and_small_ones_lie_together() -> None:
    sent = micro_batch(2000)
    frames = encode(sent)
    of_their_own = (sent.token_ids, sent.logprobs, sent.advantages, sent.temperatures)
    assert len(frames) == 2 + len(of_their_own)
    for frame, array in zip(frames[2:], of_their_own):
        assert np.shares_memory(np.frombuffer(frame, np.int32), array)
    assert len(frames[1]) == sent.cu_seqlens.nbytes + sent.loss_mask.nbytes
    received = decode(frames, MicroBatch)
    assert np.shares_memory(received.token_ids, sent.token_ids)
    assert not received.token_ids.flags.writeable


def test_odd_layouts_arrive_as_plain_arrays() -> None:
    square = np.arange(12, dtype=np.int32).reshape(3, 4)
    for array in (square.T, square[:, ::2], square.astype(">i4"), np.array(3.5)):
        got = decode(encode({"a": array}), dict)["a"]
        assert got.tolist() == array.tolist() and got.flags.c_contiguous and got.dtype.isnative


def test_misaligned_frames_give_aligned_arrays() -> None:
    frames = [bytes(frame) for frame in encode(micro_batch())]
    shifted = [memoryview(b"x" + frame)[1:] for frame in frames]
    assert all(a.flags.aligned for a in (decode(shifted, MicroBatch).logprobs, decode(shifted, MicroBatch).token_ids))


def branch(logprobs: np.ndarray) -> Branch:
    nothing = np.zeros(len(logprobs), np.int32)
    return Branch(token_ids=nothing, is_sampled=nothing > 0, logprobs=logprobs, temperature=1.0, versions=())


def test_numpy_scalars_travel_as_numbers() -> None:
    assert decode(encode({"reward": np.float32(0.5), "n": np.int64(3)}), dict) == {"reward": 0.5, "n": 3}


@settings(max_examples=100)
@given(
    st.lists(st.integers() | st.integers(-(2**70), 2**70) | st.sampled_from([-(2**63), -(2**63) - 1, 2**64 - 1, 2**64]))
)
def test_integers_of_any_size_arrive(numbers: list[int]) -> None:
    task = Task(env="e", task_id="0", data={"numbers": numbers, "deep": [{"n": n} for n in numbers], "flag": True})
    pixels = np.arange(5000, dtype=np.float32)
    record = Rollout(
        rollout_id="g0.0", group_id=0, member=0, task=task, status=RolloutStatus.FINISHED, metrics={"a": 1.0},
        branches=(branch(pixels), branch(pixels)),
    )  # fmt: skip
    arrived = decode_blob(encode_blob(record), Rollout)
    assert arrived.task == task and type(arrived.task.data["flag"]) is bool
    assert all(np.array_equal(each.logprobs, pixels) for each in arrived.branches)
    assert encode_blob(arrived) == encode_blob(record)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), {1, 2, object()}, lambda: None])
def test_what_a_record_cannot_hold_is_refused_by_the_writer(value: object) -> None:
    with pytest.raises(TypeError, match=r"cannot hold|set"):
        encode({"value": value})


@pytest.mark.parametrize(("found", "older"), [(codec.SCHEMA - 1, "the writer"), (codec.SCHEMA + 1, "this process")])
def test_another_schema_is_refused_with_both_numbers_and_who_is_older(found: int, older: str) -> None:
    frames = [bytes(frame) for frame in encode(batch())]
    frames[0] = frames[0][:4] + struct.pack("<H", found) + frames[0][6:]
    rule = f"schema {found}, this process reads schema {codec.SCHEMA}; {older} is older"
    with pytest.raises(WireError, match=rule):
        decode(frames, TrainBatch)
    blob = encode_blob(batch())
    with pytest.raises(WireError, match=rule):
        decode_blob(blob[:4] + struct.pack("<H", found) + blob[6:], TrainBatch)


def test_another_record_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="expected a Completion, received a TrainBatch"):
        decode(encode(batch()), Completion)


@pytest.mark.parametrize("frames", [[], [b""], [b"STRF"], [b"GET / HTTP/1.1\r\n"], [b"STRF\x01\x00"]])
def test_foreign_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, TrainBatch)


def test_missing_cut_and_surplus_frames_are_refused() -> None:
    frames = [bytes(frame) for frame in encode(batch())]
    many = [bytes(frame) for frame in encode(batch(5000))]
    cut = ([each[0], each[1][:-1], *each[2:]] for each in (frames, many))
    wrongs = (frames[:-1], [*frames, b""], many[:-1], [*many, b""], [*many[:-1], many[-1][:-1]], *cut)
    for wrong in wrongs:
        with pytest.raises(WireError):
            decode(wrong, TrainBatch)


@pytest.mark.heavy
@settings(max_examples=150)
@given(data=st.data())
def test_damaged_frames_never_crash(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(batch(data.draw(st.sampled_from((5, 2000)))))]
    header = frames[0]
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    del header[data.draw(st.integers(0, len(header))) :]
    try:
        decode(frames, TrainBatch)
    except (WireError, DataError):
        return


@settings(max_examples=150)
@given(data=st.data())
def test_any_changed_byte_of_a_blob_is_noticed(data: st.DataObject) -> None:
    record = Branch(
        token_ids=np.arange(9, dtype=np.int32), is_sampled=np.ones(9, bool), logprobs=np.zeros(9, np.float32),
        temperature=1.0, versions=(),
    )  # fmt: skip
    blob = bytearray(encode_blob(record))
    where = data.draw(st.integers(0, len(blob) - 1))
    blob[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises((DataError, WireError)):
        decode_blob(blob, Branch)


@pytest.mark.parametrize("keep", [0, 5, 23, 24, 30, 100])
def test_a_cut_blob_is_refused_with_its_place(keep: int) -> None:
    with pytest.raises(DataError, match="rank_0"):
        decode_blob(encode_blob(batch())[:keep], TrainBatch, where="rank_0.bin")


def test_deep_nesting_is_refused() -> None:
    frames = [bytes(frame) for frame in encode({"a": 1})]
    header = msgspec.msgpack.decode(frames[0][6:])
    header[2] = None
    nested = msgspec.msgpack.encode(["dict", []])[:-1]
    body = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(WireError):
        decode([frames[0][:6] + b"\x93" + nested[1:] + b"\x90" + body], dict)


def test_blobs_lie_end_to_end_and_stay_aligned() -> None:
    sent = [micro_batch(size) for size in (0, 3, 2000)]
    joined = b"".join(map(encode_blob, sent))
    for got, want in zip(split_blobs(joined), sent, strict=True):
        received = decode_blob(got, MicroBatch)
        assert_same(want, received)
        assert np.shares_memory(received.cu_seqlens, np.frombuffer(joined, np.uint8)), "aligned, so not copied"
    assert not list(split_blobs(b""))
    for cut in (1, 10, len(joined) // 2, len(joined) - 1):
        with pytest.raises((DataError, WireError)):
            for blob in split_blobs(joined[:cut]):
                decode_blob(blob, MicroBatch)
