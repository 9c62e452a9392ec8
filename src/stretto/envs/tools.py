"""Python functions as tools: a signature and a docstring become a schema, a call becomes a message.

Input is a function (sync or async). Output is what a chat template needs of it (`Toolset.schemas`) and the
tool message of a call (`Toolset.call`). Nothing that a policy writes into a call can raise: the tool message tells it
about unknown names, arguments that do not fit, exceptions and timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pydantic

from stretto.base.errors import ConfigError, EnvError
from stretto.base.foreign import definition_of, error_text
from stretto.data.values import describe_value, with_whole_text
from stretto.envs.base import Message, Reply

MAX_CALLS = 32
"""Functions that are not `async` and run at the same time. Further calls wait until one ends or times out."""
MAX_STUCK = 256
"""Calls that may still run in threads after their timeout."""


class Tool:
    """A function that a policy may call. `schema` describes it in OpenAI's format."""

    is_blocking = False  # runs in a thread

    def __init__(self, function: Callable[..., Any], episode_type: type | None = None) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self.is_blocking = not inspect.iscoroutinefunction(function)
        where = f"tool {self.name} ({definition_of(getattr(function, '__func__', function))})"
        try:
            parameters = inspect.signature(function, eval_str=True).parameters.values()
        except Exception as cause:  # an annotation in quotes may name anything
            raise ConfigError(f"{where}: its annotations cannot be read: {error_text(cause)}; correct them.") from cause
        is_given = {each.name: episode_type is not None and each.annotation is episode_type for each in parameters}
        self._arguments = _build_arguments_model([p for p in parameters if not is_given[p.name]], self.name, where)
        self._given = [name for name in is_given if is_given[name]]
        text, described = _split_docstring(inspect.getdoc(function) or "")
        try:
            schema = self._arguments.model_json_schema()
        except pydantic.errors.PydanticUserError as cause:
            reason = str(cause).partition("\n")[0]
            raise ConfigError(f"{where}: a type of its arguments has no JSON schema: {reason}; use another.") from cause
        schema.pop("title", None)
        for argument, value in schema.get("properties", {}).items():
            value.pop("title", None)
            if argument in described:
                value["description"] = described[argument]
        schema.setdefault("properties", {})
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": text, "parameters": schema},
        }

    async def run(self, arguments: dict[str, Any], episode: Any = None) -> str:
        """Call the function; returns a string result as it is, any other as JSON, or else as `str` gives it.

        episode: what its parameters of `episode_type` get, of which the policy knows nothing.

        Raises: pydantic.ValidationError for arguments that do not fit; whatever the function raises.
        """
        checked = self._arguments.model_validate(arguments)
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        values |= dict.fromkeys(self._given, episode)
        if self.is_blocking:
            result = await _threads.run(self.name, self._function, values)
        else:
            result = await self._function(**values)
        if isinstance(result, str):
            return with_whole_text(result)
        try:
            return with_whole_text(json.dumps(result, ensure_ascii=False))
        except (TypeError, ValueError):
            return with_whole_text(str(result))


class Toolset:
    """The tools of one environment. `timeout_s` bounds each call, counted from its start.

    A parameter annotated with `episode_type` is no argument of a call: it gets the episode in which the call is made.

    A function that is not `async` runs in a thread, which cannot be ended: after its timeout it is abandoned, and the
    next call begins. When MAX_STUCK abandoned calls still run, no further tool runs and episodes fail.
    """

    def __init__(
        self,
        tools: Iterable[Callable[..., Any] | Tool],
        timeout_s: float | None = 30.0,
        episode_type: type | None = None,
        where: str = "`tools`",
    ) -> None:
        """where: whose tools they are, for messages."""
        if isinstance(tools, str) or not isinstance(tools, Iterable):
            raise ConfigError(
                f"{where} must be a list or tuple of functions, got a {type(tools).__name__}; set it in the class, "
                "`tools = (add,)`, or in `__init__`, `self.tools = [self.add]`."
            )
        if wrong := [each for each in tools if not callable(each) and not isinstance(each, Tool)]:
            raise ConfigError(f"{where} must hold functions, got {describe_value(wrong[0])}; give the function itself.")
        built = [tool if isinstance(tool, Tool) else Tool(tool, episode_type) for tool in tools]
        self._tools = {tool.name: tool for tool in built}
        if len(self._tools) != len(built):
            names = ", ".join(tool.name for tool in built)
            raise ConfigError(f"two tools have the same name: {names}; rename one.")
        self.timeout_s = timeout_s

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, reply: Reply, episode: Any = None) -> list[Message]:
        """Tool messages for all calls of a reply, in their order; empty if it calls no tool.

        The calls of one reply run at the same time.
        """
        calls: Sequence[dict] = reply.message.get("tool_calls", ())
        messages = list(await asyncio.gather(*(self.call(call, episode) for call in calls)))
        for raw in reply.message.get("unparsed_tool_calls", ()):
            messages.append({"role": "tool", "content": f"Error: this is no valid tool call: {raw}"})
        return messages

    async def call(self, call: dict[str, Any], episode: Any = None) -> Message:
        """The tool message that answers one call. Errors of the call or the tool become its text.

        Raises: EnvError if the tool raises it, which means that the episode cannot go on.
        """
        name = call["function"]["name"]
        message: Message = {"role": "tool", "name": name}
        if "id" in call:
            message["tool_call_id"] = call["id"]
        return message | {"content": await self._result(name, call["function"]["arguments"], episode)}

    async def _result(self, name: str, arguments: Any, episode: Any) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"Error: no tool {name!r}; there are {', '.join(self._tools)}."
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            slot = _threads.slot() if tool.is_blocking else contextlib.nullcontext()
            async with slot, asyncio.timeout(self.timeout_s):
                return await tool.run(arguments or {}, episode)
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"Error: the arguments of {name} do not fit: {problems}"
        except EnvError:
            raise  # the episode cannot go on
        except TimeoutError:
            return f"Error: {name} was not done in time."
        # The boundary of a tool: the policy reads the error, which must not end the run.
        except (Exception, SystemExit) as error:
            return f"Error: {type(error).__name__}: {error}"


