"""Fixed conversations: by them a template is asked what it shows, and compared with a family's renderer."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

TOOL: Message = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "the word"}, "times": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
CALL_ID = "call00001"  # nine letters and digits, as Mistral's templates ask
CALL: Message = {
    "id": CALL_ID,
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "high tide", "times": 3}},
}
ONE_TURN: list[Message] = [{"role": "user", "content": "What is a fugue?"}]
TWO_TURNS: list[Message] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a fugue?"},
    {"role": "assistant", "content": "A piece with one theme."},
    {"role": "user", "content": "And a stretto?"},
]
LATER_SYSTEM: list[Message] = [*TWO_TURNS[1:3], TWO_TURNS[0], TWO_TURNS[3]]
WITH_TOOLS: list[Message] = [
    {"role": "user", "content": "When is high tide?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "At noon.", "name": "look_up", "tool_call_id": CALL_ID},
    {"role": "assistant", "content": "At noon."},
    {"role": "user", "content": "Thanks."},
]
THINKING: list[Message] = [
    {"role": "user", "content": "Is 91 prime?"},
    {"role": "assistant", "reasoning_content": "Seven times thirteen.", "content": "No."},
    {"role": "user", "content": "And 97?"},
]
FIXED: dict[str, tuple[list[Message], list[Message] | None]] = {
    "one turn": (ONE_TURN, None),
    "system and two turns": (TWO_TURNS, None),
    "a later system message": (LATER_SYSTEM, None),
    "tools": (WITH_TOOLS, [TOOL]),
    "thinking": (THINKING, None),
}
"""Conversations by name, each with its tools."""
