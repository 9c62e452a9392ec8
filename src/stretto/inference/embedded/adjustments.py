"""Changes of a request's logits before they are sampled from: logit_bias, min_tokens and bad_words, as vLLM has them.

A request without them costs nothing: slots.py marks the samples that have adjustments, and core.py adjusts only their
rows. Log-probabilities are those after the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.records.generate import SamplingParams
from stretto.transports.engine.api import Refusal

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Encode = Callable[[str], Sequence[int]]


class Adjustments:
    """The changes of one request's logits; all its samples share them."""

    def __init__(self, params: SamplingParams, stop_ids: Sequence[int], bad_words: Sequence[list[int]]) -> None:
        """stop_ids: all tokens that end a reply. bad_words: the tokens of each spelling of a word."""
        self._min_tokens = params.min_tokens
        self._stop_ids = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64)
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._bad_words = [(np.array(word[:-1], np.int32), word[-1]) for word in bad_words]

    @classmethod
    def of(cls, params: SamplingParams, stop_ids: Sequence[int], encode: Encode | None) -> Adjustments | None:
        """The adjustments of a request; None if it has none.

        Raises: Refusal for bad_words without a tokenizer, or if one has no token.
        """
        if not (params.min_tokens or params.logit_bias or params.bad_words):
            return None
        if params.bad_words and encode is None:
            raise Refusal("bad_words: they need a tokenizer, and this engine has none; use logit_bias")
        words = [ids for word in params.bad_words for ids in _spellings(word, encode)] if encode else []
        return cls(params, stop_ids, words)

    def apply(self, logits: Float[Tensor, " vocab"], sampled: Int[np.ndarray, " tokens"]) -> None:
        """Change the logits, in place, of the token that follows `sampled`, the reply so far."""
        if len(self._biased):
            logits.index_add_(0, self._biased.to(logits.device), self._biases.to(logits.device))
        if len(sampled) < self._min_tokens:
            logits[self._stop_ids.to(logits.device)] = -torch.inf
        for beginning, last in self._bad_words:
            size = len(beginning)
            if size <= len(sampled) and np.array_equal(sampled[len(sampled) - size :], beginning):
                logits[last] = -torch.inf


def _spellings(word: str, encode: Encode) -> Iterator[list[int]]:
    """The tokens of a word as vLLM bans them: at the start of a text, and after a blank if as many tokens differ.

    Raises: Refusal for a word without a token.
    """
    plain, after_blank = list(encode(word.lstrip())), list(encode(" " + word.lstrip()))
    if not plain:
        raise Refusal(f"bad_words: {word!r} has no token; remove it")
    yield plain
    if after_blank and after_blank[0] != plain[0] and len(after_blank) == len(plain):
        yield after_blank
