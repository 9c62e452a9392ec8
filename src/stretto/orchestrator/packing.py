"""Samples become micro batches: rows of at most seq_len tokens, equally many and equally dear on every rank.

In: the TrainSamples of one step. Out: one TrainBatch a rank. No token is lost, no sample is split, and
every rank gets the same number of micro batches. Rows are filled by first-fit-decreasing; rows are then
dealt to the ranks dearest first, one to each rank a round, the dearest of a round to the rank that has the
least so far. So the ranks are even not only over the step but within each round, where they wait for each
other.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.base.aio import at_once
from stretto.base.errors import DataError
from stretto.records.sample import MicroBatch, TrainBatch, TrainSample

STREAM_DEFAULTS = {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}


@dataclass(frozen=True)
class Cost:
    """Work of a document of n tokens: linear * n + quadratic * n^2, in FLOPs (only ratios matter)."""

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, lengths: np.ndarray) -> np.ndarray:
        return self.linear * lengths + self.quadratic * lengths.astype(np.float64) ** 2


def cost_of_model(model_dir: str | Path) -> Cost:
    """Cost by the shape in the model directory's config.json; by tokens alone when there is none to read."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        return Cost()
    hf = json.loads(path.read_text())
    try:
        hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
        intermediate, vocab = hf["intermediate_size"], hf["vocab_size"]
    except KeyError:
        return Cost()
    if (expert := hf.get("moe_intermediate_size")) and (top_k := hf.get("num_experts_per_tok")):
        intermediate = expert * top_k  # of a mixture a token pays for the experts it is sent to
    head_dim = hf.get("head_dim") or hidden // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)  # q and o, k and v
    linear = layers * (attention + 3 * hidden * intermediate) + hidden * vocab
    # Scores and weighted values, each n^2 / 2 positions because attention is causal.
    return Cost(linear=2.0 * linear, quadratic=2.0 * layers * heads * head_dim)


def pack(
    samples: Sequence[TrainSample], *, step: int, seq_len: int, world_size: int = 1, cost: Cost | None = None
) -> list[TrainBatch]:
    """Pack the samples of `step` for `world_size` ranks, without a pause; see `packing`."""
    return at_once(packing(samples, step=step, seq_len=seq_len, world_size=world_size, cost=cost))


def packing(
    samples: Sequence[TrainSample], *, step: int, seq_len: int, world_size: int = 1, cost: Cost | None = None
) -> Generator[None, None, list[TrainBatch]]:
    """The batches of `step` for `world_size` ranks; yields where others may run in between.

    Raises: DataError when a sample is longer than seq_len.
    """
    cost = cost or Cost()
    lengths = np.fromiter((len(s.token_ids) for s in samples), dtype=np.int64, count=len(samples))
    if len(samples) and lengths.max() > seq_len:
        longest = samples[int(lengths.argmax())]
        raise DataError(
            f"sample {longest.sample_id} has {lengths.max()} tokens, more than seq_len = {seq_len}; "
            "raise seq_len or shorten the replies."
        )
    rows = yield from first_fit_decreasing(lengths, seq_len)
    costs = cost.of(lengths)
    rows = split_to_multiple(rows, costs, world_size)
    ranks = deal([float(costs[row].sum()) for row in rows], world_size)
    num_micro = max((len(rank) for rank in ranks), default=0)
    streams = [name for name in STREAM_DEFAULTS if any(getattr(s, name) is not None for s in samples)]
    batches = []
    for rank, row_indices in enumerate(ranks):
        micro = []
        for r in row_indices:
            micro.append(to_micro_batch([samples[i] for i in rows[r]], streams))
            yield
        micro += [dummy_micro_batch(streams)] * (num_micro - len(micro))
        batches.append(TrainBatch(step=step, rank=rank, world_size=world_size, micro_batches=tuple(micro)))
    return batches


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> Generator[None, None, list[list[int]]]:
    """Sample indices by row.

    Longest first, each into the first row with room. Rows stay in their order of creation.
    """
    rows: list[list[int]] = []
    free = np.zeros(len(lengths), dtype=np.int64)
    for index in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[index])
        num_rows = len(rows)
        fits = free[:num_rows] >= size
        row = int(fits.argmax()) if num_rows else 0
        if not num_rows or not fits[row]:
            row = num_rows
            rows.append([])
            free[row] = capacity
        rows[row].append(index)
        free[row] -= size
        yield
    return rows


