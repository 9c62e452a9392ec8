"""Every text family of the renderers library: what a branch holds is what the engine saw, trained exactly once.

The tokenizer is a byte tokenizer that has, as single tokens, whatever special tokens a family asks for.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re

import msgspec
import numpy as np
import pytest
import tokenizers
from cases.renderers import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from published import tokenizer_dir
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from stretto.base.errors import ConfigError, DataError
from stretto.chat.backend import read_by_library
from stretto.chat.conversations import CALL
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import Tokenizer
from stretto.config.sections.model import RendererSection
from stretto.config.sections.orchestrator import SamplingSection
from stretto.config.sections.sft import LossMaskSection
from stretto.envs.base import RolloutResult, TaskSource
from stretto.envs.tools import Toolset
from stretto.orchestrator.batch import to_samples
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, VersionSpan
from stretto.records.rollout import RolloutStatus, Task


class Asked(Tokenizer):
    """A vocabulary that has every token it is asked for, and records them."""

    def __init__(self, special: tuple[str, ...]) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend, name="bytes", eos_ids=(), unk_id=None)
        self.asked: dict[str, None] = {}
        for token in special:
            self.convert_tokens_to_ids(token)

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str) and self._backend.token_to_id(tokens) is None:
            self._backend.add_special_tokens([AddedToken(tokens, special=True, normalized=False)])
            self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        if isinstance(tokens, str):
            self.asked[tokens] = None
        return super().convert_tokens_to_ids(tokens)

    def encode(self, text, *, add_special_tokens=False):
        if re.fullmatch(r"<[^<>]+>|\uff5c\w+\uff5c", text):  # how some families ask for a token
            self.convert_tokens_to_ids(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@functools.cache
def renderer_of(family: str) -> Renderer:
    first = Asked(())
    build_renderer(first, RendererSection(name=family))
    return build_renderer(Asked(tuple(first.asked)), RendererSection(name=family))


def lookup(key: str, times: int = 1) -> str:
    """Looks up a word.

    Args:
        key: the word
    """
    return f"{key}!" * times


NEVER_PLAIN = ("deepseek-v4", "glm-5.3")
"""Families of whose replies the library always looks at all tokens."""
DROP_THOUGHTS = (
    "deepseek-v4", "gemma4", "glm-5", "glm-5.1", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "qwen3", "qwen3.5",
    "qwen3.6",
)  # fmt: skip
"""Families that drop the thoughts of earlier replies once the user speaks again."""
BRANCH_ALWAYS = ("hy3", "kimi-k2.5", "minimax-m2")
"""Families that show earlier replies otherwise then, with and without thinking."""
SHOW_NO_TOOLS = ("deepseek-r1", "deepseek-v3")
"""Families whose template has no place for descriptions of tools."""


def described(family: str, tools: Toolset) -> list[dict] | None:
    """The tools' descriptions, for families that show them."""
    return None if family in SHOW_NO_TOOLS else tools.schemas


TEXTS = [
    "yes",
    "a b",
    "x=1\n\ny",
    "é",
    "ok.",
    "1",
    "\U0001f468\u200d\U0001f469 \u05e9\u05dc",
    "{{ x }} \U000f1000",
    "e\u0301\t'\\",
]
THOUGHTS = [None, "hm", "so\nthen"]


