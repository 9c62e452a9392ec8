"""One learner for sft and rl: any packing of a batch gives the same step, and every shortcut the same result."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from tiny import VOCAB, build_learner, build_policy, document, documents, gradients, pack, with_streams

from stretto.algorithms.losses import TokenStreams, total_loss
from stretto.algorithms.policy_loss import AlternativeTokens
from stretto.base.errors import ConfigError, DataError, EngineError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import (
    AdamWOptim,
    ConstantScheduler,
    CosineScheduler,
    DefaultLoss,
    LinearScheduler,
    SgdOptim,
    num_steps,
)
from stretto.models.attention import PackedLayout
from stretto.records.token_counts import count_tokens
from stretto.trainer.batch.pass_inputs import build_pass_inputs
from stretto.trainer.optim.schedule import learning_rate
from stretto.trainer.parallel.scores import compute_logprobs
from stretto.trainer.ranks.mesh import Mesh

CPU = torch.device("cpu")


def slow_step(policy, micro_batches, cfg=None):
    """Slow reference of the gradients: every document alone, all logits, token by token."""
    counts = count_tokens(micro_batches)
    total = torch.zeros(())
    for mb in micro_batches:
        for start, end in pairwise(mb.cu_seqlens):
            ids = torch.from_numpy(mb.token_ids[start:end].astype(np.int64))
            temperatures = torch.from_numpy(mb.temperatures[start + 1 : end])
            hidden = policy.hidden(ids, PackedLayout((0, len(ids)), CPU))
            logits = (hidden @ policy.output_weight.T)[:-1] / temperatures[:, None]
            every = F.log_softmax(logits, -1)
            streams = slow_streams(mb, slice(start + 1, end))
            others = None
            if streams.alternatives is not None:
                others = every.gather(1, streams.alternatives.ids.flatten(1).clamp(min=0))
            logprobs = every.gather(1, ids[1:, None]).squeeze(1)
            total = total + total_loss(logprobs, streams, counts, cfg or DefaultLoss(), alternative_logprobs=others)[0]
    policy.zero_grad()
    total.backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return float(total.detach()), grads


def slow_streams(mb, tokens):
    """Every stream of these tokens, with and without weights."""

    def take(stream):
        return None if stream is None else torch.from_numpy(stream[tokens])

    is_sampled = take(mb.loss_mask)
    return TokenStreams(
        is_sampled=is_sampled,
        behavior_logprobs=take(mb.logprobs),
        advantages=take(mb.advantages),
        rl_weights=is_sampled.float() if mb.rl_weights is None else take(mb.rl_weights) * is_sampled,
        ce_weights=take(mb.ce_weights),
        ref_kl_weights=take(mb.ref_kl_weights),
        ref_logprobs=take(mb.ref_logprobs),
        alternatives=slow_alternatives(mb.alternatives, range(tokens.start, tokens.stop)),
    )


def slow_alternatives(alternatives, tokens):
    """Those of these tokens, one by one."""
    if alternatives is None:
        return None
    rows = {int(position): row for row, position in enumerate(alternatives.positions)}
    columns = []
    for name in ("ids", "logprobs", "weights", "is_forward"):
        values = getattr(alternatives, name)
        empty = np.zeros_like(values[0])
        columns.append(torch.from_numpy(np.stack([values[rows[t]] if t in rows else empty for t in tokens])))
    return AlternativeTokens(columns[0].long(), *columns[1:])


def assert_close(ours, expected, atol=1e-6):
    assert ours.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], atol=atol * max(scale, 1), rtol=1e-4)


@pytest.mark.parametrize("streams", [False, True], ids=["rl", "rl+ce+ref_kl"])
@pytest.mark.parametrize("padding", [0, 5])
def test_gradients_equal_documents_one_by_one(streams, padding):
    mb = pack(documents(), padding=padding)
    mb = with_streams(mb) if streams else mb
    learner = build_learner()
    learner.forward_backward([mb])
    _, expected = slow_step(build_policy(), [mb])
    assert_close(gradients(learner), expected)


def test_gradients_do_not_depend_on_how_the_batch_is_cut():
    docs = documents()
    cuts = [[docs], [docs[:5], docs[5:]], [docs[::2], docs[1::2]], [[d] for d in docs], [docs[::-1]]]
    results = []
    for cut in cuts:
        learner = build_learner()
        learner.forward_backward([pack(part, padding=len(part) % 3) for part in cut])
        results.append((gradients(learner), learner.optim_step()["loss/mean"]))
    for grads, loss in results[1:]:
        assert_close(grads, results[0][0])
        assert loss == pytest.approx(results[0][1], abs=1e-6)


def test_sharing_prompts_saves_tokens_and_changes_nothing():
    mb = pack(documents(num_groups=2, group_size=6))
    shared = build_pass_inputs(mb, VOCAB, CPU, sharing="prompts")
    plain = build_pass_inputs(mb, VOCAB, CPU)
    assert len(shared.token_ids) < 0.7 * len(plain.token_ids)
    policy, learner = build_policy(), build_learner()
    results = []
    for rows in (shared, plain):
        logprobs = compute_logprobs(learner.policy, rows, learner.mesh, ModelSection())[0]
        learner.policy.zero_grad()
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        results.append({"logprobs": logprobs.detach()} | gradients(learner))
    assert policy.shares_prefixes
    assert_close(results[0], results[1], atol=2e-6)
    assert (shared.sources == plain.sources).all()


@pytest.mark.parametrize("seed", range(4))
def test_rows_ask_for_the_token_before_each_trained_one(seed):
    """In any layout, the document and position of an input are those of its token."""
    mb = pack(documents(seed, num_groups=4, group_size=3), padding=4)
    for share in ("off", "prompts", "tree"):
        rows = build_pass_inputs(mb, VOCAB, CPU, sharing=share)
        bounds = mb.cu_seqlens
        starts = bounds[np.searchsorted(bounds, rows.sources, side="right") - 1]
        predicting = rows.rows[rows.predictors].numpy()
        assert (rows.layout.position_ids.numpy()[predicting] == rows.sources - 1 - starts).all()
        assert (rows.token_ids.numpy()[predicting] == mb.token_ids[rows.sources - 1]).all()
        assert (rows.targets.numpy() == mb.token_ids[rows.sources]).all()


def test_logprobs_equal_documents_one_by_one_everywhere():
    mb = pack(documents())
    learner = build_learner()
    logprobs, entropy = learner.logprobs(mb)
    for start, end in pairwise(mb.cu_seqlens):
        ids = torch.from_numpy(mb.token_ids[start:end].astype(np.int64))
        temperatures = torch.from_numpy(mb.temperatures[start:end]).roll(-1)
        with torch.no_grad():
            hidden = learner.policy.hidden(ids, PackedLayout((0, len(ids)), CPU))
            logits = hidden @ learner.policy.output_weight.T / temperatures[:, None]
        expected = F.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        np.testing.assert_allclose(logprobs[start + 1 : end], expected, atol=1e-5)
        assert logprobs[start] == entropy[start] == 0


def test_on_policy_mismatch_is_zero():
    """With the learner's own log-probabilities nothing is masked, and the mismatch is rounding only."""
    learner = build_learner()
    mb = pack(documents())
    mb = replace(mb, logprobs=np.where(mb.loss_mask, learner.logprobs(mb)[0], 0).astype(np.float32))
    learner.forward_backward([mb])
    metrics = learner.optim_step()
    assert metrics["mismatch_kl/mean"] < 1e-10 and metrics["mismatch_kl/max"] < 1e-9
    assert metrics["is_masked/mean"] == metrics["is_masked_low/mean"] == metrics["is_masked_high/mean"] == 0


