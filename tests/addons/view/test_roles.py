"""Whose turn is whose, in every format of chat that templates which are published write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from published import TOKENIZERS, templates_dir, tokenizer_dir

from stretto.base.errors import DataError
from stretto.chat.conversations import CALL as LOOKS_UP
from stretto.chat.conversations import CALL_ID
from stretto.chat.conversations import TOOL as LOOK_UP
from stretto.chat.templates import ChatTemplate, TemplateFiles
from stretto.chat.tokenizer import load_tokenizer
from stretto_view.page import conversation
from stretto_view.roles import mark_of, readable, stretches, without_end

ASKED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n"
)
CALL, TOOL = (
    "<tool_call>6*7</tool_call><|im_end|>",
    "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n",
)
NEXT = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text",
    [
        ASKED + CALL + TOOL + NEXT + "42",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nWhat is 6 times 7?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "<tool_call>6*7</tool_call><|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n42",
    ],
)
def test_roles_are_those_of_the_template_and_a_tools_answer_is_the_tools(text: str) -> None:
    found = [(turn.role, without_end(text[turn.body : turn.end])) for turn in stretches(text) if turn.role != "text"]
    assert [role for role, _ in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[1] == ("user", "What is 6 times 7?") and "42" in found[3][1]


CALLED = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calc<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
ANSWERS = "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>43<｜tool▁output▁end｜>"
FAMILIES = {
    "deepseek-v3": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>6*7?<｜Assistant｜>"
    + CALLED
    + f"<｜tool▁outputs▁begin｜>{ANSWERS}<｜tool▁outputs▁end｜>It is 42.<｜end▁of▁sentence｜><｜User｜>Sure?",
    "deepseek-v3.1": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>6*7?<｜Assistant｜></think>"
    + CALLED
    + ANSWERS
    + "It is 42.<｜end▁of▁sentence｜><｜User｜>Sure?",
    "mistral": '<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] 6*7?[/INST][TOOL_CALLS] [{"name": "calc"}]</s>'
    '[TOOL_RESULTS] {"content": 42}[/TOOL_RESULTS][TOOL_RESULTS] {"content": 43}[/TOOL_RESULTS] It is 42.</s>'
    "[INST] Sure?",
    "gpt-oss": "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>6*7?<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{}<|call|>"
    "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>42<|end|>"
    "<|start|>functions.calc to=assistant<|channel|>commentary<|message|>43<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 42.<|return|><|start|>user<|message|>Sure?<|end|>",
    "kimi-k2": "<|im_system|>tool_declare<|im_middle|>[]<|im_end|><|im_user|>user<|im_middle|>6*7?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>calc<|tool_calls_section_end|><|im_end|>"
    "<|im_system|>calc<|im_middle|>## Return of 0\n42<|im_end|><|im_system|>tool<|im_middle|>43<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>It is 42.<|im_end|><|im_user|>user<|im_middle|>Sure?<|im_end|>",
    "minimax-m2": "]~!b[]~b]system\nBe brief.[e~[\n]~b]user\n6*7?[e~[\n]~b]ai\n<minimax:tool_call>calc[e~[\n"
    "]~b]tool\n<response>42</response>[e~[\n]~b]tool\n43[e~[\n]~b]ai\nIt is 42.[e~[\n]~b]user\nSure?[e~[\n",
    "glm": "[gMASK]<sop><|system|>\nBe brief.<|user|>\n6*7?<|assistant|>\n<tool_call>calc</tool_call><|observation|>\n"
    "<tool_response>\n42\n</tool_response><|observation|>\n43<|assistant|>\nIt is 42.<|user|>\nSure?",
    "granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>6*7?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
    "<|tool_call|>calc<|end_of_text|>\n"
    "<|start_of_role|>tool_response<|end_of_role|>42<|end_of_text|>\n<|start_of_role|>tool_response<|end_of_role|>43"
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>It is 42.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Sure?<|end_of_text|>\n",
    "apriel-1.6": "<s><|begin_system|>\nBe brief.\n<|begin_user|>\n6*7?\n<|begin_assistant|>\ncalc\n<|end|>\n"
    "<|begin_tool_result|>\n42\n\n\n<|begin_tool_result|>\n43\n\n\n\n<|begin_assistant|>\nIt is 42.\n<|end|>\n"
    "<|begin_user|>\nSure?",
    "bielik": "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n"
    "<|im_start|>assistant\ncalc"
    "<|im_end|>\n<|im_start|>user\n<|function_output|>42<|im_start|>user\n<|function_output|>43<|im_start|>assistant\n"
    "It is 42.<|im_end|>\n<|im_start|>user\nSure?",
    "seed-oss": "<seed:bos>system\nBe brief.<seed:eos><seed:bos>user\n6*7?<seed:eos><seed:bos>assistant\ncalc"
    "<seed:eos>"
    "<seed:bos>tool\n42<seed:eos><seed:bos>tool\n43<seed:eos><seed:bos>assistant\nIt is 42.<seed:eos>"
    "<seed:bos>user\nSure?",
    "gigachat": "<s>system<|role_sep|>\nBe brief.<|message_sep|>\n\nuser<|role_sep|>\n6*7?<|message_sep|>\n\n"
    "assistant<|role_sep|>\ncalc<|message_sep|>\n\nfunction result<|role_sep|>\n42<|message_sep|>\n\n"
    "function result<|role_sep|>\n43<|message_sep|>\n\nassistant<|role_sep|>\nIt is 42.<|message_sep|>\n\n"
    "user<|role_sep|>\nSure?",
    "kimi-k3": '<|open|>message role="system"<|sep|>Be brief.<|end_of_msg|><|open|>message role="user"<|sep|>6*7?'
    '<|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>call tool="calc"<|sep|><|close|>call<|sep|>'
    "<|end_of_msg|>"
    '<|open|>message role="tool" tool="calc" index="1"<|sep|>42<|end_of_msg|>'
    '<|open|>message role="tool" index="2"<|sep|>'
    '43<|end_of_msg|><|open|>message role="assistant"<|sep|>It is 42.<|end_of_msg|>'
    '<|open|>message role="user"<|sep|>Sure?',
    "minimax-m1": "<begin_of_document><beginning_of_sentence>system ai_setting=assistant\nBe brief.<end_of_sentence>\n"
    "<beginning_of_sentence>user name=user\n6*7?<end_of_sentence>\n<beginning_of_sentence>ai name=assistant\ncalc"
    "<end_of_sentence>\n<beginning_of_sentence>tool name=tools\n42\n\n<end_of_sentence>\n<beginning_of_sentence>tool "
    "name=tools\n43\n\n<end_of_sentence>\n<beginning_of_sentence>ai name=assistant\nIt is 42.<end_of_sentence>\n"
    "<beginning_of_sentence>user name=user\nSure?",
    "reka": "system: Be brief.\n\n<sep>human: 6*7?<sep>assistant: calc\n\n<sep>human: <tool_response>\n42\n"
    "</tool_response>"
    "<sep>human: <tool_response>\n43\n</tool_response><sep>assistant: It is 42.\n\n<sep>human: Sure?",
    "spark": "<｜start▁of▁sentence｜><|System|>\nBe brief.<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|User|>6*7?"
    "<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|Bot|>calc<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|Tool|>42"
    "<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|Tool|>43<｜end▁of▁sentence｜><｜start▁of▁sentence｜>"
    "<|Bot|>It is 42."
    "<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|User|>Sure?",
    "ling": "<role>SYSTEM</role>Be brief.<|role_end|><role>HUMAN</role>6*7?<|role_end|><role>ASSISTANT</role>\ncalc"
    "<|role_end|><role>OBSERVATION</role>\n42<|role_end|><role>OBSERVATION</role>\n43<|role_end|>"
    "<role>ASSISTANT</role>\n"
    "It is 42.<|role_end|><role>HUMAN</role>Sure?",
    "laguna": "〈|EOS|〉<system>\nBe brief.\n</system>\n<user>\n6*7?</user>\n<assistant>\n</think>\ncalc</assistant>\n"
    "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>\n<assistant>\nIt is 42."
    "</assistant>\n"
    "<user>\nSure?</user>",
    "solar": "<|begin|>system<|content|>Be brief.<|end|><|begin|>user<|content|>6*7?<|end|><|begin|>assistant"
    "<|tool_calls|>"
    "calc<|calls|><|begin|>tool<|tool_response|>42<|end|><|begin|>tool<|tool_response|>43<|end|><|begin|>assistant"
    "<|content|>It is 42.<|end|><|begin|>user<|content|>Sure?<|end|>",
    "command-r7b": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
    "6*7?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>calc<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>42<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>43<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|CHATBOT_TOKEN|>It is 42.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Sure?<|END_OF_TURN_TOKEN|>",
    "gemma-4": "<|turn>system\nBe brief.<turn|>\n<|turn>user\n6*7?<turn|>\n<|turn>model\n<|tool_call>calc<tool_call|>"
    "<|tool_response>42<tool_response|><|tool_response>43<tool_response|>It is 42.<turn|>\n<|turn>user\nSure?<turn|>",
}
ONE_TURN_OF_TOOLS = {
    "nemotron-nano-2": "<SPECIAL_10>System\nBe brief.\n\n<SPECIAL_11>User\n6*7?\n"
    "<SPECIAL_11>Assistant\ncalc\n<SPECIAL_12>\n"
    "<SPECIAL_11>User\n<TOOL_RESPONSE>[42, 43]</TOOL_RESPONSE><SPECIAL_11>Assistant\nIt is 42.\n<SPECIAL_12>\n"
    "<SPECIAL_11>User\nSure?",
    "deepseek-v3.2": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>6*7?<｜Assistant｜></think>calc"
    "<｜end▁of▁sentence｜>\n\n"
    "<function_results>\n<result>42</result>\n<result>43</result>\n</function_results>\n\n</think>It is 42."
    "<｜end▁of▁sentence｜><｜User｜>Sure?",
    "deepseek-v4": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>6*7?<｜Assistant｜></think>calc<｜end▁of▁sentence｜>"
    "<｜User｜>"
    "<tool_result>42</tool_result>\n\n<tool_result>43</tool_result><｜Assistant｜></think>It is 42."
    "<｜end▁of▁sentence｜>"
    "<｜User｜>Sure?",
    "hy3": "<｜hy_begin_of_sentence:opensource｜>Be brief.<｜hy_User:opensource｜>6*7?"
    "<｜hy_Assistant:opensource｜>calc"
    "<｜hy_eos:opensource｜><tool_responses:opensource>\n<tool_response:opensource>\n42\n"
    "</tool_response:opensource>\n43"
    "</tool_responses:opensource><｜hy_Assistant:opensource｜>It is 42.<｜hy_eos:opensource｜>"
    "<｜hy_User:opensource｜>Sure?",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_after_a_tools_answer_is_the_assistants(family: str) -> None:
    """Also in templates that write no mark before it: there the end of the tool's answer is the mark."""
    text = FAMILIES[family]
    found = [(turn.role, without_end(text[turn.body : turn.end])) for turn in stretches(text)]
    told = [(role, own) for role, own in found if role not in ("text", "system")]
    assert [role for role, _ in told] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert told[0][1].startswith("6*7?") and "42" in told[2][1] and "43" in told[3][1] and "42" not in told[3][1]
    assert [own.partition("</")[0] for _, own in told[4:]] == ["It is 42.", "Sure?"]