class Script:
    """An engine whose replies are messages with thoughts and calls, written as the family would sample them."""

    def __init__(self, renderer: Renderer, seed: int) -> None:
        self.renderer, self.rng, self.seen = renderer, random.Random(seed), []

    async def generate(self, request):
        tokens = np.asarray(self._reply(), np.int32)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) - 1000 * len(self.seen)
        self.seen.append((request.prompt_ids, tokens, logprobs))
        spans = (VersionSpan(0, 0, len(tokens)),)
        return [Completion(token_ids=tokens, logprobs=logprobs, finish_reason="stop", versions=spans)]

    def _reply(self) -> list[int]:
        message = {"role": "assistant", "content": self.rng.choice(TEXTS)}
        if thought := self.rng.choice(THOUGHTS):
            message["reasoning_content"] = thought
        if self.rng.random() < 0.5:
            arguments = {"key": self.rng.choice(TEXTS), "times": self.rng.randrange(3)}
            call = {"name": "lookup", "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "id": "functions.lookup:0", "function": call}]
            if self.renderer.name == "llama-3":  # its template shows a call alone
                message["content"] = ""
        tools = described(self.renderer.name, Toolset([lookup]))
        rendered = self.renderer.render_sft([QUESTION, message], LossMaskSection(), tools)
        if rendered.num_left_out:  # a family that shows no thoughts
            message.pop("reasoning_content")
            rendered = self.renderer.render_sft([QUESTION, message], LossMaskSection(), tools)
        [(ids, mask, _)] = rendered.examples
        return ids[mask].tolist()


class Chatter:
    """Answers calls with results and the rest with questions; now and then it rewrites the history.

    It does so with a new message or in the old one; `rewritten` is the number of the next turn, and the text.
    """

    name = "chatter"

    def __init__(self, family: str, seed: int, num_turns: int) -> None:
        self.family, self.seed, self.num_turns = family, seed, num_turns
        self.rewritten = []

    def tasks(self, split):
        return TaskSource(lambda index: Task(env=self.name, task_id=str(index), data={}))

    async def rollout(self, task, ctx):
        rng, tools = random.Random(self.seed), Toolset([lookup])
        messages = [{"role": "system", "content": "be brief"}] if rng.random() < 0.5 else []
        messages.append({"role": "user", "content": "go"})
        for turn in range(self.num_turns):
            reply = await ctx.chat(messages, described(self.family, tools))
            messages.append(reply.message)
            answers = await tools.answer(reply)
            for number, answer in enumerate(answers):
                answer.setdefault("name", "lookup")
                answer.setdefault("tool_call_id", f"functions.lookup:{number}")
            messages += answers or [{"role": "user", "content": rng.choice(TEXTS)}]
            if rng.random() < 0.2:
                first = next(i for i, m in enumerate(messages) if m["role"] == "user")
                text = f"go {rng.random()}"
                if rng.random() < 0.5:
                    messages[first] = {"role": "user", "content": text}
                else:
                    messages[first]["content"] = text
                self.rewritten.append((turn + 1, text))
        return RolloutResult(reward=1.0)


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), num_turns=st.integers(1, 5))
def test_branches_are_what_the_engine_saw_and_every_sampled_token_is_trained_once(family, seed, num_turns):
    renderer = renderer_of(family)
    engine, env = Script(renderer, seed), Chatter(family, seed, num_turns)
    player = Player(engine, renderer, SamplingSection(), seq_len=10**6, max_retries=0)
    group = asyncio.run(player.play(env, Draw(0, env.tasks("train").task(0), 1, version=0)))
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    assert rollout.num_turns == len(engine.seen) == num_turns
    for turn, text in env.rewritten:
        assert turn == num_turns or text in renderer.decode(engine.seen[turn][0])

    turns = iter(engine.seen)
    for branch in rollout.branches:  # each turn's prompt is all of its branch so far, and maybe more
        known = 0
        while known < len(branch.token_ids):
            prompt, completion, logprobs = next(turns)
            seen = np.concatenate((prompt, completion))
            np.testing.assert_array_equal(branch.token_ids[: len(seen)], seen)
            assert len(prompt) > known or known == 0
            assert not branch.is_sampled[known : len(prompt)].any()
            assert branch.is_sampled[len(prompt) : len(seen)].all()
            np.testing.assert_array_equal(branch.logprobs[len(prompt) : len(seen)], logprobs)
            known = len(seen)
    assert next(turns, None) is None

    samples = to_samples([msgspec.structs.replace(group, advantages=(1.0,))])
    trained = np.concatenate([sample.logprobs[sample.loss_mask] for sample in samples])
    np.testing.assert_array_equal(trained, np.concatenate([logprobs for *_, logprobs in engine.seen]))


