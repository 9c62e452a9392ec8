"""Text in, text out: /v1/completions, /v1/chat/completions (both also as server-sent events), /tokenize,
/detokenize.

Everything here ends in the same GenerateRequest as the token route; tokenizer and renderer are loaded by the
first request that needs them. A setting that this engine cannot honour is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from stretto.base.errors import StrettoError
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import Tokenizer, load_tokenizer
from stretto.config.model import RendererSection
from stretto.inference.bodies import (
    ChatBody,
    CompletionsBody,
    DetokenizeBody,
    TextBody,
    TokenizeBody,
    decode_text_body,
)
from stretto.inference.embedded.engine import Engine
from stretto.inference.embedded.scheduler import Request
from stretto.inference.text import Decode, Detokenizer, cut_at_stop
from stretto.records.generate import GenerateRequest
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal


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

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's `model` names; None: it names the engine's own, or nothing.

        Raises: Refusal 404 for any other name.
        """
        if name is None or name == self.model_name:
            return None
        adapters = self._engine().core.adapters
        if adapters.get(name) is None:
            served = ", ".join([repr(self.model_name), *(repr(adapter.name) for adapter in adapters)])
            raise Refusal(f"the model {name!r} does not exist; this engine serves {served}", 404)
        return name

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
                cache_salt=body.cache_salt, prompt_logprobs=is_scored, adapter=self.adapter_of(body.model),
            )
            for i, ids in enumerate(self._prompts(body))
        ]  # fmt: skip
        frame = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or self.model_name,
        }
        if body.stream:
            if body.echo or body.prompt_logprobs is not None:
                raise Refusal("stream: echo and prompt_logprobs cannot be streamed")
            return await self._stream(http, body, asked, frame, self._completion_piece)
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
            adapter=self.adapter_of(body.model),
        )
        created = int(time.time())
        if body.stream:
            frame = {
                "id": request_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": body.model or self.model_name,
            }
            if body.tools:
                return await self._stream_whole(http, body, asked, frame, renderer)
            return await self._stream(http, body, [asked], frame, self._chat_piece)
        frame = {
            "id": request_id,
            "object": "chat.completion",
            "created": created,
            "model": body.model or self.model_name,
        }
        done = await self._engine().generate(asked)
        choices = [self._chat_choice(body, renderer, done, member) for member in range(asked.n)]
        answer = frame | {"choices": choices, "usage": _usage([done])}
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt_ids.tolist()
        return _json(answer)

    async def tokenize(self, http: web.Request) -> web.Response:
        body = api.decode_json(await http.read(), TokenizeBody)
        self.adapter_of(body.model)
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
        self.adapter_of(body.model)
        self._check_ids(api.token_array(body.tokens, "tokens"), "tokens")
        return _json({"prompt": self.tokenizer.decode(body.tokens)})

    def _decode(self, data: bytes, kind: type[Any]) -> Any:
        body = decode_text_body(data, kind)
        self.adapter_of(body.model)
        return body

    def _prompts(self, body: CompletionsBody) -> list[np.ndarray]:
        prompt = body.prompt
        is_ids = isinstance(prompt, list) and all(isinstance(i, int) for i in prompt)
        several = [prompt] if isinstance(prompt, str) or is_ids else prompt
        if any(isinstance(one, int) for one in several):
            raise Refusal("prompt: give one text, one list of token ids, or a list of texts or of such lists")
        return [
            np.array(self.tokenizer.encode(one, add_special_tokens=body.add_special_tokens), np.int32)
            if isinstance(one, str)
            else api.token_array(one, "prompt")
            for one in several
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
            "logprobs": {
                "content": self._chat_logprobs(
                    body, completion.token_ids.tolist(), completion.logprobs.tolist()
                )
            }
            if body.logprobs
            else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
        return choice

    def _chat_logprobs(self, body: ChatBody, ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
        out = []
        for token, logprob in zip(ids, logprobs):
            text = f"token_id:{token}" if body.return_tokens_as_token_ids else self.tokenizer.decode([token])
            out.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return out

    def _text(self, body: TextBody, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)

    async def _stream(
        self, http: web.Request, body: TextBody, asked: list[GenerateRequest], frame: dict[str, Any],
        format_piece: Callable[[Any, Piece], dict[str, Any]],
    ) -> web.StreamResponse:  # fmt: skip
        """Server-sent events: pieces of text as they come, finish reasons, the usage if asked for, [DONE]."""
        for one in asked:
            if reason := self._engine().core.refusal(one):
                raise Refusal(reason)
        done: list[Request] = []
        events = _merged([self._pieces(i * one.n, one, body, done) for i, one in enumerate(asked)])
        response = await _open_stream(http)
        try:
            async with aclosing(events):
                async for piece in events:
                    await _send(response, frame | {"choices": [format_piece(body, piece)]})
        except StrettoError as error:  # the status line is long sent: say it in the stream
            status = error.status if isinstance(error, Refusal) else 500
            await response.write(b"data: " + Refusal(str(error), status).body() + b"\n\n")
        else:
            await _finish_stream(response, body, frame, done)
        return response

    async def _pieces(
        self, first_index: int, asked: GenerateRequest, body: TextBody, done: list[Request]
    ) -> AsyncIterator[Piece]:
        """One request as pieces of text; text that may be the start of a stop string waits."""
        engine = self._engine()
        decode = lambda ids: self._text(body, list(ids))
        hold = max(map(len, asked.sampling.stop), default=1) - 1
        writers = [_PieceWriter(decode, hold) for _ in range(asked.n)]
        ticket = engine.submit(asked, is_streamed=True)
        async with aclosing(engine.stream(ticket)) as lists:
            async for events in lists:
                fresh: dict[int, Piece] = {}
                for member, token, logprob in events:
                    piece = fresh.setdefault(member, Piece(first_index + member))
                    piece.ids.append(token)
                    piece.logprobs.append(logprob)
                for member, piece in fresh.items():
                    piece.is_first = not writers[member].has_begun
                    piece.text = writers[member].push(piece.ids)
                    yield piece
        request = await ticket.done
        for member, (completion, reason) in enumerate(zip(request.completions, request.stop_reasons)):
            whole = cut_at_stop(decode(completion.token_ids.tolist()), reason)
            rest = whole[len(writers[member].written) :]
            yield Piece(
                first_index + member, rest, finish_reason=completion.finish_reason, stop_reason=reason
            )
        done.append(request)

    def _completion_piece(self, body: CompletionsBody, piece: Piece) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text} | _reasons(piece)
        if body.logprobs is not None and piece.ids:
            choice["logprobs"] = self._completion_logprobs(piece.ids, piece.logprobs)
        return choice | ({"token_ids": piece.ids} if body.return_token_ids else {})

    def _chat_piece(self, body: ChatBody, piece: Piece) -> dict[str, Any]:
        delta = {"role": "assistant", "content": piece.text} if piece.is_first else {}
        if piece.text:
            delta["content"] = piece.text
        choice = {"index": piece.index, "delta": delta} | _reasons(piece)
        if body.logprobs and piece.ids:
            choice["logprobs"] = {"content": self._chat_logprobs(body, piece.ids, piece.logprobs)}
        return choice | ({"token_ids": piece.ids} if body.return_token_ids else {})

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
        await _finish_stream(response, body, frame, [done])
        return response


@dataclass(slots=True)
class Piece:
    """What one step added to one streamed sample, or its end."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_first: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _PieceWriter:
    """The text of one streamed sample; the last `hold` characters wait, they may begin a stop string."""

    def __init__(self, decode: Decode, hold: int) -> None:
        self._detokenizer, self._hold = Detokenizer(decode), hold
        self._waiting = ""
        self.written = ""
        self.has_begun = False

    def push(self, ids: list[int]) -> str:
        self.has_begun = True
        text = self._waiting + "".join(map(self._detokenizer.push, ids))
        cut = max(len(text) - self._hold, 0)
        piece, self._waiting = text[:cut], text[cut:]
        self.written += piece
        return piece


async def _merged(sources: list[AsyncIterator[Piece]]) -> AsyncIterator[Piece]:
    """The items of all sources as they come; the failure of one ends all."""
    queue: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def drain(source: AsyncIterator[Piece]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    queue.put_nowait(item)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is not None:
                yield item
                continue
            num_open -= 1
            await asyncio.sleep(0)  # let the task that said it ended do so
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()


def _reasons(piece: Piece) -> dict[str, Any]:
    reasons: dict[str, Any] = {"logprobs": None, "finish_reason": piece.finish_reason}
    return reasons | ({"stop_reason": piece.stop_reason} if piece.finish_reason else {})


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


async def _finish_stream(
    response: web.StreamResponse, body: TextBody, frame: dict[str, Any], done: list[Request]
) -> None:
    if (body.stream_options or {}).get("include_usage"):
        await _send(response, frame | {"choices": [], "usage": _usage(done)})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
