"""Branches that grow turn by turn while an episode is played."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stretto.records.generate import Completion, VersionSpan
from stretto.records.images import Image
from stretto.records.partial import merge_expert_choices
from stretto.records.rollout import Branch, TurnSpan
from stretto.records.support import Support, concat_supports

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int32


class OpenBranch:
    """A token sequence that grows turn by turn and records which of its tokens were sampled."""

    def __init__(self, temperature: float, agent: str = "policy", *, is_trained: bool = True) -> None:
        self.temperature = temperature
        self._agent, self._is_trained = agent, is_trained
        self.token_ids = np.empty(0, dtype=np.int32)
        self.images: tuple[Image, ...] = ()  # in the order of their placeholders
        self._logprobs: list[np.ndarray] = []
        self._routes: np.ndarray | None = None
        self._sampled: list[tuple[int, int]] = []
        self._turns: list[int] = []  # number of each reply in its rollout
        self._versions: list[VersionSpan] = []
        self._supports: list[Support | None] = []  # one per entry of _logprobs
        self._has_support = False  # is one of them not None?
        self._greedy: list[tuple[int, int]] = []
        self._ce: list[tuple[int, np.ndarray]] = []  # echoed tokens: index of the first, and weights

    @property
    def num_known_routes(self) -> int:
        """Number of tokens with final expert choices; the last is computed in the next turn."""
        return 0 if self._routes is None else len(self._routes) - 1

    def is_extended_by(
        self, prompt_ids: Int32[np.ndarray, " prompt"], temperature: float, images: tuple[Image, ...] = ()
    ) -> bool:
        """Does the prompt begin with this branch, tokens and images, at the same temperature?"""
        length = len(self.token_ids)
        is_same = temperature == self.temperature and images[: len(self.images)] == self.images
        return is_same and prompt_ids[:length].tobytes() == self.token_ids.tobytes()  # both int32

    def add_turn(
        self,
        prompt_ids: Int32[np.ndarray, " prompt"],
        completion: Completion,
        version: int,
        ce_weights: Float32[np.ndarray, " prompt"] | None = None,
        *,
        images: tuple[Image, ...] = (),
        is_greedy: bool = False,
        turn: int = 0,
    ) -> None:
        """Append the new prompt tokens, then the sampled ones.

        version: of the sampled tokens if the engine names none. ce_weights: of the prompt's tokens, float32. images:
        all of the prompt.
        is_greedy: the reply is no sample of the policy and is not trained. turn: its number in the rollout.
        """
        start, known = len(prompt_ids), max(len(self.token_ids), 1)  # the first token is never predicted
        if ce_weights is not None and ce_weights[known:].any():
            self._ce.append((known, ce_weights[known:]))
        new = completion.routed_experts
        whole = start + len(completion.token_ids)
        self._routes = None if new is None else merge_expert_choices(self._routes, new, whole)
        self.images = images
        self._logprobs.append(np.zeros(start - len(self.token_ids), dtype=np.float32))
        self._logprobs.append(completion.logprobs)
        self._supports += [None, completion.support]
        self._has_support |= completion.support is not None
        self.token_ids = np.concatenate((prompt_ids, completion.token_ids), dtype=np.int32)
        self._sampled.append((start, len(self.token_ids)))
        self._turns.append(turn)
        if is_greedy:
            self._greedy.append(self._sampled[-1])
        spans = completion.versions or (VersionSpan(version, 0, len(completion.token_ids)),)
        self._versions += [VersionSpan(s.version, start + s.start, start + s.end) for s in spans]

    def close(self, *, trained_from: int | None = None, is_scored: bool = False) -> Branch:
        """The branch with all turns so far; records/rollout.py explains trained_from. is_scored: it names its turns."""
        ce_weights = None
        if self._ce:
            ce_weights = np.zeros(len(self.token_ids), dtype=np.float32)
            for start, weights in self._ce:
                ce_weights[start : start + len(weights)] = weights
        return Branch(
            token_ids=self.token_ids,
            is_sampled=self._mask_of(self._sampled),
            logprobs=np.concatenate(self._logprobs, dtype=np.float32),
            temperature=self.temperature,
            versions=tuple(self._versions),
            routed_experts=self._routes,
            support=concat_supports(self._supports, list(map(len, self._logprobs))) if self._has_support else None,
            is_greedy=self._mask_of(self._greedy) if self._greedy else None,
            agent=self._agent,
            is_trained=self._is_trained,
            trained_from=trained_from,
            ce_weights=ce_weights,
            images=self.images,
            turns=tuple(TurnSpan(n, *at) for n, at in zip(self._turns, self._sampled)) if is_scored else (),
        )

    def _mask_of(self, spans: list[tuple[int, int]]) -> Bool[np.ndarray, " tokens"]:
        """A mask of the branch's tokens, True in these spans; bool [tokens]."""
        mask = np.zeros(len(self.token_ids), dtype=bool)
        for start, end in spans:
            mask[start:end] = True
        return mask
