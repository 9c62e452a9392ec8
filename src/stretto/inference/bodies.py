"""Bodies of the text routes, as OpenAI and vLLM define them.

Fields of type Any are settings that this engine does not support. They must have a neutral value (in NEUTRAL_TEXT, or
api.NEUTRAL for those of the token route); any other value is refused, because an engine that silently ignores a setting
gives wrong answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stretto.records.generate import SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.api import NEUTRAL, Refusal

NEUTRAL_TEXT: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "parallel_tool_calls": (None, True),
    # vllm-router adds these to the bodies of text routes.
    "no_stop_trim": (None, False),
    "return_hidden_states": (None, False),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "include_reasoning": (None, True),
}


class TextBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both text routes accept."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool = True
    user: str | None = None
    metadata: Any = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    structured_outputs: Any = None
    include_stop_str_in_output: Any = False
    kv_transfer_params: Any = None
    no_stop_trim: Any = None
    return_hidden_states: Any = None

    def sampling(self, stop_ids: Sequence[int] = ()) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=None if self.top_k in (0, -1) else self.top_k,
            min_p=self.min_p or 0.0,
            max_tokens=self.max_tokens,
            stop_token_ids=(*(self.stop_token_ids or ()), *(() if self.ignore_eos else stop_ids)),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            min_tokens=self.min_tokens or 0,
            logit_bias=api.token_biases(self.logit_bias),
            bad_words=tuple(dict.fromkeys(self.bad_words or ())),
        )


class CompletionsBody(TextBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]  # a text, a list of ids, or a list of texts and lists of ids
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: Any = None
    best_of: Any = None


class ChatBody(TextBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    include_reasoning: Any = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def decode_text_body(data: bytes, kind: type[Any]) -> Any:
    """Decode a CompletionsBody or ChatBody. Raises: Refusal if it is invalid or not supported."""
    body = api.decode_json(data, kind)
    for name in body.__struct_fields__:
        value, allowed = getattr(body, name), NEUTRAL_TEXT.get(name) or NEUTRAL.get(name)
        if name in ("stream", "stream_options") or allowed is None:
            continue
        if value not in allowed:
            raise Refusal(f"{name}: {value!r} is not supported by the embedded engine; remove it")
    if unknown := (body.stream_options or {}).keys() - {"include_usage", "continuous_usage_stats"}:
        raise Refusal(f"stream_options: {sorted(unknown)} is not supported; only include_usage is")
    return body


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises: Refusal for messages that no chat template can render."""
    if not messages:
        raise Refusal("messages: the conversation is empty")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message.get("role"), str):
            raise Refusal(f"{where}: `role` is missing or not a text")
        if not isinstance(message.get("content"), str | list | None):
            raise Refusal(f"{where}: `content` must be a text, a list of parts, or null")
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None):
            raise Refusal(f"{where}: `tool_calls` must be a list, or null")
        for call in calls or ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise Refusal(f"{where}: each of `tool_calls` needs a `function` with a `name`")
            if not isinstance(function.get("arguments"), str | dict | None):
                raise Refusal(f"{where}: `arguments` of a tool call must be JSON as a text, or an object")
