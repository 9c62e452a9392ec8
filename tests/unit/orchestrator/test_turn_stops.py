"""What ends a reply and what bans tokens, in turns: what is requested, what environments see, what is refused."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from fakes import CharRenderer, EchoEnv, FakeEngine, parrot, run_virtual
from orchestrator_runs import config

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import RolloutResult, SingleTurnEnv, TaskSource
from stretto.orchestrator.batch import samples_of
from stretto.orchestrator.dry_run import check_sampling
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import RolloutStatus
from stretto.records.support import Support


class ScriptedEngine(FakeEngine):
    """Answers with these texts, one after another; one that ends with `stop` was ended by it."""

    def __init__(self, *texts: str, stop: str | int | None = "</s>") -> None:
        super().__init__(parrot(1.0))
        self.texts, self.stop = list(texts), stop
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        made = []
        for _ in range(request.n):
            ids = np.array([ord(char) for char in self.texts.pop(0)], np.int32)
            support = Support.of([[token, 46] for token in ids.tolist()])
            made.append(
                Completion(
                    token_ids=ids,
                    logprobs=np.full(len(ids), -1.0, np.float32),
                    finish_reason="stop",
                    stop_reason=self.stop,
                    support=support if request.sampling.is_truncated else None,
                )
            )
        return made


class Searching:
    """Continues its own tokens after each stop, as a search tool does."""

    name = "searching"
    limits = None

    def __init__(self) -> None:
        self.replies: list = []

    def tasks(self, split: str) -> TaskSource:
        return EchoEnv().tasks(split)

    async def rollout(self, task, ctx) -> RolloutResult:
        tokens = np.array([ord(char) for char in "q:"], np.int32)
        for _ in range(2):
            reply = await ctx.generate(tokens)
            self.replies.append(reply)
            result = np.array([ord(char) for char in "<i>r</i>"], np.int32)
            tokens = np.concatenate((tokens, reply.token_ids, result))
        return RolloutResult(reward=1.0)


def play(env, engine, *, members=1, **settings):
    settings = {
        "sampling": SamplingSection(stop="</s>"), "seq_len": 200, "is_learned": True, "max_retries": 0,
    } | settings  # fmt: skip
    player = Player(engine=engine, renderer=CharRenderer(), **settings)
    draw = Draw(0, env.tasks("train").task(7), members, version=0)
    return run_virtual(player.play(env, draw)).rollouts


def test_an_episode_goes_on_after_a_stop_in_one_branch_with_all_of_its_tokens():
    env, engine = Searching(), ScriptedEngine("<s>a</s>\n", "<s>b</s>")
    [rollout] = play(env, engine)
    assert rollout.status is RolloutStatus.FINISHED, "a reply that a stop text ended is not cut off"
    first, second = env.replies
    assert (first.text, first.stop_reason, first.finish_reason) == ("<s>a</s>", "</s>", "stop")
    assert "".join(map(chr, first.token_ids)) == "<s>a</s>\n", "the last token is whole"
    assert second.text == "<s>b</s>"
    [branch] = rollout.branches
    assert "".join(map(chr, branch.token_ids)) == "q:<s>a</s>\n<i>r</i><s>b</s>"
    trained = "".join(chr(token) for token, is_sampled in zip(branch.token_ids, branch.is_sampled) if is_sampled)
    assert trained == "<s>a</s>\n<s>b</s>"
    [sample] = samples_of(rollout, 1.0)
    assert sample.loss_mask.sum() == len(trained)
    assert [request.sampling.stop for request in engine.requests] == [("</s>",)] * 2


class Scored(SingleTurnEnv):
    name = "scored"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def tasks(self, split: str) -> TaskSource:
        return EchoEnv().tasks(split)

    def prompt(self, task):
        return "abc"

    def score(self, task, text):
        self.texts.append(text)
        return 1.0


def test_a_reward_sees_the_text_up_to_and_including_the_stop():
    env = Scored()
    rollouts = play(env, ScriptedEngine("x</s>y", "z</s>"), members=2)
    assert sorted(env.texts) == ["x</s>", "z</s>"]
    assert sorted(len(r.branches[0].token_ids[r.branches[0].is_sampled]) for r in rollouts) == [5, 6]


def test_a_token_that_is_a_stop_is_told_and_cuts_no_text():
    env, engine = Searching(), ScriptedEngine("ab", "cd", stop=98)
    play(env, engine, sampling=SamplingSection(stop_token_ids=[98, 100]))
    assert [(reply.text, reply.stop_reason) for reply in env.replies] == [("ab", 98), ("cd", 98)]
    assert engine.requests[0].sampling.stop_token_ids == (*CharRenderer().stop_ids, 98, 100)


def test_a_turns_own_settings_replace_those_of_the_run():
    class Own(Searching):
        async def rollout(self, task, ctx):
            await ctx.chat([{"role": "user", "content": "a"}], stop=["x", "y"], stop_token_ids=[5], min_tokens=2)
            await ctx.agent("b", is_trained=False).chat(
                [{"role": "user", "content": "a"}], stop="z", logit_bias={"a": 2.0, 98: -1.0}, bad_words="no"
            )
            return RolloutResult(reward=1.0)

    engine = ScriptedEngine("a", "b", stop=None)
    [rollout] = play(Own(), engine, max_support=8)
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    first, second = (request.sampling for request in engine.requests)
    assert (first.stop, first.min_tokens, first.top_k) == (("x", "y"), 2, 8)
    assert first.stop_token_ids == (*CharRenderer().stop_ids, 5)
    assert (second.stop, second.logit_bias, second.bad_words) == (("z",), {97: 2.0, 98: -1.0}, ("no",))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"min_tokens": 3}, "min_tokens = 3: the engine's log-probabilities"),
        ({"bad_words": ["no"]}, "bad_words = ['no']: the engine's log-probabilities"),
        ({"logit_bias": {"97": 1.0}}, "logit_bias: the engine's log-probabilities would be of the changed logits"),
    ],
)
def test_what_changes_the_distribution_is_replayed_or_refused(sampling, words):
    section = SamplingSection(**sampling)
    [rollout] = play(Searching(), ScriptedEngine("a", "b"), sampling=section)
    assert rollout.status is RolloutStatus.FAILED and words in rollout.error
    [rollout] = play(Searching(), ScriptedEngine("a", "b"), sampling=section, is_learned=False)
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    [rollout] = play(Searching(), ScriptedEngine("a", "b"), sampling=section, max_support=8)
    is_replayed = "logit_bias" not in sampling
    assert (rollout.status is RolloutStatus.FINISHED) == is_replayed
    if is_replayed:
        assert rollout.branches[0].support is not None


def test_a_trained_reply_without_supports_is_refused():
    class Silent(ScriptedEngine):
        async def generate(self, request):
            return [msgspec.structs.replace(c, support=None) for c in await super().generate(request)]

    [rollout] = play(Searching(), Silent("a", "b"), sampling=SamplingSection(min_tokens=1), max_support=8)
    assert rollout.status is RolloutStatus.FAILED and "enable_return_sampling_mask" in rollout.error


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"stop_token_ids": [3, 10**6]}, r"sampling\.stop_token_ids has 1000000, and the model's tokens are 0 to"),
        ({"bad_words": [" "]}, r"train\.sampling\.bad_words has ' ', which has no token"),
        ({"logit_bias": {"abc": 1.0}}, r"train\.sampling\.logit_bias: 'abc' is 3 tokens"),
        ({"logit_bias": {"1000000": 1.0}}, r"train\.sampling\.logit_bias has token 1000000"),
        ({"stop": "</s>", "stop_token_ids": [3], "bad_words": ["a"], "logit_bias": {"a": 1.0}}, None),
    ],
)
def test_a_dry_run_finds_tokens_and_texts_that_are_none(tmp_path, sampling, words):
    class Renderer(CharRenderer):
        class tokenizer:
            vocab_size = 128

    cfg = config(tmp_path)
    train = cfg.train.model_copy(update={"sampling": SamplingSection(**sampling)})
    cfg = cfg.model_copy(update={"train": train})
    if words is None:
        check_sampling(cfg, Renderer())
        return
    with pytest.raises(ConfigError, match=words):
        check_sampling(cfg, Renderer())


def toml(value) -> str:
    """A value of a TOML file, in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"sampling": {"stop": ["a", ""]}}}, "train.sampling.stop has an empty text"),
        ({"train": {"sampling": {"bad_words": [" "]}, "replay": {}}}, "bad_words has an empty text"),
        (
            {"train": {"sampling": {"min_tokens": 9, "max_completion_tokens": 5}, "replay": {}}},
            "min_tokens = 9 is more than",
        ),
        ({"train": {"sampling": {"min_tokens": 9}}}, "or add [orchestrator.train.replay]"),
        ({"env": [{"id": "sort-letters", "sampling": {"bad_words": ["a"]}}]}, "env.0.sampling.bad_words"),
        ({"train": {"sampling": {"logit_bias": {"a": 1.0}}, "replay": {}}}, "or ban words with bad_words"),
        ({"train": {"sampling": {"logit_bias": {"a": 101.0}}}}, "logit_bias"),
        ({"train": {"sampling": {"min_tokens": 9}, "replay": {}}}, None),
        ({"train": {"sampling": {"stop": "</s>", "stop_token_ids": [3]}}}, None),
        ({"eval": {"sampling": {"logit_bias": {"a": 1.0}, "min_tokens": 3, "bad_words": ["b"]}}}, None),
    ],
)
def test_a_config_is_refused_with_a_way_out(tmp_path, given, words):
    file = tmp_path / "run.toml"
    section = {"env": [{"id": "sort-letters"}]} | given
    file.write_text("orchestrator = " + toml(section))
    if words is None:
        load(RLConfig, ["@", str(file)])
        return
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["@", str(file)])
    assert words in str(caught.value)
