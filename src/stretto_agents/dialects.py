"""The three forms of request that programs send: chat completions and responses of OpenAI, messages of Anthropic.

Each dialect reads a body as a `Request`, and writes an answer as one body, or as the events of a stream. A stream has
the whole reply in one piece of each kind: it is sampled before it is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import DataError
from stretto.envs.base import Message
from stretto_agents.session import Answer, Request, returned_message

Event = tuple[str | None, Any]
"""Name and data of an event of a stream."""


def framed(event: Event) -> bytes:
    """An event as bytes of a stream."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


@dataclass(frozen=True)
class Dialect:
    """How requests of one route are read and answered."""

    read: Callable[[dict[str, Any]], Request]
    write: Callable[[Answer, str], dict[str, Any]]
    """(answer, name of the model)."""
    stream: Callable[[Answer, str, Request], Iterator[Event]]
    refuse: Callable[[str, str, str | None], dict[str, Any]]
    """(type, text, code) of an error."""

    def request(self, body: Any) -> Request:
        """The request of a body.

        Raises: DataError if it is none of this dialect.
        """
        if not isinstance(body, dict):
            raise DataError("the body must be an object")
        try:
            return self.read(body)
        except (KeyError, TypeError, AttributeError) as cause:
            raise DataError(f"the body is no request of this route: {type(cause).__name__}: {cause}") from None


def text_of(content: Any, where: str) -> Any:
    """Content as text; content with pictures as parts of chat completions.

    Raises: DataError for a part that is neither text nor a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise DataError(f"{where}: content must be text or a list of objects, got {type(content).__name__}")
    parts = [_part(part, where) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    if kind == "image_url":
        return part
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "image" and isinstance(source := part.get("source"), dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise DataError(f"{where}: the policy reads text and pictures, not {kind!r}")


def _listed(body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = body.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise DataError(f"{key}: a list of objects is needed")
    return value


def _sampling(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The limit of tokens, under the first of these keys that is there."""
    for key in keys:
        if (value := body.get(key)) is not None:
            if not isinstance(value, int) or value < 1:
                raise DataError(f"{key} = {value!r} must be a whole number > 0")
            return {"max_tokens": value}
    return {}


def _tools(tools: list[dict[str, Any]] | None, schema_key: str) -> list[dict[str, Any]] | None:
    """Tools in the form of chat completions. Tools without a schema run at a provider: the policy has none of them."""
    found = []
    for tool in tools or ():
        if tool.get("type") not in (None, "function", "custom") or schema_key not in tool:
            raise DataError(f"tools: {tool.get('name') or tool.get('type')!r} runs at a provider; turn it off")
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get(schema_key) or {"type": "object", "properties": {}},
        }
        found.append({"type": "function", "function": function})
    return found or None


def _call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- chat completions --


def read_chat(body: dict[str, Any]) -> Request:
    if body.get("n") not in (None, 1):
        raise DataError(f"n = {body['n']}: a request has one reply; send several")
    messages: list[Message] = []
    for index, given in enumerate(_listed(body, "messages")):
        role = given.get("role")
        message: Message = {"role": "system" if role == "developer" else role}
        message["content"] = text_of(given.get("content"), f"messages[{index}]")
        message |= {key: given[key] for key in ("tool_calls", "tool_call_id", "name") if given.get(key)}
        if thought := given.get("reasoning_content") or given.get("reasoning"):
            message["reasoning_content"] = thought
        messages.append(message)
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    sampling = _sampling(body, "max_completion_tokens", "max_tokens")
    return Request(messages, body.get("tools") or None, sampling, bool(body.get("stream")), wants_usage)


def _chat_usage(answer: Answer) -> dict[str, int]:
    given, sampled = answer.reply.num_prompt_tokens, len(answer.reply.token_ids)
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def _chat_finish(answer: Answer) -> str:
    return "length" if answer.is_cut_off else "tool_calls" if answer.calls else "stop"


