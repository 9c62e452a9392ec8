"""Partial rollouts: the turns so far of an interrupted rollout; the last turn may be incomplete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stretto.records.generate import Completion, GenerateRequest, SamplingParams, VersionSpan
from stretto.records.images import Image
from stretto.records.support import concat_supports

if TYPE_CHECKING:
    from jaxtyping import UInt

ABORTED = "abort"
"""finish_reason of a completion that was interrupted and can be continued."""


def empty_completions(n: int) -> list[Completion]:
    """The samples of a request that was ended before an engine had begun it."""
    empty = Completion(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason=ABORTED)
    return [empty] * n


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a rollout: a prompt and its completion.

    The prompt is the first num_shared tokens of the same agent's previous turn (prompt and completion), followed by
    prompt_ids.
    """

    agent: str
    index: int  # number of this turn among its agent's turns
    attempt: int  # number of the attempt at this rollout; each attempt begins from the first turn
    seed: int  # with it, the completion continues as if it had never been interrupted
    temperature: float
    num_shared: int
    prompt_ids: np.ndarray  # int32
    completion: Completion
    images: tuple[Image, ...] = ()  # those of prompt_ids, without patches: the environment shows them again

    @property
    def is_done(self) -> bool:
        """Whether the completion is complete."""
        return self.completion.finish_reason != ABORTED


class PartialRollout(msgspec.Struct, frozen=True, kw_only=True):
    """The turns so far of a rollout, in the order in which they were played."""

    turns: tuple[Turn, ...]

    @property
    def first_version(self) -> int:
        """Version that sampled the first token."""
        return self.turns[0].completion.versions[0].version

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


def latest_turns(turns: Iterable[Turn]) -> list[Turn]:
    """Those of all recorded turns that are valid, in the order in which they were recorded.

    A turn replaces its agent's turns from its own index on, and all turns of earlier attempts.
    """
    valid: list[Turn] = []
    last: dict[str, int] = {}  # index of each agent's last turn among them
    for turn in turns:
        if valid and (turn.attempt != valid[-1].attempt or turn.index <= last.get(turn.agent, -1)):
            valid = [
                other
                for other in valid
                if other.attempt == turn.attempt and (other.agent != turn.agent or other.index < turn.index)
            ]
            last = {other.agent: other.index for other in valid}
        valid.append(turn)
        last[turn.agent] = turn.index
    return valid


def turns_up_to(turns: Iterable[Turn], version: int) -> list[Turn]:
    """The turns up to the first token that was sampled by a version later than `version`."""
    kept = []
    for turn in turns:
        spans = turn.completion.versions
        end = next((span.start for span in spans if span.version > version), None)
        if end is None:
            kept.append(turn)
            continue
        if end:
            kept.append(msgspec.structs.replace(turn, completion=cut_completion(turn.completion, end)))
        break
    return kept


def cut_completion(completion: Completion, end: int) -> Completion:
    """The first `end` tokens of a completion, as one that can be continued."""
    num_removed = len(completion.token_ids) - end
    experts = completion.routed_experts
    return msgspec.structs.replace(
        completion,
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        finish_reason=ABORTED,
        versions=tuple(
            VersionSpan(span.version, span.start, min(span.end, end))
            for span in completion.versions
            if span.start < end
        ),
        routed_experts=None if experts is None else experts[: len(experts) - num_removed],
        support=None if completion.support is None else completion.support.part(0, end),
    )


def concat_completions(first: Completion, rest: Completion) -> Completion:
    """Concatenate an interrupted completion and its continuation, except their routed_experts."""
    start = len(first.token_ids)
    spans = list(first.versions)
    for span in rest.versions:
        moved = VersionSpan(span.version, span.start + start, span.end + start)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            moved = VersionSpan(moved.version, spans.pop().start, moved.end)
        spans.append(moved)
    return msgspec.structs.replace(
        rest,
        token_ids=np.concatenate((first.token_ids, rest.token_ids), dtype=np.int32),
        logprobs=np.concatenate((first.logprobs, rest.logprobs), dtype=np.float32),
        versions=tuple(spans),
        cached_tokens=first.cached_tokens,
        support=concat_supports((first.support, rest.support), (start, len(rest.token_ids))),
    )


def continued_request(request: GenerateRequest, begun: Completion, seed: int | None) -> GenerateRequest:
    """The request for the rest of a reply of one sample that was interrupted; seed: that of its first part."""
    ids, sampling = begun.token_ids, request.sampling
    assert sampling.max_tokens is not None, "requests of rollouts always have one"
    prompt_ids = np.concatenate((request.prompt_ids, ids), dtype=np.int32)
    return msgspec.structs.replace(
        request,
        prompt_ids=prompt_ids,
        sampling=msgspec.structs.replace(
            sampling,
            max_tokens=max(sampling.max_tokens - len(ids), 1),
            min_tokens=max(sampling.min_tokens - len(ids), 0),
            seed=seed,
        ),
        routed_experts_start=request.routed_experts_start if begun.routed_experts is None else len(prompt_ids) - 1,
    )


def needs_whole_reply(sampling: SamplingParams) -> bool:
    """Whether a reply cannot be continued: a stop text or a bad word may span both of its parts."""
    return bool(sampling.stop or sampling.bad_words)


def merge_completions(first: Completion, rest: Completion, request: GenerateRequest) -> Completion:
    """Both parts of a reply as one, with expert choices if both parts have them."""
    whole = concat_completions(first, rest)
    if first.routed_experts is None or rest.routed_experts is None:
        return whole
    num_tokens = len(request.prompt_ids) + len(whole.token_ids) - request.routed_experts_start
    routes = merge_expert_choices(first.routed_experts, rest.routed_experts, num_tokens)
    return msgspec.structs.replace(whole, routed_experts=routes)


def merge_expert_choices(
    known: UInt[np.ndarray, "known layers top_k"] | None,
    new: UInt[np.ndarray, "new layers top_k"] | None,
    num_tokens: int,
) -> UInt[np.ndarray, "tokens layers top_k"] | None:
    """Expert choices of a branch of num_tokens after a turn.

    known: those before the turn; new: those that the turn adds at the end. A token keeps its first choices,
    because the tokens after it were sampled with them. Only the last known one is replaced: it had not been computed.
    None if choices are missing in between, because the engine gave none in an earlier turn or gives none now.
    """
    if new is None:
        return None
    start = num_tokens - len(new)
    if known is None:
        return new if start == 0 else None
    num_final = len(known) - 1
    return np.concatenate((known[:-1], new[num_final - start :])) if start <= num_final else None
