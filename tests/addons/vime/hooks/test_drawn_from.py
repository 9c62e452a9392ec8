"""Trained replies are samples of the policy: top_p and the like are replayed or refused, greedy turns skipped."""

from __future__ import annotations

import itertools
import textwrap

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from turns import Turns, play_turns

from stretto.base.errors import EngineError, EnvError
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.batch import samples_of
from stretto.vime import Sample, post
from stretto.vime.convert import sample_of
from stretto_vime.hooks.batches import _apply_row
from stretto_vime.hooks.engine import requests_to_engines
from stretto_vime.hooks.trained import branch_of


def test_a_conversion_trains_no_token_that_is_no_sample():
    [rollout] = play_turns(Turns({}, {"temperature": 0.0}, {}))
    train = next(each for each in samples_of(rollout, 1.0) if not each.loss_mask.all())
    sample = sample_of(rollout, "", int(train.sample_id.rpartition("/")[2]))
    masks, size = sample.loss_mask, sample.response_length
    assert 0 in masks
    assert _apply_row(train, sample, {"loss_masks": masks}, 200).loss_mask.sum() == sum(masks)
    with pytest.raises(EnvError, match=f"loss_masks trains token {masks.index(0)} of the response"):
        _apply_row(train, sample, {"loss_masks": [1] * size}, 200)


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
