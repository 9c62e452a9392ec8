"""The sampling half of the Tinker API: sampling sessions, samples, and logprobs of prompts and samples.

A sample is a future; engines get the request when its user has a slot. docs/tinker.md lists the differences from the
original service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from stretto.base.errors import StrettoError
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.transports.engine.api import Refusal
from stretto_service.access import User
from stretto_service.engines import adapter_name
from stretto_service.futures import Future, Result
from stretto_service.hub import USER, Hub, Routes, answer, read
from stretto_service.requests import bodies, protobuf
from stretto_service.runs.register import check_free
from stretto_service.store import Run, Sampler

if TYPE_CHECKING:
    from jaxtyping import Int32

logger = logging.getLogger(__name__)

POLL_S = 20.0
"""Longest wait for samples in one request."""
Top = tuple[np.ndarray, np.ndarray]
"""Ids and logprobs of the likeliest tokens, [tokens, k]."""
MAX_TOP = 20
MAX_TARGETS = 64
NO_LOGPROB = -99999.0
"""Clients read it as a logprob that is missing."""
CLONE = 1_000_000_000
"""The clone i of a sampler's client numbers its requests from i * CLONE."""
MAX_SAMPLES = 4096
NOT_COMPUTED = {
    "prompt_alt_tokens_k": "tokens are drawn at the end of a sequence only; sample from prompts that end there",
    "record_stability_info": "stable_reinforce needs what only the original service records",
}
"""Fields of a sample request that this service refuses, and why."""