@dataclass(eq=False)
class _Call:
    """A call that runs in a thread."""

    name: str
    work: Callable[[], Any]
    ended: asyncio.Future[tuple[Any, BaseException | None]]
    is_running: bool = True

    def end(self, result: Any, error: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result((result, error))


class _Threads:
    """Daemon threads for functions that block; a thread that hangs is replaced.

    The few threads of the event loop are not used: calls that hang would use them up for all other code.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Call]] = []  # each is the inbox of an idle thread
        self._stuck: set[_Call] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(MAX_CALLS)

    def slot(self) -> asyncio.Semaphore:
        """The semaphore of MAX_CALLS of this event loop, held while a call is awaited."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots = loop, asyncio.Semaphore(MAX_CALLS)
        return self._slots

    async def run(self, name: str, function: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Run a function in a thread and return its result.

        Raises: what the function raises; EnvError if too many threads hang, or no thread can be started.
        """
        self._stuck = {call for call in self._stuck if call.is_running}
        if len(self._stuck) >= MAX_STUCK:
            names = ", ".join(sorted({call.name for call in self._stuck}))
            raise EnvError(
                f"tool {name}: {len(self._stuck)} calls have not ended after their timeout ({names}); give what they "
                "wait for a timeout of its own, or make them `async`"
            )
        work = functools.partial(contextvars.copy_context().run, function, **values)
        call = _Call(name, work, asyncio.get_running_loop().create_future())
        self._inbox().put(call)
        try:
            result, error = await call.ended
        except asyncio.CancelledError:
            self._stuck.add(call)
            raise
        if error is not None:
            raise error
        return result

    def _inbox(self) -> SimpleQueue[_Call]:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        inbox: SimpleQueue[_Call] = SimpleQueue()
        try:
            threading.Thread(target=self._serve, args=(inbox,), name="tool", daemon=True).start()
        except RuntimeError as cause:
            raise EnvError(f"cannot start a thread for a tool call: {cause}") from cause
        return inbox

    def _serve(self, inbox: SimpleQueue[_Call]) -> None:
        while True:
            call, result, error = inbox.get(), None, None
            try:
                result = call.work()
            # It is raised where the call is awaited.
            except BaseException as cause:
                error = cause
            call.is_running = False
            self._idle.append(inbox)
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and no call is awaited
                call.ended.get_loop().call_soon_threadsafe(call.end, result, error)
            del call, result, error


_threads = _Threads()


def _build_arguments_model(parameters: Iterable[inspect.Parameter], name: str, where: str) -> type[pydantic.BaseModel]:
    """A pydantic model of a function's arguments, from annotations; without a default they are required.

    where: which function, for messages.
    """
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: {parameter} cannot be described; name every argument.")
        if parameter.annotation is parameter.empty:
            raise ConfigError(
                f"{where}: argument {parameter.name} has no type; annotate it, such as `{parameter.name}: int`."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())
    try:
        return pydantic.create_model(name, __config__=config, **fields)
    except Exception as cause:  # a type that pydantic does not know
        reason = str(cause).partition("\n")[0]
        raise ConfigError(f"{where}: a type of its arguments cannot be checked: {reason}; use another.") from cause


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring, and the description of each argument (Google's `Args:` section)."""
    head, _, rest = text.partition("\nArgs:\n")
    described: dict[str, str] = {}
    for line in rest.splitlines():
        if not line.startswith(" "):
            break
        argument, colon, what = line.strip().partition(":")
        if colon:
            described[argument.split(" ")[0]] = what.strip()
    return head.strip(), described
