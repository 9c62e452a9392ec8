"""`post`: HTTP for hooks. Requests to the policy's engines are recognised, so that their tokens can be trained.

While a hook generates a sample, a request to `/inference/v1/generate` of the policy becomes a turn of the rollout: it
has the rollout's session, seed, weights and limits, and its tokens, log-probabilities and versions are
recorded. In a rollout or eval function such a request gets the loaded version as cache salt, so that no engine
answers it from prompts that it read under other weights. Every other request, also one to another model's engine, is
plain HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from stretto.base.errors import EnvError
from stretto.records.generate import NOT_REPLAYED, REPLAYED, changed_by
from stretto.vime.arguments import Address, address_of
from stretto.vime.requests import GENERATE, send

if TYPE_CHECKING:
    from jaxtyping import Int

logger = logging.getLogger(__name__)

SAMPLING = {
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "logit_bias",
}
"""Sampling parameters that a request may set; all others are the run's."""
IGNORED = {
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "include_stop_str_in_output",
}
"""Parameters that do not change which tokens are sampled: log-probabilities are always recorded, and returned for
`logprobs`; a reply's tokens include those of its stop text."""


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


class Turns(Protocol):
    """The part of a rollout's context that a request needs."""

    async def generate(self, prompt_ids: Int[np.ndarray, " prompt"], **sampling: Any) -> Any: ...


@dataclass
class EngineRequests:
    """Adds salt and key to the requests of a rollout or eval function, and records how they sampled."""

    addresses: set[Address]
    """Addresses of the policy's engines."""
    version: Callable[[], int]
    """The version that is loaded."""
    key: str | None
    is_truncated_sampling_refused: bool
    is_trained: bool = False
    """Whether the samples are trained by their log-probabilities."""
    has_truncated_sampling: bool = False
    """A request that was not greedy left a part of the vocabulary to draw from."""
    temperatures: set[float] = field(default_factory=set)
    """Temperatures of all requests."""

    def salt(self, url: str, payload: dict[str, Any]) -> dict[str, str]:
        """Fields to add to a request: the cache salt, for requests for tokens of the policy.

        Raises: EnvError for a request whose log-probabilities could not be trained.
        """
        if not _is_for_policy(url, self.addresses):
            return {}
        given = payload.get("sampling_params") or {}
        temperature = 1.0 if given.get("temperature") is None else given["temperature"]
        if isinstance(temperature, int | float):  # otherwise the engine refuses it
            self.temperatures.add(temperature)
        restricted, changed = changed_by(given, REPLAYED), changed_by(given, NOT_REPLAYED)
        if changed and temperature != 0 and self.is_trained:
            raise EnvError(
                f"sampling_params has {', '.join(changed)}: the engine's log-probabilities would be of changed "
                "probabilities, and the trainer's of the model's own; remove it"
            )
        if restricted and temperature != 0:
            self.has_truncated_sampling = True
            if self.is_truncated_sampling_refused:
                raise EnvError(
                    f"sampling_params has {', '.join(restricted)}: the engine's log-probabilities would be over the "
                    "tokens that are left, and the trainer's over the whole vocabulary; remove it, or add "
                    "[orchestrator.train.replay]"
                )
        return {"cache_salt": str(self.version())}

    def headers(self, url: str) -> dict[str, str]:
        """The API key, for requests to the policy's engines only."""
        is_for_policy = self.key is not None and address_of(url) in self.addresses
        return {"Authorization": f"Bearer {self.key}"} if is_for_policy else {}


_requests: ContextVar[EngineRequests | None] = ContextVar("requests", default=None)
_turns: ContextVar[tuple[Turns, set[Address]] | None] = ContextVar("turns", default=None)
"""The rollout that a hook generates, and the addresses of the policy's engines."""


def headers_for(url: str) -> dict[str, str]:
    """What a request of a rollout function to this URL needs: the key, if it goes to the policy's engines."""
    requests = _requests.get()
    return {} if requests is None else requests.headers(url)


def _is_for_policy(url: str, addresses: set[Address]) -> bool:
    """Is this a request for tokens of the policy?"""
    return urlsplit(url).path.endswith(GENERATE) and address_of(url) in addresses


