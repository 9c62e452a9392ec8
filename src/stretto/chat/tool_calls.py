"""Tool calls in replies: one parser per format.

A reply's text goes in, its content and its calls come out. Formats whose marks are single tokens of a family are parsed
by the renderers library, on tokens; the formats below are text in many models, so they are parsed as text. Which format
a model writes is found by trying (template_backend.py): the one that reads a call back from the template's own text.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import DataError
from stretto.data.values import checked_json, with_whole_text


@dataclass(frozen=True)
class Call:
    """One attempt to call a tool; `name` is None if it is malformed."""

    raw: str
    name: str | None = None
    arguments: Any = None
    id: str | None = None
    """What the policy called the call, in formats where it does (Kimi K2); the result names it."""


def call_of(raw: str, name: Any, arguments: Any, call_id: str | None = None) -> Call:
    """A call as JSON holds it, with U+FFFD for half a character; malformed without a name, or where JSON cannot.

    arguments: an object, or one as JSON text.
    """
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return Call(raw)
    try:
        return Call(raw, with_whole_text(name), checked_json(arguments, "", DataError), call_id)
    except DataError:  # a number that is not finite, a set of Python, hundreds of levels
        return Call(raw)


Parsed = tuple[str, list[Call]]
Parser = Callable[[str], Parsed]


def _between(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """The text before the first block, and the blocks; the last one may be open."""
    content, *rest = text.split(start)
    blocks = [each.partition(end)[0] if end else each for each in rest]
    return content, blocks


def _json_call(value: Any, raw: str) -> Call:
    """A call from an object with `name` (or `tool_name`), and `arguments` or `parameters`."""
    if not isinstance(value, dict):
        return Call(raw)
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = value.get("name") or value.get("tool_name") or value.get("function")
    return call_of(raw, name, value.get("arguments", value.get("parameters", {})))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _hermes(text: str) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen, SmolLM3 and Granite 4 write it."""
    content, blocks = _between(text, "<tool_call>", "</tool_call>")
    return content, [_json_call(_loads(block), block.strip()) for block in blocks]


def _qwen3_coder(text: str) -> Parsed:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>."""
    content, blocks = _between(text, "<tool_call>", "</tool_call>")
    return content, [_xml_call(block) for block in blocks]


def _xml_call(block: str) -> Call:
    # Without a text behind the last end, so that no search runs to the end of a long reply once per start.
    found = re.search(r"<function=([^>\n]+)>(.*?)</function>", _up_to("</function>", block), re.S)
    if found is None:
        return Call(block.strip())
    body = _up_to("</parameter>", found[2])
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.S)
    return call_of(block.strip(), found[1].strip(), {key: _value(value) for key, value in pairs})


def _up_to(end: str, text: str) -> str:
    """The text up to the last `end`, with it; nothing if there is none."""
    at = text.rfind(end)
    return text[: at + len(end)] if at >= 0 else ""


def _value(text: str) -> Any:
    value = _loads(text)
    is_number = not isinstance(value, float) or math.isfinite(value)  # "NaN" is a word
    return value if is_number and (value is not None or text.strip() == "null") else text


def _mistral(text: str) -> Parsed:
    """[TOOL_CALLS][{...}, ...], and the later [TOOL_CALLS]NAME[ARGS]{...}."""
    content, blocks = _between(text, "[TOOL_CALLS]", "")
    calls: list[Call] = []
    for block in blocks:
        value = _loads(block.strip())
        if isinstance(value, list):
            calls += [_json_call(each, json.dumps(each)) for each in value]
            continue
        named = re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", block, re.S)
        arguments = None if named is None else _loads(named[2])
        calls.append(call_of(block.strip(), named and named[1], arguments))
    return content, calls


def _json_list(start: str, end: str = "") -> Parser:
    """A JSON list of calls between two marks: Granite 3, Command R."""

    def parse(text: str) -> Parsed:
        content, blocks = _between(text, start, end)
        calls: list[Call] = []
        for block in blocks:
            value = _loads(block.strip())
            values = value if isinstance(value, list) else [value]
            calls += [_json_call(each, block.strip()) for each in values]
        return content, calls

    return parse


def _function_tags(text: str) -> Parsed:
    """<function=NAME>{...}</function>, as functionary and Llama 3.1's own examples write it."""
    content, *blocks = re.split(r"(?=<function=)", text)
    calls = []
    for block in blocks:
        found = re.match(r"<function=([^>\n]+)>(.*?)</function>", block, re.S)
        arguments = None if found is None else _loads(found[2])
        calls.append(call_of(block.strip(), found and found[1], arguments))
    return content, calls


