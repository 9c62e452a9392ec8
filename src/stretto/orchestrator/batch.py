"""Makes a batch of groups: a training sample per trained branch, and rows of samples, balanced over ranks.

A sample has the advantage of its branch's agent on its tokens. `pack` gets the samples of a step and returns one
TrainBatch per rank. No token is lost, no sample is split, and every rank gets the same number of micro batches. Rows of
at most seq_len tokens are filled by first-fit-decreasing. They are assigned to ranks in rounds, most expensive rows
first: each rank gets one row per round, the most expensive row of a round goes to the rank with the lowest total cost
so far. So costs are balanced over the step and within each round, after which ranks wait for each other.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.algorithms.credit import whiten
from stretto.base.errors import DataError
from stretto.records.alternatives import concat_alternatives
from stretto.records.rollout import Branch, Group, Rollout
from stretto.records.row_packing import PrefixTree, first_fit_decreasing, pack_by_prefix
from stretto.records.sample import ImageFields, MicroBatch, TrainBatch, TrainSample, images_by_document
from stretto.records.support import Support, concat_supports

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64, Int, UInt

STREAM_DEFAULTS = {
    "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0, "token_rewards": 0.0,
}  # fmt: skip
NO_IMAGES: ImageFields = {"images": (), "num_images": ()}


# -- samples --


def build_samples(groups: Iterable[Group]) -> Generator[None, None, list[TrainSample]]:
    """Samples of all counted rollouts, in group and member order; yields after each group, so that other tasks run."""
    samples: list[TrainSample] = []
    for group in groups:
        samples += to_samples([group])
        yield
    return samples


def to_samples(groups: Iterable[Group]) -> list[TrainSample]:
    """Samples of all counted rollouts, in group and member order, at once."""
    samples: list[TrainSample] = []
    for group in groups:
        counted = [member for member, rollout in enumerate(group.rollouts) if rollout.is_counted]
        for member in counted:
            by_agent = group.advantages_of(member) if group.agent_advantages else {}
            by_branch = group.branch_advantages[member] if group.branch_advantages else ()
            rollout, advantage = group.rollouts[member], group.advantages[member]
            if not rollout.turns:
                samples += samples_of(rollout, advantage, by_agent, by_branch)
                continue
            by_turn = group.turn_advantages[member] if group.turn_advantages else ()
            rewards = group.turn_rewards[member] if group.turn_rewards else ()
            samples += samples_of(rollout, advantage, by_agent, by_branch, by_turn=by_turn, turn_rewards=rewards)
    return samples


def whiten_samples(samples: list[TrainSample], envs: Collection[str]) -> list[TrainSample]:
    """Whiten the advantages of these environments over all their trained tokens together."""
    whitened = [sample for sample in samples if sample.env in envs]
    if not whitened:
        return samples
    values = whiten(np.concatenate([sample.advantages[sample.loss_mask] for sample in whitened]))
    parts = iter(np.split(values, np.cumsum([sample.loss_mask.sum() for sample in whitened])[:-1]))
    return [_with_advantages(s, next(parts)) if s.env in envs else s for s in samples]


def _with_advantages(sample: TrainSample, values: Float[np.ndarray, " trained"]) -> TrainSample:
    advantages = np.zeros(len(sample.token_ids), dtype=np.float32)
    advantages[sample.loss_mask] = values
    return msgspec.structs.replace(sample, advantages=advantages)


def samples_of(
    rollout: Rollout,
    advantage: float,
    by_agent: Mapping[str, float] = MappingProxyType({}),
    by_branch: Sequence[float] = (),
    *,
    by_turn: Sequence[float] = (),
    turn_rewards: Sequence[float] = (),
) -> list[TrainSample]:
    """One sample per trained branch of a rollout.

    by_agent: advantages of agents that have their own; the others get `advantage`. by_branch: one advantage per branch
    if branches have rewards of their own, else (). by_turn: what the tokens of each turn get in addition.
    turn_rewards: of each turn, if the trainer makes advantages of rewards. The first token of a document is not
    predicted and never trained.
    """
    samples = []
    for index, branch in enumerate(rollout.branches):
        if not branch.is_trained:
            continue
        loss_mask = trained_tokens(branch)
        if not loss_mask.any():
            continue
        branch_advantage = by_branch[index] if by_branch else by_agent.get(branch.agent, advantage)
        sample = TrainSample(
            sample_id=f"{rollout.rollout_id}/{index}",
            env=rollout.task.env,
            token_ids=branch.token_ids,
            first_version=branch.versions[0].version if branch.versions else 0,
            loss_mask=loss_mask,
            logprobs=branch.logprobs,
            advantages=loss_mask * advantages_of_tokens(branch, branch_advantage, by_turn),
            token_rewards=rewards_of_tokens(branch, loss_mask, turn_rewards) if turn_rewards else None,
            temperature=branch.temperature,
            routed_experts=branch.routed_experts,
            support=branch.support,
            images=branch.images,
        )
        if branch.is_frozen or branch.ref_logprobs is not None or branch.ce_weights is not None:
            distilled = distillation_streams(branch, loss_mask, has_advantage=bool(sample.advantages.any()))
            sample = msgspec.structs.replace(sample, **distilled)
        samples.append(sample)
    return samples


def advantages_of_tokens(
    branch: Branch, advantage: float, by_turn: Sequence[float]
) -> Float32[np.ndarray, " tokens"] | np.float32:
    """The advantage of a branch's tokens; one for all if turns have none of their own."""
    if not by_turn:
        return np.float32(advantage)
    advantages = np.full(len(branch.token_ids), advantage)
    for span in branch.turns:
        advantages[span.start : span.end] += by_turn[span.turn]
    return advantages.astype(np.float32)


