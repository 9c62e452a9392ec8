"""Whose text is whose: the turns of a rendered conversation, by the marks that chat templates write before each.

A tool's answer is a turn of the tool, also where a template (Qwen's, for example) writes it as one of the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(
    r"<\|im_start\|>(\w+)\n"
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*"
    r"|<(?:start_of_turn>|\|turn>|seed:bos>)(\w+)\n"
    r"|<\|START_OF_TURN_TOKEN\|><\|(SYSTEM|USER|CHATBOT)_TOKEN\|>"
    r"|<\|start_of_role\|>(\w+)<\|end_of_role\|>"
    r"|<\|start\|>(\w+)(?:[^<\n]*(?:<\|channel\|>[^<\n]*)?(?:<\|constrain\|>[^<\n]*)?<\|message\|>|\Z)"
    r"|<\|begin\|>(\w+)(?:<\|(?:content|tool_response)\|>)?"
    r"|(?:<｜start▁of▁sentence｜>)?<\|(?:begin_)?([Ss]ystem|[Uu]ser|assistant|Bot|observation|[Tt]ool|tool_result)\|>\n?"
    r"|<\|(system|developer|user|assistant)_start\|>"
    r"|<beginning_of_sentence>(\w+) [^\n]*\n"
    r"|<SPECIAL_1[01]>(\w+)\n"
    r"|<\|im_(user|assistant)\|>[^<\n]*<\|im_middle\|>"
    r"|<\|im_system\|>(system|tool_declare)<\|im_middle\|>"
    r"|<\|(im_system)\|>[^<\n]*<\|im_middle\|>"
    r"|<\|open\|>message role=\"(\w+)\"[^<\n]*<\|sep\|>"
    r"|(?:<\|message_sep\|>\s*|<s>|\A)((?:developer |function )?[a-z]+)<\|role_sep\|>\n?"
    r"|<role>(\w+)</role>"
    r"|<sep>(human|assistant|system):|\A(human): "
    r"|\]~b\](\w+)[^\n]*\n"
    r"|<｜(?:hy_)?(User|Assistant)[^｜\n]*｜>"
    r"|(?:<｜tool▁outputs▁begin｜>)?<｜(tool▁output▁begin)｜>"
    r"|<｜(tool▁output▁end)｜>(?!\s*<｜tool▁output▁begin｜>)(?:\s*<｜tool▁outputs▁end｜>)?"
    r"|<｜(?:end▁of▁sentence|hy_eos[^｜\n]*)｜>\s*<(function_results|tool_responses)[^>\n]*>"
    r"|(?<=</function_results>\n\n)<(/?think)>"
    r"|(?<!<)<\|(tool_response)>"
    r"|<(tool_response\|)>(?!\s*<\|(?:tool_response|turn)>)"
    r"|\[(SYSTEM_PROMPT|AVAILABLE_TOOLS|/?INST|TOOL_RESULTS|/TOOL_RESULTS(?!\]\s*\[TOOL_RESULTS\]))\] ?"
)
_PLAIN_TAGS = re.compile(r"<(system|user|assistant|tool_response)>")
_PLAIN_TAGS_BEGIN = "〈|EOS|〉<"
"""Marks that also stand in texts of people count only in a conversation that begins as their template's does."""
_ROLES = {
    "model": "assistant", "ai": "assistant", "human": "user", "inst": "user", "/inst": "assistant",
    "chatbot": "assistant", "bot": "assistant", "developer": "system", "developer system": "system",
    "system_prompt": "system", "available_tools": "system", "tools": "system", "function descriptions": "system",
    "tool_declare": "system", "ipython": "tool", "observation": "tool", "function": "tool", "functions": "tool",
    "function result": "tool", "function_results": "tool", "im_system": "tool", "tool_response": "tool",
    "tool_responses": "tool", "tool_result": "tool", "tool_results": "tool", "tool▁output▁begin": "tool",
    "tool▁output▁end": "assistant", "/tool_results": "assistant", "tool_response|": "assistant",
    "think": "assistant", "/think": "assistant",
}  # fmt: skip
"""Names in marks that are no roles. Where nothing marks the reply after a tool's answer, the answer's end does."""
_TOOLS_ANSWER = re.compile(
    r"\s*(?:<tool_(?:response|result)>|<TOOL_RESPONSE>|<\|function_output\|>|<\|START_TOOL_RESULT\|>|<results>)"
)
_END_MARK = (
    r"(?:<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|end|return|call|calls|role_end|END_OF_TURN_TOKEN|message_sep"
    r"|end_of_msg|(?:system|developer|user|assistant)_end)\|>|<end_of_turn>|<turn\|>|</s>|<seed:eos>|<end_of_sentence>"
    r"|<SPECIAL_12>|\[e~\[|<｜(?:end▁of▁sentence|tool▁output▁end|hy_eos[^｜]*)｜>"
    r"|\[/(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)\])"
)
_END = re.compile(_END_MARK + r"\s*$")
_ANY_END = re.compile(_END_MARK)
_FIRST_TOKEN = re.compile(r"<[^>]*>|\[[^\]]*\]|\]~b\]")
_ONLY_MARKS = re.compile(r"(?:\s|<[^<>\s]*>|〈[^〉\s]*〉|\[[A-Za-z]+\]|\]~!b\[)*")


class Stretch(NamedTuple):
    """A turn as places in the text: where its mark begins, where its own text does, and where that ends."""

    role: str
    start: int
    body: int
    end: int


def stretches(text: str) -> Iterator[Stretch]:
    """The turns of a text, in order. None without a mark.

    What stands before the first mark is the system's, which some templates do not mark; "text" if it is only marks.
    """
    found = list((_PLAIN_TAGS if text.startswith(_PLAIN_TAGS_BEGIN) else _HEADER).finditer(text))
    if found and (begins := found[0].start()):
        yield Stretch("text" if _ONLY_MARKS.fullmatch(text, 0, begins) else "system", 0, 0, begins)
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends):
        role = _role(match)
        if role in ("user", "system") and _TOOLS_ANSWER.match(text, match.end(), end):
            role = "tool"
        yield Stretch(role, match.start(), match.end(), end)


def mark_of(text: str, stretch: Stretch) -> str:
    """The first special token of a turn's mark, such as `<|im_start|>`."""
    found = _FIRST_TOKEN.match(text, stretch.start, stretch.body)
    return found[0] if found else ""


def without_end(text: str) -> str:
    """A turn's text without the blanks around it and the mark that ends it."""
    return _END.sub("", text).strip()


def readable(text: str) -> str:
    """A piece of a rendered conversation with names of roles in place of marks."""
    named = _HEADER.sub(lambda match: _role(match) + ": ", text)
    return _ANY_END.sub(" ", named)


def _role(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group).lower()
    return _ROLES.get(name, name)
