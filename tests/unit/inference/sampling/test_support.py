"""Supports, the tokens left by top_p, top_k and min_p: recorded by the engine, sent, and used in training."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_runs import ask, build_core, build_model, run
from sampling_cases import SETTINGS, build_rows, slow_distribution
from tiny import VOCAB, build_learner, build_policy, documents, gradients, pack

from stretto.algorithms.losses import TokenCounts, TokenStreams, total_loss
from stretto.algorithms.sample_index import SampleIndex
from stretto.base.errors import DataError, WireError
from stretto.config.sections.algorithm import CorrectionSection, DefaultLoss, GspoLoss, ReinforceLoss, RejectSection
from stretto.inference.embedded.sampler import sample, stream_key, uniforms
from stretto.models import lm_head
from stretto.models.lm_head import token_logprobs
from stretto.orchestrator.batch import samples_of, to_micro_batch
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.records.codec import decode, encode
from stretto.records.generate import Completion, GenerateRequest, SamplingParams, VersionSpan
from stretto.records.partial import concat_completions, cut_completion
from stretto.records.rollout import Rollout, RolloutStatus, Task
from stretto.records.sample import MicroBatch
from stretto.records.support import Support, concat_supports
from stretto.trainer.updates import _merge_documents, split_samples
from stretto.transports.engine.completions import decode_completions

CUTS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 8, "min_p": 0.02, "temperature": 1.4},
}
PROMPT = np.arange(2, 14, dtype=np.int32)


def random_support(rng: np.random.Generator, targets: np.ndarray, vocab: int = VOCAB) -> Support:
    """Supports that hold the target at most positions, and are empty at some."""
    parts = []
    for target in targets.tolist():
        size = 0 if rng.random() < 0.3 else int(rng.integers(1, vocab // 2))
        parts.append(np.union1d(rng.permutation(vocab)[:size], [target]) if size else [])
    return Support.of(parts)


# -- the record --


def test_positions_are_picked_and_concatenated_like_lists():
    rng = np.random.default_rng(0)
    support = random_support(rng, rng.integers(0, VOCAB, 30))
    lists = support.lists()
    assert Support.of(lists).lists() == lists and len(support) == 30
    assert support.part(4, 19).lists() == lists[4:19]
    assert support.part(0, 0).lists() == []
    index = np.array([29, 3, 3, 0])
    assert support.at(index).lists() == [lists[i] for i in index]
    is_kept = rng.random(30) < 0.5
    assert support.where(is_kept).lists() == [ids if kept else [] for ids, kept in zip(lists, is_kept)]
    assert concat_supports([None, support, None], [2, 30, 1]).lists() == [[], [], *lists, []]
    assert concat_supports([None, None], [2, 3]) is None


def test_a_support_travels_with_its_completion_and_is_cut_and_continued_with_it():
    completion = Completion(
        token_ids=np.arange(4, dtype=np.int32), logprobs=np.zeros(4, np.float32), finish_reason="stop",
        versions=(VersionSpan(0, 0, 4),), support=Support.of([[0, 9], [1], [], [3, 4, 5]]),
    )  # fmt: skip
    back = decode(encode(completion), Completion)
    assert back.support.lists() == completion.support.lists()
    first = cut_completion(completion, 2)
    assert first.support.lists() == [[0, 9], [1]]
    rest = msgspec.structs.replace(first, versions=(VersionSpan(1, 0, 2),), support=Support.of([[7], [8, 9]]))
    assert concat_completions(first, rest).support.lists() == [[0, 9], [1], [7], [8, 9]]
    bare = msgspec.structs.replace(rest, support=None)
    assert concat_completions(first, bare).support.lists() == [[0, 9], [1], [], []]


def answer(mask, **sampling):
    spec = GenerateRequest(request_id="a", prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=2, **sampling))
    choice = {"index": 0, "token_ids": [4, 5], "finish_reason": "length", "sampling_mask": mask}
    choice["logprobs"] = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
    return decode_completions(spec, msgspec.json.encode({"choices": [choice]}))[0].support


def test_an_engines_answer_is_read_where_something_was_cut():
    assert answer([[4, 6], []], top_p=0.5).lists() == [[4, 6], []]
    assert answer([[], []], top_p=0.5).lists() == [[], []]
    assert answer(None, top_p=0.5) is None
    assert answer([[4, 6], [5]]) is None
    assert answer([[4, 6], [5]], top_p=0.5, temperature=0.0) is None
    with pytest.raises(WireError, match="sampling_mask has 1 entries for 2 tokens"):
        answer([[4]], top_p=0.5)
    with pytest.raises(WireError, match="beyond 32 bits"):
        answer([[4], [2**40]], top_p=0.5)


# -- the engine --


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_sampler_says_what_it_left(setting):
    logits = torch.randn(12, 24, generator=torch.Generator().manual_seed(2)) * 2
    supports: dict[int, np.ndarray] = {}
    u = uniforms(np.full(12, stream_key(3, 0), np.uint64), np.arange(12))
    tokens, _ = sample(logits.clone(), build_rows(12, **setting), u, supports)
    is_cutting = setting["top_k"] is not None or setting["top_p"] < 1 or setting["min_p"] > 0
    assert sorted(supports) == (list(range(12)) if is_cutting else [])
    for row, ids in supports.items():
        expected = np.flatnonzero(slow_distribution(logits[row].tolist(), **setting))
        assert sorted(ids.tolist()) == ([] if len(expected) == 24 else expected.tolist())
        assert not len(ids) or tokens[row] in ids


def drawn(*, n: int = 6, engine=None, **sampling) -> MicroBatch:
    """Samples of an engine with the weights of `build_model(3)`, packed by the orchestrator's own path."""
    core = build_core(build_model(3), **{"enable_return_sampling_mask": True} | (engine or {}))
    completions = run(core, ask("a", PROMPT, n=n, max_tokens=20, **sampling))[0]
    assert not core.scheduler.supports, "nothing is left behind"
    assert bool(core.scheduler.counters.num_preemptions) == bool(engine)
    return packed(completions, sampling.get("temperature", 1.0))


