"""Sequences of clients as micro batches, and back."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.base.errors import DataError
from stretto_service.requests.data import Batch, pack
from stretto_service.requests.protobuf import Datum


def datum(tokens: list[int], **inputs: list) -> Datum:
    arrays = {name: np.array(values) for name, values in inputs.items()}
    return Datum(np.array(tokens, np.int32), {"target_tokens": np.array([*tokens[1:], 9])} | arrays)


def packed(data: list[Datum], loss: str = "cross_entropy", **config: float) -> Batch:
    return pack(data, loss, config, seq_len=8, vocab_size=50)


def test_a_sequence_becomes_a_document_whose_last_token_is_the_last_target() -> None:
    batch = packed([datum([1, 2, 3], weights=[0.0, 1.0, 0.5])])
    [micro_batch] = batch.micro_batches
    assert micro_batch.token_ids.tolist() == [1, 2, 3, 9]
    assert micro_batch.ce_weights.tolist() == [0, 0, 1, 0.5]
    assert batch.targets == (None,)


def test_targets_that_are_other_tokens_go_along() -> None:
    batch = packed([datum([1, 2, 3], target_tokens=[7, 8, 9])])
    assert batch.micro_batches[0].token_ids.tolist() == [1, 2, 3, 9]
    assert batch.targets[0].tolist() == [1, 7, 8, 9]


def test_rows_are_filled_in_order_and_results_come_back_per_sequence() -> None:
    data = [datum(list(range(1, n + 1))) for n in (3, 2, 7, 1)]
    batch = packed(data)
    assert batch.units == (7, 8, 2)
    scores = [np.arange(units, dtype=np.float32) for units in batch.units]
    assert [each.tolist() for each in batch.per_sequence(scores)] == [[1, 2, 3], [5, 6], list(range(1, 8)), [1]]


def test_policy_losses_have_logprobs_advantages_and_masks() -> None:
    inputs = {"logprobs": [-1.0, -2.0], "advantages": [3.0, 4.0], "mask": [0.0, 1.0]}
    batch = packed([datum([1, 2], **inputs)], "ppo", clip_high_threshold=1.3)
    [micro_batch] = batch.micro_batches
    assert micro_batch.logprobs.tolist() == [0, -1, -2]
    assert micro_batch.advantages.tolist() == [0, 3, 4]
    assert micro_batch.rl_weights.tolist() == [0, 0, 1]
    assert (batch.loss.type, batch.loss.clip_high_threshold) == ("ppo", pytest.approx(1.3))


def test_a_threshold_as_an_array_of_one_value_is_the_setting() -> None:
    inputs = {"logprobs": [0.0, 0.0], "advantages": [1.0, 1.0], "clip_low_threshold": [0.5, 0.5]}
    assert packed([datum([1, 2], **inputs)], "cispo").loss.clip_low_threshold == 0.5
    inputs["clip_low_threshold"] = [0.5, 0.6]
    with pytest.raises(DataError, match="one value"):
        packed([datum([1, 2], **inputs)], "cispo")


@pytest.mark.parametrize(
    ("bad", "loss", "message"),
    [
        (datum([1] * 8), "cross_entropy", "at most 7"),
        (datum([1, 50]), "cross_entropy", "another tokenizer"),
        (datum([1, -1]), "cross_entropy", "another tokenizer"),
        (datum([1, 2], weights=[1.0]), "cross_entropy", "1 values for 2 tokens"),
        (datum([1, 2], weights=[1.0, np.nan]), "cross_entropy", "not finite"),
        (datum([1, 2], advantages=[1.0, 1.0]), "cross_entropy", "means nothing"),
        (datum([1, 2]), "ppo", "advantages is missing"),
        (datum([]), "cross_entropy", "is empty"),
        (datum([1, 2]), "stable_reinforce", "not supported"),
        (datum([1, 2]), "sum", "unknown"),
        (datum([1, 2], weights=[[1.0, 1.0], [1.0, 1.0]]), "cross_entropy", "2 values per token"),
    ],
)
def test_what_cannot_be_computed_is_named(bad: Datum, loss: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        packed([datum([1]), bad], loss)


def test_unknown_settings_of_a_loss_are_refused() -> None:
    with pytest.raises(DataError, match="clip is unknown"):
        packed([datum([1])], clip=1.0)
