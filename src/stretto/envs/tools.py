"""Python functions as tools: a signature and a docstring become a schema, a call becomes a message.

In goes a function (sync or async), out comes what a chat template needs of it (`Toolset.schemas`) and the
tool message of a call (`Toolset.call`). Nothing that a policy writes into a call can raise: unknown names,
arguments that do not fit, exceptions and timeouts are told to the policy in the tool message.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pydantic

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import Message, Reply


class Tool:
    """One function a policy may call. `schema` is OpenAI's description of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._arguments = _arguments_of(function, self.name)
        text, described = _split_docstring(inspect.getdoc(function) or "")
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for argument, value in parameters.get("properties", {}).items():
            value.pop("title", None)
            if argument in described:
                value["description"] = described[argument]
        parameters.setdefault("properties", {})
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": text, "parameters": parameters},
        }

    async def run(self, arguments: dict[str, Any]) -> str:
        """The result as text: a string as it is, anything else as JSON where it can be.

        Raises: pydantic.ValidationError for arguments that do not fit; whatever the function raises.
        """
        checked = self._arguments.model_validate(arguments)
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**values)
        else:
            result = await asyncio.to_thread(self._function, **values)
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)


class Toolset:
    """The tools of one environment; `timeout_s` bounds each call.

    A sync function runs in a thread, which cannot be ended: after its timeout nobody waits for it any more.
    """

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool], timeout_s: float | None = 30.0) -> None:
        made = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) != len(made):
            raise ConfigError(
                f"two tools have one name: {', '.join(tool.name for tool in made)}; rename one."
            )
        self.timeout_s = timeout_s

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, reply: Reply) -> list[Message]:
        """Tool messages for all calls of a reply, in its order; empty when it calls nothing.

        The calls of one reply run at the same time.
        """
        calls: Sequence[dict] = reply.message.get("tool_calls", ())
        messages = list(await asyncio.gather(*(self.call(call) for call in calls)))
        for raw in reply.message.get("unparsed_tool_calls", ()):
            messages.append({"role": "tool", "content": f"Error: this is no valid tool call: {raw}"})
        return messages

    async def call(self, call: dict[str, Any]) -> Message:
        """The tool message that answers one call. Never raises for what a policy or a tool does.

        Raises: EnvError when a tool does, because the episode and not the call is at fault.
        """
        name = call["function"]["name"]
        message: Message = {"role": "tool", "name": name}
        if "id" in call:
            message["tool_call_id"] = call["id"]
        return message | {"content": await self._result(name, call["function"]["arguments"])}

    async def _result(self, name: str, arguments: Any) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"Error: no tool {name!r}; there are {', '.join(self._tools)}."
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            async with asyncio.timeout(self.timeout_s):
                return await tool.run(arguments or {})
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"Error: the arguments of {name} do not fit: {problems}"
        except EnvError:
            raise  # not the call is wrong: the episode cannot go on
        except TimeoutError:
            return f"Error: {name} was not done in time."
        # The boundary of a tool: what it raises is for the policy to read.
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"


def _arguments_of(function: Callable[..., Any], name: str) -> type[pydantic.BaseModel]:
    """A model of a function's arguments, by its annotations; what has no default is required."""
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: {parameter} cannot be described; name every argument.")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"tool {name}: argument {parameter.name} has no type; annotate it.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())
    return pydantic.create_model(name, __config__=config, **fields)


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each argument (Google's `Args:` section)."""
    head, _, rest = text.partition("\nArgs:\n")
    described: dict[str, str] = {}
    for line in rest.splitlines():
        if not line.startswith(" "):
            break
        argument, colon, what = line.strip().partition(":")
        if colon:
            described[argument.split(" ")[0]] = what.strip()
    return head.strip(), described
