"""Text in, text out: /v1/completions, /v1/chat/completions (both also as server-sent events), /tokenize, /detokenize.

Everything here ends in the same GenerateRequest as the token route; tokenizer and renderer are loaded by the first
request that needs them. A setting that this engine cannot honour is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import Tokenizer, load_tokenizer
from stretto.config.model import RendererSection
from stretto.inference.embedded.engine import Engine
from stretto.inference.embedded.scheduler import Request
from stretto.inference.text import Decode, Detokenizer, cut_at_stop
from stretto.records.generate import GenerateRequest, SamplingParams
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
}


class _TextBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both routes take. Fields typed Any must have a neutral value (api.NEUTRAL, NEUTRAL_TEXT)."""

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
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    structured_outputs: Any = None
    include_stop_str_in_output: Any = False
    kv_transfer_params: Any = None

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
        )


class CompletionsBody(_TextBody, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: Any = None
    best_of: Any = None


class ChatBody(_TextBody, kw_only=True):
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


class OpenAIRoutes:
    """The text routes of one model directory over one engine."""

    def __init__(self, directory: Path, model_name: str, engine: Callable[[], Engine]) -> None:
        self.directory, self.model_name, self._engine = directory, model_name, engine
        self._renderers: dict[bool, Renderer] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.directory)

    def decoder(self) -> Decode:
        """How stop strings see tokens: special tokens are spelled out."""
        return self.tokenizer.decode

    def check_model(self, name: str | None) -> None:
        """Raises Refusal 404 for any name but the served one."""
        if name is not None and name != self.model_name:
            raise Refusal(f"the model {name!r} does not exist; this engine serves {self.model_name!r}", 404)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = self._decode(await http.read(), CompletionsBody)
        if body.logprobs is not None and not 0 <= body.logprobs <= 1:
            raise Refusal(
                f"logprobs: {body.logprobs} is not supported; 0 and 1 give the sampled token's logprob"
            )
        is_scored = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
        params = body.sampling()
        if body.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=16)
        request_id = body.request_id or f"cmpl-{uuid4().hex}"
        asked = [
            GenerateRequest(
                request_id=f"{request_id}-{i}", prompt_ids=ids, n=body.n or 1, sampling=params,
                cache_salt=body.cache_salt, prompt_logprobs=is_scored,
            )
            for i, ids in enumerate(self._prompts(body))
        ]  # fmt: skip
        frame = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model_name,
        }
        if body.stream:
            if body.echo or body.prompt_logprobs is not None:
                raise Refusal("stream: echo and prompt_logprobs cannot be streamed")
            return await self._stream(http, body, asked, frame, _completion_delta)
        done = await self._generate_all(asked)
        choices = [
            self._completion_choice(body, request, member, index * (body.n or 1) + member)
            for index, request in enumerate(done)
            for member in range(body.n or 1)
        ]
        return _json(frame | {"choices": choices, "usage": _usage(done)})

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = self._decode(await http.read(), ChatBody)
        renderer = await self._renderer(body.chat_template_kwargs)
        prompt_ids = self._render(renderer, body.messages, body.tools)
        params = body.sampling(renderer.stop_ids)
        if body.max_completion_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=body.max_completion_tokens)
        request_id = body.request_id or f"chatcmpl-{uuid4().hex}"
        asked = GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            n=body.n or 1,
            sampling=params,
            cache_salt=body.cache_salt,
        )
        created = int(time.time())
        if body.stream:
            frame = {
                "id": request_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": self.model_name,
            }
            if body.tools:
                return await self._stream_whole(http, body, asked, frame, renderer)
            return await self._stream(http, body, [asked], frame, _chat_delta)
        frame = {"id": request_id, "object": "chat.completion", "created": created, "model": self.model_name}
        done = await self._engine().generate(asked)
        choices = [self._chat_choice(body, renderer, done, member) for member in range(asked.n)]
        answer = frame | {"choices": choices, "usage": _usage([done])}
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt_ids.tolist()
        return _json(answer)

    async def tokenize(self, http: web.Request) -> web.Response:
        body = api.decode_json(await http.read(), TokenizeBody)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal("give either `prompt` or `messages`")
        if body.prompt is not None:
            ids = self.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            renderer = await self._renderer(body.chat_template_kwargs)
            ids = self._render(renderer, body.messages, body.tools).tolist()
        return _json({"count": len(ids), "max_model_len": self._engine().core.max_model_len, "tokens": ids})

    async def detokenize(self, http: web.Request) -> web.Response:
        body = api.decode_json(await http.read(), DetokenizeBody)
        self.check_model(body.model)
        self._check_ids(api.token_array(body.tokens, "tokens"), "tokens")
        return _json({"prompt": self.tokenizer.decode(body.tokens)})

    def _decode(self, data: bytes, kind: type[Any]) -> Any:
        body = api.decode_json(data, kind)
        self.check_model(body.model)
        for name in body.__struct_fields__:
            allowed = NEUTRAL_TEXT.get(name) or (
                None if name in ("stream", "stream_options") else NEUTRAL.get(name)
            )
            if allowed is not None and getattr(body, name) not in allowed:
                raise Refusal(
                    f"{name}: {getattr(body, name)!r} is not supported by the embedded engine; leave it out"
                )
        return body

    def _prompts(self, body: CompletionsBody) -> list[np.ndarray]:
        prompt = body.prompt
        several = (
            prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        )
        return [
            np.array(self.tokenizer.encode(p, add_special_tokens=body.add_special_tokens), np.int32)
            if isinstance(p, str)
            else api.token_array(p, "prompt")
            for p in several
        ]

    def _check_ids(self, ids: np.ndarray, where: str) -> None:
        size = self._engine().core.config.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            raise Refusal(f"{where}: a token id is out of vocabulary; ids are 0 to {size - 1}")

    async def _renderer(self, template_settings: dict[str, Any] | None) -> Renderer:
        settings = template_settings or {}
        if unknown := settings.keys() - {"enable_thinking"}:
            raise Refusal(f"chat_template_kwargs: {sorted(unknown)} not supported; only enable_thinking is")
        thinking = bool(settings.get("enable_thinking", False))
        if thinking not in self._renderers:
            model_type = self._engine().core.config.hf.get("model_type")
            section = RendererSection(enable_thinking=thinking)
            loop = asyncio.get_running_loop()
            self._renderers[thinking] = await loop.run_in_executor(
                None, build_renderer, self.directory, section, model_type
            )
        return self._renderers[thinking]

    def _render(
        self, renderer: Renderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> np.ndarray:
        if not messages:
            raise Refusal("messages: the conversation is empty")
        for i, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise Refusal(f"messages[{i}]: `role` is missing or not a text")
        try:
            return renderer.render_prompt(messages, tools)
        except (ValueError, TypeError, KeyError) as error:
            raise Refusal(
                f"messages: the template of family {renderer.family} refuses them: {error!r}"
            ) from error

    async def _generate_all(self, asked: list[GenerateRequest]) -> list[Request]:
        engine = self._engine()
        for one in asked:  # so that nothing is begun when one of them cannot be served
            if reason := engine.core.refusal(one):
                raise Refusal(reason)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(one)) for one in asked]
        return [task.result() for task in tasks]

    def _completion_choice(
        self, body: CompletionsBody, done: Request, member: int, index: int
    ) -> dict[str, Any]:
        completion, reason = done.completions[member], done.stop_reasons[member]
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        text = cut_at_stop(self._text(body, ids), reason)
        if body.echo:
            prompt_ids = done.request.prompt_ids.tolist()
            text = self._text(body, prompt_ids) + text
            ids = prompt_ids + ids
            if completion.prompt_logprobs is not None:
                logprobs = [None, *completion.prompt_logprobs[1:].tolist(), *logprobs]
        choice = {
            "index": index,
            "text": text,
            "finish_reason": completion.finish_reason,
            "stop_reason": reason,
            "logprobs": None if body.logprobs is None else self._completion_logprobs(ids, logprobs),
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = api.encode_prompt_logprobs(done.request, completion)
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["prompt_token_ids"] = done.request.prompt_ids.tolist()
        return choice

    def _completion_logprobs(self, ids: list[int], logprobs: list[float | None]) -> dict[str, Any]:
        detokenizer = Detokenizer(self.tokenizer.decode)
        tokens = [detokenizer.push(i) for i in ids]
        offsets = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
        top = [None if x is None else {t: x} for t, x in zip(tokens, logprobs)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _chat_choice(self, body: ChatBody, renderer: Renderer, done: Request, member: int) -> dict[str, Any]:
        completion, reason = done.completions[member], done.stop_reasons[member]
        message = dict(renderer.parse(completion.token_ids, done.request.prompt_ids, body.tools))
        message["content"] = cut_at_stop(message.get("content") or "", reason)
        finish = completion.finish_reason
        message.pop("unparsed_tool_calls", None)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_tool_call(call) for call in calls]
            finish = "tool_calls" if finish == "stop" else finish
        choice = {
            "index": member,
            "message": message,
            "finish_reason": finish,
            "stop_reason": reason,
            "logprobs": {"content": self._chat_logprobs(body, completion)} if body.logprobs else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
        return choice

    def _chat_logprobs(self, body: ChatBody, completion: Any) -> list[dict[str, Any]]:
        out = []
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist()):
            text = f"token_id:{token}" if body.return_tokens_as_token_ids else self.tokenizer.decode([token])
            out.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return out

    def _text(self, body: _TextBody, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)

    async def _stream(
        self, http: web.Request, body: _TextBody, asked: list[GenerateRequest], frame: dict[str, Any],
        delta: Callable[[str, bool], dict[str, Any]],
    ) -> web.StreamResponse:  # fmt: skip
        """Server-sent events: pieces of text as they come, finish reasons, the usage if asked for, [DONE]."""
        engine = self._engine()
        for one in asked:
            if reason := engine.core.refusal(one):
                raise Refusal(reason)
        decode = lambda ids: self._text(body, list(ids))
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def read(index: int, one: GenerateRequest) -> Request:
            async for choice in self._pieces(engine, one, decode, body):
                choice["index"] += index * one.n
                await queue.put(choice)
            return self._ended.pop(one.request_id)

        self._ended: dict[str, Request] = getattr(self, "_ended", {})
        response = await _open_stream(http)
        tasks = [asyncio.create_task(read(i, one)) for i, one in enumerate(asked)]
        everything = asyncio.ensure_future(asyncio.gather(*tasks))
        try:
            is_first: set[int] = set()
            while True:
                taken = asyncio.ensure_future(queue.get())
                await asyncio.wait({taken, everything}, return_when=asyncio.FIRST_COMPLETED)
                if not taken.done():
                    taken.cancel()
                    break
                choice = taken.result()
                text, index = choice.pop("text"), choice["index"]
                choice |= delta(text, index not in is_first)
                is_first.add(index)
                await _send(response, frame | {"choices": [choice]})
            done = await everything
            if (body.stream_options or {}).get("include_usage"):
                await _send(response, frame | {"choices": [], "usage": _usage(done)})
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            everything.cancel()
            for task in tasks:
                task.cancel()
        return response

    async def _pieces(
        self, engine: Engine, asked: GenerateRequest, decode: Decode, body: _TextBody
    ) -> AsyncIterator[dict[str, Any]]:
        """Choices with a piece of text each; text that may be the start of a stop string waits."""
        hold = max(map(len, asked.sampling.stop), default=1) - 1
        writers = [_PieceWriter(decode, hold) for _ in range(asked.n)]
        ticket = engine.submit(asked, is_streamed=True)
        async with aclosing(engine.stream(ticket)) as lists:
            async for events in lists:
                fresh: dict[int, list[int]] = {}
                for member, token, _ in events:
                    fresh.setdefault(member, []).append(token)
                for member, ids in fresh.items():
                    if (text := writers[member].push(ids)) or body.return_token_ids:
                        choice = {"index": member, "text": text, "finish_reason": None}
                        yield choice | ({"token_ids": ids} if body.return_token_ids else {})
        request = await ticket.done
        for member, (completion, reason) in enumerate(zip(request.completions, request.stop_reasons)):
            whole = cut_at_stop(decode(completion.token_ids.tolist()), reason)
            yield {
                "index": member,
                "text": whole[len(writers[member].written) :],
                "finish_reason": completion.finish_reason,
                "stop_reason": reason,
            }
        self._ended[asked.request_id] = request

    async def _stream_whole(
        self,
        http: web.Request,
        body: ChatBody,
        asked: GenerateRequest,
        frame: dict[str, Any],
        renderer: Renderer,
    ) -> web.StreamResponse:
        """With tools a reply must be read to its end to know what it is: one delta a choice."""
        done = await self._engine().generate(asked)
        response = await _open_stream(http)
        for member in range(asked.n):
            choice = self._chat_choice(body, renderer, done, member)
            message = choice.pop("message")
            for i, call in enumerate(message.get("tool_calls", ())):
                call["index"] = i
            finish = {k: choice.pop(k) for k in ("finish_reason", "stop_reason")}
            await _send(response, frame | {"choices": [choice | {"delta": message, "finish_reason": None}]})
            await _send(response, frame | {"choices": [{"index": member, "delta": {}} | finish]})
        if (body.stream_options or {}).get("include_usage"):
            await _send(response, frame | {"choices": [], "usage": _usage([done])})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class _PieceWriter:
    """The text of one streamed sample; the last `hold` characters wait, they may begin a stop string."""

    def __init__(self, decode: Decode, hold: int) -> None:
        self._detokenizer, self._hold = Detokenizer(decode), hold
        self._waiting = ""
        self.written = ""

    def push(self, ids: list[int]) -> str:
        text = self._waiting + "".join(map(self._detokenizer.push, ids))
        cut = max(len(text) - self._hold, 0)
        piece, self._waiting = text[:cut], text[cut:]
        self.written += piece
        return piece


def _completion_delta(text: str, _: bool) -> dict[str, Any]:
    return {"text": text, "logprobs": None}


def _chat_delta(text: str, is_first: bool) -> dict[str, Any]:
    role = {"role": "assistant"} if is_first else {}
    return {"delta": role | ({"content": text} if text or is_first else {}), "logprobs": None}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {
        "id": call.get("id") or f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _usage(done: list[Request]) -> dict[str, Any]:
    return api.usage(
        sum(len(r.request.prompt_ids) for r in done),
        sum(len(c.token_ids) for r in done for c in r.completions),
        sum(r.cached_tokens for r in done),
    )


async def _open_stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