def write_chat(answer: Answer, model: str) -> dict[str, Any]:
    choice = {"index": 0, "message": returned_message(answer), "finish_reason": _chat_finish(answer), "logprobs": None}
    head = {"id": f"chatcmpl-{answer.name}", "object": "chat.completion", "created": 0, "model": model}
    return head | {"choices": [choice], "usage": _chat_usage(answer)}


def stream_chat(answer: Answer, model: str, request: Request) -> Iterator[Event]:
    head = {"id": f"chatcmpl-{answer.name}", "object": "chat.completion.chunk", "created": 0, "model": model}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
        return None, head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    message = returned_message(answer)
    if answer.thought:
        yield chunk({"reasoning_content": answer.thought})
    if answer.text:
        yield chunk({"content": answer.text})
    if calls := message.get("tool_calls"):
        yield chunk({"tool_calls": [{"index": index} | call for index, call in enumerate(calls)]})
    yield chunk({}, _chat_finish(answer))
    if request.wants_usage:
        yield None, head | {"choices": [], "usage": _chat_usage(answer)}
    yield None, "[DONE]"


def refuse_openai(kind: str, text: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


# -- messages of Anthropic --


def read_messages(body: dict[str, Any]) -> Request:
    messages: list[Message] = []
    if system := text_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for index, given in enumerate(_listed(body, "messages")):
        messages += _from_blocks(given, f"messages[{index}]")
    tools = _tools(body.get("tools"), "input_schema")
    return Request(messages, tools, _sampling(body, "max_tokens"), bool(body.get("stream")))


def _from_blocks(given: dict[str, Any], where: str) -> list[Message]:
    """A message as messages of chat completions: results of tools are messages of their own, and come first."""
    role, content = given.get("role"), given.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, where)}]
    results: list[Message] = []
    message: Message = {"role": role}
    rest, calls, thoughts = [], [], []
    for block in content:
        match block.get("type"):
            case "tool_result":
                text = text_of(block.get("content"), where)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                calls.append(_call(block.get("id"), block.get("name"), arguments))
            case "thinking":
                thoughts.append(block.get("thinking") or "")
            case "redacted_thinking":
                pass  # the policy never makes one
            case _:
                rest.append(block)
    message["content"] = text_of(rest, where)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*results, message] if rest or role == "assistant" else results


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": answer.name})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call_id, name, arguments in answer.calls:
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": _object(arguments)})
    return blocks