def rewards_of_tokens(
    branch: Branch, loss_mask: Bool[np.ndarray, " tokens"], turn_rewards: Sequence[float]
) -> Float32[np.ndarray, " tokens"]:
    """Rewards of turns at their last trained tokens; of a turn without one, at the last trained token before it."""
    rewards = np.zeros(len(branch.token_ids), dtype=np.float32)
    for span in branch.turns:
        trained = np.flatnonzero(loss_mask[: span.end])
        if len(trained):
            rewards[trained[-1]] += turn_rewards[span.turn]
    return rewards


def trained_tokens(branch: Branch) -> Bool[np.ndarray, " tokens"]:
    """Sampled tokens that are trained: not the first, none before trained_from, no greedy ones; bool [tokens]."""
    is_trained = branch.is_sampled.copy()
    if branch.is_greedy is not None and not branch.is_frozen:
        is_trained &= ~branch.is_greedy
    is_trained[:1] = False
    if branch.trained_from is not None:
        for span in branch.versions:
            if span.version < branch.trained_from:
                is_trained[span.start : span.end] = False
    return is_trained


def distillation_streams(
    branch: Branch, loss_mask: Bool[np.ndarray, " tokens"], *, has_advantage: bool
) -> dict[str, Any]:
    """Streams of a branch for the ce and ref_kl components.

    Tokens that a teacher played are no samples of the policy: they are in ce at temperature 1, not in loss_mask or
    rl. Tokens that a teacher scored are in ref_kl, not in rl. Echoed prompt tokens are in ce; without an advantage,
    only they are trained.
    """
    zeros = np.zeros(len(loss_mask), np.float32)
    if branch.is_frozen:
        return {
            "loss_mask": np.zeros_like(loss_mask),
            "logprobs": zeros,
            "advantages": zeros,
            "temperature": 1.0,
            "routed_experts": None,
            "support": None,
            "ce_weights": loss_mask.astype(np.float32),
        }
    if branch.ref_logprobs is not None:
        return {
            "rl_weights": zeros,
            "ref_kl_weights": loss_mask.astype(np.float32),
            "ref_logprobs": branch.ref_logprobs,
            "alternatives": branch.alternatives,
        }
    streams = {"ce_weights": branch.ce_weights}
    return streams if has_advantage else streams | {"rl_weights": zeros}


# -- packing --


