"""`openenv:SOURCE`: an environment of OpenEnv, played over the WebSocket of its server.

SOURCE is the URL of a server, or a directory or module with an `openenv.yaml`, whose server each worker starts as a
process of its own. The client is here and not the package's: that one excludes other packages of a trainer, and the
server may have a Python of its own.

Servers offer tools (their actions are calls), or one kind of action by its JSON schema. Such an action is the text of a
reply if it needs one text only, else the arguments of the tool `step`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp

from stretto.base.errors import ConfigError, EnvError
from stretto.data.messages import short_repr
from stretto.envs.base import EpisodeLimits, LimitReached, Message, RolloutContext, RolloutResult, Split, TaskSource
from stretto.records.rollout import Task
from stretto_hubs.servers import LocalServer, answer_of, fetch_json, find_python, missing_package, split_of

logger = logging.getLogger(__name__)

MANIFEST = "openenv.yaml"
STEP = "step"
EVAL_SEED = 2**30
"""The seed of the first held-out task."""
_CALLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the schema of actions that are calls of tools."""
_MAX_MESSAGE_BYTES = 100 * 2**20
_RETRY_S = 0.25
_UNSEEN = ("metadata", "done", "reward")
"""Fields of an observation that are not for the policy."""


class OpenEnv:
    """An environment of OpenEnv.

    resets: the arguments of `reset` of each task; None: tasks without end, which differ in `seed`. num_eval: how many
    of the last resets are held out (0: training and evaluation use all). prompt: the system message. action: how the
    policy acts, in `"text"` or by the tool `"step"`; None: as the schema needs. reward: of an episode, the `"sum"` of
    its steps' or the `"last"`. max_turns: replies of one episode. timeout_s: for each answer of the server. python:
    the Python that starts the server of a directory; None: this one.
    """

    def __init__(
        self,
        source: str,
        resets: list[dict[str, Any]] | None = None,
        num_eval: int = 0,
        prompt: str | None = None,
        action: Literal["text", "step"] | None = None,
        reward: Literal["sum", "last"] = "sum",
        max_turns: int | None = 20,
        timeout_s: float = 60.0,
        python: str | None = None,
    ) -> None:
        self.name = f"openenv/{source}"
        self._what = f"openenv:{source}"
        if resets is None and num_eval:
            raise ConfigError(f"{self._what}: num_eval is about `resets`; without them held-out seeds begin at 2**30")
        self._resets = resets
        self._train, self._eval = split_of(self._what, len(resets or [{}]), num_eval, "resets")
        self.are_tasks_shared = resets is not None and num_eval == 0
        self._prompt, self._action, self._reward = prompt, action, reward
        self._timeout_s = timeout_s
        self.limits = EpisodeLimits(max_turns=max_turns)
        self._server = None if "://" in source else _local_server(self._what, source, python)
        self._url = source.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._is_full_told = False

    # -- the protocol of environments --

    def tasks(self, split: Split) -> TaskSource:
        if self._resets is None:
            first = EVAL_SEED if split == "eval" else 0
            return TaskSource(lambda i: self._task(f"seed-{first + i}", {"seed": first + i}))
        resets, chosen = self._resets, self._train if split == "train" else self._eval
        return TaskSource(lambda i: self._task(f"reset-{chosen[i]}", resets[chosen[i]]), len(chosen))

    def _task(self, task_id: str, reset: dict[str, Any]) -> Task:
        return Task(env=self.name, task_id=task_id, data={"reset": reset})

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        async with self._session() as session:
            offer = await self._offer(session)
            episode = _Episode(session, offer, await session.ask("reset", task.data["reset"]))
            is_truncated = await episode.play(ctx, self._prompt)
        reward = sum(episode.rewards) if self._reward == "sum" else episode.rewards[-1]
        metrics = {"turns": float(episode.num_turns), "invalid_actions": float(episode.num_invalid)}
        return RolloutResult(reward=reward, metrics=metrics, is_truncated=is_truncated)

    async def close(self) -> None:
        """End the connections, and the server if it was started here."""
        if self._http is not None:
            await self._http.close()
        if self._server is not None:
            await self._server.close()

    def check(self) -> list[str]:
        """What is missing for a run, one sentence each."""
        if self._server is not None:
            missing = missing_package(self._server.argv[0], "openenv")
            return [] if missing is None else [missing]
        schema = fetch_json(f"{self._url}/schema")
        if isinstance(schema, str):
            return [f"the server {self._url} does not answer: {schema}; start it, or correct the id"]
        if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
            return [f"{self._url}/schema has no `action`, so it is no server of OpenEnv; correct the id"]
        return []

    # -- sessions --

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        """A session of the server; while all are taken, it waits."""
        if self._server is not None:
            self._url = await self._server.url()
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        address = self._url.replace("http", "ws", 1) + "/ws"
        while True:
            try:
                socket = await self._http.ws_connect(address, max_msg_size=_MAX_MESSAGE_BYTES)
            except aiohttp.ClientError as cause:
                raise EnvError(f"{self._what}: {self._url} is not reached: {cause}") from cause
            async with socket:
                session = _Session(self._what, socket, self._timeout_s)
                if (refused := await session.open()) is None:
                    yield session
                    return
            if not self._is_full_told:
                self._is_full_told = True
                logger.warning("%s: %s Other rollouts wait; the server sets max_concurrent_envs", self._what, refused)
            await asyncio.sleep(_RETRY_S)

    async def _offer(self, session: _Session) -> _Offer:
        """How the policy acts here."""
        assert self._http is not None
        schema = (await answer_of(self._http, "GET", f"{self._url}/schema", self._what))["action"]
        if schema.get("title") in _CALLS:
            listed = await session.ask("step", {"type": "list_tools"})
            tools = listed.observation.get("tools") or []
            return _Offer(schema, [_tool(t["name"], t.get("description"), t.get("input_schema")) for t in tools], True)
        fields = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        needed = [name for name in schema.get("required", []) if name in fields]
        is_text = len(needed) == 1 and fields[needed[0]].get("type") == "string"
        if self._action == "text" or (self._action is None and is_text):
            return _Offer(schema, None, False, needed[0] if is_text else None)
        parameters = {"type": "object", "properties": fields, "required": needed}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        return _Offer(schema, [_tool(STEP, schema.get("description"), parameters)], False)


