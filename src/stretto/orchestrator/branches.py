"""Token sequences that grow turn by turn while an episode is played."""

from __future__ import annotations

import numpy as np

from stretto.records.generate import Completion, VersionSpan
from stretto.records.rollout import Branch


class OpenBranch:
    """A token sequence that grows turn by turn; what was sampled is told from what was given."""

    def __init__(self, temperature: float, agent: str = "policy", *, is_trained: bool = True) -> None:
        self.temperature = temperature
        self._agent, self._is_trained = agent, is_trained
        self.token_ids = np.empty(0, dtype=np.int32)
        self._logprobs: list[np.ndarray] = []
        self._routes: np.ndarray | None = None
        self._sampled: list[tuple[int, int]] = []
        self._versions: list[VersionSpan] = []
        self._ce: list[tuple[int, np.ndarray]] = []  # given tokens of some weight: first one, and weights

    @property
    def num_known_routes(self) -> int:
        """Tokens whose expert choices are known: all but the last, from which nothing has been computed."""
        return 0 if self._routes is None else len(self._routes) - 1

    def is_extended_by(self, prompt_ids: np.ndarray, temperature: float) -> bool:
        length = len(self.token_ids)
        return temperature == self.temperature and np.array_equal(prompt_ids[:length], self.token_ids)

    def add_turn(
        self,
        prompt_ids: np.ndarray,
        completion: Completion,
        version: int,
        ce_weights: np.ndarray | None = None,
    ) -> None:
        """Append the given tokens that are new, then the sampled ones.

        `version` where the engine names none; ce_weights of the prompt's tokens, float32.
        """
        start, known = len(prompt_ids), max(len(self.token_ids), 1)  # nothing predicts a first token
        if ce_weights is not None and ce_weights[known:].any():
            self._ce.append((known, ce_weights[known:]))
        self._routes = join_routes(self._routes, completion.routed_experts, start + len(completion.token_ids))
        self._logprobs.append(np.zeros(start - len(self.token_ids), dtype=np.float32))
        self._logprobs.append(completion.logprobs)
        self.token_ids = np.concatenate((prompt_ids, completion.token_ids), dtype=np.int32)
        self._sampled.append((start, len(self.token_ids)))
        spans = completion.versions or (VersionSpan(version, 0, len(completion.token_ids)),)
        self._versions += [VersionSpan(s.version, start + s.start, start + s.end) for s in spans]

    def close(self, *, trained_from: int | None = None) -> Branch:
        """The branch as it is; of `trained_from`: see records/rollout.py."""
        ce_weights = np.zeros(len(self.token_ids), dtype=np.float32) if self._ce else None
        for start, weights in self._ce:
            ce_weights[start : start + len(weights)] = weights
        is_sampled = np.zeros(len(self.token_ids), dtype=bool)
        for start, end in self._sampled:
            is_sampled[start:end] = True
        return Branch(
            token_ids=self.token_ids,
            is_sampled=is_sampled,
            logprobs=np.concatenate(self._logprobs, dtype=np.float32),
            temperature=self.temperature,
            versions=tuple(self._versions),
            routed_experts=self._routes,
            agent=self._agent,
            is_trained=self._is_trained,
            trained_from=trained_from,
            ce_weights=ce_weights,
        )


def join_routes(known: np.ndarray | None, new: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """Expert choices of a branch of num_tokens after a turn, from those before it and those of its end.

    A token keeps the choices with which it was computed first: what was sampled after it was sampled with
    them. Only the last one known is replaced: nothing had been computed from it. None where choices are
    missing in between: an engine gave none in an earlier turn, or gives none now.
    """
    if new is None:
        return None
    start = num_tokens - len(new)
    if known is None:
        return new if start == 0 else None
    kept = len(known) - 1
    return np.concatenate((known[:-1], new[kept - start :])) if start <= kept else None