@dataclass(frozen=True)
class Cost:
    """FLOPs of a document of n tokens: linear * n + quadratic * n^2 (only ratios matter).

    patches: FLOPs of one patch of its images in the vision tower.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    patches: float = 0.0

    def of(self, lengths: Int[np.ndarray, " documents"]) -> Float64[np.ndarray, " documents"]:
        """The cost of documents of these lengths."""
        return self.linear * lengths + self.quadratic * lengths.astype(np.float64) ** 2


def cost_of_model(model_dir: str | Path) -> Cost:
    """The cost for the model in config.json; proportional to tokens if there is no such file."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        return Cost()
    hf = json.loads(path.read_text())
    hf |= hf.get("text_config") or {}
    try:
        hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
        intermediate, vocab = hf["intermediate_size"], hf["vocab_size"]
    except KeyError:
        return Cost()
    if top_k := hf.get("num_experts_per_tok"):
        # A token is computed by top_k experts, whose width has a name of its own in families with dense blocks.
        intermediate = (hf.get("moe_intermediate_size") or intermediate) * top_k
    head_dim = hf.get("head_dim") or hidden // heads
    kv_heads = hf.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)  # q and o, k and v
    linear = layers * (attention + 3 * hidden * intermediate) + hidden * vocab
    tower = hf.get("vision_config") or {}
    width, inner = tower.get("hidden_size", 0), tower.get("intermediate_size", 0)
    return Cost(
        linear=2.0 * linear,
        # Scores and weighted values, each n^2 / 2 positions because attention is causal.
        quadratic=2.0 * layers * heads * head_dim,
        patches=2.0 * tower.get("depth", 0) * (4 * width**2 + 2 * width * inner),
    )


def pack(
    samples: Sequence[TrainSample],
    *,
    step: int,
    seq_len: int,
    row_tokens: int | None = None,
    world_size: int = 1,
    cost: Cost | None = None,
    max_patches: int | None = None,
    shares_prefixes: bool = False,
    is_sent: bool = True,
) -> Generator[None, None, list[TrainBatch]]:
    """Pack the batches of `step` for `world_size` ranks; yields wherever other tasks may run.

    row_tokens: most tokens of a row, None: seq_len; a sample with more has a row of its own. max_patches: the same for
    patches of images. shares_prefixes: samples that begin alike stand in one row as far as they fit, and what they have
    in common counts once. is_sent: do engines get the version that the step makes?

    Raises: DataError if a sample is longer than seq_len.
    """
    cost = cost or Cost()
    lengths = np.fromiter((len(s.token_ids) for s in samples), dtype=np.int64, count=len(samples))
    if len(samples) and lengths.max() > seq_len:
        longest = samples[int(lengths.argmax())]
        raise DataError(
            f"sample {longest.sample_id} has {lengths.max()} tokens, more than seq_len = {seq_len}; "
            "raise seq_len or shorten the replies."
        )
    images = [{image.hash: image.num_patches for image in sample.images} for sample in samples]
    shown = images if any(images) else ()
    costs = alone = cost.of(lengths)
    if shares_prefixes:
        tree = yield from PrefixTree.build(_streams_of(samples))
        rows, own = yield from pack_by_prefix(tree, lengths, row_tokens or seq_len, shown, max_patches)
        costs = alone - cost.of(lengths - own)
    else:
        rows = yield from first_fit_decreasing(lengths, row_tokens or seq_len, shown, max_patches)
    if shown:
        patches = np.array([cost.patches * sum(each.values()) for each in images])
        costs, alone = costs + patches, alone + patches
    rows, row_costs = yield from split_to_multiple(rows, costs, world_size, alone if shares_prefixes else None)
    ranks = yield from assign_rows(row_costs, world_size)
    num_micro = max((len(rank) for rank in ranks), default=0)
    streams = [name for name in STREAM_DEFAULTS if any(getattr(s, name) is not None for s in samples)]
    totals = rollout_tokens(samples)
    batches = []
    for rank, row_indices in enumerate(ranks):
        micro = []
        for r in row_indices:
            micro.append(to_micro_batch([samples[i] for i in rows[r]], streams, totals))
            yield
        micro += [dummy_micro_batch(streams)] * (num_micro - len(micro))
        batches.append(
            TrainBatch(step=step, rank=rank, world_size=world_size, micro_batches=tuple(micro), is_sent=is_sent)
        )
    return batches