def _local_server(what: str, source: str, python: str | None) -> LocalServer:
    """The server of a directory or a module.

    Raises: ConfigError if there is no `openenv.yaml`, or it names no app.
    """
    place = Path(source)
    if not place.is_dir() and source.replace(".", "").isidentifier():
        spec = importlib.util.find_spec(source)
        place = Path(spec.origin).parent if spec is not None and spec.origin else place
    manifest = place / MANIFEST
    if not manifest.is_file():
        raise ConfigError(
            f"{what}: {source!r} is neither a URL nor a directory or module with {MANIFEST}; "
            "give the URL of a running server, or the directory of an environment"
        )
    lines = [line.partition(":") for line in manifest.read_text().splitlines() if not line.startswith((" ", "#"))]
    app = next((value.strip().strip("'\"") for key, _, value in lines if key.strip() == "app"), "")
    if ":" not in app:
        raise ConfigError(f"{what}: {manifest} has no `app: module:name`, which says what to start; start it yourself")
    argv = [find_python(python), "-m", "uvicorn", app, "--host", "127.0.0.1", "--port"]
    return LocalServer(what, argv, place.resolve())


@dataclass(frozen=True)
class _Offer:
    """How the policy acts."""

    schema: dict[str, Any]
    tools: list[dict[str, Any]] | None
    are_calls: bool
    """Actions are calls of the server's tools."""
    text_field: str | None = None
    """The field that the text of a reply fills; None: the text is JSON."""

    def action_of_text(self, text: str) -> dict[str, Any]:
        """Raises: ValueError for a text that is no action."""
        text = text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = "\n".join(text.splitlines()[1:-1]).strip()
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        if isinstance(action, dict):
            return action
        if self.text_field is None:
            raise ValueError(f"answer with a JSON object of this schema: {json.dumps(self.schema)}")
        return {self.text_field: text}

    def action_of_call(self, name: str, arguments: Any) -> dict[str, Any]:
        """Raises: ValueError for a call that is no action."""
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {name} must be an object")
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if name not in names:
            raise ValueError(f"no tool {name!r}; there are {', '.join(names)}")
        return {"type": "call_tool", "tool_name": name, "arguments": arguments} if self.are_calls else arguments


@dataclass(frozen=True)
class _Step:
    """What the server answers to an action."""

    observation: dict[str, Any]
    reward: float | None = None
    is_done: bool = False


class _Refused(Exception):
    """The server refuses an action, because it does not fit the schema."""


