"""Packs the sequences of a training request into micro batches, and splits the trainer's results by sequence.

A client names the target of each position: `target_tokens[i]` follows `model_input[:i + 1]`. The trainer scores token t
from the tokens before it. So a sequence of n tokens becomes a document of n + 1, whose last token is the last target.
Targets that differ from the following tokens are sent beside the micro batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import DataError
from stretto.records.sample import MicroBatch
from stretto_service.requests.protobuf import Datum
from stretto_service.wires.operations import SumLoss

if TYPE_CHECKING:
    from jaxtyping import Float32

LOSSES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "cross_entropy": (frozenset({"target_tokens"}), frozenset({"weights"})),
    **dict.fromkeys(
        ("importance_sampling", "ppo", "cispo", "dro", "gspo"),
        (
            frozenset({"target_tokens", "logprobs", "advantages"}),
            frozenset({"mask", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"}),
        ),
    ),
}
"""By loss: the arrays that it requires, and optional ones."""
UNSUPPORTED = {
    "stable_reinforce": "it needs what only the original service records while it samples",
    "custom": "losses run in the client here: forward_backward_custom with a function",
}
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
_MASKS = ("mask", "sequence_ratio_mask")


@dataclass(frozen=True)
class Batch:
    """The sequences of one request. targets: per micro batch, None if they are the next tokens."""

    micro_batches: tuple[MicroBatch, ...]
    targets: tuple[np.ndarray | None, ...]
    loss: SumLoss

    @property
    def units(self) -> tuple[int, ...]:
        """Tokens of each micro batch."""
        return tuple(len(micro_batch.token_ids) for micro_batch in self.micro_batches)

    def per_sequence(self, logprobs: Sequence[Float32[np.ndarray, " _"]]) -> list[Float32[np.ndarray, " _"]]:
        """Split logprobs of micro batches into an array per sequence."""
        parts = []
        for micro_batch, scores in zip(self.micro_batches, logprobs):
            bounds = micro_batch.cu_seqlens.tolist()
            parts += [scores[start + 1 : stop] for start, stop in itertools.pairwise(bounds)]
        return parts


def pack(
    data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str], *, seq_len: int, vocab_size: int
) -> Batch:
    """Pack sequences into micro batches of at most seq_len tokens.

    Raises: DataError naming the sequence, its array and the fault, for everything that the trainer cannot compute.
    """
    if loss_fn in UNSUPPORTED:
        raise DataError(f"loss_fn = {loss_fn!r} is not supported: {UNSUPPORTED[loss_fn]}")
    if loss_fn not in LOSSES:
        raise DataError(f"loss_fn = {loss_fn!r} is unknown; there are {', '.join(LOSSES)}")
    if not data:
        raise DataError("data: there is no sequence")
    documents = [
        _document(datum, loss_fn, f"data[{i}]", seq_len=seq_len, vocab_size=vocab_size) for i, datum in enumerate(data)
    ]
    loss = _loss(loss_fn, config, data)
    rows: list[list[dict[str, np.ndarray]]] = []
    room = 0
    for document in documents:
        size = len(document["token_ids"])
        if size > room:
            rows.append([])
            room = seq_len
        rows[-1].append(document)
        room -= size
    micro_batches, targets = zip(*map(_row, rows))
    return Batch(micro_batches, targets, loss)


def _document(datum: Datum, loss_fn: str, where: str, *, seq_len: int, vocab_size: int) -> dict[str, np.ndarray]:
    if datum.refused:
        raise DataError(f"{where}.model_input: {datum.refused}")
    required, optional = LOSSES[loss_fn]
    if missing := sorted(required - datum.inputs.keys()):
        raise DataError(f"{where}.loss_fn_inputs: {missing[0]} is missing, which {loss_fn} needs")
    if unknown := sorted(datum.inputs.keys() - required - optional):
        raise DataError(f"{where}.loss_fn_inputs: {unknown[0]} means nothing to {loss_fn}; leave it out")
    size = len(datum.tokens)
    if not size:
        raise DataError(f"{where}.model_input is empty")
    if size + 1 > seq_len:
        raise DataError(
            f"{where}.model_input has {size} tokens; this service trains on at most {seq_len - 1} (seq_len = {seq_len})"
        )
    inputs = {name: _flat(array, name, size, where) for name, array in datum.inputs.items()}
    targets = inputs["target_tokens"]
    for name, ids in (("model_input", datum.tokens), ("loss_fn_inputs.target_tokens", targets)):
        if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocab_size:
            raise DataError(
                f"{where}.{name}: a token id is not below {vocab_size}, the size of this model's vocabulary; is it "
                "of another tokenizer?"
            )
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{where}.loss_fn_inputs.{name} has values that are not finite")
    shifted = lambda array: np.concatenate(([0], array)).astype(np.float32)
    ones = np.ones(size, np.float32)
    document = {
        "token_ids": np.concatenate((datum.tokens, targets[-1:])).astype(np.int32),
        "targets": np.concatenate((datum.tokens[:1], targets)).astype(np.int32),
        "loss_mask": np.arange(size + 1) > 0,
        "logprobs": shifted(inputs.get("logprobs", 0 * ones)),
        "advantages": shifted(inputs.get("advantages", 0 * ones)),
    }
    if loss_fn == "cross_entropy":
        document["ce_weights"] = shifted(inputs.get("weights", ones))
        document["rl_weights"] = 0 * document["ce_weights"]
    else:
        masks = [inputs[name] for name in _MASKS if name in inputs]
        document["rl_weights"] = shifted(np.prod([ones, *masks], axis=0))
    return document


def _flat(array: np.ndarray, name: str, size: int, where: str) -> np.ndarray:
    """One value per position: [size] or [size, 1]."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 2:
        raise DataError(f"{where}.loss_fn_inputs.{name} has {array.shape[1]} values per token; this service takes one")
    if array.shape != (size,):
        raise DataError(f"{where}.loss_fn_inputs.{name} has {array.size} values for {size} tokens of model_input")
    return array