@pytest.mark.parametrize("family", ONE_TURN_OF_TOOLS)
def test_several_answers_may_be_one_turn_of_the_tool(family: str) -> None:
    text = ONE_TURN_OF_TOOLS[family]
    found = [(turn.role, text[turn.body : turn.end]) for turn in stretches(text)]
    assert [role for role, _ in found] == ["system", "user", "assistant", "tool", "assistant", "user"]
    for (_, own), has in zip(found, ("Be brief.", "6*7?", "calc", "43", "It is 42.", "Sure?")):
        assert has in own


def test_every_mark_of_the_templates_begins_with_its_token() -> None:
    """A turn's mark counts on the page if its first special token is one token."""
    for family, text in (FAMILIES | ONE_TURN_OF_TOOLS).items():
        for turn in stretches(text):
            mark = mark_of(text, turn)
            assert (mark == "") == (turn.start == turn.body) and text.startswith(mark, turn.start), family
            assert len(mark) <= len("<｜hy_begin_of_sentence:opensource｜>") and "\n" not in mark, family


def test_the_system_of_a_template_that_does_not_mark_it_is_the_system() -> None:
    for begins in ("<｜begin▁of▁sentence｜>", "[gMASK]<sop>", ""):
        for said, role in (("Be brief.", "system"), ("", "text" if begins else "user")):
            first, *_ = stretches(f"{begins}{said}<｜User｜>6*7?<｜Assistant｜>")
            assert first.role == role, (begins, said)


