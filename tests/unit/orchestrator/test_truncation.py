"""Trained replies are samples of the policy: top_p and the like are replayed or refused, greedy turns skipped."""

from __future__ import annotations

import itertools
import json
import textwrap

import msgspec
import numpy as np
import pytest
from fakes import CharRenderer, EchoEnv, FakeEngine, FakeTrainer, parrot, run_virtual
from orchestrator_runs import config, train

from stretto.base.errors import EngineError, EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import RolloutResult, TaskSource
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.batch import samples_of
from stretto.orchestrator.batch_hooks import _apply_row
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.run.pipeline import trained_player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import RolloutStatus
from stretto.records.support import Support
from stretto.vime import Sample, post
from stretto.vime.convert import branch_of, sample_of
from stretto.vime.engine import requests_to_engines


class TellingEngine(FakeEngine):
    """Reports for each token of a restricted reply that it was drawn from itself and the full stop."""

    requests: list[GenerateRequest]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        completions = await super().generate(request)
        if not request.sampling.is_truncated:
            return completions
        supports = [Support.of([[int(token), 46] for token in c.token_ids]) for c in completions]
        return [msgspec.structs.replace(c, support=s) for c, s in zip(completions, supports)]


class Turns:
    """Plays one turn with each of these settings; the setting `agent` names its agent."""

    name = "turns"
    limits = None

    def __init__(self, *turns: dict) -> None:
        self.turns = turns

    def tasks(self, split: str) -> TaskSource:
        return EchoEnv().tasks(split)

    async def rollout(self, task, ctx) -> RolloutResult:
        messages = [{"role": "user", "content": "abc"}]
        for turn in self.turns:
            settings = dict(turn)
            who = ctx.agent("other", is_trained=False) if settings.pop("other", False) else ctx
            reply = await who.chat(messages, **settings)
            messages = [*messages, reply.message, {"role": "user", "content": "def"}]
        return RolloutResult(reward=1.0)


def play(env, engine=None, *, members=1, **settings):
    engine = engine or TellingEngine(parrot(1.0))
    settings = {"sampling": SamplingSection(), "seq_len": 200, "is_learned": True, "max_retries": 0} | settings
    player = Player(engine=engine, renderer=CharRenderer(), **settings)
    draw = Draw(0, env.tasks("train").task(7), members, version=0)
    return run_virtual(player.play(env, draw)).rollouts


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"top_k": 20}, "top_k = 20"),
        ({"min_p": 0.1, "top_k": 5}, "top_k = 5, min_p = 0.1"),
    ],
)
def test_a_turn_that_is_cut_and_trained_fails_with_the_reason(turn, words):
    [rollout] = play(Turns({}, turn))
    assert rollout.status is RolloutStatus.FAILED
    assert f"is sampled with {words}:" in rollout.error and "[orchestrator.train.replay]" in rollout.error