def packed(completions, temperature: float) -> MicroBatch:
    samples = []
    for member, completion in enumerate(completions):
        branch = OpenBranch(temperature)
        branch.add_turn(PROMPT, completion, 0)
        rollout = Rollout(
            rollout_id=f"g0.{member}", group_id=0, member=member, status=RolloutStatus.FINISHED,
            task=Task(env="env", task_id="0", data={}), branches=(branch.close(),),
        )  # fmt: skip
        samples += samples_of(rollout, 1.0 if member % 2 else -1.0)
    return to_micro_batch(samples)


def ratios(mb: MicroBatch) -> np.ndarray:
    """Trainer to engine, with the same weights."""
    [logprobs] = build_learner(build_model(3)).trained_logprobs([mb])
    return np.exp(logprobs - mb.logprobs)[mb.loss_mask]


@pytest.mark.heavy
@pytest.mark.parametrize("engine", [{}, {"kv_cache_tokens": 96, "max_model_len": 48}], ids=["roomy", "preempting"])
@pytest.mark.parametrize("cut", CUTS)
def test_ratio_of_trainer_to_engine_is_one(cut, engine):
    mb = drawn(engine=engine, **CUTS[cut])
    np.testing.assert_allclose(ratios(mb), 1, atol=1e-5, rtol=0)
    bare = msgspec.structs.replace(mb, support=None)
    assert np.abs(ratios(bare) - 1).max() > 1e-2, "it is the support that makes it so"


def test_an_engine_that_is_not_asked_says_nothing_and_samples_the_same():
    model = build_model(3)
    spec = ask("a", PROMPT, n=3, top_p=0.8)
    without = run(build_core(model), spec)[0]
    with_masks = run(build_core(model, enable_return_sampling_mask=True), spec)[0]
    for one, other in zip(without, with_masks):
        assert one.support is None and other.support is not None
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_an_aborted_reply_has_the_support_of_its_tokens():
    core = build_core(build_model(3), enable_return_sampling_mask=True)
    request = core.build_request(ask("a", PROMPT, n=2, top_k=4, max_tokens=30))
    core.submit(request)
    for _ in range(6):
        core.step()
    core.abort()
    for completion in request.completions:
        assert len(completion.support) == len(completion.token_ids) > 0
        assert (completion.support.sizes == 4).all()


