"""Rewards by name: known cases of each, and the environment that uses them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from cases.dataset import RUN, play

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.envs.base import load_environment
from stretto.envs.rewards.builtin import async_rm, batched_async_rm
from stretto.envs.rewards.instructions import CHECKS, follows
from stretto.vime import Sample

CHOICES = {"choices": ["red", "blue", "green"], "correct_letter": "B"}
CASES = [
    ("math", r"so \boxed{\frac{1}{2}}", "0.5", {}, 1.0),
    ("math", "no box 3", "3", {}, 0.0),
    ("boxed_math", r"\boxed{1,200}", r"\boxed{1200}", {}, 1.0),
    ("deepscaler", r"\boxed{3}", "3", {}, 0.0),
    ("deepscaler", r"<think>\boxed{4}</think> \boxed{3}", "3", {}, 1.0),
    ("deepscaler", r"<think>\boxed{3}</think> \boxed{4}", "3", {}, 0.0),
    ("f1", "The quick brown fox.", "a brown dog", {}, 0.4),
    ("f1", "Paris", "paris!", {}, 1.0),
    ("f1", "yes it is", "yes", {}, 0.0),
    ("boxed_f1", r"long talk \boxed{brown fox}", "brown fox", {}, 1.0),
    ("gpqa", "Answer: (B)", None, CHOICES, 1.0),
    ("gpqa", "The answer is **B**", None, CHOICES, 1.0),
    ("gpqa", r"\boxed{\text{A}} because B", None, CHOICES, 0.0),
    ("gpqa", "I think it is\nblue", "blue", {"choices": CHOICES["choices"]}, 1.0),
    ("gpqa", "<think>Answer: A</think> B.", "B", {}, 1.0),
    ("gpqa", "the answer is C", 1, {}, 0.0),
]


@pytest.mark.parametrize(("kind", "reply", "label", "metadata", "reward"), CASES)
async def test_known_cases(kind, reply, label, metadata, reward):
    sample = Sample(response=reply, label=label, metadata=metadata)
    assert await async_rm(SimpleNamespace(rm_type=kind), sample) == pytest.approx(reward)
    own = Sample(response=reply, label=label, metadata={**metadata, "rm_type": kind})
    assert await batched_async_rm(SimpleNamespace(rm_type="random"), [own]) == [pytest.approx(reward)]


@pytest.mark.parametrize(
    ("reply", "label", "score", "pred"),
    [
        ("...\nAnswer: 34", "34", 1.0, "34"),
        ("Answer: 3\nAnswer: $34$.", "34", 1.0, "34"),
        (r"Answer: \boxed{1,234 dollars}", "1234", 1.0, "1234"),
        (r"Answer: x = \dfrac12", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
        ("Answer: 35", "34", -1.0, "35"),
        ("34", "34", -1.0, "[INVALID]"),
        ("Answer: 34" + " " * 300, "34", -1.0, "[INVALID]"),
    ],
)
async def test_dapo_reads_the_last_answer_line(reply, label, score, pred):
    found = await async_rm(SimpleNamespace(rm_type="dapo"), Sample(response=reply, label=label))
    assert found == {"score": score, "acc": score > 0, "pred": pred}


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"),
    [
        ("keywords:existence", {"keywords": ["Sun", "sea"]}, "The sea and the sun", "the sea"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a b", "a a"),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "catalogue", "a Cat!"),
        ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "Eel e", "ee"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "A b. C?", "Mr. X sat."),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
        ("length_constraints:nth_paragraph_first_word",
         {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "why"}, "a\n\nWhy, b", "a\n\nb"),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP. S. y", "x"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
        ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a*"),
        ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1 Part 2", "x"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a}"),
        ("detectable_format:title", {}, "<<joy>> x", "<< >>"),
        ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "say it. ok", "ok"),
        ("startend:end_checker", {"end_phrase": "the end"}, "a The End", "the end."),
        ("startend:quotation", {}, '"a"', '"a'),
        ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "at least"}, "A NATO", "b"),
        ("change_case:english_capital", {}, "ABC", "Abc"),
        ("change_case:english_lowercase", {}, "abc", "Abc"),
        ("punctuation:no_comma", {}, "a b", "a, b"),
    ],
)  # fmt: skip
async def test_instructions_are_checked(name, arguments, good, bad):
    assert follows(good, name, arguments) and not follows(bad, name, arguments)
    metadata = {"instruction_id_list": [name, "punctuation:no_comma"], "kwargs": [arguments, {"keywords": None}]}
    args = SimpleNamespace(rm_type="ifbench")
    assert await async_rm(args, Sample(response=bad, metadata=metadata)) == 0.0
    assert await async_rm(args, Sample(response=good, metadata=metadata)) == float("," not in good)


def test_every_instruction_is_known_by_its_name():
    assert len(CHECKS) == 25
    with pytest.raises(EnvError, match="instruction 'x:y' is not known; known are change_case"):
        follows("a", "x:y", {})
    with pytest.raises(EnvError, match=r"number_words.*missing 1 required"):
        follows("a", "length_constraints:number_words", {})


async def test_a_server_rewards_and_what_is_missing_is_said():
    async def answer(request):
        got = await request.json()
        return web.json_response({"score": len(got["response"]) + len(got["prompt"]), "label": got["label"]})

    app = web.Application()
    app.router.add_post("/rm", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        args = SimpleNamespace(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{runner.addresses[0][1]}/rm")
        sample = Sample(prompt="ab", response="c", label="d")
        assert await async_rm(args, sample) == {"score": 3, "label": "d"}
    finally:
        await runner.cleanup()
    for name, message in (
        ("remote_rm", "--rm-url"),
        ("maths", "no such reward"),
        ("f1", "compares replies with a label"),
    ):
        with pytest.raises(EnvError, match=message):
            await async_rm(SimpleNamespace(rm_type=name), Sample(response="x"))


def environment(path, rows, **args):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_environment("dataset", {"path": str(path)} | args, "mine", RUN)


def test_an_environment_rewards_by_name_or_by_record(tmp_path):
    rows = [{"prompt": "word", "label": "word", "metadata": {"rm_type": "f1"}}]
    for reward, expected in (("f1", {0.0, 1.0}), ("by_record", {0.0, 1.0}), ("dapo", {0.0, 1.0})):
        group, _ = play(environment(tmp_path / "a.jsonl", rows, reward=reward), members=8)
        assert {rollout.reward for rollout in group.rollouts} == expected, group.rollouts[0].error
    plain = [{"prompt": "word", "label": "word"}]
    group, _ = play(environment(tmp_path / "b.jsonl", plain, reward="dapo"), members=2)
    assert [rollout.reward for rollout in group.rollouts] == [-1.0, -1.0]
    with pytest.raises(DataError, match=r"metadata.rm_type is None, and it says how"):
        environment(tmp_path / "c.jsonl", plain, reward="by_record")
    with pytest.raises(DataError, match=r'no .label. \(label_key\); reward = "boxed_f1" compares'):
        environment(tmp_path / "d.jsonl", [{"prompt": "a"}], reward="boxed_f1")
    with pytest.raises(ConfigError, match='reward = "f2": use "exact", "math", "dapo"'):
        environment(tmp_path / "e.jsonl", plain, reward="f2")
