"""Clients of the frozen models beside the policy, [models.NAME]: retries, limits, and a cache of greedy replies.

kept_replies.py keeps that cache over starts of a run.

Environments see `ChatModel` of envs/models.py. A model is an engine that the run has started, or any server with
/chat/completions, and for a reward model with vLLM's /classify. A request waits for its turn (max_concurrent,
requests_per_minute), then has timeout_s, retries included. Two requests at once that are the same are one. What cannot
be answered raises: the rollout fails, and is played again, unless the environment catches the error.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from stretto.base.errors import ConfigError, EngineError, EnvError
from stretto.config.sections.distill import TEACHER_KEY_VAR, FrozenModelPlace
from stretto.data.messages import checked_messages
from stretto.data.pictures import openai_messages
from stretto.envs.models import ChatModel, ModelReply
from stretto.transports.engine import api, http
from stretto_frozen.costs import Spending
from stretto_frozen.kept_replies import KeptReplies

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0
_POLL_S = 0.5
_KEY_REFUSED = ("HTTP 401", "HTTP 403")


@dataclass(frozen=True)
class _Kind:
    """What a frozen model is asked for."""

    url: Callable[[str], str]
    """The route's address from `ModelClient.base_url`."""
    read: Callable[[Any], dict[str, Any]]
    """An answer's text, message and finish_reason."""
    otherwise: str
    hint: str = ""


def _read_chat(answer: Any) -> dict[str, Any]:
    choice = answer["choices"][0]
    message = {key: value for key, value in choice["message"].items() if value is not None}
    text, end = _text_of(message.get("content", "")), choice.get("finish_reason") or "stop"
    return {"text": text, "message": message, "finish_reason": end}


def _read_score(answer: Any) -> dict[str, Any]:
    (value,) = answer["data"][0]["probs"]
    if not math.isfinite(value):
        raise ValueError(f"a score of {value}")
    return {"text": repr(float(value)), "message": {}, "finish_reason": "stop"}


_CHAT = _Kind(lambda base: f"{base}/chat/completions", _read_chat, "no chat completion")
_SCORE = _Kind(
    lambda base: base.removesuffix("/v1") + api.CLASSIFY,
    _read_score,
    "no score of one label",
    "; `score` asks a reward model, a directory for sequence classification with one label",
)