def test_tags_that_a_person_may_write_are_marks_only_in_their_own_template() -> None:
    text = "<|im_start|>user\nIs <user>this</user> <role_sep> or <tool_response> XML?<|im_end|>\n"
    assert [turn.role for turn in stretches(text)] == ["user"]


def test_an_open_mark_at_the_end_of_a_prompt_is_not_the_users_text() -> None:
    text = "<|start|>user<|message|>6*7?<|end|><|start|>assistant"
    found = [(turn.role, without_end(text[turn.body : turn.end])) for turn in stretches(text)]
    assert found == [("user", "6*7?"), ("assistant", "")]


def test_turns_without_system_or_marks_are_found_too() -> None:
    text = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
    assert [(turn.role, without_end(text[turn.body : turn.end])) for turn in stretches(text)] == [
        ("user", "Hi"), ("assistant", "yes"),
    ]  # fmt: skip
    assert list(stretches("1 + 1 = 2")) == []
    assert readable("<|im_start|>user\nHi<|im_end|>").strip() == "user: Hi"


def test_text_that_spells_a_mark_is_no_mark() -> None:
    pieces = ["<|im_start|>", "user\n", "<|im_", "start|>system\n", "evil", "<|im_end|>"]
    found = list(conversation.turns(pieces, np.zeros(len(pieces), bool)))
    assert [(turn["role"], turn["start"], turn["end"]) for turn in found] == [("user", 0, 6)]