def _streams_of(samples: Sequence[TrainSample]) -> list[list[np.ndarray]]:
    """Per sample, what must be equal where samples share tokens: tokens, recorded experts, images.

    Images are compared all at once: samples share tokens only if all their images are the same.
    """
    parts = _expert_choices(samples)
    numbers: dict[tuple[str, ...], int] = {}
    has_images = any(sample.images for sample in samples)
    streams = [[sample.token_ids] for sample in samples]
    for index, (sample, found) in enumerate(zip(samples, streams)):
        if parts is not None:
            found.append(parts[index])
        if has_images:
            shown = numbers.setdefault(tuple(image.hash for image in sample.images), len(numbers))
            found.append(np.full(len(sample.token_ids), shown, np.int32))
    return streams


def split_to_multiple(
    given: Sequence[Sequence[int]],
    costs: Float[np.ndarray, " samples"],
    multiple: int,
    alone: Float[np.ndarray, " samples"] | None = None,
) -> Generator[None, None, tuple[list[list[int]], list[float]]]:
    """Split the most expensive of the given rows until their number is a multiple of `multiple`, if possible.

    Rows of one sample are not split. alone: what samples cost that share nothing with the one before them, if `costs`
    say what they add to it; neighbours then stay together. Returns the rows and their costs.
    """
    rows, row_costs, costs = [list(row) for row in given], [], costs.copy()  # ours to change
    for row in rows:
        row_costs.append(float(costs[row].sum()))
        yield
    by_cost = [(-cost, r) for r, cost in enumerate(row_costs) if len(rows[r]) > 1]
    heapq.heapify(by_cost)
    while len(rows) % multiple and by_cost:
        _, largest = heapq.heappop(by_cost)
        if alone is None:
            halves = _halves(rows[largest], costs)
        else:
            halves = _cut_in_half(rows[largest], costs, alone)
            costs[halves[1][0]] = alone[halves[1][0]]
        rows[largest] = halves[0]
        rows.append(halves[1])
        row_costs.append(0.0)
        for r in (largest, len(rows) - 1):
            row_costs[r] = float(costs[rows[r]].sum())
            if len(rows[r]) > 1:
                heapq.heappush(by_cost, (-row_costs[r], r))
        yield
    return rows, row_costs