@contextmanager
def requests_as_turns(ctx: Turns, urls: Sequence[str]) -> Iterator[None]:
    """Inside, requests for tokens to the policy at these addresses become turns of this rollout."""
    token = _turns.set((ctx, set(map(address_of, urls))))
    try:
        yield
    finally:
        _turns.reset(token)


@contextmanager
def requests_to_engines(
    urls: Sequence[str],
    version: Callable[[], int],
    *,
    key: str | None = None,
    is_truncated_sampling_refused: bool = False,
    is_trained: bool = False,
) -> Iterator[EngineRequests]:
    """Inside, requests for tokens to the policy at these addresses share cached prompts per version only.

    key: API key of the policy's engines; it is sent to no other server.
    is_truncated_sampling_refused: the samples are trained and top_p, top_k, min_p, min_tokens and bad_words are not
    replayed. is_trained: the samples are trained by their log-probabilities.
    """
    requests = EngineRequests(set(map(address_of, urls)), version, key, is_truncated_sampling_refused, is_trained)
    token = _requests.set(requests)
    try:
        yield requests
    finally:
        _requests.reset(token)


async def post(
    url: str, payload: dict[str, Any], max_retries: int = 60, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Send JSON, return JSON, as `vime.requests.send` does; a request for tokens of the policy as above.

    Raises: EngineError when the server answers an error or does not answer; EnvError for an invalid request.
    """
    if (turns := _turns.get()) is not None and _is_for_policy(url, turns[1]):
        return await _request_turn(turns[0], payload)
    if (requests := _requests.get()) is not None:
        payload, headers = requests.salt(url, payload) | payload, requests.headers(url) | (headers or {})
    return await send(url, payload, max_retries, headers)


async def _request_turn(ctx: Turns, payload: dict[str, Any]) -> dict[str, Any]:
    tokens = payload.get("token_ids")
    if not tokens:
        raise EnvError("a request to /inference/v1/generate needs `token_ids`: the tokens to continue")
    given = dict(payload.get("sampling_params") or {})
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    if unknown := sorted(set(given) - SAMPLING - IGNORED - {"n", "seed"}):
        known = ", ".join(sorted(SAMPLING))
        raise EnvError(f"sampling_params has {', '.join(unknown)}; a turn of a rollout accepts {known}")
    if payload.get("stream"):
        raise EnvError("stream: a turn of a rollout is answered whole; remove it from the request")
    if ours := sorted({"seed"} & set(given) | {"cache_salt", "seed"} & set(payload)):
        _warn_once(f"{', '.join(ours)} of a request inside `generate` has no effect: a turn has its rollout's own")
    if given.get("n", 1) != 1:
        raise EnvError("sampling_params.n: a turn has one reply; set group_size of the run to get several rollouts")
    settings = {key: value for key, value in given.items() if key in SAMPLING and value is not None}
    reply = await ctx.generate(np.asarray(tokens, np.int32), **settings)
    return _answer(reply, len(tokens), payload, with_logprobs=given.get("logprobs") is not None)


def _answer(reply: Any, num_prompt: int, payload: dict[str, Any], *, with_logprobs: bool) -> dict[str, Any]:
    """A reply as an engine's route answers it."""
    token_ids = reply.token_ids.tolist()
    choice = {"index": 0, "token_ids": token_ids, "text": reply.text, "finish_reason": reply.finish_reason}
    choice["stop_reason"] = reply.stop_reason
    if with_logprobs and reply.logprobs is not None:
        pairs = zip(token_ids, reply.logprobs.tolist())
        choice["logprobs"] = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}
    if reply.support is not None:
        choice["sampling_mask"] = reply.support.lists()
    spans = [{"version": str(s.version), "start": s.start, "end": s.end} for s in reply.versions]
    choice["weight_versions"] = spans
    num_tokens = {"prompt_tokens": num_prompt, "completion_tokens": len(token_ids)}
    return {
        "model": payload.get("model"),
        "choices": [choice],
        "usage": num_tokens | {"total_tokens": sum(num_tokens.values())},
        "weight_version": spans[-1]["version"] if spans else None,
    }