def _object(arguments: str) -> Any:
    """The arguments of a call as an object; text that is no JSON is under `raw`."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"raw": arguments}


def write_messages(answer: Answer, model: str) -> dict[str, Any]:
    usage = {"input_tokens": answer.reply.num_prompt_tokens, "output_tokens": len(answer.reply.token_ids)}
    stop = "max_tokens" if answer.is_cut_off else "tool_use" if answer.calls else "end_turn"
    head = {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": model}
    return head | {"content": _blocks(answer), "stop_reason": stop, "stop_sequence": None, "usage": usage}


def stream_messages(answer: Answer, model: str, request: Request) -> Iterator[Event]:
    whole = write_messages(answer, model)
    usage = whole["usage"] | {"output_tokens": 0}
    empty = whole | {"content": [], "stop_reason": None, "usage": usage}
    yield "message_start", {"type": "message_start", "message": empty}
    for index, block in enumerate(whole["content"]):
        place = {"index": index}
        match block["type"]:
            case "thinking":
                start = block | {"thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            case "text":
                start, deltas = block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case _:
                start = block | {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield "content_block_start", {"type": "content_block_start", "content_block": start} | place
        for delta in deltas:
            yield "content_block_delta", {"type": "content_block_delta", "delta": delta} | place
        yield "content_block_stop", {"type": "content_block_stop"} | place
    ends = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    tokens = {"output_tokens": whole["usage"]["output_tokens"]}
    yield "message_delta", {"type": "message_delta", "delta": ends, "usage": tokens}
    yield "message_stop", {"type": "message_stop"}


def refuse_anthropic(kind: str, text: str, code: str | None) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": text}}


# -- responses of OpenAI --


def read_responses(body: dict[str, Any]) -> Request:
    if body.get("previous_response_id"):
        raise DataError("previous_response_id: responses are not stored here; send the whole input")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _listed(body, "input")
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    tools = _tools(body.get("tools"), "parameters")
    return Request(messages, tools, _sampling(body, "max_output_tokens"), bool(body.get("stream")))


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    """Add an item of the input. Thought, text and calls of one reply are items that follow each other."""
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        text = text_of(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        return
    role = item.get("role") if kind == "message" else "assistant"
    if role != "assistant":
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": text_of(item.get("content"), where)})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    message = messages[-1]
    match kind:
        case "message":
            message["content"] += text_of(item.get("content"), where)
        case "function_call":
            calls = message.setdefault("tool_calls", [])
            calls.append(_call(item.get("call_id"), item.get("name"), item.get("arguments")))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            message["reasoning_content"] = "".join(part.get("text") or "" for part in parts)
        case _:
            raise DataError(f"{where}: an item {kind!r} is not known; messages, calls and their outputs are")


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.thought:
        thought = [{"type": "reasoning_text", "text": answer.thought}]
        items.append({"type": "reasoning", "id": f"rs_{answer.name}", "summary": [], "content": thought})
    if answer.text or not answer.calls:
        text = [{"type": "output_text", "text": answer.text, "annotations": []}]
        head = {"type": "message", "id": f"msg_{answer.name}", "role": "assistant", "status": "completed"}
        items.append(head | {"content": text})
    for number, (call_id, name, arguments) in enumerate(answer.calls):
        call = {"type": "function_call", "id": f"fc_{answer.name}_{number}", "call_id": call_id}
        items.append(call | {"name": name, "arguments": arguments, "status": "completed"})
    return items


def write_responses(answer: Answer, model: str) -> dict[str, Any]:
    given, sampled = answer.reply.num_prompt_tokens, len(answer.reply.token_ids)
    usage = {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + sampled,
    }
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": 0,
        "model": model,
        "status": "incomplete" if answer.is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut_off else None,
        "error": None,
        "output": _items(answer),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def stream_responses(answer: Answer, model: str, request: Request) -> Iterator[Event]:
    whole = write_responses(answer, model)
    number = -1

    def event(name: str, /, **fields: Any) -> Event:
        nonlocal number
        number += 1
        return f"response.{name}", {"type": f"response.{name}", "sequence_number": number} | fields

    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        hollow: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("output_item.added", output_index=index, item=item | hollow)
        match item["type"]:
            case "message":
                part = item["content"][0]
                inner = place | {"content_index": 0}
                yield event("content_part.added", part=part | {"text": ""}, **inner)
                yield event("output_text.delta", delta=part["text"], logprobs=[], **inner)
                yield event("output_text.done", text=part["text"], logprobs=[], **inner)
                yield event("content_part.done", part=part, **inner)
            case "reasoning":
                text = item["content"][0]["text"]
                yield event("reasoning_text.delta", delta=text, content_index=0, **place)
                yield event("reasoning_text.done", text=text, content_index=0, **place)
            case _:
                yield event("function_call_arguments.delta", delta=item["arguments"], **place)
                yield event("function_call_arguments.done", arguments=item["arguments"], name=item["name"], **place)
        yield event("output_item.done", output_index=index, item=item)
    yield event("incomplete" if answer.is_cut_off else "completed", response=whole)


DIALECTS = {
    "/chat/completions": Dialect(read_chat, write_chat, stream_chat, refuse_openai),
    "/messages": Dialect(read_messages, write_messages, stream_messages, refuse_anthropic),
    "/responses": Dialect(read_responses, write_responses, stream_responses, refuse_openai),
}
"""By the route below `/v1`."""