def _halves(row: Sequence[int], costs: Float[np.ndarray, " samples"]) -> tuple[list[int], list[int]]:
    """Split a row into two of nearly equal cost, most expensive samples first."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0.0, 0.0]
    for index in sorted(row, key=lambda i: -costs[i]):
        lighter = int(totals[1] < totals[0])
        halves[lighter].append(index)
        totals[lighter] += costs[index]
    return halves


def _cut_in_half(
    row: Sequence[int], costs: Float[np.ndarray, " samples"], alone: Float[np.ndarray, " samples"]
) -> tuple[list[int], list[int]]:
    """Cut a row where its two parts cost about the same; the first sample of the second part is then alone."""
    own, whole = costs[list(row)], alone[list(row)]
    first = np.cumsum(own)[:-1]
    second = own.sum() - first - own[1:] + whole[1:]
    middle = int(np.maximum(first, second).argmin()) + 1
    return list(row[:middle]), list(row[middle:])


def assign_rows(row_costs: Sequence[float], world_size: int) -> Generator[None, None, list[list[int]]]:
    """Assign rows to ranks in rounds of one row per rank; row indices by rank.

    The last round may be incomplete.
    """
    order = sorted(range(len(row_costs)), key=lambda r: -row_costs[r])
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    totals = [0.0] * world_size
    for start in range(0, len(order), world_size):
        lightest_first = sorted(range(world_size), key=lambda rank: totals[rank])
        for rank, row in zip(lightest_first, order[start : start + world_size]):
            ranks[rank].append(row)
            totals[rank] += row_costs[row]
        yield
    return ranks


def rollout_tokens(samples: Sequence[TrainSample]) -> Counter[str]:
    """Number of tokens of the rl component by rollout id, over all samples (branches) of the rollout."""
    totals: Counter[str] = Counter()
    for sample in samples:
        weights = sample.loss_mask if sample.rl_weights is None else sample.loss_mask * sample.rl_weights
        totals[_rollout_of(sample)] += int(np.count_nonzero(weights))
    return totals


def _rollout_of(sample: TrainSample) -> str:
    return sample.sample_id.rpartition("/")[0] or sample.sample_id


def to_micro_batch(
    samples: Sequence[TrainSample], streams: Sequence[str] = (), totals: Mapping[str, int] | None = None
) -> MicroBatch:
    """One row of these samples, in this order, without padding.

    A sample without one of the `streams` gets the default value on all its tokens. totals: `rollout_tokens` of the
    batch; None if the batch has no other samples.
    """
    totals = rollout_tokens(samples) if totals is None else totals
    lengths = [len(s.token_ids) for s in samples]
    cu_seqlens = np.zeros(len(samples) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    temperatures = np.repeat(np.array([s.temperature for s in samples], dtype=np.float32), lengths)
    loss_mask = np.concatenate([s.loss_mask for s in samples])
    columns = {name: _stream_of(samples, name) for name in streams}
    if "ce_weights" in columns:  # these tokens were not sampled: they are trained at temperature 1
        temperatures[(columns["ce_weights"] != 0) & ~loss_mask] = 1.0
    row = MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]),
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        logprobs=np.concatenate([s.logprobs for s in samples]),
        advantages=np.concatenate([s.advantages for s in samples]),
        temperatures=temperatures,
        sample_ids=tuple(s.sample_id for s in samples),
        envs=tuple(s.env for s in samples),
        first_versions=tuple(s.first_version for s in samples),
        rollout_tokens=tuple(totals[_rollout_of(s)] for s in samples),
        routed_experts=_merge_expert_choices(samples),
        support=_merge_supports(samples, lengths),
        alternatives=concat_alternatives([s.alternatives for s in samples], lengths)
        if any(s.alternatives is not None for s in samples)
        else None,
        **(images_by_document([s.images for s in samples]) if any(s.images for s in samples) else NO_IMAGES),
    )
    return msgspec.structs.replace(row, **columns)


def dummy_micro_batch(streams: Sequence[str] = ()) -> MicroBatch:
    """One padding token and no sample: the cheapest row that keeps a rank in lockstep."""
    zero = np.zeros(1, dtype=np.float32)
    row = MicroBatch(
        token_ids=np.zeros(1, dtype=np.int32),
        cu_seqlens=np.array([0, 1], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=bool),
        logprobs=zero,
        advantages=zero,
        temperatures=np.ones(1, dtype=np.float32),
    )
    return msgspec.structs.replace(row, **dict.fromkeys(streams, zero))


def _merge_expert_choices(samples: Sequence[TrainSample]) -> UInt[np.ndarray, "tokens layers top_k"] | None:
    """Expert choices of all tokens, as `_expert_choices`."""
    parts = _expert_choices(samples)
    return None if parts is None else np.concatenate(parts)


def _expert_choices(samples: Sequence[TrainSample]) -> list[UInt[np.ndarray, "tokens layers top_k"]] | None:
    """Expert choices of each sample's tokens; the largest integer marks tokens without choices.

    Raises: DataError if the choices are of different models.
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
    unknown = lambda s: np.full((len(s.token_ids), *shape), missing, first.dtype)
    return [unknown(s) if s.routed_experts is None else s.routed_experts for s in samples]


def _merge_supports(samples: Sequence[TrainSample], lengths: Sequence[int]) -> Support | None:
    """The support of the trained tokens; that of other tokens is not needed. None: all are unrestricted."""
    if all(sample.support is None for sample in samples):
        return None
    parts = [None if s.support is None else s.support.where(s.loss_mask) for s in samples]
    return concat_supports(parts, lengths)


def _stream_of(samples: Sequence[TrainSample], name: str) -> Float32[np.ndarray, " tokens"]:
    default = np.float32(STREAM_DEFAULTS[name])
    parts = [(getattr(sample, name), len(sample.token_ids)) for sample in samples]
    return np.concatenate([np.full(size, default) if values is None else values for values, size in parts])