class SampleRoutes(Routes):
    """Sampling sessions and samples."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        post = {
            "create_sampling_session": self.create_sampling_session,
            "join_sampling_session": self.join_sampling_session,
            "asample": self.sample,
            "retrieve_futures": self.retrieve_futures,
        }
        return [web.post(f"/api/v1/{path}", handler) for path, handler in post.items()]

    async def create_sampling_session(self, http: web.Request) -> web.Response:
        body, user = await read(http, bodies.SamplingSessionBody), http[USER]
        session = self.hub.session(user, body.session_id)
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if self.hub.store.get(Sampler, name) is None:
            sampler = self._sampler(user, name, body.base_model, body.model_path, session.id)
            self.hub.check_room(sampler)
            self.hub.store.put(sampler)
        return answer({"type": "create_sampling_session", "sampling_session_id": name})

    def _sampler(
        self, user: User, name: str, base_model: str | None, model_path: str | None, session: str | None
    ) -> Sampler:
        """Build a sampler. Raises: Refusal for another model, or weights that the user may not read."""
        self.hub.check_model(base_model)
        directory = run = None
        if model_path is not None:
            found = self.hub.checkpoint(user, model_path, "sampler")
            directory, run = found.directory, found.run
        return Sampler(
            id=name,
            owner=user.name,
            base_model=self.hub.model_name,
            session=session,
            model_path=model_path,
            directory=directory,
            run=run,
        )

    async def join_sampling_session(self, http: web.Request) -> web.Response:
        body = await read(http, bodies.JoinBody)
        sampler = self.hub.sampler(http[USER], body.sampling_session_id)
        sampler.num_clients += 1
        self.hub.store.put(sampler)
        return answer({"type": "join_sampling_session", "client_counter": sampler.num_clients})

    async def sample(self, http: web.Request) -> web.Response:
        body, user = await read(http, bodies.SampleBody), http[USER]
        if body.sampling_session_id is not None:
            sampler = self.hub.sampler(user, body.sampling_session_id)
        else:
            sampler = self._sampler(user, "", body.base_model, body.model_path, None)
        run = self.hub.store.get(Run, sampler.run or "")
        if run is not None and run.owner == user.name:
            check_free(run)
        request = self._request(sampler, body)
        seq = uuid4().hex if body.seq_id is None or not sampler.id else body.seq_id
        name = f"{sampler.id or 'sample'}/{seq}"
        future = self.hub.futures.find(name)
        if future is None:
            self.hub.engines.check_room(user)
            future = self.hub.futures.open(name, user.name)
            task = asyncio.create_task(self._generate(user, sampler, request, body, future))
            future.cancel = task.cancel
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        ids = [f"{name}/{i}" for i in range(body.num_samples)]
        return answer({"request_id": future.id, "sample_sequence_ids": ids})

    def _request(self, sampler: Sampler, body: bodies.SampleBody) -> GenerateRequest:
        """The request for an engine. Raises: Refusal for a value that this service does not support."""
        params = body.sampling_params
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise Refusal("prompt: this service samples from tokens; it has no chunks of images or audio")
        tokens = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        size = self.hub.vocab_size
        if not tokens or min(tokens) < 0 or max(tokens) >= size:
            raise Refusal(f"prompt: token ids must be 0 to {size - 1}, and there must be some")
        limit = self.hub.max_model_len
        if len(tokens) >= limit:
            raise Refusal(f"prompt: {len(tokens)} tokens leave no room for a reply; the limit is {limit}")
        if not 0 < body.num_samples <= MAX_SAMPLES:
            raise Refusal(f"num_samples = {body.num_samples} must be 1 to {MAX_SAMPLES}")
        for name, why in NOT_COMPUTED.items():
            if getattr(body, name):
                raise Refusal(f"{name} is not computed here: {why}")
        top = check_top(body, size)
        targets = read_targets(body.target_prompt_logprobs, len(tokens), size)
        last = body.prompt_logprobs_last_n
        if last is not None and not 0 < last < len(tokens):
            raise Refusal(f"prompt_logprobs_last_n = {last} must be 1 to {len(tokens) - 1}")
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        # The reply is then scored as a prompt, after which one token is sampled.
        limit -= body.topk_sample_logprobs > 0
        max_tokens = limit - len(tokens) if params.max_tokens is None else params.max_tokens
        if max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
            raise Refusal("sampling_params: max_tokens at least 1, temperature at least 0, top_p in (0, 1]")
        adapter = None if sampler.directory is None else adapter_name(sampler)
        return GenerateRequest(
            request_id=uuid4().hex,
            prompt_ids=np.array(tokens, np.int32),
            n=body.num_samples,
            sampling=SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k if params.top_k > 0 else None,
                max_tokens=min(max_tokens, limit - len(tokens)),
                stop=tuple(each for each in stop if isinstance(each, str)),
                stop_token_ids=tuple(each for each in stop if isinstance(each, int)),
                seed=params.seed,
            ),
            cache_salt=adapter or f"user {sampler.owner}",
            adapter=adapter,
            prompt_logprobs=bool(body.prompt_logprobs) or top > 0 or targets is not None,
            top_prompt_logprobs=top,
            prompt_targets=targets,
        )

    async def _generate(
        self, user: User, sampler: Sampler, request: GenerateRequest, body: bodies.SampleBody, future: Future
    ) -> None:
        try:
            completions = await self.hub.engines.generate(user, sampler, request)
            tops = await self._top_of_samples(user, sampler, request, completions, body.topk_sample_logprobs)
            future.set(Result(protobuf.write_sampled(_sampled(completions, body, tops)), is_protobuf=True))
        except asyncio.CancelledError:
            future.set(Result.failed("this request was cancelled"))
            raise
        except StrettoError as error:
            category = "user" if isinstance(error, Refusal) else "server"
            future.set(Result.failed(str(error), category))
        except Exception as error:  # the one who waits learns of any failure
            logger.exception("a sample of %s failed", sampler.id)
            future.set(Result.failed(f"{type(error).__name__}: {error}", "server"))

    async def _top_of_samples(
        self, user: User, sampler: Sampler, request: GenerateRequest, completions: Sequence[Completion], top: int
    ) -> list[Top | None]:
        """The likeliest tokens at each sampled token: an engine scores each sequence once more, as a prompt."""
        if not top:
            return [None] * len(completions)
        start = len(request.prompt_ids)

        async def score(completion: Completion) -> Top:
            scoring = msgspec.structs.replace(
                request,
                request_id=uuid4().hex,
                prompt_ids=np.concatenate((request.prompt_ids, completion.token_ids)).astype(np.int32),
                n=1,
                sampling=SamplingParams(max_tokens=1),
                prompt_logprobs=True,
                top_prompt_logprobs=top,
                prompt_targets=None,
            )
            [scored] = await self.hub.engines.generate(user, sampler, scoring)
            ids, logprobs = scored.top_prompt_ids, scored.top_prompt_logprobs
            assert ids is not None and logprobs is not None, "the request has top_prompt_logprobs"
            return ids[start:], logprobs[start:]

        return list(await asyncio.gather(*map(score, completions)))

    async def retrieve_futures(self, http: web.Request) -> web.Response:
        """Wait for samples of a session that are done after a cursor, and return them."""
        body, user = await read(http, bodies.FuturesBody), http[USER]
        sampler = self.hub.sampler(user, body.target.sampling_session_id)
        clone = body.target.cloned_sampler_id
        wait_s = POLL_S if body.timeout is None else min(max(body.timeout, 0.0), POLL_S)
        done = await self.hub.futures.wait_any(
            lambda future: is_of_clone(future, sampler, clone), body.prev_cursor, wait_s
        )
        cursor = max((future.number_done for future in done), default=body.prev_cursor)
        return answer({"completions": [_completion(future) for future in done], "cursor": cursor})


def check_top(body: bodies.SampleBody, vocab_size: int) -> int:
    """The number of likeliest tokens per prompt position. Raises: Refusal if it, or that of samples, is too large."""
    limit = min(MAX_TOP, vocab_size)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(body, name) <= limit:
            raise Refusal(f"{name} = {getattr(body, name)} must be 0 to {limit}")
    return body.topk_prompt_logprobs


def read_targets(
    tensor: bodies.TensorBody | None, num_tokens: int, vocab_size: int
) -> Int32[np.ndarray, "positions targets"] | None:
    """Tokens to score at each prompt position after the first. Raises: Refusal for a wrong shape or unknown tokens."""
    if tensor is None:
        return None
    if tensor.sparse_crow_indices is not None or tensor.sparse_col_indices is not None:
        raise Refusal("target_prompt_logprobs: this service takes dense tensors; put -1 where there is no target")
    shape = tensor.shape or []
    is_fit = len(shape) == 2 and shape[0] == num_tokens - 1 and 0 < shape[1] <= MAX_TARGETS
    if not is_fit or len(tensor.data) != shape[0] * shape[1]:
        raise Refusal(
            f"target_prompt_logprobs has shape {shape} and {len(tensor.data)} values; it must have a row of 1 to "
            f"{MAX_TARGETS} tokens for each of the {num_tokens - 1} prompt positions after the first"
        )
    if tensor.data and not -1 <= min(tensor.data) <= max(tensor.data) < vocab_size:
        raise Refusal(f"target_prompt_logprobs: token ids are 0 to {vocab_size - 1}, or -1 for none")
    return np.array(tensor.data, np.int32).reshape(shape)


def is_of_clone(future: Future, sampler: Sampler, clone: int) -> bool:
    """Whether a future is a request of this clone of a sampler's client."""
    name, _, seq = future.id.rpartition("/")
    return name == sampler.id and seq.isdigit() and int(seq) // CLONE == clone