def test_metrics_are_means_over_the_whole_step():
    docs = documents()
    learner = build_learner()
    learner.forward_backward([pack(docs[:3]), pack(docs[3:])])
    metrics = learner.optim_step()
    mb = pack(docs)
    logprobs, entropy = build_learner().logprobs(mb)
    log_ratio = (logprobs - mb.logprobs)[mb.loss_mask]
    mismatch = np.exp(log_ratio) - 1 - log_ratio
    assert metrics["mismatch_kl/mean"] == pytest.approx(mismatch.mean(), rel=1e-4)
    assert metrics["mismatch_kl/max"] == pytest.approx(mismatch.max(), rel=1e-4)
    assert metrics["entropy/mean"] == pytest.approx(entropy[mb.loss_mask].mean(), rel=1e-4)
    assert metrics["loss/mean"] == pytest.approx(slow_step(build_policy(), [mb])[0], abs=1e-5)
    assert metrics["batch/sampled_tokens"] == mb.loss_mask.sum()


def test_environments_are_reported_apart():
    docs = documents(num_groups=1, group_size=4)
    learner = build_learner()
    learner.forward_backward([pack(docs, envs=["a", "b", "a", "b"])])
    metrics = learner.optim_step()
    alone = build_learner()
    alone.forward_backward([pack(docs[::2])])
    assert metrics["mismatch_kl/a/mean"] == pytest.approx(alone.optim_step()["mismatch_kl/mean"], rel=1e-4)
    assert "entropy/b/mean" in metrics


