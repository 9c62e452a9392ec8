"""An agent with one tool, as one has it before any training: it asks its model until a reply calls no tool.

It speaks three dialects, with streams or without, and reads its model's address and key where clients of OpenAI and
Anthropic do: python program.py "47*86=" [chat | messages | responses] [stream]
"""

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

Said = tuple[str, list[tuple[str, Any]]]
"""A reply's text, and its calls of tools, as (id, arguments)."""
TEXT = "The value of an expression of whole numbers, + - * and brackets."
PROPERTIES = {"expression": {"type": "string"}}
SCHEMA = {"additionalProperties": False, "properties": PROPERTIES, "required": ["expression"], "type": "object"}
TOOL = {"name": "calculate", "description": TEXT}


def calculate(expression: str) -> str:
    try:
        first, second = expression.split("*")
        return str(int(first) * int(second))
    except (AttributeError, ValueError) as error:
        return f"Error: {error}"


def send(url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """The reply to a request; if it is streamed, its events."""
    data = json.dumps(body | {"model": "any"}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    with urllib.request.urlopen(request) as http:
        if not body["stream"]:
            return json.load(http)
        lines = [line[6:] for line in http.read().decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def openai(route: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return send(os.environ["OPENAI_BASE_URL"] + route, body, headers)


def chat(history: list[Any], stream: bool) -> Said:
    """One request of chat completions: the text, and the calls as (id, arguments)."""
    tools = [{"type": "function", "function": TOOL | {"parameters": SCHEMA}}]
    reply = openai("/chat/completions", {"messages": history, "tools": tools, "stream": stream})
    if stream:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for delta in (choice["delta"] for chunk in reply for choice in chunk["choices"]):
            message["content"] = (message["content"] or "") + (delta.get("content") or "")
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or ())
        message = {key: value for key, value in message.items() if value}
    else:
        message = reply["choices"][0]["message"]
    history.append(message)
    calls = message.get("tool_calls") or ()
    return message.get("content") or "", [(each["id"], json.loads(each["function"]["arguments"])) for each in calls]


def messages(history: list[Any], stream: bool) -> Said:
    """The same as messages of Anthropic."""
    body = {"messages": history, "tools": [TOOL | {"input_schema": SCHEMA}], "stream": stream, "max_tokens": 64}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    reply = send(url, body, {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"})
    if stream:
        blocks = [event["content_block"] for event in reply if event["type"] == "content_block_start"]
        for event in reply:
            delta = event.get("delta", {})
            if delta.get("type") == "input_json_delta":
                blocks[event["index"]]["input"] = json.loads(delta["partial_json"])
            for key in ("text", "thinking", "signature"):
                if event["type"] == "content_block_delta" and key in delta:
                    blocks[event["index"]][key] += delta[key]
    else:
        blocks = reply["content"]
    history.append({"role": "assistant", "content": blocks})
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, [(block["id"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def responses(history: list[Any], stream: bool) -> Said:
    """The same as responses of OpenAI."""
    tools = [{"type": "function"} | TOOL | {"parameters": SCHEMA}]
    reply = openai("/responses", {"input": history, "tools": tools, "stream": stream, "max_output_tokens": 64})
    items = reply[-1]["response"]["output"] if stream else reply["output"]
    history.extend(items)
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [item for item in items if item["type"] == "function_call"]
    return text, [(item["call_id"], json.loads(item["arguments"])) for item in calls]


def results(dialect: Callable[..., Said], outputs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The messages that answer calls."""
    if dialect is chat:
        return [{"role": "tool", "tool_call_id": call, "content": output} for call, output in outputs]
    if dialect is responses:
        return [{"type": "function_call_output", "call_id": call, "output": output} for call, output in outputs]
    blocks = [{"type": "tool_result", "tool_use_id": call, "content": output} for call, output in outputs]
    return [{"role": "user", "content": blocks}]


def main(prompt: str, name: str = "chat", stream: str = "") -> None:
    dialect = {"chat": chat, "messages": messages, "responses": responses}[name]
    history = [{"role": "user", "content": prompt}]
    while True:
        text, calls = dialect(history, bool(stream))
        if not calls:
            return print(text)
        history += results(dialect, [(call, calculate(given.get("expression"))) for call, given in calls])


if __name__ == "__main__":
    main(*sys.argv[1:])
