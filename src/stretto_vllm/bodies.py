"""Check the bodies of requests before vLLM reads them; does not import vLLM.

A body is valid if its numbers fit int64, its tokens are in the vocabulary, and its sizes are within ../limits.py. The
token route and the admin routes accept only the fields of transports/engine/api.py. The text routes are OpenAI's; vLLM
checks their other fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import StrettoError
from stretto.chat.tokenizer import load_tokenizer
from stretto.inference.bodies import check_messages
from stretto.inference.boundary import MAX_ADMIN_BYTES, max_body_bytes
from stretto.inference.limits import (
    MAX_BAD_WORDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOP_K,
    MAX_TOP_LOGPROBS,
    MIN_TEMPERATURE,
    bad_n,
    check_text_size,
    long_prompt,
    unknown_token,
)
from stretto.transports.engine import api, updates
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.images import VisionSizes, refusal_reason

MAX_DEPTH = 64
_TEXT_ROUTES = (api.COMPLETIONS, api.CHAT_COMPLETIONS, api.TOKENIZE, api.DETOKENIZE)
_KINDS: dict[str, type[Any]] = {
    api.GENERATE: api.GenerateBody,
    api.UPDATE_WEIGHTS: updates.UpdateBody,
    api.FINISH_UPDATE: updates.FinishBody,
    api.LOAD_ADAPTER: api.LoadAdapterBody,
    api.UNLOAD_ADAPTER: api.UnloadAdapterBody,
    api.ABORT: api.AbortBody,
    api.ABORT_REQUESTS: api.AbortBody,
}
_WITHOUT_BODY = {api.PAUSE, api.RESUME, api.START_UPDATE, api.RESET_PREFIX_CACHE, api.SLEEP, api.WAKE_UP}
"""Routes that ignore their body."""
_VLLM_ONLY = frozenset({"structured_outputs", "kv_transfer_params", "ec_transfer_params", "stream", "stream_options",
                   "output_mode", "presence_penalty", "frequency_penalty", "repetition_penalty",
                   "allowed_token_ids", "include_stop_str_in_output"})  # fmt: skip
"""Settings of the token route that vLLM supports and the embedded engine does not."""
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_COUNTS = ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "prompt_logprobs",
           "top_logprobs", "truncate_prompt_tokens", "routed_experts_prompt_start")  # fmt: skip
_OBJECTS = ("structured_outputs", "response_format", "stream_options", "chat_template_kwargs",
            "kv_transfer_params")  # fmt: skip
_GRAMMARS = frozenset({"structured_outputs", "response_format", "tools"})


@dataclass(frozen=True)
class EngineSizes:
    """Sizes and abilities of the engine behind the routes."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    token_bytes: int  # of the longest token; 1 if there is no tokenizer
    vision: VisionSizes | None = None  # None if the model takes no images
    can_sleep: bool = False  # if False, vLLM's /sleep would only stop scheduling, without a way back

    @classmethod
    def of(cls, state: Any) -> EngineSizes:
        """Read them from the engine in vLLM's app state."""
        model = state.engine_client.vllm_config.model_config
        try:
            token_bytes = load_tokenizer(Path(model.tokenizer or model.model)).max_token_bytes
        except StrettoError:
            token_bytes = 1
        seqs = state.engine_client.vllm_config.scheduler_config.max_num_seqs
        vision = VisionSizes.of(model.hf_config.to_dict())
        can_sleep = bool(model.enable_sleep_mode)
        return cls(model.get_vocab_size(), model.max_model_len, seqs, token_bytes, vision, can_sleep)

    def max_body_bytes(self, path: str) -> int:
        """The largest body of a route."""
        if path == api.GENERATE:
            return max_body_bytes(self.max_model_len, vision=self.vision)
        if path in _KINDS or path in _WITHOUT_BODY:
            return MAX_ADMIN_BYTES
        return max_body_bytes(self.max_model_len, self.token_bytes)


@dataclass(frozen=True)
class CheckedBody:
    """A checked body; has_grammar: vLLM compiles a grammar for the reply."""

    data: bytes
    has_grammar: bool = False


def check(path: str, data: bytes, sizes: EngineSizes) -> CheckedBody:
    """Check the body of a request to vLLM. Raises: Refusal if vLLM must not read it."""
    if path in _WITHOUT_BODY or (path in (api.ABORT, api.ABORT_REQUESTS) and not data):
        return CheckedBody(data)
    body = api.decode_json(data, dict[str, Any])
    _check_depth({name: value for name, value in body.items() if name != "token_ids"})
    if (kind := _KINDS.get(path)) is not None:
        api.decode_json(data, kind)
    if path == api.GENERATE:
        _check_generate(body, sizes)
        return CheckedBody(data, "structured_outputs" in body["sampling_params"])
    if path in _TEXT_ROUTES:
        _check_text(path, body, sizes)
    return CheckedBody(data, not _GRAMMARS.isdisjoint(body))