def _python(start: str = "", end: str = "") -> Parser:
    """[name(key=value), ...]: Llama 3.2 and 4, and LFM2 between marks."""

    def parse(text: str) -> Parsed:
        if not start:
            body = text.strip().removeprefix("<|python_tag|>")
            calls = _python_calls(body) if body.startswith("[") and body.endswith("]") else None
            return ("", calls) if calls else (text, [])
        content, blocks = _between(text, start, end)
        return content, [call for block in blocks for call in _python_calls(block.strip()) or [Call(block.strip())]]

    return parse


def _python_calls(body: str) -> list[Call] | None:
    try:
        tree = ast.parse(body, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return call_of(ast.unparse(node), ast.unparse(node.func), arguments)


def _bare_json(text: str) -> Parsed:
    """The whole reply is {"name": ..., "parameters": {...}}, one or several with ; between: Llama 3."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return text, []
    calls = [_json_call(value, json.dumps(value, ensure_ascii=False)) for value in _json_values(body)]
    return ("", calls) if calls and all(call.name for call in calls) else (text, [])


def _json_values(text: str) -> Iterator[Any]:
    """JSON values one after the other, with blanks, commas or semicolons between; None at the first that is none."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        while position < len(text) and text[position] in " \n\t,;":
            position += 1


TEXT_FORMATS: dict[str, Parser] = {
    "qwen3-coder": _qwen3_coder,
    "hermes": _hermes,
    "mistral": _mistral,
    "granite": _json_list("<|tool_call|>"),
    "command-r": _json_list("<|START_ACTION|>", "<|END_ACTION|>"),
    "apertus": _json_list("<|tools_prefix|>", "<|tools_suffix|>"),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "function-tags": _function_tags,
    "python": _python(),
    "llama3": _bare_json,
}
"""Formats that are parsed as text, those with marks first."""
FORMAT_MARKS = {
    "qwen3-coder": "<parameter=", "hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "granite": "<|tool_call|>",
    "command-r": "<|START_ACTION|>", "lfm2": "<|tool_call_start|>",
}  # fmt: skip
"""Words by which a template tells the model of a format, where it shows tools and writes no calls itself."""
UNMARKED = ("python", "llama3")
"""Formats without marks: a reply is parsed by them only if the conversation has tools."""

LIBRARY_FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "deepseek-v3": ("parse_deepseek_v3", {
        "tool_calls_begin_id": "<｜tool▁calls▁begin｜>", "tool_calls_end_id": "<｜tool▁calls▁end｜>",
        "tool_call_begin_id": "<｜tool▁call▁begin｜>", "tool_call_end_id": "<｜tool▁call▁end｜>",
        "tool_sep_id": "<｜tool▁sep｜>",
    }),
    "kimi-k2": ("parse_kimi_k2", {
        "tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
        "tool_calls_section_end_id": "<|tool_calls_section_end|>", "tool_call_begin_id": "<|tool_call_begin|>",
        "tool_call_argument_begin_id": "<|tool_call_argument_begin|>", "tool_call_end_id": "<|tool_call_end|>",
    }),
    "glm": ("parse_glm", {
        "think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<tool_call>",
        "tool_call_end_id": "</tool_call>", "arg_key_id": "<arg_key>", "arg_key_end_id": "</arg_key>",
        "arg_value_id": "<arg_value>", "arg_value_end_id": "</arg_value>",
    }),
    "minimax-m2": ("parse_minimax", {
        "think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<minimax:tool_call>",
        "tool_call_end_id": "</minimax:tool_call>",
    }),
    "gpt-oss": ("parse_gpt_oss", {
        "return_id": "<|return|>", "call_id": "<|call|>", "start_id": "<|start|>", "end_id": "<|end|>",
        "channel_id": "<|channel|>", "message_id": "<|message|>", "constrain_id": "<|constrain|>",
    }),
}  # fmt: skip
"""Formats that the renderers library parses: its function, and the tokens by the name of its argument."""
LAST_TOKENS = {"gpt-oss": "<|call|>"}
"""The token that is a part of a call and ends the reply, by format."""
FORMATS = (*LIBRARY_FORMATS, *TEXT_FORMATS)
ALIASES = {"qwen3": "hermes", "qwen3.5": "qwen3-coder", "glm45": "glm", "kimi_k2": "kimi-k2", "openai": "gpt-oss"}
"""What the renderers library and vLLM call a format."""
