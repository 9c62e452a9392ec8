"""Messages of the Tinker API: ours against those of the library's own classes, and damaged ones."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import DataError
from stretto_service.requests import protobuf

tinker = pytest.importorskip("tinker", reason="the client of the extra `tinker`")


from tinker import types  # noqa: E402
from tinker.proto import response_conv  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402


def request_bytes(data: list[types.Datum], **config: float | str) -> bytes:
    inner = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config or None)
    request = types.ForwardBackwardRequest(forward_backward_input=inner, model_id="s:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def datum() -> types.Datum:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[70_000])]
    return types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": [2, 3, -4], "advantages": [0.5, -1.0, 2.0]},
    )


def test_a_request_of_the_client_is_read() -> None:
    read = protobuf.read_forward_backward(request_bytes([datum()] * 3, clip_low_threshold=0.7, mode="x"))
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("s:train:0", 7, "ppo", False)
    assert read.config == {"clip_low_threshold": 0.7, "mode": "x"}
    assert len(read.data) == 3
    np.testing.assert_array_equal(read.data[1].tokens, [1, 2, 70_000])
    assert read.data[1].inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(read.data[1].inputs["target_tokens"], [2, 3, -4])
    np.testing.assert_array_equal(read.data[1].inputs["advantages"], np.float32([0.5, -1, 2]))


def test_a_sparse_tensor_is_read_with_its_zeros() -> None:
    import torch

    dense = torch.zeros(3, 40)
    dense[0, 1], dense[2, 39] = 2.0, 4.0
    sparse = types.TensorData.from_torch_sparse(dense)
    assert sparse.sparse_crow_indices is not None
    one = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"weights": sparse})
    [read] = protobuf.read_forward_backward(request_bytes([one])).data
    np.testing.assert_array_equal(read.inputs["weights"], dense.numpy())


def test_chunks_other_than_tokens_are_marked() -> None:
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    one = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={})
    assert protobuf.read_forward_backward(request_bytes([one])).data[0].refused


def test_the_client_reads_what_passes_give() -> None:
    outputs = [{"logprobs": np.float32([-1, -2])}, {"logprobs": np.float32([-3])}]
    read = response_conv.deserialize_forward_backward_output(
        protobuf.write_forward_backward(outputs, {"loss:sum": math.pi, "zero:mean": 0.0})
    )
    assert read.metrics == {"loss:sum": math.pi, "zero:mean": 0.0}
    assert [output["logprobs"].to_numpy().tolist() for output in read.loss_fn_outputs] == [[-1, -2], [-3]]


def test_the_client_reads_samples() -> None:
    topk = (np.arange(6).reshape(3, 2), np.linspace(-1, -6, 6).reshape(3, 2))
    sequences = [
        protobuf.SampledSequence("length", np.int32([5, 6, 7]), np.float32([-1, -2, -3]), topk),
        protobuf.SampledSequence("stop", np.int32([]), np.float32([])),
    ]
    read = response_conv.deserialize_sample_response(
        protobuf.write_sampled(
            protobuf.Sampled(sequences, np.float32([np.nan, -1]), topk, np.float32([[-1, np.nan]]), 300)
        )
    )
    assert [each.stop_reason for each in read.sequences] == ["length", "stop"]
    assert read.sequences[0].tokens == [5, 6, 7] and read.sequences[0].logprobs == [-1, -2, -3]
    assert read.sequences[0].topk_logprobs[1][0] == (2, pytest.approx(-3))
    assert read.prompt_logprobs == [None, -1.0]
    assert read.topk_prompt_logprobs[2][1][0] == 5
    np.testing.assert_array_equal(read.target_prompt_logprobs.to_numpy(), np.float32([[-1, np.nan]]))
    assert read.prompt_cache_hit_tokens == 300


@pytest.mark.heavy
@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_refused_or_empty_and_never_crashes(body: bytes) -> None:
    with contextlib.suppress(DataError):
        protobuf.read_forward_backward(body)


@pytest.mark.heavy
@settings(max_examples=200)
@given(st.data())
def test_a_damaged_request_never_crashes(choose: st.DataObject) -> None:
    body = bytearray(request_bytes([datum()], clip_low_threshold=0.7))
    for _ in range(choose.draw(st.integers(1, 4))):
        body[choose.draw(st.integers(0, len(body) - 1))] = choose.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        protobuf.read_forward_backward(bytes(body[: choose.draw(st.integers(0, len(body)))]))
