"""Client that uses any /chat/completions server as an engine for evaluation: text in, text out.

Rollouts are written for token ids. Here an array of ids is a handle: its first element is an index into a table of this
client, which has message lists and replies; the other elements only make the array as long as the server says that the
reply was. So the client is both renderer and engine, and environments run on it unchanged. There are no
log-probabilities, so nothing can be trained.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.base.errors import EngineError
from stretto.records.generate import Completion, GenerateRequest
from stretto.transports.engine import api, http

if TYPE_CHECKING:
    from jaxtyping import Int32


class ChatClient:
    """One OpenAI-compatible server; base_url is for example http://host/v1."""

    stop_ids: tuple[int, ...] = ()
    images = image_token_id = None  # the server also tokenizes images

    def __init__(
        self, base_url: str, api_key: str | None = None, *, model: str | None = None, timeout_s: float = 600.0,
        max_retries: int = 3, prepare: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list,
    ) -> None:  # fmt: skip
        """prepare: converts the messages of an environment into values that JSON can express."""
        self._prepare = prepare
        self.base_url, self.model = base_url.rstrip("/"), model
        self.timeout_s, self.max_retries = timeout_s, max_retries
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = http.Connections(headers, has_router=False)
        self._texts: list[Any] = []  # by handle: a request's messages and tools, or a reply's message

    # -- methods of a renderer --

    def render_prompt(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> Int32[np.ndarray, " 1"]:
        """A handle for the conversation, int32 [1]."""
        return self._handle({"messages": self._prepare(messages), "tools": tools}, 1)

    def images_of(self, messages: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        """No images beside the tokens: they travel in the messages."""
        return ()

    def check_images(self, *_: Any, **__: Any) -> None:
        """Nothing to check, for the same reason."""

    def pictures(self, *_: Any) -> tuple[Any, ...]:
        """No pictures, for the same reason."""
        return ()

    def readable(self, token_ids: Int32[np.ndarray, " tokens"]) -> str:
        """`decode`."""
        return self.decode(token_ids)

    def extend(self, *_: Any, **__: Any) -> None:
        """None: the server renders every turn from the beginning."""

    def parse(self, completion_ids: Int32[np.ndarray, " completion"], *_: Any, **__: Any) -> dict[str, Any]:
        """The message of the reply with this handle."""
        return dict(self._texts[int(completion_ids[0])])

    def decode(self, token_ids: Int32[np.ndarray, " tokens"]) -> str:
        """The conversation or reply with this handle, as text."""
        if not len(token_ids):
            return ""
        value = self._texts[int(token_ids[0])]
        if "messages" in value:
            return "\n".join(f"{each['role']}: {each.get('content') or ''}" for each in value["messages"])
        calls = value.get("tool_calls")
        return (value.get("content") or "") + (msgspec.json.encode(calls).decode() if calls else "")

    # -- methods of an engine --

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server lists its models; uses the first one if no model was named.

        One that has no such list is taken as it is if a model was named.

        Raises: EngineError if it does not answer in time, or refuses the key.
        """
        cause, answer = "no answer yet", dict[str, Any]()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        answer = await self._once("GET", "/models")
                        break
                    except http.Transient as error:
                        cause = str(error)
                        await asyncio.sleep(http.BACKOFF_S)
        except TimeoutError:
            raise EngineError(f"not ready after {timeout_s:g} s: {cause}") from None
        except EngineError as error:
            if any(f"/models: {code}" in str(error) for code in (401, 403)):
                raise EngineError(f"{error}; correct the key in client.api_key_var.") from None
            if self.model is None:
                raise EngineError(f"{error}; name the model as client.served_model.") from None
        if self.model is None:
            try:
                self.model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise EngineError(f"{self.base_url}/models lists no model; set client.served_model.") from None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The request's n samples, each by a separate HTTP request: many servers do not support n.

        Raises: EngineError.
        """
        handle = int(request.prompt_ids[0]) if len(request.prompt_ids) == 1 else -1
        if not 0 <= handle < len(self._texts) or "messages" not in self._texts[handle]:
            raise EngineError(
                f"generate {request.request_id}: the environment makes its own token ids, but client.api = "
                '"chat" supports only text; evaluate it with an engine that takes tokens.'
            )
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*(self._sample(request, handle, i) for i in range(request.n)))
        except TimeoutError:
            what = f"generate {request.request_id}"
            raise EngineError(f"{what}: no answer from {self.base_url} in {self.timeout_s:g} s") from None

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    # -- inside --

    def _handle(self, value: Any, length: int) -> Int32[np.ndarray, " tokens"]:
        self._texts.append(value)
        ids = np.zeros(length, dtype=np.int32)
        ids[0] = len(self._texts) - 1
        return ids

    async def _sample(self, request: GenerateRequest, handle: int, index: int) -> Completion:
        prompt, sampling = self._texts[handle], request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": prompt["messages"],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        optional = {
            "max_tokens": sampling.max_tokens,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "min_tokens": sampling.min_tokens or None,
            "bad_words": list(sampling.bad_words) or None,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "tools": prompt["tools"] or None,
            # Servers accept 32 bits; each member of a group needs another seed.
            "seed": None if sampling.seed is None else (sampling.seed + index) % (1 << 31),
        }
        body |= {key: value for key, value in optional.items() if value is not None}
        answer = await self._post_with_retries(request.request_id, msgspec.json.encode(body))
        try:
            choice = answer["choices"][0]
            message = {key: value for key, value in choice["message"].items() if value is not None}
        except (KeyError, IndexError, TypeError, AttributeError) as cause:
            raise EngineError(f"{self.base_url}: the answer has no choices[0].message: {cause!r}") from cause
        message = {"content": ""} | message | {"role": "assistant"}
        stop = choice.get("stop_reason")  # vLLM and our engines say it; servers leave the stop text out
        if isinstance(stop, str):
            message["content"] += stop
        num_tokens = (answer.get("usage") or {}).get("completion_tokens") or 1
        ids = self._handle(message, num_tokens)
        reason = choice.get("finish_reason")
        return Completion(
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="length" if reason == "length" else "stop",
            stop_reason=stop,
        )

    async def _post_with_retries(self, request_id: str, body: bytes) -> dict[str, Any]:
        attempt = waits = 0
        while True:
            try:
                return await self._once("POST", "/chat/completions", body)
            except http.Full:  # does not count as an attempt; timeout_s limits the waiting
                await asyncio.sleep(random.uniform(0.5, 1.5) * http.backoff_s(waits))
                waits += 1
                continue
            except http.Transient as error:
                if attempt >= self.max_retries:
                    raise EngineError(f"generate {request_id}: {error} (after {attempt + 1} attempts)") from error
            await asyncio.sleep(http.backoff_s(attempt))
            attempt += 1

    async def _once(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        url = self.base_url + path
        data = await self._http.request(method, url, body, api.JSON_HEADERS if body is not None else None)
        try:
            answer = msgspec.json.decode(data)
        except msgspec.DecodeError as cause:
            raise EngineError(f"{url}: the answer is not JSON: {cause}") from cause
        if not isinstance(answer, dict):
            raise EngineError(f"{url}: expected a JSON object, received a {type(answer).__name__}")
        return answer
