"""Text routes: /v1/completions and /v1/chat/completions (also streamed), /tokenize, /detokenize.

Text becomes the same GenerateRequest as on the token route. Tokenizer and renderer are loaded by the first request
that needs them. A setting that this engine does not support is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from stretto.base.aio import task_group
from stretto.base.errors import DataError, StrettoError
from stretto.chat.patches import load_image_processor, refuse_paths
from stretto.chat.placeholders import with_placeholders
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import Tokenizer, load_tokenizer
from stretto.config.sections.model import RendererSection
from stretto.inference.bodies import (
    ChatBody,
    CompletionsBody,
    DetokenizeBody,
    TextBody,
    TokenizeBody,
    check_messages,
    decode_text_body,
)
from stretto.inference.boundary import hold_pixels, json_response, max_body_bytes, read_body
from stretto.inference.embedded.adjustments import Encode
from stretto.inference.embedded.engine import Engine, Ticket
from stretto.inference.embedded.scheduler import EngineRequest
from stretto.inference.events import (
    PieceDecoder,
    StreamPiece,
    end_stream,
    finish_fields,
    merge_pieces,
    open_stream,
    send_event,
)
from stretto.inference.limits import check_text_size, unknown_token
from stretto.inference.text import Decode, Detokenizer, cut_at_stop
from stretto.records.generate import GenerateRequest
from stretto.records.images import Image
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal
from stretto.transports.engine.completions import encode_prompt_logprobs, usage
from stretto.transports.engine.images import VisionSizes

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OFFLOAD_SIZE = 4096  # characters or tokens, from which work runs in a thread
_MAX_RENDERERS = 8  # with different settings of the template
_MESSAGE_OVERHEAD_BYTES = 64  # JSON of a message without its text


class OpenAIRoutes:
    """The text routes of one model directory over one engine."""

    def __init__(self, directory: Path, model_name: str, engine: Callable[[], Engine]) -> None:
        self.directory, self.model_name, self._engine = directory, model_name, engine
        self._renderers: dict[str, Renderer] = {}  # by the template's settings
        self._building = asyncio.Lock()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        try:
            return load_tokenizer(self.directory)
        except DataError as error:
            raise Refusal(f"this engine has no tokenizer, so it accepts token ids only: {error}") from error

    def decoder(self) -> Decode:
        """The decoder for stop strings; special tokens are decoded to their text."""
        return self.tokenizer.decode

    def encoder(self) -> Encode:
        """The encoder for bad words."""
        return self.tokenizer.encode

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's `model` names; None for the engine's own model and for None.

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
        body = self._decode(await self._read(http), CompletionsBody)
        if body.logprobs is not None and not 0 <= body.logprobs <= 1:
            raise Refusal(f"logprobs: {body.logprobs} is not supported; 0 and 1 give the sampled token's logprob")
        is_scored = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
        params = body.sampling()
        if body.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=16)
        request_id = body.request_id or f"cmpl-{uuid4().hex}"
        specs = [
            GenerateRequest(
                request_id=f"{request_id}-{i}", prompt_ids=ids, n=body.n or 1, sampling=params,
                cache_salt=body.cache_salt, prompt_logprobs=is_scored, adapter=self.adapter_of(body.model),
            )
            for i, ids in enumerate(await self._prompts(body))
        ]  # fmt: skip
        frame = self._frame(body, request_id, "text_completion")
        if body.stream:
            if body.echo or body.prompt_logprobs is not None:
                raise Refusal("stream: echo and prompt_logprobs cannot be streamed")
            return await self._stream(http, body, specs, frame, self._completion_piece)
        done = await self._generate_all(specs)

        def build_response() -> web.Response:
            choices = [
                self._completion_choice(body, request, member, index * (body.n or 1) + member)
                for index, request in enumerate(done)
                for member in range(body.n or 1)
            ]
            return json_response(frame | {"choices": choices, "usage": _usage(done)})

        return await _offload(_num_tokens(done), build_response)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        data = await self._read(http)
        body = self._decode(data, ChatBody)
        renderer = await self._renderer(body.chat_template_kwargs)
        prompt_ids, images = await self._render(renderer, body.messages, body.tools)
        hold_pixels(http, images, body_bytes=len(data))
        params = body.sampling(renderer.stop_ids)
        if body.max_completion_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=body.max_completion_tokens)
        request_id = body.request_id or f"chatcmpl-{uuid4().hex}"
        spec = GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            n=body.n or 1,
            sampling=params,
            cache_salt=body.cache_salt,
            adapter=self.adapter_of(body.model),
            images=images,
            image_token_id=renderer.image_token_id if images else None,
        )
        frame = self._frame(body, request_id, f"chat.completion{'.chunk' if body.stream else ''}")
        if body.stream and body.tools:
            return await self._stream_whole(http, body, spec, frame, renderer)
        if body.stream:
            return await self._stream(http, body, [spec], frame, self._chat_piece)
        done = await self._engine().generate(spec)

        def build_response() -> web.Response:
            choices = [self._chat_choice(body, renderer, done, member) for member in range(spec.n)]
            reply = frame | {"choices": choices, "usage": _usage([done])}
            if body.return_token_ids:
                reply["prompt_token_ids"] = prompt_ids.tolist()
            return json_response(reply)

        return await _offload(_num_tokens([done]), build_response)

    async def tokenize(self, http: web.Request) -> web.Response:
        body = api.decode_json(await self._read(http), TokenizeBody)
        self.adapter_of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal("give either `prompt` or `messages`")
        if body.prompt is not None:
            [ids] = await self._encode([body.prompt], body.add_special_tokens)
        else:
            assert body.messages is not None, "there is one of both"
            renderer = await self._renderer(body.chat_template_kwargs)
            ids = (await self._render(renderer, body.messages, body.tools))[0].tolist()
        return json_response({"count": len(ids), "max_model_len": self._engine().core.max_model_len, "tokens": ids})

    async def detokenize(self, http: web.Request) -> web.Response:
        body = api.decode_json(await self._read(http), DetokenizeBody)
        self.adapter_of(body.model)
        self._check_ids(api.token_array(body.tokens, "tokens"), "tokens")
        return await _offload(len(body.tokens), lambda: json_response({"prompt": self.tokenizer.decode(body.tokens)}))

    def _frame(self, body: TextBody, request_id: str, kind: str) -> dict[str, Any]:
        """The fields that all answers to a request have."""
        model = body.model or self.model_name
        return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}

    async def _read(self, http: web.Request) -> bytes:
        """Read the body of a text route; refuse one larger than any prompt that the engine can serve."""
        core = self._engine().core
        if "tokenizer" not in self.__dict__:
            await asyncio.to_thread(lambda: self.tokenizer.max_token_bytes)
        vision = VisionSizes.of(core.config.hf)
        return await read_body(http, max_body_bytes(core.max_model_len, self.tokenizer.max_token_bytes, vision))

    def _check_size(self, num_bytes: int, where: str) -> None:
        max_model_len, token_bytes = self._engine().core.max_model_len, self.tokenizer.max_token_bytes
        check_text_size(where, num_bytes, max_model_len=max_model_len, token_bytes=token_bytes)

    async def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        for text in texts:
            self._check_size(len(text.encode()), "prompt")
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        return await _offload(sum(map(len, texts)), lambda: list(map(encode, texts)))

    def _decode(self, data: bytes, kind: type[Any]) -> Any:
        body = decode_text_body(data, kind)
        self.adapter_of(body.model)
        return body

    async def _prompts(self, body: CompletionsBody) -> list[np.ndarray]:
        prompt = body.prompt
        numbers = [] if isinstance(prompt, str) else [each for each in prompt if isinstance(each, int)]
        prompts: list[str | list[int]]
        if isinstance(prompt, str):
            prompts = [prompt]
        elif len(numbers) == len(prompt):
            prompts = [numbers]
        elif numbers:
            raise Refusal("prompt: send one text, one list of token ids, or a list of texts or of such lists")
        else:
            prompts = [each for each in prompt if not isinstance(each, int)]
        texts = [each for each in prompts if isinstance(each, str)]
        ids = iter(await self._encode(texts, body.add_special_tokens))
        return [api.token_array(next(ids) if isinstance(each, str) else each, "prompt") for each in prompts]

    def _check_ids(self, ids: np.ndarray, where: str) -> None:
        vocab_size = self._engine().core.config.vocab_size
        if len(bad := ids[(ids < 0) | (ids >= vocab_size)]):
            raise Refusal(unknown_token(where, int(bad[0]), vocab_size))

    async def _renderer(self, template_settings: dict[str, Any] | None) -> Renderer:
        """The renderer with a request's `chat_template_kwargs`; the last few are kept."""
        settings = dict(template_settings or {})
        key = repr(sorted(settings.items()))
        if (known := self._renderers.get(key)) is not None:  # it does not wait for others that are built
            return known
        async with self._building:  # requests that come at once build it once
            if key not in self._renderers:
                model_type = self._engine().core.config.hf.get("model_type")
                thinking = bool(settings.pop("enable_thinking", False))
                section = RendererSection(enable_thinking=thinking, settings=settings)
                build = lambda: build_renderer(
                    self.directory, section, model_type, load_image_processor(self.directory)
                )
                try:
                    built = await asyncio.to_thread(build)
                except StrettoError as error:
                    raise Refusal(f"messages: {error}") from error
                logger.info("chats are rendered by %s", built.description)
                while len(self._renderers) >= _MAX_RENDERERS:
                    del self._renderers[next(iter(self._renderers))]
                self._renderers[key] = built
            return self._renderers[key]

    async def _render(
        self, renderer: Renderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[np.ndarray, tuple[Image, ...]]:
        """The tokens of a conversation, int32, and its images."""
        check_messages(messages)
        try:
            refuse_paths(messages)
            size = len(msgspec.json.encode((with_placeholders(messages), tools)))
        except StrettoError as error:
            raise Refusal(str(error)) from error
        self._check_size(size - _MESSAGE_OVERHEAD_BYTES * len(messages), "messages")
        try:
            return await _offload(size, lambda: (renderer.render_prompt(messages, tools), renderer.images_of(messages)))
        except StrettoError as error:
            raise Refusal(str(error)) from error
        except Exception as error:  # templates are third-party code and may raise anything
            logger.info("messages are refused", exc_info=True)
            raise Refusal(f"messages: {renderer.name} refuses them: {error!r}") from error

    def _submit_all(self, specs: list[GenerateRequest], *, is_streamed: bool = False) -> list[Ticket]:
        """Submit all requests; if one is refused, cancel the others and raise its Refusal."""
        engine = self._engine()
        tickets: list[Ticket] = []
        try:
            for spec in specs:
                tickets.append(engine.submit(spec, is_streamed=is_streamed))
        except Refusal:
            for ticket in tickets:
                engine.cancel(ticket)
            raise
        return tickets

    async def _generate_all(self, specs: list[GenerateRequest]) -> list[EngineRequest]:
        tickets = self._submit_all(specs)
        async with task_group() as group:
            tasks = [group.create_task(self._engine().result(ticket)) for ticket in tickets]
        return [task.result() for task in tasks]

    def _completion_choice(self, body: CompletionsBody, done: EngineRequest, member: int, index: int) -> dict[str, Any]:
        completion, reason = done.results[member], done.stop_reasons[member]
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        text = cut_at_stop(self._text(body, ids), reason, min_tokens=done.spec.sampling.min_tokens)
        if body.echo:
            prompt_ids = done.spec.prompt_ids.tolist()
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
            choice["prompt_logprobs"] = encode_prompt_logprobs(done.spec, completion)
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["prompt_token_ids"] = done.spec.prompt_ids.tolist()
        return choice

    def _completion_logprobs(self, ids: list[int], logprobs: Sequence[float | None]) -> dict[str, Any]:
        detokenizer = Detokenizer(self.tokenizer.decode)
        tokens = [detokenizer.push(i) for i in ids]
        offsets = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
        top = [None if x is None else {t: x} for t, x in zip(tokens, logprobs)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _chat_choice(self, body: ChatBody, renderer: Renderer, done: EngineRequest, member: int) -> dict[str, Any]:
        completion, reason = done.results[member], done.stop_reasons[member]
        message = dict(renderer.parse(completion.token_ids, done.spec.prompt_ids, body.tools))
        content = cut_at_stop(message.get("content") or "", reason, min_tokens=done.spec.sampling.min_tokens)
        # Malformed calls are text here, as in vLLM.
        message["content"] = "\n".join(filter(None, (content, *message.pop("unparsed_tool_calls", ()))))
        finish = completion.finish_reason
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_tool_call(call) for call in calls]
            finish = "tool_calls" if finish == "stop" else finish
        choice = {"index": member, "message": message, "finish_reason": finish, "stop_reason": reason}
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        choice["logprobs"] = {"content": self._chat_logprobs(body, ids, logprobs)} if body.logprobs else None
        return choice | ({"token_ids": ids} if body.return_token_ids else {})

    def _chat_logprobs(self, body: ChatBody, ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
        content = []
        for token, logprob in zip(ids, logprobs):
            text = f"token_id:{token}" if body.return_tokens_as_token_ids else self.tokenizer.decode([token])
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return content

    def _text(self, body: TextBody, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)

    async def _stream(
        self, http: web.Request, body: TextBody, specs: list[GenerateRequest], frame: dict[str, Any],
        format_piece: Callable[[Any, StreamPiece], dict[str, Any]],
    ) -> web.StreamResponse:  # fmt: skip
        """Stream pieces of text, finish reasons, the usage if requested, and [DONE]."""
        done: list[EngineRequest] = []
        tickets = self._submit_all(specs, is_streamed=True)
        num_samples = specs[0].n
        events = merge_pieces([self._pieces(i * num_samples, t, body, done) for i, t in enumerate(tickets)])
        try:
            async with aclosing(events), open_stream(http) as response:
                async for piece in events:
                    await send_event(response, frame | {"choices": [format_piece(body, piece)]})
                await end_stream(response, _usage_event(body, frame, done))
        finally:  # requests that have not ended, if the reader has disconnected
            for ticket in tickets:
                self._engine().cancel(ticket)
        return response

    async def _pieces(
        self, first_index: int, ticket: Ticket, body: TextBody, done: list[EngineRequest]
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield one request as pieces of text; text that may be the start of a stop string is held back."""
        engine, spec = self._engine(), ticket.request.spec
        decode = lambda ids: self._text(body, list(ids))
        longest_stop = max(map(len, spec.sampling.stop), default=0)
        decoders = [PieceDecoder(decode, longest_stop) for _ in range(spec.n)]
        async with aclosing(engine.stream(ticket)) as lists:
            async for events in lists:
                pieces: dict[int, StreamPiece] = {}
                for member, token, logprob in events:
                    piece = pieces.setdefault(member, StreamPiece(first_index + member))
                    piece.ids.append(token)
                    piece.logprobs.append(logprob)
                for member, piece in pieces.items():
                    piece.is_first = not decoders[member].has_begun
                    piece.text = decoders[member].push(piece.ids)
                    yield piece
        request = await ticket.future
        for member, (completion, reason) in enumerate(zip(request.results, request.stop_reasons)):
            text = decode(completion.token_ids.tolist())
            text = cut_at_stop(text, reason, min_tokens=spec.sampling.min_tokens)
            rest = text[len(decoders[member].returned) :]
            yield StreamPiece(first_index + member, rest, finish_reason=completion.finish_reason, stop_reason=reason)
        done.append(request)

    def _completion_piece(self, body: CompletionsBody, piece: StreamPiece) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text} | finish_fields(piece)
        if body.logprobs is not None and piece.ids:
            choice["logprobs"] = self._completion_logprobs(piece.ids, piece.logprobs)
        return choice | ({"token_ids": piece.ids} if body.return_token_ids else {})

    def _chat_piece(self, body: ChatBody, piece: StreamPiece) -> dict[str, Any]:
        delta = {"role": "assistant", "content": piece.text} if piece.is_first else {}
        if piece.text:
            delta["content"] = piece.text
        choice = {"index": piece.index, "delta": delta} | finish_fields(piece)
        if body.logprobs and piece.ids:
            choice["logprobs"] = {"content": self._chat_logprobs(body, piece.ids, piece.logprobs)}
        return choice | ({"token_ids": piece.ids} if body.return_token_ids else {})

    async def _stream_whole(
        self, http: web.Request, body: ChatBody, spec: GenerateRequest, frame: dict[str, Any], renderer: Renderer
    ) -> web.StreamResponse:
        """Stream one delta per choice: if there are tools, only a complete reply can be parsed."""
        done = await self._engine().generate(spec)
        async with open_stream(http) as response:
            for member in range(spec.n):
                choice = self._chat_choice(body, renderer, done, member)
                message = choice.pop("message")
                for i, call in enumerate(message.get("tool_calls", ())):
                    call["index"] = i
                finish = {k: choice.pop(k) for k in ("finish_reason", "stop_reason")}
                await send_event(response, frame | {"choices": [choice | {"delta": message, "finish_reason": None}]})
                await send_event(response, frame | {"choices": [{"index": member, "delta": {}} | finish]})
            await end_stream(response, _usage_event(body, frame, [done]))
        return response


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


async def _offload(size: int, work: Callable[[], T]) -> T:
    """Run `work`; in a thread if `size` is large, so that other requests are answered in the meantime."""
    return work() if size < _OFFLOAD_SIZE else await asyncio.to_thread(work)


def _num_tokens(done: list[EngineRequest]) -> int:
    return sum(len(completion.token_ids) for request in done for completion in request.results)


def _usage(done: list[EngineRequest]) -> dict[str, Any]:
    prompt_tokens = sum(len(request.spec.prompt_ids) for request in done)
    return usage(prompt_tokens, _num_tokens(done), sum(request.cached_tokens for request in done))


def _usage_event(body: TextBody, frame: dict[str, Any], done: list[EngineRequest]) -> dict[str, Any] | None:
    """The last event of a stream whose request has include_usage; None for others."""
    has_usage = (body.stream_options or {}).get("include_usage")
    return frame | {"choices": [], "usage": _usage(done)} if has_usage else None