def _completion(future: Future) -> dict[str, Any]:
    """A future that is done, as `retrieve_futures` lists it."""
    result = future.result
    assert result is not None, "it is done"
    if result.error is not None:
        return {"state": "failed", "request_id": future.id}
    return {"state": "finished", "request_id": future.id, "response_payload_uncompressed_size": len(result.body)}


def _sampled(
    completions: Sequence[Completion], body: bodies.SampleBody, tops: Sequence[Top | None]
) -> protobuf.Sampled:
    """The result of a sample request."""
    sequences = [
        protobuf.SampledSequence(
            "length" if each.finish_reason == "length" else "stop", each.token_ids, each.logprobs, top
        )
        for each, top in zip(completions, tops)
    ]
    first, last = completions[0], body.prompt_logprobs_last_n
    num_tokens = sum(len(chunk.tokens) for chunk in body.prompt.chunks)
    scores = first.prompt_logprobs if body.prompt_logprobs else None
    unscored = 1 if last is None else num_tokens - last
    if scores is not None:
        scores = scores.astype(np.float32)
        scores[:unscored] = np.nan
    top_prompt = None
    if first.top_prompt_ids is not None and first.top_prompt_logprobs is not None:
        top_prompt = (first.top_prompt_ids.copy(), first.top_prompt_logprobs.copy())
        top_prompt[0][:unscored], top_prompt[1][:unscored] = 0, NO_LOGPROB
    return protobuf.Sampled(
        sequences, scores, top_prompt, first.target_prompt_logprobs, cached_tokens=first.cached_tokens
    )