class ModelClient(ChatModel):
    """One frozen model; it belongs to the event loop that first uses it."""

    def __init__(
        self, name: str, section: FrozenModelPlace, key: str | None = None, directory: Path | None = None
    ) -> None:
        assert isinstance(section.base_url, str), "one address: checked with the config, or filled in by the launcher"
        self.name, self._section = name, section
        self.base_url = chat_url(section.base_url)
        self._model = section.model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = http.Connections(headers, has_router=True)
        self._turns = asyncio.Semaphore(section.max_concurrent)
        self._next_at = 0.0  # when requests_per_minute lets another one begin
        self._source = (section.source or self.base_url).encode()
        self._kept = KeptReplies(directory and directory / f"{name}.sqlite", section.cache_size)
        self._replies: OrderedDict[bytes, ModelReply] = OrderedDict(self._kept.load())
        self._asked: dict[bytes, asyncio.Task[ModelReply]] = {}  # by the requests that are under way
        self.spending = Spending(name, section)
        self.counts = self.spending.counts
        self._has_failed = False
        if self._replies:
            logger.info("models.%s: %d replies are known from before", name, len(self._replies))

    async def chat(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> ModelReply:
        checked = openai_messages(checked_messages(messages, f"models.{self.name}: messages of chat"))
        given = {"temperature": 0.0, "tools": tools or None} | options
        body = {"model": self._model, "messages": checked} | {k: v for k, v in given.items() if v is not None}
        return await self._answered(body, _CHAT, is_same_again=given["temperature"] == 0)

    async def score(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> float:
        checked = openai_messages(checked_messages(messages, f"models.{self.name}: messages of score"))
        body: dict[str, Any] = {"model": self._model, "messages": checked, "use_activation": False}
        if tools:  # vLLM's route has no field of its own for them
            body["chat_template_kwargs"] = {"tools": tools}
        return float((await self._answered(body, _SCORE, is_same_again=True)).text)

    async def _answered(self, body: dict[str, Any], kind: _Kind, *, is_same_again: bool) -> ModelReply:
        """The reply to a request; is_same_again: an equal request would get the same."""
        try:
            data = msgspec.json.encode(body)
        except (TypeError, ValueError) as cause:
            raise EnvError(
                f"models.{self.name}: the request cannot be sent: {cause}; give what JSON can hold"
            ) from None
        self.counts["requests"] += 1
        if not self._section.cache_size or not is_same_again:
            return await self._reply(data, kind)
        return await self._cached(data, kind)

    async def _cached(self, body: bytes, kind: _Kind) -> ModelReply:
        """The reply to a request, which is sent only if no earlier one was the same."""
        key = hashlib.sha256(self._source + b"\0" + body).digest()
        if (known := self._replies.get(key)) is not None:
            self._replies.move_to_end(key)
            self.counts["cached"] += 1
            return msgspec.structs.replace(known, is_cached=True)
        is_asked = key in self._asked
        if not is_asked:
            # A task of its own: the request goes on for others if the rollout that began it is cancelled.
            self._asked[key] = asyncio.create_task(self._reply(body, kind))
            self._asked[key].add_done_callback(partial(self._keep, key))
        self.counts["cached"] += is_asked
        reply = await asyncio.shield(self._asked[key])
        return msgspec.structs.replace(reply, is_cached=True) if is_asked else reply

    def _keep(self, key: bytes, task: asyncio.Task[ModelReply]) -> None:
        """Keep the reply of a task that has ended, and no failure, also if nobody waits for it any more."""
        del self._asked[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._replies[key] = task.result()
        self._kept.add(key, task.result())
        if len(self._replies) > self._section.cache_size:
            self._replies.popitem(last=False)

    async def _reply(self, body: bytes, kind: _Kind) -> ModelReply:
        async with self._turns:
            await self.spending.admit()
            await self._pace()
            timeout_s = self._section.timeout_s
            seen: list[str] = []
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._post(kind.url(self.base_url), body, seen)
            except TimeoutError:
                last = f"; the last answer: {seen[-1]}" if seen else ""
                raise self._failure(f"no reply in {timeout_s:g} s (client.timeout_s){last}") from None
            except http.RequestRefused as error:
                raise EnvError(f"models.{self.name} refuses the request: {error}{kind.hint}") from error
            except EngineError as error:
                hint = kind.hint if "HTTP 404" in str(error) else ""  # the server has no such route
                raise self._failure(f"{error}{hint}") from error
        reply = self._parsed(answer, kind)
        self.spending.add(reply)
        return reply

    async def _pace(self) -> None:
        """Wait until requests_per_minute allows another request."""
        if (most := self._section.requests_per_minute) is None:
            return
        now = asyncio.get_running_loop().time()
        begins_at = max(now, self._next_at)
        self._next_at = begins_at + 60.0 / most
        await asyncio.sleep(begins_at - now)

    async def _post(self, url: str, body: bytes, seen: list[str]) -> bytes:
        """The answer to a request; `seen` gets the errors of attempts that failed.

        Raises: EngineError after max_retries; RequestRefused.
        """
        num_failed = 0
        while True:
            try:
                return await self._http.request("POST", url, body, api.JSON_HEADERS)
            except http.Transient as error:
                seen.append(str(error))
                num_failed += not isinstance(error, http.Full | http.Unavailable)  # those wait until timeout_s
                if num_failed > self._section.max_retries:
                    raise EngineError(f"{error} (after {num_failed} attempts)") from error
                backoff_s = min(_BACKOFF_S * 2 ** (len(seen) - 1), _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(error.wait_s or 0.0, backoff_s))

    def _parsed(self, data: bytes, kind: _Kind) -> ModelReply:
        try:
            answer = msgspec.json.decode(data)
            usage = answer.get("usage") or {}
            reply = kind.read(answer) | {
                "num_prompt_tokens": usage.get("prompt_tokens") or 0,
                "num_completion_tokens": usage.get("completion_tokens") or 0,
            }
            return msgspec.convert(reply, ModelReply)
        except (msgspec.MsgspecError, KeyError, IndexError, TypeError, AttributeError, ValueError) as cause:
            raise self._failure(f"the answer of {self.base_url} is {kind.otherwise}: {cause!r}") from None

    def _failure(self, text: str) -> EngineError:
        """The error of a request that got no reply. The first is a warning: an environment may catch it and go on."""
        self.counts["failed"] += 1
        if not self._has_failed:
            self._has_failed = True
            logger.warning("models.%s: %s; models/%s/failed counts such requests", self.name, text, self.name)
        return EngineError(f"models.{self.name}: {text}")

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server lists its models; one that has no such list is taken as it is.

        Raises: EngineError if it does not answer in time, or refuses the key.
        """
        cause, url = "no answer yet", self.base_url + "/models"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return self._choose(await self._http.request("GET", url))
                    except http.Transient as error:
                        cause = str(error)
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineError(f"not ready after {timeout_s:g} s: {cause}") from None
        except EngineError as error:
            if any(f"{url}: {code}" in str(error) for code in _KEY_REFUSED):
                raise EngineError(f"{error}; correct the key in {self._section.api_key_var}") from None
            if self._model is None:
                raise EngineError(f"{error}; name the model as served_model_name") from None

    def _choose(self, data: bytes) -> None:
        """Ask for the first model of a server's list, unless the config names one."""
        try:
            names = [each["id"] for each in msgspec.json.decode(data)["data"]]
        except (msgspec.DecodeError, KeyError, TypeError):
            names = []
        self._model = self._model or next(iter(names), None)
        if self._model is None:
            raise EngineError(f"{self.base_url}/models lists no model; name one as served_model_name")

    async def close(self) -> None:
        """Close the connections, and say what was asked."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.wait(self._asked.values()) if self._asked else None
        self._kept.close()
        await self._http.close()
        if summary := self.spending.summary():
            logger.log(logging.WARNING if self._has_failed else logging.INFO, "models.%s: %s", self.name, summary)


def _text_of(content: Any) -> Any:
    """The text of an answer's content, which may be a list of parts."""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def chat_url(address: str) -> str:
    """The address before /chat/completions: /v1 of a server that is named by host and port alone."""
    address = address.rstrip("/")
    return address if urlsplit(address).path.strip("/") else f"{address}/v1"


def open_models(
    sections: Mapping[str, FrozenModelPlace], stack: AsyncExitStack, directory: Path | None = None
) -> dict[str, ModelClient]:
    """Clients of the frozen models by name; `stack` closes them. Replies are kept in `directory`, if one is given.

    Raises: ConfigError for an API key whose environment variable is not set.
    """
    clients = {}
    for name, section in sections.items():
        if section.base_url is not None:
            urls = [section.base_url] if isinstance(section.base_url, str) else section.base_url
            one = section.model_copy(update={"base_url": urls[0]})
            clients[name] = ModelClient(name, one, key_of(name, section), directory)
            stack.push_async_callback(clients[name].close)
    return clients


def key_of(name: str, section: FrozenModelPlace) -> str | None:
    """The API key of a model.

    Raises: ConfigError if the config names an environment variable that is not set.
    """
    key = os.environ.get(section.api_key_var)
    if key is None and section.api_key_var != TEACHER_KEY_VAR and "api_key_var" in section.model_fields_set:
        var = section.api_key_var
        raise ConfigError(f"models.{name}.client.api_key_var: the environment variable {var} is not set; export it")
    return key