@pytest.mark.parametrize(
    "turn",
    [{"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"temperature": 0, "top_p": 0.9}, {"top_p": 0.9, "other": True}],
)
def test_a_turn_that_cuts_nothing_or_is_not_trained_may_be_played(turn):
    [rollout] = play(Turns({}, turn))
    assert rollout.status is RolloutStatus.FINISHED, rollout.error


def test_rollouts_that_are_not_learned_from_are_sampled_as_one_likes():
    [rollout] = play(Turns({"top_p": 0.9}, {"temperature": 0}), is_learned=False)
    assert rollout.status is RolloutStatus.FINISHED and rollout.branches[0].is_greedy is None
    assert len(play(EchoEnv(), is_learned=False, sampling=SamplingSection(top_p=0.5))) == 1


@pytest.mark.parametrize("env", [EchoEnv(), Turns({}, {})], ids=["group", "turns"])
def test_what_was_left_to_draw_from_comes_with_the_tokens(env):
    engine = TellingEngine(parrot(1.0))
    rollouts = play(env, engine, members=3, sampling=SamplingSection(top_p=0.9), max_support=64)
    assert {request.sampling.top_k for request in engine.requests} == {64}, "a bound for the wire"
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.FINISHED, rollout.error
        for branch in rollout.branches:
            parts = branch.support.lists()
            assert len(parts) == len(branch.token_ids)
            for token, is_sampled, part in zip(branch.token_ids.tolist(), branch.is_sampled, parts):
                assert part == ([token, 46] if is_sampled else [])
        assert all(sample.support is not None for sample in samples_of(rollout, 1.0))


def test_a_turn_keeps_its_own_top_k_as_far_as_it_can_be_replayed():
    engine = TellingEngine(parrot(1.0))
    [rollout] = play(Turns({"top_k": 8}, {}, {"min_p": 0.1}), engine, max_support=64)
    assert [request.sampling.top_k for request in engine.requests] == [8, None, 64]
    [branch] = rollout.branches
    assert (branch.support.sizes > 0).sum() == branch.is_sampled.sum() - len("def.")
    [rollout] = play(Turns({"top_k": 65}), max_support=64)
    assert "top_k = 65, more than orchestrator.train.replay.max_tokens = 64" in rollout.error


@pytest.mark.parametrize("env", [EchoEnv(), Turns({})], ids=["group", "turns"])
def test_an_engine_that_does_not_say_what_was_left_is_named(env):
    [rollout] = play(env, FakeEngine(parrot(1.0)), sampling=SamplingSection(top_p=0.9), max_support=64)
    assert rollout.status is RolloutStatus.FAILED
    assert "inference.enable_return_sampling_mask = true" in rollout.error


# -- greedy turns --


def test_tokens_of_a_greedy_turn_are_not_trained():
    [rollout] = play(Turns({}, {"temperature": 0}, {}))
    [branch] = rollout.branches
    [sample] = samples_of(rollout, 1.0)
    assert "".join(chr(i) for i in branch.token_ids[branch.is_greedy]) == "def."
    assert (sample.loss_mask == (branch.is_sampled & ~branch.is_greedy)).all()
    assert sample.loss_mask.sum() == len("abc.def.") and not sample.advantages[branch.is_greedy].any()
    assert rollout.num_sampled_tokens == len("abc.def.def."), "they were sampled all the same"
    shown = sample_of(rollout, "")
    assert shown.loss_mask == sample.loss_mask[-shown.response_length :].astype(int).tolist()


def test_a_conversion_trains_no_token_that_is_no_sample():
    [rollout] = play(Turns({}, {"temperature": 0.0}, {}))
    train = next(each for each in samples_of(rollout, 1.0) if not each.loss_mask.all())
    sample = sample_of(rollout, "", int(train.sample_id.rpartition("/")[2]))
    masks, size = sample.loss_mask, sample.response_length
    assert 0 in masks
    assert _apply_row(train, sample, {"loss_masks": masks}, 200).loss_mask.sum() == sum(masks)
    with pytest.raises(EnvError, match=f"loss_masks trains token {masks.index(0)} of the response"):
        _apply_row(train, sample, {"loss_masks": [1] * size}, 200)


def test_a_rollout_whose_every_turn_is_greedy_fails_with_the_reason():
    [rollout] = play(Turns({"temperature": 0}, {"temperature": 0}))
    assert rollout.status is RolloutStatus.FAILED and "all its replies are greedy" in rollout.error
    [rollout] = play(Turns({"temperature": 0, "other": True}, {}))
    assert rollout.status is RolloutStatus.FINISHED


def test_a_teachers_greedy_turn_is_learned_by_cross_entropy():
    [rollout] = play(Turns({}, {"temperature": 0}))
    frozen = msgspec.structs.replace(rollout.branches[0], is_frozen=True)
    [sample] = samples_of(msgspec.structs.replace(rollout, branches=(frozen,)), 0.0)
    assert (sample.ce_weights > 0).sum() == len("abc.def.") and sample.support is None


def test_only_players_of_trained_environments_require_logprobs(tmp_path):
    teacher = {"base_url": "http://127.0.0.1:9/v1"}
    envs = [
        {"id": "sort-letters"},
        {"id": "reverse-text", "algo": {"type": "sft", "teacher": teacher}, "sampling": {"top_p": 0.9}},
    ]
    cfg = config(tmp_path, env=envs, train={"replay": {"max_tokens": 32}})
    player = Player(engine=None, renderer=None, sampling=cfg.train.sampling, seq_len=10)
    assert not player.is_learned, "as evals play"
    first, second = (trained_player(player, cfg, name) for name in ("sort-letters", "reverse-text"))
    assert (first.is_learned, first.max_support, second.is_learned) == (True, 32, False)


# -- samples that functions bring along --


def brought(**changes) -> Sample:
    return Sample(
        **{
            "tokens": [5, 6, 7, 8], "response_length": 3, "rollout_log_probs": [-1.0, -2.0, -3.0],
            "loss_mask": [1, 0, 1],
        } | changes
    )  # fmt: skip


def test_a_sample_says_its_temperature_and_what_it_was_drawn_from():
    assert branch_of(brought(), 0, 0.7).temperature == 0.7
    branch = branch_of(
        brought(temperature=0.5, rollout_top_p_token_ids=[6, 9, 8], rollout_top_p_token_lengths=[2, 0, 1]), 0, 0.7
    )
    assert branch.temperature == 0.5 and branch.support.lists() == [[], [6, 9], [], [8]]
    with pytest.raises(EnvError, match="temperature is 0: greedy tokens"):
        branch_of(brought(temperature=0.0), 0, 0.7)
    branch_of(brought(temperature=0.0, loss_mask=[0, 0, 0]), 0, 0.7)
    for wrong, words in (
        ({"temperature": -1.0}, "temperature = -1"),
        (
            {"rollout_top_p_token_ids": [1], "rollout_top_p_token_lengths": [1, 1, 0]},
            "has 1 entries, and .* add up to 2",
        ),
        ({"rollout_top_p_token_ids": [1], "rollout_top_p_token_lengths": [1]}, "1 entries for a response of 3"),
        ({"rollout_top_p_token_ids": [1]}, "has 1 entries, and .* add up to 0"),
    ):
        with pytest.raises(EnvError, match=words):
            branch_of(brought(**wrong), 0, 0.7)


def test_a_sample_that_grows_and_shrinks_keeps_what_it_was_drawn_from():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens([3], [-1.0])
    sample.append_response_tokens([4, 5], [-1.0, -2.0], sampling_mask=[[4, 9], [5]])
    sample.append_response_tokens([6], trainable=False)
    assert sample.rollout_top_p_token_ids == [4, 9, 5]
    assert sample.rollout_top_p_token_lengths == [0, 2, 1, 0]
    sample.strip_last_output_tokens(2)
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_lengths) == ([4, 9], [0, 2])
    sample.check()
    with pytest.raises(EnvError, match="sampling_mask of 1"):
        sample.append_response_tokens([4, 5], [-1.0, -2.0], sampling_mask=[[4]])
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """Writes a module with a function and gives its import path."""

    numbers = itertools.count()

    def write(name, code):
        module = f"hooks_of_{tmp_path.name}_{next(numbers)}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(tmp_path))
        return {name: f"{module}:{name}"}

    return write


ROLLOUTS = """
    def rollout_function(args, rollout_id, data_source, evaluation=False):
        groups = data_source.get_samples(args.rollout_batch_size)
        for group in groups:
            for sample in group:
                sample.tokens, sample.response_length = [1, 2, 3], 2
                sample.rollout_log_probs, sample.reward = [-1.0, -2.0], float(sample.index % 2)
                sample.status = sample.Status.COMPLETED
                CHANGE
        return groups
"""


def run_own(path, hook, change, **settings):
    cfg = config(path, hooks=hook("rollout_function", ROLLOUTS.replace("CHANGE", change)), max_steps=2, **settings)
    trainer = FakeTrainer(max_steps=2)
    train(cfg, FakeEngine(parrot(0.5)), trainer)
    assert audit(cfg.run_dir) == []
    with LedgerReader(cfg.run_dir) as ledger:
        errors = {row["error"] for row in ledger.rows("SELECT error FROM rollouts WHERE error IS NOT NULL")}
    rows = [mb for step in trainer.batches for batch in step for mb in batch.micro_batches]
    return rows, errors


def test_an_over_long_sample_of_a_rollout_function_is_a_failed_rollout(tmp_path, hook):
    change = "if sample.index == 2: sample.tokens = [1] * 900 + [2, 3]"
    rows, errors = run_own(tmp_path, hook, change)
    assert len(rows) >= 2 and max(len(mb.token_ids) for mb in rows) <= 400
    assert len(errors) >= 1 and all("it has 902 tokens, more than seq_len" in error for error in errors)


def test_a_number_that_is_no_token_is_a_failed_rollout(tmp_path, hook):
    rows, errors = run_own(tmp_path, hook, "if sample.index == 2: sample.tokens[1] = -5")
    assert len(rows) >= 2 and errors and all("-5 is no token id" in error for error in errors)


def test_temperatures_of_a_rollout_functions_samples_reach_the_trainer(tmp_path, hook):
    rows, errors = run_own(tmp_path, hook, "sample.temperature = 0.5")
    assert not errors and all((mb.temperatures[: mb.num_tokens] == 0.5).all() for mb in rows)


def test_a_rollout_function_says_what_it_drew_from_where_the_run_cuts(tmp_path, hook):
    settings = {"train": {"sampling": {"top_p": 0.9}, "replay": {}}}
    telling = """if sample.index != 2: sample.rollout_top_p_token_ids = [2, 7, 3]
                sample.rollout_top_p_token_lengths = None if sample.index == 2 else [2, 1]"""
    rows, errors = run_own(tmp_path, hook, telling, **settings)
    assert errors and all("does not say what its tokens were drawn from" in error for error in errors)
    for mb in rows:
        assert mb.support.sizes[mb.loss_mask].tolist() == [2, 1] * mb.num_samples
    settings["train"]["replay"] = {"max_tokens": 1}
    with pytest.raises(EnvError, match=r"drawn from 2, .*replay\.max_tokens = 1"):
        run_own(tmp_path / "narrow", hook, telling, **settings)


ASKING = """
    import asyncio
    from stretto.base.errors import EngineError
    from stretto.vime import post

    def rollout_function(args, rollout_id, data_source, evaluation=False):
        groups = data_source.get_samples(args.rollout_batch_size)
        body = {"token_ids": [1], "sampling_params": SAMPLING}
        try:  # nobody listens there
            asyncio.run(post(args.vllm_model_urls["actor"] + "/inference/v1/generate", body, max_retries=0))
        except EngineError:
            pass
        for group in groups:
            for sample in group:
                sample.tokens, sample.response_length = [1, 2, 3], 2
                sample.rollout_log_probs, sample.reward = [-1.0, -2.0], float(sample.index % 2)
                sample.rollout_top_p_token_lengths = None if sample.index == 2 else [0, 0]
                sample.temperature = None if sample.index == 2 else 0.5
                sample.status = sample.Status.COMPLETED
        return groups
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            {"top_p": 0.9},
            "requested top_p, top_k, min_p, min_tokens, bad_words or allowed_token_ids, and it does not say",
        ),
        ({"temperature": 0.5}, "requested temperature = 0.5, the run has 1, and it does not say at which"),
        ({"temperature": 0}, "requested temperature = 0, the run has 1, and it does not say at which"),
        ({"top_p": 1.0, "temperature": 1.0}, None),
    ],
)
def test_a_rollout_function_that_samples_in_its_own_way_says_so(tmp_path, hook, sampling, words):
    named = hook("rollout_function", ASKING.replace("SAMPLING", repr(sampling)))
    cfg = config(tmp_path, hooks=named, max_steps=2, train={"replay": {}})
    trainer = FakeTrainer(max_steps=2)
    train(cfg, FakeEngine(parrot(0.5)), trainer)
    with LedgerReader(cfg.run_dir) as ledger:
        errors = {row["error"] for row in ledger.rows("SELECT error FROM rollouts WHERE error IS NOT NULL")}
    assert bool(errors) == (words is not None) and all(words in error for error in errors)


async def test_a_rollout_function_asks_for_cuts_only_where_they_are_replayed():
    url = "http://127.0.0.1:9/inference/v1/generate"

    async def ask(is_truncated_sampling_refused, **sampling):
        with requests_to_engines(
            ["http://127.0.0.1:9/v1"], lambda: 3, is_truncated_sampling_refused=is_truncated_sampling_refused
        ):
            await post(url, {"token_ids": [1], "sampling_params": sampling}, max_retries=0)

    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with pytest.raises(EnvError, match=r"sampling_params has .*\[orchestrator\.train\.replay\]"):
            await ask(True, **cut)
    for is_truncated_sampling_refused, whole in (
        (False, {"top_p": 0.9}),
        (True, {"top_p": 1, "top_k": -1, "min_p": 0}),
        (True, {"top_p": 0.9, "temperature": 0}),
    ):
        with pytest.raises(EngineError, match="no answer"):  # nobody listens there
            await ask(is_truncated_sampling_refused, **whole)


def test_a_conversion_that_makes_a_sample_too_long_loses_its_batch_and_not_the_run(tmp_path, hook):
    named = hook("convert_samples_to_train_data", """
        calls = []

        def convert_samples_to_train_data(args, samples):
            calls.append(1)
            if len(calls) != 1:
                return {}
            more = [1] * 900
            return {
                "tokens": [sample.tokens + more for sample in samples],
                "response_lengths": [sample.response_length + 900 for sample in samples],
                "loss_masks": [sample.loss_mask + more for sample in samples],
                "rollout_log_probs": [sample.rollout_log_probs + more for sample in samples],
            }
    """)  # fmt: skip
    cfg = config(tmp_path, hooks=named, max_steps=2)
    trainer = FakeTrainer(max_steps=2)
    train(cfg, FakeEngine(parrot(0.5)), trainer)
    assert len(trainer.batches) == 2 and audit(cfg.run_dir) == []
    with LedgerReader(cfg.run_dir) as ledger:
        assert sum(ledger.drops_by_reason().values()) >= 2


def test_a_run_with_cuts_ships_what_was_left_to_draw_from(tmp_path):
    cfg = config(tmp_path, train={"sampling": {"top_p": 0.9}, "replay": {"max_tokens": 16}}, max_steps=2)
    engine, trainer = TellingEngine(parrot(0.5)), FakeTrainer(max_steps=2)
    train(cfg, engine, trainer)
    assert {request.sampling.top_k for request in engine.requests} == {16}
    for mb in (mb for step in trainer.batches for batch in step for mb in batch.micro_batches):
        sizes = mb.support.sizes
        assert (sizes[mb.loss_mask] == 2).all() and not sizes[~mb.loss_mask].any()
        assert np.array_equal(mb.support.ids[::2], mb.token_ids[mb.loss_mask])
