"""What is kept of every trained token: the right values at the right places, within a budget."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny import build_learner, documents, pack

from stretto.records.trained_tokens import TrainedTokens, read_rollout, samples_of, step_sizes, write_step
from stretto.trainer.batch.token_values import PassValues, TokenValues, excess_steps, in_columns

COLUMNS = ("position", "log_ratio", "entropy", "advantage")


def passes_of(mb, order, log_ratio, entropy):
    """A pass over the trained tokens of a micro batch, in some order of its own."""
    sources = np.flatnonzero(mb.loss_mask)[order]
    owners = np.searchsorted(mb.cu_seqlens, sources, side="right") - 1
    return PassValues(mb, sources, owners, torch.tensor(np.stack((log_ratio, entropy))).half())


@pytest.mark.parametrize("has_token_advantages", [False, True])
def test_columns_have_every_trained_token_in_the_order_of_the_text(has_token_advantages):
    mb = replace(pack(documents(3)), sample_ids=tuple(f"g{at}.0/1" for at in range(len(documents(3)))))
    rng = np.random.default_rng(0)
    num = int(mb.loss_mask.sum())
    if has_token_advantages:
        mb = replace(mb, advantages=rng.normal(size=len(mb.token_ids)).astype(np.float32))
    else:
        lengths = np.diff(mb.cu_seqlens)
        mb = replace(mb, advantages=np.repeat(rng.normal(size=len(lengths)).astype(np.float32), lengths))
    order = rng.permutation(num)
    log_ratio, entropy = rng.normal(size=(2, num)).astype(np.float16)
    tokens = in_columns([passes_of(mb, order, log_ratio[order], entropy[order])])
    trained = np.flatnonzero(mb.loss_mask)
    owner = np.searchsorted(mb.cu_seqlens, trained, side="right") - 1
    by_name = sorted(samples_of(tokens), key=lambda pair: mb.sample_ids.index(pair[0]))
    whole = {name: np.concatenate([getattr(each, name) for _, each in by_name]) for name in COLUMNS}
    assert whole["position"].tolist() == (trained - mb.cu_seqlens[owner]).tolist()
    assert whole["log_ratio"].tolist() == log_ratio.tolist() and whole["entropy"].tolist() == entropy.tolist()
    assert whole["advantage"] == pytest.approx(mb.advantages[trained], abs=2e-3)
    assert (tokens.advantages.dtype == np.float16) == has_token_advantages


def test_a_sample_that_is_trained_again_in_a_step_has_the_values_of_the_first_pass():
    mb = pack(documents(1))
    mb = replace(mb, sample_ids=tuple(f"g{at}.0/0" for at in range(len(mb.sample_ids))))
    num = int(mb.loss_mask.sum())
    first, second = (passes_of(mb, np.arange(num), np.full(num, value), np.zeros(num)) for value in (0.5, 2.0))
    assert set(in_columns([first, second]).log_ratio.tolist()) == {0.5}


def test_the_log_ratio_to_an_unknown_log_probability_is_unknown():
    mb = pack(documents(1))
    mb = replace(mb, logprobs=np.full_like(mb.logprobs, np.nan))
    num = int(mb.loss_mask.sum())
    tokens = in_columns([passes_of(mb, np.arange(num), np.zeros(num), np.ones(num))])
    assert np.isnan(tokens.log_ratio).all() and (tokens.entropy == 1).all()


def test_what_a_learner_trains_is_on_disk_with_its_own_values(tmp_path):
    learner, mb, seen = build_learner(), pack(documents(1)), []
    mb = replace(mb, sample_ids=tuple(f"g{at}.3/0" for at in range(len(mb.sample_ids))))
    values = TokenValues(tmp_path, 10**6)
    learner.observers += [values.add, lambda step, mb, inputs, logprobs, entropy: seen.append((logprobs, entropy))]
    scored = learner.logprobs(mb)[0]
    learner.forward_backward([mb])
    learner.optim_step()
    values.end_step(learner.step)
    values.close()
    assert list(step_sizes(tmp_path)) == [1] and len(seen) == 1
    for document, (begin, end) in enumerate(zip(mb.cu_seqlens, mb.cu_seqlens[1:])):
        positions = np.flatnonzero(mb.loss_mask[begin:end])
        [columns] = read_rollout(tmp_path, 1, f"g{document}.3").values()
        assert columns.position.tolist() == positions.tolist()
        expected = (scored - mb.logprobs)[begin:end][positions]
        assert columns.log_ratio == pytest.approx(expected, abs=1e-2)
    entropies = np.concatenate([read_rollout(tmp_path, 1, f"g{at}.3")[0].entropy for at in range(len(mb.sample_ids))])
    assert sorted(entropies.tolist()) == sorted(seen[0][1].detach().half().tolist())


def test_files_of_all_ranks_are_read_and_a_missing_one_is_no_error(tmp_path):
    for rank in range(2):
        one = TrainedTokens((f"g1.{rank}/{rank}",), *(np.array([each], np.int32) for each in (1, 7, 1)),
            *(np.zeros(1, np.float16),) * 2, np.zeros(1, np.float32))  # fmt: skip
        write_step(tmp_path / f"rank_{rank}", 4, one)
    assert list(read_rollout(tmp_path, 4, "g1.1")) == [1]
    assert read_rollout(tmp_path, 4, "g1.10") == read_rollout(tmp_path, 5, "g1.1") == {}


def test_within_the_budget_the_newest_steps_stay_and_of_older_ones_every_tenth_and_hundredth():
    sizes: dict[int, int] = {}
    for step in range(1, 1001):
        sizes[step] = 10
        for old in excess_steps(sizes, 400):
            del sizes[old]
        assert sum(sizes.values()) <= 400
    assert set(range(981, 1001)) <= set(sizes) and set(range(100, 1001, 100)) <= set(sizes)
    older = [step for step in sizes if step <= 980]
    assert older and all(step % 10 == 0 for step in older)


def test_one_step_beyond_the_budget_is_not_kept():
    assert excess_steps({1: 500}, 400) == [1]


def test_a_disk_that_refuses_ends_the_writing_with_one_message_and_not_the_training(tmp_path, caplog):
    (tmp_path / "values").write_text("no directory")
    values, mb = TokenValues(tmp_path / "values", 10**6), pack(documents(1))
    inputs = SimpleNamespace(sources=np.flatnonzero(mb.loss_mask), documents=np.zeros(int(mb.loss_mask.sum()), int))
    inputs.streams = SimpleNamespace(behavior_logprobs=torch.zeros(len(inputs.sources)))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            values.add(step, mb, inputs, torch.zeros(len(inputs.sources)), torch.zeros(len(inputs.sources)))
            values.end_step(step)
        values.close()
    [record] = [each for each in caplog.records if "training goes on" in each.message]
    assert "from step 1 on" in record.message