@dataclass
class _Session:
    """One session: a WebSocket, on which each message has one answer."""

    what: str
    socket: aiohttp.ClientWebSocketResponse
    timeout_s: float

    async def open(self) -> str | None:
        """Wait until the session exists; the server's sentence if it has no room."""
        kind, data = await self._exchange({"type": "state"})
        if kind == "error" and data.get("code") == "CAPACITY_REACHED":
            return str(data.get("message"))
        if kind == "error" and data.get("code") in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise EnvError(f"{self.what}: no session: {data.get('message')}")
        return None

    async def ask(self, kind: str, data: dict[str, Any]) -> _Step:
        """The answer to a `reset` or a `step`.

        Raises: _Refused for an action that does not fit; EnvError for any other error.
        """
        answered, content = await self._exchange({"type": kind, "data": data})
        if answered == "error":
            faults = content.get("errors") or ()
            text = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults)
            if kind == "step" and content.get("code") == "VALIDATION_ERROR":
                raise _Refused(text or content.get("message"))
            raise EnvError(f"{self.what}: {kind} {short_repr(data)}: {content.get('message')} {text}".rstrip())
        observation = content.get("observation")
        if not isinstance(observation, dict):
            raise EnvError(f"{self.what}: {kind} answered without an observation: {short_repr(content)}")
        return _Step(observation, content.get("reward"), bool(content.get("done")))

    async def _exchange(self, message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.socket.send_json(message)
                answer = await self.socket.receive()
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as cause:
            why = f"no answer in {self.timeout_s:g} s" if isinstance(cause, TimeoutError) else str(cause)
            raise EnvError(f"{self.what}: {message['type']}: {why}") from cause
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(f"{self.what}: {message['type']}: the server has closed the session")
        content = json.loads(answer.data)
        return content.get("type", ""), content.get("data") or {}


@dataclass
class _Episode:
    """One episode: its messages, and what its steps gave."""

    session: _Session
    offer: _Offer
    last: _Step
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0
    num_invalid: int = 0

    async def play(self, ctx: RolloutContext, prompt: str | None) -> bool:
        """Play to the end; whether a limit ended it."""
        self._take(self.last)
        if prompt is not None:
            self.messages.append({"role": "system", "content": prompt})
        self.messages.append({"role": "user", "content": shown(self.last.observation)})
        while not self.last.is_done:
            try:
                reply = await ctx.chat(self.messages, self.offer.tools)
            except LimitReached:
                if not self.num_turns:
                    raise
                return True
            self.num_turns += 1
            self.messages.append(reply.message)
            if reply.finish_reason == "length":
                return True
            if self.offer.tools is None:
                content = await self._act(partial(self.offer.action_of_text, reply.text))
                answers: list[Message] = [{"role": "user", "content": content}]
            else:
                answers = await self._answer_calls(reply.message)
            if not answers:
                return False
            self.messages += answers
        return False

    async def _answer_calls(self, message: Message) -> list[Message]:
        answers: list[Message] = []
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            answer: Message = {"role": "tool", "name": name}
            if "id" in call:
                answer["tool_call_id"] = call["id"]
            if self.last.is_done:
                answers.append(answer | {"content": "Error: the episode has ended."})
                continue
            content = await self._act(partial(self.offer.action_of_call, name, arguments))
            answers.append(answer | {"content": content})
        for raw in message.get("unparsed_tool_calls") or ():
            self.num_invalid += 1
            answers.append({"role": "tool", "content": f"Error: this is no valid tool call: {raw}"})
        return answers

    async def _act(self, action_of: Callable[[], dict[str, Any]]) -> str:
        """What the policy reads after its action; an action that does not fit is not counted as a step."""
        try:
            step = await self.session.ask("step", action_of())
        except (ValueError, _Refused) as error:
            self.num_invalid += 1
            return f"Error: {error}"
        self._take(step)
        return shown(step.observation)

    def _take(self, step: _Step) -> None:
        self.last = step
        self.rewards.append(float(step.reward or 0.0))


def _tool(name: str, description: str | None, schema: dict[str, Any] | None) -> dict[str, Any]:
    parameters = schema or {"type": "object", "properties": {}}
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def shown(observation: dict[str, Any]) -> str:
    """An observation as the policy reads it: its text if it has nothing else, the result of a tool, or JSON."""
    if "tool_name" in observation and (error := observation.get("error")):
        return f"Error: {error.get('message') if isinstance(error, dict) else error}"
    if "tool_name" in observation:
        return _result_text(observation.get("result"))
    values = {name: each for name, each in observation.items() if name not in _UNSEEN and each is not None}
    texts: Sequence[Any] = list(values.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(values, ensure_ascii=False)


def _result_text(result: Any) -> str:
    """The text of a tool's result, which may be wrapped as MCP does it."""
    if isinstance(result, dict) and isinstance(parts := result.get("content"), list):
        return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in parts if isinstance(part, dict))
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
