"""What is kept of a rollout that is not done: its turns so far, the last of them perhaps unfinished."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from stretto.records.generate import Completion, VersionSpan

ABORTED = "abort"
"""finish_reason of a reply that was interrupted and can be continued."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of an episode, and the prompt it answers.

    The prompt is the first num_shared tokens of what its agent had before (prompt and reply of its last turn),
    then prompt_ids.
    """

    agent: str
    index: int  # of the turn, among those of its agent
    attempt: int  # at the rollout; a later one begins anew
    seed: int  # continues the reply as if it had never been interrupted
    temperature: float
    num_shared: int
    prompt_ids: np.ndarray  # int32
    completion: Completion

    @property
    def is_done(self) -> bool:
        """Was it answered to its end?"""
        return self.completion.finish_reason != ABORTED


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a rollout in the order they were played, and the versions that sampled them."""

    turns: tuple[Turn, ...]

    @property
    def first_version(self) -> int:
        """Version of the first token."""
        return self.turns[0].completion.versions[0].version

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


def standing(turns: Iterable[Turn]) -> list[Turn]:
    """The turns that count of all that were written down: a turn replaces its agent's from its index on.

    One of a later attempt replaces all of earlier ones.
    """
    found: list[Turn] = []
    for turn in turns:
        found = [
            other
            for other in found
            if other.attempt == turn.attempt and (other.agent != turn.agent or other.index < turn.index)
        ]
        found.append(turn)
    return found


def up_to(turns: Iterable[Turn], version: int) -> list[Turn]:
    """The turns as far as no token comes from a later version; what follows such a token is gone."""
    found = []
    for turn in turns:
        spans = turn.completion.versions
        end = next((span.start for span in spans if span.version > version), None)
        if end is None:
            found.append(turn)
            continue
        if end:
            found.append(msgspec.structs.replace(turn, completion=cut(turn.completion, end)))
        break
    return found


def cut(completion: Completion, end: int) -> Completion:
    """The first `end` tokens of a reply, to be continued."""
    left = len(completion.token_ids) - end
    routes = completion.routed_experts
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
        routed_experts=None if routes is None else routes[: len(routes) - left],
    )


def joined(first: Completion, rest: Completion) -> Completion:
    """A reply that was interrupted and what continued it, as one. Expert choices are the caller's to join."""
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
    )