# -- the head --


def naive(hidden, weight, targets, temperatures, support):
    logits = (hidden @ weight.T) / temperatures[:, None]
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(support.lists()):
        is_kept[row, ids or list(range(logits.shape[1]))] = True
        is_kept[row, targets[row]] = True
    logprobs = F.log_softmax(logits.masked_fill(~is_kept, -torch.inf), dim=-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~is_kept, 0.0)).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("saved", [1 << 21, 0], ids=["kept", "recomputed"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_head_normalises_over_what_was_left(monkeypatch, saved, chunk):
    monkeypatch.setattr(lm_head, "MAX_SAVED_LOGITS", saved)
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    hidden = torch.randn(37, 16, generator=generator).requires_grad_()
    weight = torch.randn(29, 16, generator=generator).requires_grad_()
    targets = torch.randint(0, 29, (37,), generator=generator)
    temperatures = torch.rand(37, generator=generator) + 0.5
    support = random_support(rng, targets.numpy(), 29)
    support = Support.of([[i for i in ids if i != targets[0]] for ids in support.lists()])  # the target stays
    probes = torch.linspace(-1, 2, 37), torch.linspace(3, -2, 37)
    results = []
    for logprobs, entropy in (
        token_logprobs(hidden, weight, targets, temperatures, chunk, entropy_grad=True, support=support),
        naive(hidden, weight, targets, temperatures, support),
    ):
        value = (logprobs * probes[0]).sum() + (entropy * probes[1]).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(value, (hidden, weight))))
    for fused, slow in zip(*results):
        torch.testing.assert_close(fused, slow, atol=2e-5, rtol=1e-5)


# -- the batch --


def with_supports(seed: int = 0, **shape) -> list[MicroBatch]:
    """Documents alone in their micro batches, with a support of their trained tokens."""
    rng, found = np.random.default_rng(seed), []
    for doc in documents(seed, **shape):
        mb = pack([doc])
        support = random_support(rng, mb.token_ids).where(mb.loss_mask)
        found.append(msgspec.structs.replace(mb, support=support))
    return found


def joined_row(mbs: list[MicroBatch]) -> MicroBatch:
    """All documents in one micro batch, as a step of several updates concatenates them."""
    return _merge_documents([(mb, 0) for mb in mbs])


@pytest.mark.heavy
@pytest.mark.parametrize("sharing", ["tree", "prompts", "off"])
def test_gradients_do_not_depend_on_packing(sharing):
    mbs, results = with_supports(), []
    mbs[1] = msgspec.structs.replace(mbs[1], support=None)
    row = joined_row(mbs)
    halves = [joined_row(mbs[::2]), joined_row(mbs[1::2])]
    dealt = [mb for part in split_samples([row], 3) for mb in part]
    for batch in (mbs, [row], halves, dealt):
        learner = build_learner(build_policy(2))
        learner.network.sharing = sharing
        learner.forward_backward(batch)
        results.append(gradients(learner))
    for other in results[1:]:
        for name, grad in results[0].items():
            torch.testing.assert_close(other[name], grad, atol=1e-5, rtol=1e-4)
    plain = build_learner(build_policy(2))
    plain.forward_backward([msgspec.structs.replace(row, support=None)])
    assert any(not torch.allclose(grad, results[0][name]) for name, grad in gradients(plain).items())


def test_reference_and_policy_are_compared_over_the_same_tokens():
    mb = drawn(top_k=5)
    learner = build_learner(build_model(3))
    learner.network.reference = build_model(3)
    [own], [reference] = learner.trained_logprobs([mb]), learner.trained_logprobs([mb], is_reference=True)
    np.testing.assert_allclose(own, reference, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: Support(np.append(s.ids, 0).astype(np.int32), s.sizes), "and .* ids"),
        (lambda s: s.part(0, len(s) - 1), "there are .* tokens"),
        (lambda s: Support(s.ids + VOCAB, s.sizes), "token id .*the model knows 0..39"),
    ],
)
def test_a_support_that_does_not_fit_is_named(change, words):
    [mb, *_] = with_supports(3, num_groups=1, group_size=2)
    mb = msgspec.structs.replace(mb, support=change(random_support(np.random.default_rng(0), mb.token_ids)))
    with pytest.raises(DataError, match=words):
        build_learner().forward_backward([mb])