def _loss(loss_fn: str, config: Mapping[str, float | str], data: Sequence[Datum]) -> SumLoss:
    settings: dict[str, Any] = dict(config)
    for name in THRESHOLDS:  # clients may send one value per token, but the trainer has one for all
        values = {float(x) for datum in data if name in datum.inputs for x in np.unique(datum.inputs[name])}
        if len(values) > 1:
            raise DataError(f"loss_fn_inputs.{name}: this service takes one value for all tokens of a request")
        if values:
            settings[name] = values.pop()
    known = {*THRESHOLDS, "beta"}
    if unknown := sorted(settings.keys() - known):
        raise DataError(f"loss_fn_config: {unknown[0]} is unknown; there are {', '.join(sorted(known))}")
    if bad := [name for name, value in settings.items() if isinstance(value, str) or not np.isfinite(value)]:
        raise DataError(f"loss_fn_config.{bad[0]}: {settings[bad[0]]!r} is not a finite number")
    return SumLoss(type=loss_fn, **settings)  # type: ignore[arg-type]


def _row(documents: Sequence[dict[str, np.ndarray]]) -> tuple[MicroBatch, np.ndarray | None]:
    """A micro batch, and its targets if they are not its tokens."""
    joined = {name: np.concatenate([document[name] for document in documents]) for name in documents[0]}
    targets = joined.pop("targets")
    sizes = [len(document["token_ids"]) for document in documents]
    micro_batch = MicroBatch(
        **joined,
        cu_seqlens=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        temperatures=np.ones(sum(sizes), np.float32),
        sample_ids=tuple(str(i) for i in range(len(sizes))),
        envs=("",) * len(sizes),
    )
    return micro_batch, None if np.array_equal(targets, micro_batch.token_ids) else targets