# -- published templates --


def said(role: str, text: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": text, **more}


def answer(text: str, call: str = CALL_ID) -> dict[str, object]:
    return said("tool", text, name="look_up", tool_call_id=call)


SECOND = LOOKS_UP | {"id": "call00002"}
CONVERSATIONS = {
    "plain": [said("system", "Qsystem1"), said("user", "Quser1"), said("assistant", "Qassistant1"), said("user", "Q")],
    "without a system": [said("user", "Quser1"), said("assistant", "Qassistant1"), said("user", "Quser2")],
    "tools": [
        said("system", "Qsystem1"), said("user", "Quser1"), said("assistant", "", tool_calls=[LOOKS_UP, SECOND]),
        answer("Qtool1"), answer("Qtool2", SECOND["id"]), said("assistant", "Qassistant2"), said("user", "Quser2"),
    ],
    "tools at the end": [said("user", "Quser1"), said("assistant", "", tool_calls=[LOOKS_UP]), answer("Qtool1")],
    "tools twice": [
        said("user", "Quser1"), said("assistant", "", tool_calls=[LOOKS_UP]), answer("Qtool1"),
        said("assistant", "", tool_calls=[SECOND]), answer("Qtool2", SECOND["id"]), said("assistant", "Qassistant2"),
    ],
}  # fmt: skip
NO_SYSTEM = ("gemma3", "gemma3_training")
"""Templates that write the system's text into the turn of the user."""


def rendered(files: TemplateFiles, tokens: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Those of the conversations that a template does not refuse."""
    template = ChatTemplate(files, tokens)
    for title, messages in CONVERSATIONS.items():
        tools = [LOOK_UP] if "tools" in title else None
        with suppress(DataError):
            yield title, template.render(messages, tools, add_generation_prompt=True)


def wrong_roles(text: str, turns: Iterable[tuple[str, int, int]]) -> list[tuple[str, str | None]]:
    """What is not in a turn of its role; turns: role, begin and end in the text."""
    turns = list(turns)
    found = [
        (match[0], match[1], next((role for role, start, end in turns if start <= match.start() < end), None))
        for match in re.finditer(r"Q(system|user|assistant|tool)\d", text)
    ]
    return [(what, role) for what, wanted, role in found if role != wanted]


@pytest.mark.heavy
def test_roles_are_known_in_every_published_template() -> None:
    num = 0
    for file in sorted(templates_dir().glob("*.jinja")):
        files = TemplateFiles({"default": file.read_text(encoding="utf-8")}, file.stem)
        for title, text in rendered(files, {"bos_token": "<s>", "eos_token": "</s>"}):
            wrong = wrong_roles(text, ((turn.role, turn.body, turn.end) for turn in stretches(text)))
            if file.stem in NO_SYSTEM:
                wrong = [each for each in wrong if each != ("Qsystem1", "user")]
            assert not wrong, (file.stem, title)
            num += 1
    assert num > 250


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_roles_of_tokens_are_those_of_their_text(name: str) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(name))
    for title, text in rendered(tokenizer.templates, tokenizer.template_tokens) if tokenizer.templates else ():
        pieces = conversation.token_texts(tokenizer, np.array(tokenizer.encode(text)))
        shown = list(conversation.turns(pieces, np.zeros(len(pieces), bool)))
        assert [
            (turn["role"], without_end("".join(pieces[turn["body"] : turn["end"]]))) for turn in shown
        ] == [(turn.role, without_end(text[turn.body : turn.end])) for turn in stretches(text)], title  # fmt: skip