def taught(loss, *, is_replayed: bool, num_steps: int = 80) -> float:
    """Probability of a rewarded token after training on tokens that the engine samples with a top_k.

    Samples of eight tokens from one distribution over 64; a third of the tokens earns 1.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 1, generator=generator).requires_grad_()
    is_good = torch.arange(64) % 3 == 0
    optimizer, hidden, once = torch.optim.Adam([weight], lr=0.03), torch.ones(256, 1), torch.ones(256)
    rows, key = build_rows(256, top_k=12), np.full(256, stream_key(1, 0), np.uint64)
    sample_index = SampleIndex.of(torch.full((32,), 8))
    for step in range(num_steps):
        supports: dict[int, np.ndarray] = {}
        u = uniforms(key, np.arange(256) + 256 * step)
        drawn_tokens, behavior = sample(weight.detach().T.repeat(256, 1), rows, u, supports)
        tokens = torch.from_numpy(drawn_tokens)
        support = Support.of([supports[i] for i in range(256)]) if is_replayed else None
        logprobs, _ = token_logprobs(hidden, weight, tokens, once, 64, support=support)
        rewards = sample_index.mean(is_good[tokens].float(), once.bool())
        streams = TokenStreams(
            is_sampled=once.bool(),
            behavior_logprobs=torch.from_numpy(behavior),
            advantages=(rewards - rewards.mean())[sample_index.index],
            rl_weights=once,
            sample_index=sample_index,
        )
        value, _ = total_loss(logprobs, streams, TokenCounts(256, 0, 0, 32), loss)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    left, ids = weight.detach()[:, 0].topk(12)
    return float(torch.softmax(left, 0)[is_good[ids]].sum())


BANDITS = {
    "reinforce, geometric rejection": ReinforceLoss(correction=CorrectionSection(reject=RejectSection())),
    "gspo": GspoLoss(),
    "default": DefaultLoss(),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", BANDITS)
def test_a_bandit_learns_from_cuts_that_are_replayed(name):
    before = taught(BANDITS[name], is_replayed=True, num_steps=0)
    assert before < 0.5 and taught(BANDITS[name], is_replayed=True) > 0.9


@pytest.mark.heavy
def test_a_bandit_learns_nothing_where_every_sample_is_rejected_for_its_cut():
    loss = BANDITS["reinforce, geometric rejection"]
    before = taught(loss, is_replayed=False, num_steps=0)
    assert taught(loss, is_replayed=False) == pytest.approx(before)


def test_tokens_that_are_not_trained_send_no_support():
    core = build_core(build_model(3), enable_return_sampling_mask=True)
    [completion] = run(core, ask("a", PROMPT, top_k=5, max_tokens=8))[0]
    branch = OpenBranch(1.0)
    branch.add_turn(PROMPT, completion, 0)
    branch.add_turn(np.concatenate((branch.token_ids, PROMPT)), completion, 0, is_greedy=True)
    rollout = Rollout(
        rollout_id="g0.0", group_id=0, member=0, status=RolloutStatus.FINISHED,
        task=Task(env="env", task_id="0", data={}), branches=(branch.close(),),
    )  # fmt: skip
    [sampled] = samples_of(rollout, 1.0)
    mb = to_micro_batch([sampled])
    assert len(sampled.support) == len(mb.token_ids) == len(mb.support) == 40
    assert sampled.support.sizes[12:20].tolist() == sampled.support.sizes[32:].tolist() == [5] * 8
    assert mb.loss_mask.sum() == 8 and mb.support.sizes.tolist() == [0] * 12 + [5] * 8 + [0] * 20
