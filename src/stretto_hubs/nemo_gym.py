"""`nemo-gym:SOURCE`: a resources server of NeMo Gym, with the policy in place of its agent and its model.

SOURCE is the URL of a resources server, or the name of one in the package (`resources_servers/NAME`), which each worker
starts as a process of its own. A task is a row of a .jsonl file as NeMo Gym makes them: `responses_create_params` is
the first request, all else is for the server. There are two kinds of servers, told apart by their routes:

* `/seed_session`, a route for each tool, `/verify`, which gets the whole conversation and gives the reward;
* `/reset` and `/step` (Gymnasium): each reply is a step, and the reward is the sum.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.data.records import read_records
from stretto.envs.base import (
    EpisodeLimits,
    LimitReached,
    Message,
    Reply,
    RolloutContext,
    RolloutResult,
    Split,
    TaskSource,
)
from stretto.records.rollout import Task
from stretto_agents.dialects import DIALECTS
from stretto_agents.session import Answer, Request
from stretto_hubs.servers import LocalServer, answer_of, fetch_json, find_python, missing_package, split_of

PROGRAM = Path(__file__).parent / "other_python" / "serve_resources.py"
PARAMS = "responses_create_params"
_RESPONSES = DIALECTS["/responses"]


class NemoGym:
    """A resources server of NeMo Gym.

    path: rows of a .jsonl file. eval_path: held-out rows; without it the last num_eval of `path` are held out (0:
    training and evaluation use all). max_turns: replies of one episode. timeout_s: for each answer of the server.
    python: the Python that has NeMo Gym and starts the server; None: this one. server_args: settings of a server that
    is started here.
    """

    def __init__(
        self,
        source: str,
        path: str,
        eval_path: str | None = None,
        num_eval: int = 0,
        max_turns: int | None = 10,
        timeout_s: float = 60.0,
        python: str | None = None,
        server_args: dict[str, Any] | None = None,
    ) -> None:
        self.name = f"nemo-gym/{source}"
        self._what = f"nemo-gym:{source}"
        if eval_path is not None and num_eval:
            raise ConfigError(f"{self._what}: eval_path and num_eval both name held-out rows; give one of them")
        rows = _rows(self._what, path, "path")
        train, held_out = split_of(self._what, len(rows), num_eval, "rows")
        self._rows = {"train": [rows[i] for i in train], "eval": [rows[i] for i in held_out]}
        if eval_path is not None:
            self._rows["eval"] = _rows(self._what, eval_path, "eval_path")
        self.are_tasks_shared = eval_path is None and num_eval == 0
        self.limits = EpisodeLimits(max_turns=max_turns)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._url, self._server = source.rstrip("/"), None
        if "://" not in source:
            argv = [find_python(python), str(PROGRAM), source, json.dumps(server_args or {})]
            self._server = LocalServer(self._what, argv)
        elif server_args:
            raise ConfigError(f"{self._what}: server_args are for a server that is started here; remove them")
        self._routes: set[str] | None = None
        self._connector: aiohttp.TCPConnector | None = None

    # -- the protocol of environments --

    def tasks(self, split: Split) -> TaskSource:
        rows = self._rows[split]
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"row": rows[i]}), len(rows))

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        async with self._client() as client:
            episode = _Episode(client, task.data["row"], _RESPONSES.read(task.data["row"][PARAMS]))
            return await (episode.play_steps(ctx) if "/step" in await self._known(client) else episode.play_tools(ctx))

    async def close(self) -> None:
        if self._connector is not None:
            await self._connector.close()
        if self._server is not None:
            await self._server.close()

    def check(self) -> list[str]:
        """What is missing for a run, one sentence each."""
        if self._server is not None:
            missing = missing_package(self._server.argv[0], "nemo-gym", " (Python 3.12 or later)")
            return [] if missing is None else [missing]
        schema = fetch_json(f"{self._url}/openapi.json")
        if isinstance(schema, str):
            return [f"the server {self._url} does not answer: {schema}; start it, or correct the id"]
        return [fault] if (fault := _fault_of(self._url, set(schema.get("paths", {})))) else []

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[_Client]:
        """Requests of one episode, which its cookies hold together."""
        if self._server is not None:
            self._url = await self._server.url()
        if self._connector is None:
            self._connector = aiohttp.TCPConnector(limit=0)
        jar = aiohttp.CookieJar(unsafe=True)  # a server may have no name, only an address
        async with aiohttp.ClientSession(
            connector=self._connector, connector_owner=False, cookie_jar=jar, timeout=self._timeout
        ) as http:
            yield _Client(self._what, self._url, http)

    async def _known(self, client: _Client) -> set[str]:
        """The routes of the server."""
        if self._routes is None:
            routes = set((await answer_of(client.http, "GET", f"{self._url}/openapi.json", self._what))["paths"])
            if fault := _fault_of(self._url, routes):
                raise EnvError(f"{self._what}: {fault}")
            self._routes = routes
        return self._routes


def _rows(what: str, path: str, key: str) -> list[dict[str, Any]]:
    """Raises: ConfigError, DataError for a row that is none, with file and line."""
    rows = []
    for place, row in read_records(path, f"args.{key}"):
        params = row.get(PARAMS)
        if not isinstance(params, dict):
            raise DataError(f"{what}: {place}: a row of NeMo Gym has an object {PARAMS}; this one has none")
        try:
            _RESPONSES.request(params)
        except DataError as error:
            raise DataError(f"{what}: {place}: {PARAMS}: {error}") from None
        rows.append(row)
    return rows


def _fault_of(url: str, routes: set[str]) -> str | None:
    """Why a server with these routes cannot be played."""
    if "/step" in routes or {"/seed_session", "/verify"} <= routes:
        return None
    if "/run" in routes:
        return f"{url} is an agent of NeMo Gym, whose place the policy takes; give the URL of its resources server"
    return f"{url} has neither /verify nor /step, so it is no resources server of NeMo Gym; correct the id"


@dataclass(frozen=True)
class _Client:
    what: str
    url: str
    http: aiohttp.ClientSession

    async def ask(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises: EnvError if the server refuses or does not answer."""
        return await answer_of(self.http, "POST", f"{self.url}{route}", self.what, json=body)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that a tool answers, also an error.

        Raises: EnvError if the server does not answer.
        """
        try:
            async with self.http.post(f"{self.url}/{name}", json=arguments) as answer:
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError) as cause:
            raise EnvError(f"{self.what}: {name}: {type(cause).__name__}: {cause}") from cause


@dataclass
class _Episode:
    """One episode: its messages for the policy, and its items for the server."""

    client: _Client
    row: dict[str, Any]
    request: Request
    items: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0
    is_truncated: bool = False

    async def play_tools(self, ctx: RolloutContext) -> RolloutResult:
        """Tools until a reply calls none, then `/verify`."""
        seeded = await self.client.ask("/seed_session", self.row)
        if seeded.get("mcp"):
            raise EnvError(f"{self.client.what}: the server offers its tools over MCP, which is not played here")
        messages, whole = list(self.request.messages), {}
        while (answer := await self._turn(ctx, messages)) is not None:
            whole = _RESPONSES.write(answer, "policy")
            self.items += whole["output"]
            calls = answer.calls
            if self.is_truncated or not calls:
                break
            answered = await asyncio.gather(*(self._call(name, arguments) for _, name, arguments in calls))
            for (call_id, name, _), content, call in zip(calls, answered, answer.reply.message["tool_calls"]):
                self.items.append({"type": "function_call_output", "call_id": call_id, "output": content})
                messages.append(_tool_message(name, content, call))
        params = self.row[PARAMS]
        more = {"output": self.items, "tools": params.get("tools") or []}
        result = await self.client.ask("/verify", self.row | {"response": whole | more})
        return self._result(result.get("reward"), result)

    async def play_steps(self, ctx: RolloutContext) -> RolloutResult:
        """Steps until the server ends the episode."""
        first = await self.client.ask("/reset", self.row)
        messages = list(self.request.messages)
        if first.get("observation"):
            messages.append({"role": "user", "content": first["observation"]})
        reward, step = 0.0, first
        while (answer := await self._turn(ctx, messages)) is not None and not self.is_truncated:
            step = await self.client.ask("/step", self.row | {"response": _RESPONSES.write(answer, "policy")})
            reward += step.get("reward") or 0.0
            if step.get("terminated") or step.get("truncated"):
                self.is_truncated = bool(step.get("truncated"))
                break
            by_id = {each["call_id"]: each["output"] for each in (step.get("info") or {}).get("tool_outputs", ())}
            for (call_id, name, _), call in zip(answer.calls, answer.reply.message.get("tool_calls") or ()):
                messages.append(_tool_message(name, by_id.get(call_id, ""), call))
            if step.get("observation"):
                messages.append({"role": "user", "content": step["observation"]})
        return self._result(reward, step.get("info") or {})

    async def _turn(self, ctx: RolloutContext, messages: list[Message]) -> Answer | None:
        """The next reply, which is added to the messages; None at a limit."""
        try:
            reply: Reply = await ctx.chat(messages, self.request.tools, **self.request.sampling)
        except LimitReached:
            if not self.num_turns:
                raise
            self.is_truncated = True
            return None
        self.num_turns += 1
        self.is_truncated = reply.finish_reason == "length"
        messages.append(reply.message)
        return Answer(str(self.num_turns), reply)

    async def _call(self, name: str, arguments: str) -> str:
        names = [tool["function"]["name"] for tool in self.request.tools or ()]
        if name not in names:
            return json.dumps({"error": f"no tool {name!r}; there are {', '.join(names)}"})
        try:
            values = json.loads(arguments)
        except ValueError as error:
            return json.dumps({"error": f"the arguments are no JSON: {error}"})
        return await self.client.call(name, values)

    def _result(self, reward: Any, numbers: dict[str, Any]) -> RolloutResult:
        metrics = {
            name: float(value) for name, value in numbers.items() if isinstance(value, int | float) and name != "reward"
        }
        return RolloutResult(
            reward=reward, metrics=metrics | {"turns": float(self.num_turns)}, is_truncated=self.is_truncated
        )


def _tool_message(name: str, content: str, call: dict[str, Any]) -> Message:
    """The answer to a call of the policy; it bears the call's id if that has one."""
    message: Message = {"role": "tool", "name": name, "content": content}
    return message | ({"tool_call_id": call["id"]} if "id" in call else {})