def test_a_step_is_the_same_bits_again():
    weights = []
    for _ in range(2):
        learner = build_learner()
        for seed in range(3):
            learner.forward_backward([pack(documents(seed))])
            learner.optim_step()
        weights.append(dict(learner.export_tensors()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_advantage_of_zero_moves_nothing_but_the_kl_term():
    mb = pack(documents())
    mb = replace(mb, advantages=np.zeros_like(mb.advantages))
    learner = build_learner(loss=DefaultLoss(kl_tau=0.0))
    learner.forward_backward([mb])
    assert all(not grad.any() for grad in gradients(learner).values())


def everything(learner):
    """Weights and the optimizer's state, copied."""
    return {name: part.tensor.clone() for name, part in learner.state().slices.items()}


@pytest.mark.parametrize("advantage", [0.0, 1e-17])
def test_a_batch_without_any_advantage_moves_neither_weights_nor_moments(advantage):
    learner = build_learner(optim=AdamWOptim(lr=1e-2, weight_decay=0.1))
    learner.forward_backward([pack(documents())])
    learner.optim_step()
    before = everything(learner)
    mb = pack(documents(1))
    learner.forward_backward([replace(mb, advantages=np.full_like(mb.advantages, advantage))])
    metrics = learner.optim_step()
    assert metrics["optim/skipped"] == 1 and metrics["optim/grad_norm"] > 0 and learner.step == 2
    after = everything(learner)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    learner.forward_backward([mb])
    assert "optim/skipped" not in learner.optim_step()
    assert not all(torch.equal(before[name], part) for name, part in everything(learner).items())


@pytest.mark.parametrize("change", [{"ce_weights": 1.0}, {"ref_kl_weights": 1.0, "ref_logprobs": -1.0}])
def test_other_targets_are_a_signal_without_advantages(change):
    mb = pack(documents())
    mask = mb.loss_mask.astype(np.float32)
    mb = replace(mb, advantages=0 * mask, **{name: value * mask for name, value in change.items()})
    learner = build_learner()
    before = everything(learner)
    learner.forward_backward([mb])
    assert "optim/skipped" not in learner.optim_step()
    assert not all(torch.equal(before[name], part) for name, part in everything(learner).items())


@pytest.mark.parametrize(("gap", "moves"), [(2e-4, False), (0.05, True)])
def test_a_policy_that_equals_its_teacher_but_for_rounding_stays_where_it_is(gap, moves):
    """AdamW makes full steps of any gradient that is alone, rounding noise too."""
    learner, mb = build_learner(optim=AdamWOptim(lr=1e-2, weight_decay=0.0)), pack(documents())
    mask = mb.loss_mask.astype(np.float32)
    own = np.where(mb.loss_mask, learner.logprobs(mb)[0], 0).astype(np.float32)
    teacher = own + gap * np.random.default_rng(0).choice([-1, 1], len(own)).astype(np.float32)
    before = everything(learner)
    mb = replace(mb, advantages=0 * mask, ref_kl_weights=mask, ref_logprobs=teacher, logprobs=own - 2e-4 * mask)
    learner.forward_backward([mb])
    learner.optim_step()
    after = everything(learner)
    assert moves != all(torch.equal(before[name], after[name]) for name in before if "step" not in name)


def test_an_entropy_bonus_is_a_signal_without_advantages():
    mb = pack(documents())
    learner = build_learner(loss=DefaultLoss(entropy_coef=0.01))
    learner.forward_backward([replace(mb, advantages=np.zeros_like(mb.advantages))])
    assert "optim/skipped" not in learner.optim_step()


def test_effective_sample_sizes_are_those_of_ratios_one_by_one():
    learner, docs = build_learner(), documents(4)
    rows = [pack(docs[:5]), pack(docs[5:])]
    for mb in rows:
        learner.forward_backward([mb])
    tokens, samples = [], []
    for mb in rows:
        logs = np.where(mb.loss_mask, learner.logprobs(mb)[0] - mb.logprobs, 0.0)
        for low, high in pairwise(mb.cu_seqlens):
            if mb.loss_mask[low:high].any():
                tokens += np.exp(logs[low:high][mb.loss_mask[low:high]]).tolist()
                samples.append(np.exp(logs[low:high].sum()))
    metrics = learner.optim_step()
    for name, ratios in (("tokens", np.array(tokens)), ("rollouts", np.array(samples))):
        assert metrics[f"ess/{name}"] == pytest.approx(effective_share(ratios), rel=1e-4)
    assert not any("age" in name for name in metrics)  # the versions are not known


def effective_share(ratios: np.ndarray) -> float:
    return ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())


def test_tokens_are_told_apart_by_the_version_that_began_their_rollout():
    learner, docs = build_learner(), documents(5)
    learner.step = 20
    ages = [0, 0, 4, 12, 0, 3, 2, 2, 0, 7, 1, 4]
    spans = {"0": [0], "1": [1], "2": [2], "3-4": [3, 4], "5-8": [5, 6, 7, 8], "9+": list(range(9, 30))}
    rows = []
    for first, last in ((0, 5), (5, 12)):
        versions = tuple(20 - age for age in ages[first:last])
        rows.append(replace(pack(docs[first:last], padding=3), first_versions=versions))
    assert len(ages) == len(docs)
    found = {age: ([], [], []) for age in spans}
    for mb in rows:
        learner.forward_backward([mb])
        logs = np.where(mb.loss_mask, learner.logprobs(mb)[0] - mb.logprobs, 0.0)
        for d, version in enumerate(mb.first_versions):
            part = slice(*mb.cu_seqlens[d : d + 2])
            own = logs[part][mb.loss_mask[part]]
            tokens, samples, mismatch = found[next(age for age, span in spans.items() if 20 - version in span)]
            tokens += np.exp(own).tolist()
            samples += [np.exp(own.sum())] if len(own) else []
            mismatch += (np.exp(own) - own - 1).tolist()
    metrics = learner.optim_step()
    total = sum(len(tokens) for tokens, _, _ in found.values())
    for age, (tokens, samples, mismatch) in found.items():
        assert metrics[f"age/{age}"] == pytest.approx(len(tokens) / total)
        assert metrics[f"ess/tokens/age/{age}"] == pytest.approx(effective_share(np.array(tokens)), rel=1e-4)
        assert metrics[f"ess/rollouts/age/{age}"] == pytest.approx(effective_share(np.array(samples)), rel=1e-4)
        assert metrics[f"mismatch_kl/age/{age}"] == pytest.approx(np.mean(mismatch), rel=1e-3)
    weighted = sum(metrics[f"age/{age}"] * metrics[f"mismatch_kl/age/{age}"] for age in spans)
    assert weighted == pytest.approx(metrics["mismatch_kl/mean"], rel=1e-5)


def test_the_policy_learns_what_is_rewarded():
    """One token of a document has positive advantage: its probability rises."""
    rng = np.random.default_rng(0)
    mb = pack([document(rng, rng.integers(0, VOCAB, 5), 1)])
    learner = build_learner(optim=AdamWOptim(lr=1e-3))
    mb = replace(mb, advantages=mb.loss_mask.astype(np.float32))
    before = learner.logprobs(mb)[0][-1]
    for _ in range(3):
        mb = replace(mb, logprobs=np.where(mb.loss_mask, learner.logprobs(mb)[0], 0).astype(np.float32))
        learner.forward_backward([mb])
        learner.optim_step()
    assert learner.logprobs(mb)[0][-1] > before + 0.1


@pytest.mark.heavy
def test_bfloat16_keeps_float32_masters():
    """Updates far below bfloat16's resolution still add up."""
    policy = build_policy().to(torch.bfloat16)
    before = policy.output_weight.detach().clone()
    learner = build_learner(policy, dtype="bfloat16", optim=AdamWOptim(lr=2e-5, weight_decay=0.0))
    rough = build_learner(
        build_policy().to(torch.bfloat16),
        dtype="bfloat16",
        optimization_dtype="bfloat16",
        optim=AdamWOptim(lr=2e-5, weight_decay=0.0),
    )
    for trained in (learner, rough):
        for _ in range(30):
            trained.forward_backward([pack(documents())])
            trained.optim_step()
    moved = (policy.output_weight != before).float().mean()
    moved_roughly = (rough.policy.output_weight != before).float().mean()
    assert policy.output_weight.dtype is torch.bfloat16 and moved > 2 * moved_roughly
    master = learner.state().slices["model.model.embed_tokens.weight"].tensor
    assert master.dtype is torch.float32 and torch.equal(master.bfloat16(), policy.output_weight)


@pytest.mark.heavy
def test_bfloat16_sums_gradients_of_micro_batches_in_float32():
    docs = documents()
    learner = build_learner(build_policy().to(torch.bfloat16), dtype="bfloat16")
    learner.forward_backward([pack([d]) for d in docs])
    _, exact = slow_step(build_policy().to(torch.bfloat16).float(), [pack(docs)])
    for name, master in zip(learner.network.weights.names, learner.network.weights.parameters):
        assert master.grad.dtype is torch.float32
        assert (master.grad - exact[name]).norm() < 0.05 * exact[name].norm() + 1e-3


def test_masters_coarser_than_the_model_are_refused():
    with pytest.raises(ConfigError, match="optimization_dtype = bfloat16 is coarser than dtype = float32"):
        build_learner(optimization_dtype="bfloat16")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            AdamWOptim(lr=1e-2, weight_decay=0.1, betas1=0.8, betas2=0.95, eps=1e-6),
            lambda p: torch.optim.AdamW(
                p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, foreach=False, fused=False
            ),
        ),
        (
            SgdOptim(lr=1e-2, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=False),
        ),
        (SgdOptim(lr=1e-2, momentum=0.0), lambda p: torch.optim.SGD(p, lr=1e-2, foreach=False)),
    ],
)
def test_updates_equal_the_plain_optimizer(ours, theirs):
    learner, policy = build_learner(optim=ours), build_policy()
    optimizer = theirs(list(policy.parameters()))
    for seed in range(3):
        mb = pack(documents(seed))
        learner.forward_backward([mb])
        learner.optim_step()
        _, grads = slow_step(policy, [mb])
        for name, parameter in policy.named_parameters():
            parameter.grad = grads[name]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    for (name, a), (_, b) in zip(learner.export_tensors(), policy.named_parameters()):
        torch.testing.assert_close(a, b.detach(), atol=2e-4, rtol=1e-3, msg=name)