WORD = "zqxhighvz"
SYSTEM, QUESTION, ANSWER = (
    {"role": "system", "content": WORD},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_shows_tools_or_refuses_them(family):
    renderer, tools = renderer_of(family), Toolset([lookup]).schemas
    try:
        assert "Looks up a word" in renderer.render_text([QUESTION], tools)
    except DataError as error:
        assert family in SHOW_NO_TOOLS and f"{family} shows no tools" in str(error)
    row = [QUESTION, ANSWER | {"content": "", "tool_calls": [CALL]}]
    if family in SHOW_NO_TOOLS:
        with pytest.raises(DataError, match="shows no tools"):
            renderer.render_sft(row, LossMaskSection(), tools)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["second", "after a user", "after a reply"])
def test_a_system_message_that_is_not_the_first_is_shown_or_refused(family, place):
    before = {"second": [SYSTEM | {"content": "x"}], "after a user": [QUESTION], "after a reply": [QUESTION, ANSWER]}
    renderer = renderer_of(family)
    messages = [*before[place], SYSTEM, QUESTION]
    try:
        assert WORD in renderer.render_text(messages)
    except DataError as error:
        assert family in str(error)
    if place != "after a reply":
        return
    prompt = renderer.render_prompt([QUESTION])
    reply = [*renderer.encode("b").tolist(), renderer.stop_ids[0]]
    try:
        extended = renderer.extend(prompt, reply, [QUESTION, ANSWER], [SYSTEM, QUESTION])
        assert extended is None or WORD in renderer.decode(extended)
    except DataError as error:
        assert f"{family} drops a message of the role 'system' behind one of the role 'assistant'" in str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_beside_a_call_is_trained_or_the_reply_is_left_out_and_counted(family):
    renderer, tools = renderer_of(family), described(family, Toolset([lookup]))
    row = [QUESTION, ANSWER | {"content": WORD, "tool_calls": [CALL]}]
    rendered = renderer.render_sft(row, LossMaskSection(), tools)
    if rendered.num_left_out:
        assert not rendered.examples
    else:
        [(ids, mask, _)] = rendered.examples
        assert WORD in renderer.decode(ids[mask]) and CALL["function"]["name"] in renderer.decode(ids[mask])


def test_a_conversation_that_the_library_refuses_is_an_error_of_the_data():
    row = [QUESTION, ANSWER | {"content": "", "tool_calls": [CALL, CALL]}]
    with pytest.raises(DataError, match=r"llama-3 refuses the conversation: .*single tool call"):
        renderer_of("llama-3").render_sft(row, LossMaskSection(), Toolset([lookup]).schemas)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_is_trained_or_its_reply_is_left_out_and_counted(family):
    row = [QUESTION, ANSWER | {"reasoning_content": WORD}]
    rendered = renderer_of(family).render_sft(row, LossMaskSection())
    if rendered.num_left_out:
        assert not rendered.examples
    else:
        [(ids, mask, _)] = rendered.examples
        assert WORD in renderer_of(family).decode(ids[mask])


@pytest.mark.parametrize("family", ["kimi-k2", "kimi-k2.5"])
@pytest.mark.parametrize("ids", [(None, None), ("call_a", "call_b"), ("functions.other:3", "functions.look_up:4")])
def test_calls_of_kimi_name_their_function_and_results_their_call(family, ids):
    renderer = renderer_of(family)
    functions = ({"name": "other", "arguments": {}}, CALL["function"])
    calls = [{"type": "function", "function": f} | ({} if i is None else {"id": i}) for f, i in zip(functions, ids)]
    results = [
        {"role": "tool", "content": f"r{n}", "name": f["name"]} | ({} if i is None else {"tool_call_id": i})
        for n, (f, i) in enumerate(zip(functions, ids))
    ]
    row = [QUESTION, ANSWER | {"content": "", "tool_calls": calls}, *results, ANSWER]
    rendered = renderer.render_sft(row, LossMaskSection(), Toolset([lookup]).schemas)
    assert rendered.num_left_out == 0
    text = renderer.decode(rendered.examples[-1].token_ids)
    first, second = ("functions.other:3", "functions.look_up:4") if ids[0] == "functions.other:3" else (
        "functions.other:0", "functions.look_up:1",
    )  # fmt: skip
    assert f"<|tool_call_begin|>{first}<" in text and f"<|tool_call_begin|>{second}<" in text
    assert f"## Return of {first}\nr0" in text and f"## Return of {second}\nr1" in text