def split_to_multiple(rows: list[list[int]], costs: np.ndarray, multiple: int) -> list[list[int]]:
    """Halve the dearest rows that hold several samples until their number is a multiple, if possible."""
    rows = [list(row) for row in rows]
    while len(rows) % multiple:
        candidates = [r for r, row in enumerate(rows) if len(row) > 1]
        if not candidates:
            break
        dearest = max(candidates, key=lambda r: costs[rows[r]].sum())
        halves: tuple[list[int], list[int]] = ([], [])
        totals = [0.0, 0.0]
        for index in sorted(rows[dearest], key=lambda i: -costs[i]):
            lighter = int(totals[1] < totals[0])
            halves[lighter].append(index)
            totals[lighter] += costs[index]
        rows[dearest] = halves[0]
        rows.append(halves[1])
    return rows


def deal(row_costs: list[float], world_size: int) -> list[list[int]]:
    """Row indices by rank, in rounds of one row a rank; the last round may leave ranks without one."""
    order = sorted(range(len(row_costs)), key=lambda r: -row_costs[r])
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    totals = [0.0] * world_size
    for start in range(0, len(order), world_size):
        lightest_first = sorted(range(world_size), key=lambda rank: totals[rank])
        for rank, row in zip(lightest_first, order[start : start + world_size]):
            ranks[rank].append(row)
            totals[rank] += row_costs[row]
    return ranks


def to_micro_batch(samples: Sequence[TrainSample], streams: Sequence[str] = ()) -> MicroBatch:
    """One row of these documents, in this order, without padding.

    `streams` are made whole for all of them.
    """
    lengths = [len(s.token_ids) for s in samples]
    cu_seqlens = np.zeros(len(samples) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    temperatures = np.repeat(np.array([s.temperature for s in samples], dtype=np.float32), lengths)
    loss_mask = np.concatenate([s.loss_mask for s in samples])
    whole = {name: _stream(samples, name) for name in streams}
    if "ce_weights" in whole:  # nobody sampled these tokens at any temperature: they are learned at 1
        temperatures[(whole["ce_weights"] != 0) & ~loss_mask] = 1.0
    return MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]),
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        logprobs=np.concatenate([s.logprobs for s in samples]),
        advantages=np.concatenate([s.advantages for s in samples]),
        temperatures=temperatures,
        sample_ids=tuple(s.sample_id for s in samples),
        envs=tuple(s.env for s in samples),
        routed_experts=_routes(samples),
        **whole,
    )


def dummy_micro_batch(streams: Sequence[str] = ()) -> MicroBatch:
    """One padding token and no sample: the cheapest thing that keeps a rank in step."""
    nothing = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        token_ids=np.zeros(1, dtype=np.int32),
        cu_seqlens=np.array([0, 1], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=bool),
        logprobs=nothing,
        advantages=nothing,
        temperatures=np.ones(1, dtype=np.float32),
        **{name: nothing for name in streams},
    )


def _routes(samples: Sequence[TrainSample]) -> np.ndarray | None:
    """Expert choices of all tokens; samples that have none get rows that say so.

    Raises: DataError when the choices are of different models.
    """
    known = [(s.sample_id, s.routed_experts) for s in samples if s.routed_experts is not None]
    if not known:
        return None
    first_id, first = known[0]
    for sample_id, routes in known:
        if routes.shape[1:] != first.shape[1:] or routes.dtype != first.dtype:
            raise DataError(
                f"samples {first_id} and {sample_id} were routed by different models: "
                f"{first.dtype}{list(first.shape[1:])} and {routes.dtype}{list(routes.shape[1:])} (layers, top_k)"
            )
    shape, missing = first.shape[1:], np.iinfo(first.dtype).max
    nothing = lambda s: np.full((len(s.token_ids), *shape), missing, first.dtype)
    return np.concatenate([nothing(s) if s.routed_experts is None else s.routed_experts for s in samples])


def _stream(samples: Sequence[TrainSample], name: str) -> np.ndarray:
    parts = []
    for sample in samples:
        values = getattr(sample, name)
        default = np.float32(STREAM_DEFAULTS[name])
        parts.append(np.full(len(sample.token_ids), default) if values is None else values)
    return np.concatenate(parts)