def test_clipping_bounds_the_norm_and_reports_the_one_before():
    mb = pack(documents())
    for max_norm, expected in ((1e-3, 1e-3), (None, None), (1e6, None)):
        learner = build_learner(optim=SgdOptim(lr=1.0, momentum=0.0, max_norm=max_norm))
        before = {name: t.clone() for name, t in learner.export_tensors()}
        learner.forward_backward([mb])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients(learner).values()))
        metrics = learner.optim_step()
        moved = math.sqrt(sum(float((t - before[name]).square().sum()) for name, t in learner.export_tensors()))
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert moved == pytest.approx(expected or norm, rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported():
    learner = build_learner()
    before = {name: t.clone() for name, t in learner.export_tensors()}
    mb = pack(documents())
    learner.forward_backward([replace(mb, advantages=np.where(mb.loss_mask, np.inf, 0).astype(np.float32))])
    with pytest.raises(EngineError, match="step 1: gradient norm is"):
        learner.optim_step()
    assert learner.step == 0 and all(torch.equal(t, before[name]) for name, t in learner.export_tensors())


def test_evaluation_is_the_mean_negative_log_likelihood():
    mb = pack(documents())
    mb = replace(mb, ce_weights=mb.loss_mask.astype(np.float32), rl_weights=np.zeros(len(mb.token_ids), np.float32))
    learner = build_learner()
    logprobs, _ = learner.logprobs(mb)
    result = learner.evaluate([mb, mb])
    assert result["nll"] == pytest.approx(-logprobs[mb.loss_mask].mean(), rel=1e-5)
    assert result["tokens"] == 2 * mb.loss_mask.sum()
    learner.forward_backward([mb])
    metrics = learner.optim_step()
    assert metrics["nll/mean"] == pytest.approx(result["nll"], rel=1e-5)
    assert metrics["loss/mean"] == pytest.approx(result["nll"], rel=1e-5)


def test_an_empty_micro_batch_keeps_step():
    empty = pack([d | {"loss_mask": np.zeros_like(d["loss_mask"])} for d in documents()[:2]])
    results = []
    for batch in ([pack(documents())], [empty, pack(documents()), empty]):
        learner = build_learner()
        learner.forward_backward(batch)
        results.append(gradients(learner))
    assert_close(*results)


def test_reduce_sees_every_count_once_and_its_answer_divides():
    """As with two equal ranks: counts and sums double, the gradients of one rank halve."""
    double = lambda sums: {n: v if n.startswith("max/") else 2 * v for n, v in sums.items()}
    mesh = Mesh.single_rank(torch.device("cpu"))
    mesh.reduce = double
    learner, alone = build_learner(mesh=mesh), build_learner()
    for each in (learner, alone):
        each.forward_backward([pack(documents())])
    assert_close(gradients(learner), {name: g / 2 for name, g in gradients(alone).items()})
    metrics, expected = learner.optim_step(), alone.optim_step()
    assert metrics["mismatch_kl/mean"] == pytest.approx(expected["mismatch_kl/mean"])
    assert metrics["loss/mean"] == pytest.approx(expected["loss/mean"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_mask": lambda m: np.ones_like(m)}, "first token of sample g0.0/0 is trained"),
        ({"loss_mask": lambda m: np.zeros_like(m)}, "the batch of step 1 trains no token"),
        ({"token_ids": lambda t: np.where(np.arange(len(t)) == 3, VOCAB, t)}, f"token id {VOCAB} in sample g0"),
        ({"token_ids": lambda t: np.where(np.arange(len(t)) == 3, -1, t)}, "token id -1 in sample g0"),
        ({"cu_seqlens": lambda c: c[:-1]}, "do not divide"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(change, words):
    mb = pack(documents())
    mb = replace(mb, **{name: f(getattr(mb, name)) for name, f in change.items()})
    with pytest.raises(DataError, match=words):
        build_learner().forward_backward([mb])


def rates(cfg, max_steps, peak=1.0):
    return [learning_rate(step, peak, cfg, max_steps) for step in range(1, max_steps + 1)]


def test_constant_rate_rises_in_equal_parts_and_stays():
    assert rates(ConstantScheduler(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(ConstantScheduler(warmup_steps=0), 2, peak=0.1) == [0.1, 0.1]


@pytest.mark.parametrize("kind", [ConstantScheduler, LinearScheduler, CosineScheduler])
def test_every_rate_rises_over_ten_steps_unless_told_otherwise(kind):
    assert rates(kind(), 100)[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1], rel=0.01)


def test_linear_rate_rises_stays_and_falls():
    cfg = LinearScheduler(warmup_steps=2, decay_steps=4, min_lr=0.2)
    assert rates(cfg, 8) == pytest.approx([0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    assert learning_rate(9, 1.0, cfg, 8) == pytest.approx(0.2) == learning_rate(99, 1.0, cfg, 8)
    assert learning_rate(50, 1.0, cfg, None) == 1.0


def test_a_fall_that_is_longer_than_what_is_left_begins_at_the_full_rate():
    """As in a run whose schedule begins anew with its last steps."""
    cfg = LinearScheduler(warmup_steps=2, decay_steps=100, min_lr=0.2)
    assert rates(cfg, 6) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])
    assert rates(cfg, 2) == [0.5, 1]


@pytest.mark.parametrize("max_steps", [1, 2, 3, 5, 6, 50, 500, 777])
@pytest.mark.parametrize("warmup", [0.04, 0.1667, 0.25, 0.5])
def test_shares_of_a_run_are_steps_that_fit_into_it(max_steps, warmup):
    shares = LinearScheduler(warmup_steps=warmup, decay_steps=1 - warmup)
    steps = [num_steps(share, max_steps) for share in (shares.warmup_steps, shares.decay_steps)]
    assert sum(steps) <= max_steps and abs(steps[0] - warmup * max_steps) <= 0.5
    assert rates(shares, max_steps) == rates(LinearScheduler(warmup_steps=steps[0], decay_steps=steps[1]), max_steps)


def test_cosine_rate_is_half_a_cosine():
    cfg = CosineScheduler(warmup_steps=2, min_lr=0.1)
    got = rates(cfg, 12)
    assert got[:3] == [0.5, 1.0, 1.0] and got[7] == pytest.approx(0.55)
    assert all(a >= b for a, b in pairwise(got[2:])) and learning_rate(13, 1.0, cfg, 12) == pytest.approx(0.1)


def test_the_rate_of_a_step_is_the_one_reported_and_used():
    learner = build_learner(scheduler=LinearScheduler(warmup_steps=2, decay_steps=2), max_steps=4)
    seen = []
    for seed in range(4):
        learner.forward_backward([pack(documents(seed))])
        seen.append(learner.optim_step()["optim/lr"])
    assert seen == pytest.approx([0.005, 0.01, 0.01, 0.005])