def _check_generate(body: dict[str, Any], sizes: EngineSizes) -> None:
    params = body.get("sampling_params")
    if params is None:
        raise Refusal("sampling_params: it is missing; {} means all defaults")
    for name, allowed in api.NEUTRAL.items():
        for place in (body, params):
            if name not in _VLLM_ONLY and name in place and place[name] not in allowed:
                raise Refusal(f"{name}: {place[name]!r} is not supported; remove it")
    _check_ids(body["token_ids"], "token_ids", sizes)
    if not 0 < len(body["token_ids"]) < sizes.max_model_len:
        raise Refusal(long_prompt(len(body["token_ids"]), sizes.max_model_len))
    _check_sampling(params, sizes)
    _check_images(body, sizes)


def _check_images(body: dict[str, Any], sizes: EngineSizes) -> None:
    """Check images before vLLM reads them: an error inside its engine ends the engine."""
    if body.get("features") is None:
        return
    request, _ = api.decode_generate(msgspec.json.encode({k: body[k] for k in ("token_ids", "features")}))
    if (reason := refusal_reason(request, sizes.vision)) is not None:
        raise Refusal(reason)


def _check_text(path: str, body: dict[str, Any], sizes: EngineSizes) -> None:
    _check_sampling(body, sizes)
    for name in _OBJECTS:
        if not isinstance(body.get(name), dict | None):
            raise Refusal(f"{name}: expected an object, got {body[name]!r}")
    if path == api.DETOKENIZE:
        _check_ids(body.get("tokens"), "tokens", sizes)
    if isinstance(messages := body.get("messages"), list):
        if not all(isinstance(message, dict) for message in messages):
            raise Refusal("messages: each must be an object")
        check_messages(messages)
    for prompt in _prompts(body.get("prompt")):
        if isinstance(prompt, str):
            if sizes.token_bytes > 1:
                num_bytes, token_bytes = len(prompt.encode()), sizes.token_bytes
                check_text_size("prompt", num_bytes, max_model_len=sizes.max_model_len, token_bytes=token_bytes)
        elif isinstance(prompt, list):
            _check_ids(prompt, "prompt", sizes)
            if not prompt:
                raise Refusal("prompt: it is empty; at least one token is needed")


def _prompts(prompt: Any) -> Iterable[Any]:
    if isinstance(prompt, list) and prompt and not all(isinstance(i, int) for i in prompt):
        return prompt
    return () if prompt is None else (prompt,)


def _check_sampling(params: dict[str, Any], sizes: EngineSizes) -> None:
    for name in _NUMBERS:
        value = params.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise Refusal(f"{name}: expected a number, got {value!r}")
    for name in _COUNTS:
        value = params.get(name)
        if isinstance(value, int) and not -1 <= value < 2**31:
            raise Refusal(f"{name}: {value} is not allowed; it must be 0 to {2**31 - 1}")
    n, temperature, top_k = params.get("n"), params.get("temperature"), params.get("top_k")
    if isinstance(n, int) and not 1 <= n <= sizes.max_num_seqs:
        raise Refusal(bad_n(n, sizes.max_num_seqs))
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
        raise Refusal(
            f"temperature: {temperature} is not allowed; it must be 0 (greedy), or {MIN_TEMPERATURE:g} or more"
        )
    if isinstance(top_k, int) and not -1 <= top_k <= MAX_TOP_K:
        raise Refusal(f"top_k: {top_k} is not allowed; it must be 1 to {MAX_TOP_K}, or 0 for all")
    for name in ("logprobs", "prompt_logprobs", "top_logprobs"):
        if isinstance(value := params.get(name), int) and not 0 <= value <= MAX_TOP_LOGPROBS:
            raise Refusal(f"{name}: {value} is not allowed; it must be 0 to {MAX_TOP_LOGPROBS}")
    _check_stops(params, sizes)


def _check_stops(params: dict[str, Any], sizes: EngineSizes) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (ids := params.get(name)) is not None:
            _check_ids(ids, name, sizes)
    if len(params.get("stop_token_ids") or ()) > MAX_STOP_TOKEN_IDS:
        raise Refusal(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} ids are allowed")
    for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)):
        value = params.get(name)
        texts = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Refusal(f"{name}: expected a text or a list of texts")
        if len(texts) > most or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in texts):
            raise Refusal(f"{name}: at most {most} texts of 1 to {MAX_STOP_CHARACTERS} characters are allowed")
    bias = params.get("logit_bias")
    if bias is None:
        return
    if not isinstance(bias, dict) or not all(isinstance(weight, int | float) for weight in bias.values()):
        raise Refusal("logit_bias: expected numbers by token id")
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
        raise Refusal("logit_bias: its keys must be token ids")
    _check_ids([int(token) for token in bias], "logit_bias", sizes)


def _check_ids(ids: Any, where: str, sizes: EngineSizes) -> None:
    if not isinstance(ids, list):
        raise Refusal(f"{where}: expected a list of token ids")
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise Refusal(f"{where}: {i!r} is not a token id")
        if not 0 <= i < sizes.vocab_size:
            raise Refusal(unknown_token(where, i, sizes.vocab_size))


def _check_depth(body: Any) -> None:
    """Check that all integers fit int64, and that the nesting has at most MAX_DEPTH levels."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise Refusal(f"the body: {value} does not fit an int64")
        if not inner:
            return
        level = inner
    raise Refusal(f"the body: it is nested more than {MAX_DEPTH} levels deep")