def test_a_result_names_the_call_as_the_policy_has_named_it():
    renderer, tools = renderer_of("kimi-k2"), Toolset([lookup])
    prompt = renderer.render_prompt([QUESTION], tools.schemas)
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:7<|tool_call_argument_begin|>"
    reply = renderer.encode(call + '{"key": "a"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>').tolist()
    message = renderer.parse(reply, prompt, tools.schemas)
    answer = asyncio.run(tools.call(message["tool_calls"][0]))
    extended = renderer.extend(prompt, reply, [QUESTION, message], [answer], tools.schemas)
    assert extended is not None
    assert "## Return of functions.lookup:7\na!" in renderer.decode(extended[len(prompt) + len(reply) :])


RESULT = {"role": "tool", "content": "zqxlowvz", "name": "look_up", "tool_call_id": CALL["id"]}
"""An answer to CALL."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_role_is_trained_by_the_tokens_of_its_text_alone(family):
    renderer, tools = renderer_of(family), described(family, Toolset([lookup]))
    row = [SYSTEM, QUESTION, ANSWER | {"content": "", "tool_calls": [CALL]}, RESULT, ANSWER]
    for role, text in (("system", WORD), ("user", "a"), ("tool", RESULT["content"])):
        only = LossMaskSection(**{each: each == role for each in ("system", "user", "assistant", "tool")})
        examples = renderer.render_sft(row, only, tools).examples
        assert "".join(renderer.decode(ids[mask]) for ids, mask, _ in examples) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_ends_with_a_token_that_ends_it_and_the_next_turn_goes_on_behind_that(family):
    renderer, tools = renderer_of(family), described(family, Toolset([lookup]))
    called = ANSWER | {"content": "", "tool_calls": [CALL]}
    for first, answer in ((ANSWER, QUESTION), (called, RESULT)):
        row = [QUESTION, first, answer, ANSWER]
        rendered = renderer.render_sft(row, LossMaskSection(), tools)
        assert rendered.num_left_out == 0
        ends = [renderer.tokenizer.token_text(token) for token in renderer.stop_ids]
        for ids, mask, _ in rendered.examples:
            assert ids[mask][-1] in renderer.stop_ids
        ids = rendered.examples[0].token_ids
        sampled = renderer.render_sft(row[:2], LossMaskSection(), tools).examples[0]
        assert np.array_equal(ids[: len(sampled.token_ids)], sampled.token_ids)
        behind = renderer.decode(ids[len(sampled.token_ids) :]).lstrip()
        assert not behind.startswith(tuple(ends)) or len(rendered.examples) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_in_parts_is_one_text(family):
    renderer = renderer_of(family)
    row = [SYSTEM | {"content": "x. y"}, QUESTION | {"content": "a\nb"}, ANSWER | {"content": "b c"}]
    parts = [("x.", " y"), ("a\n", "b"), ("b", " c")]
    split = [m | {"content": [{"type": "text", "text": text} for text in part]} for m, part in zip(row, parts)]
    found, expected = (renderer.render_sft(each, LossMaskSection()).examples for each in (split, row))
    assert [e.token_ids.tolist() for e in found] == [e.token_ids.tolist() for e in expected]
    assert [e.is_trained.tolist() for e in found] == [e.is_trained.tolist() for e in expected]


@pytest.mark.parametrize("family", ["qwen3", "llama-3"])
def test_a_row_that_begins_with_a_reply_is_trained_from_its_second_reply_on(family):
    renderer = renderer_of(family)
    rendered = renderer.render_sft([ANSWER | {"content": "hello"}, QUESTION, ANSWER], LossMaskSection())
    [(ids, mask, _)] = rendered.examples
    assert rendered.num_left_out == 1 and "message 0" in rendered.why
    assert "hello" in renderer.decode(ids[~mask]) and "hello" not in renderer.decode(ids[mask])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_drops_thoughts_says_so_and_the_setting_that_it_names_keeps_them(family):
    tokenizer = Asked(tuple(renderer_of(family).tokenizer.asked))
    for thinks in (True, False):
        section = RendererSection(name=family, enable_thinking=thinks)
        renderer = build_renderer(tokenizer, section)
        assert bool(renderer.branching) == ((thinks and family in DROP_THOUGHTS) or family in BRANCH_ALWAYS)
        kept = build_renderer(tokenizer, section.model_copy(update={"settings": {"thinking_retention": "all"}}))
        assert not kept.branching


def test_a_letter_that_the_tokenizer_composes_is_trained():
    tokenizer = Asked(tuple(renderer_of("qwen3").tokenizer.asked))
    tokenizer._backend.normalizer = normalizers.NFC()
    renderer = build_renderer(tokenizer, RendererSection(name="qwen3"))
    rendered = renderer.render_sft([QUESTION, ANSWER | {"content": "cafe\u0301"}], LossMaskSection())
    [(ids, mask, _)] = rendered.examples
    assert rendered.num_left_out == 0 and "caf\u00e9<" in renderer.decode(ids[mask])


@pytest.mark.slow
def test_gpt_oss_trains_each_thought_and_every_token_between_thought_and_call():
    try:
        renderer = build_renderer(tokenizer_dir("gptoss"), RendererSection(name="gpt-oss"))
    except ConfigError as error:
        pytest.skip(str(error))
    tools = Toolset([lookup]).schemas
    call = ANSWER | {"content": "", "reasoning_content": "I must look.", "tool_calls": [CALL]}
    found = {"role": "tool", "content": "At noon.", "name": "look_up"}
    rendered = renderer.render_sft(
        [QUESTION, call, found, ANSWER | {"reasoning_content": WORD}], LossMaskSection(), tools
    )
    texts = [renderer.decode(ids[mask]) for ids, mask, _ in rendered.examples]
    assert rendered.num_left_out == 0
    assert "I must look.<|end|><|start|>assistant<|channel|>commentary to=functions.look_up<|message|>{" in texts[0]
    assert texts[-1].endswith(f"{WORD}<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>")
    prompt = renderer.render_prompt([QUESTION], tools)
    assert rendered.examples[0].token_ids[: len(prompt)].tolist() == prompt.tolist()


@pytest.mark.slow
def test_gpt_oss_names_the_function_of_a_result_that_has_the_id_of_its_call_alone():
    try:
        renderer = build_renderer(tokenizer_dir("gptoss"), RendererSection(name="gpt-oss"))
    except ConfigError as error:
        pytest.skip(str(error))
    first, second = CALL | {"id": "a"}, CALL | {"id": "b", "function": CALL["function"] | {"name": "add"}}
    called = [QUESTION, ANSWER | {"content": "", "tool_calls": [first, second]}]
    results = [{"role": "tool", "content": "2", "tool_call_id": "b"}, {"role": "tool", "content": "1"}]
    named = [result | {"name": name} for result, name in zip(results, ("add", "look_up"))]
    assert renderer.render_text([*called, *results]) == renderer.render_text([*called, *named])
    assert "functions.add" in renderer.render_text([*called, *results])
    prompt, reply = renderer.render_prompt(called[:1]), renderer.encode("x").tolist()
    extended = renderer.extend(prompt, reply, called, results)
    assert extended is not None and extended.tolist() == renderer.extend(prompt, reply, called, named).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("has_call", [False, True])
def test_gpt_oss_trains_a_reply_without_a_thought_after_the_prompt_that_a_policy_gets(has_call):
    try:
        renderer = build_renderer(tokenizer_dir("gptoss"), RendererSection(name="gpt-oss"))
    except ConfigError as error:
        pytest.skip(str(error))
    tools = Toolset([lookup]).schemas if has_call else None
    talk = [QUESTION, ANSWER, QUESTION, ANSWER]
    if has_call:
        talk[1:1] = [
            ANSWER | {"content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "name": "look_up"},
        ]
    rendered = renderer.render_sft(talk, LossMaskSection(), tools)
    assert rendered.num_left_out == 0
    end = "<|end|><|start|>assistant<|channel|>"
    trained = [renderer.decode(ids[mask]) for ids, mask, _ in rendered.examples]
    assert "".join(trained).count(end) == len(talk) // 2 and not any("analysis" in text for text in trained)
    (first, _, _), *_ = rendered.examples
    prompt = renderer.render_prompt([QUESTION], tools)
    assert first[: len(prompt)].tolist() == prompt.tolist()
    assert renderer.decode(first[len(prompt) :]).startswith(
        end + ("commentary to=" if has_call else "final<|message|>")
    )
    said = renderer.parse(renderer.encode(f"{end}final<|message|>b<|return|>").tolist(), prompt, tools)
    assert said == ANSWER | {"content": "b"}


REPLIES = [
    "yes", " a b ", "\n\nso.\n", "x = 1\n\ny", "é ü 世界", "a < b", "<think>", "hm</think>so",
    '{"name": "f", "arguments": {}}',
    "[1] {2}", "", " ", "1", "ok.\t", "<tool_call>", "◁think▷", "｜x｜",
]  # fmt: skip
ANSWERS = [
    [{"role": "user", "content": "more"}],
    [{"role": "user", "content": " \n more\n"}],
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "<b> {x}"}],
    [{"role": "tool", "content": "42", "tool_call_id": "1"}],
    [{"role": "user", "content": "a", "name": "b"}],
]


def outcome(work):
    """The result of a call, or the type of its error."""
    try:
        return work()
    except Exception as error:
        return type(error)


def is_equally_bridged(renderer, prompt, reply, answer) -> bool:
    """Whether an answer is put behind a reply without a look at all tokens; it must be what the library does."""
    backend = renderer._backend
    message = outcome(lambda: renderer.parse(reply, prompt))
    between = outcome(lambda: backend.between(prompt, reply, [message], answer, None))
    if not isinstance(between, tuple):
        return False
    theirs = backend._backend.bridge_to_next_turn(prompt.tolist(), reply, answer, tools=None)
    assert theirs.token_ids == [*prompt, *reply, *between], (reply, answer)
    return True


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_turns_are_what_the_library_makes_of_them(family):
    renderer = renderer_of(family)
    backend = renderer._backend
    num_plain = 0
    prompts = [
        renderer.render_prompt([{"role": "user", "content": "a"}]),
        renderer.render_prompt([{"role": "system", "content": "b"}, {"role": "user", "content": "word " * 20}]),
        renderer.encode("a text that goes on"),
    ]
    for prompt in (*prompts, np.concatenate((prompts[0], renderer.encode("so "))), None):
        for text in REPLIES:
            for end in ([], *([each] for each in backend.stop_ids), [backend.stop_ids[0]] * 2):
                reply, before = [*renderer.encode(text).tolist(), *end], None if prompt is None else prompt.tolist()
                plain = backend._plain.parse(reply, prompt)
                num_plain += plain is not None
                if plain is not None:
                    read = functools.partial(backend._backend.parse_response, reply, tools=None, prompt_ids=before)
                    assert plain == read_by_library(read, str), (text, end)
                for answer in ANSWERS if prompt is not None else ():
                    num_plain += is_equally_bridged(renderer, prompt, reply, answer)
    assert num_plain or family in NEVER_PLAIN
