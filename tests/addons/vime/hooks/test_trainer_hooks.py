"""[trainer.hooks]: functions in a step of the trainer."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from processes.add_ons import needs
from tiny import build_learner, build_policy, documents, pack

from stretto.base.errors import ConfigError
from stretto.config.sections.algorithm import CorrectionSection, PpoLoss, WeightsSection
from stretto.config.sections.trainer import AdamWOptim, TrainerHooksSection, TrainerSection
from stretto.trainer.hooks import load_hooks
from stretto.trainer.updates import Updates

HOOKS = """
import torch
seen = []

def init(args):
    seen.append(("init", args.eps_clip, args.mine))

def before_log_prob(args, model, store_prefix):
    seen.append(("log_prob", type(model).__name__, store_prefix))

def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    assert hasattr(optimizer, "step") and opt_param_scheduler.lr > 0
    seen.append(("step", rollout_id, step_id))

def advantages(args, rollout_data):
    lengths = rollout_data["response_lengths"]
    assert all(len(each) == n for each, n in zip(rollout_data["log_probs"], lengths))
    assert all(len(t) == n for t, n in zip(rollout_data["tokens"], rollout_data["total_lengths"]))
    rollout_data["advantages"] = [torch.full((n,), 0.25) for n in lengths]

def data_postprocess(args, rollout_id, rollout_data):
    seen.append(("data", rollout_id))
    rollout_data["loss_masks"][0].zero_()
    rollout_data["advantages"] = [2 * each for each in rollout_data["advantages"]]

def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw):
    weights = [(ours - theirs).exp().clamp(max=2.0) for ours, theirs in zip(train_log_probs, rollout_log_probs)]
    assert list(map(len, weights)) == list(response_lengths) and len(pg_loss) == sum(response_lengths)
    flat = torch.cat(weights)
    return pg_loss * flat, loss_masks, {"tis": flat}

def short(args, rollout_id, rollout_data):
    rollout_data["advantages"].pop()

def broken(args, rollout_id, rollout_data):
    raise ValueError("no")

def without(args, rollout_id, rollout_data):
    rollout_data["advantages"] = None

def holes(args, rollout_id, rollout_data):
    rollout_data["advantages"][0] = None

def not_finite(args, rollout_id, rollout_data):
    rollout_data["rollout_log_probs"][0][:] = float("nan")

def longer(args, rollout_id, rollout_data):
    rollout_data["loss_masks"][0] = [1] * 999

def whole_loss(args, batch, logits, sum_of_sample_mean):
    found, start = [], 0
    columns = ("unconcat_tokens", "total_lengths", "response_lengths", "temperatures")
    for tokens, length, size, temperatures in zip(*map(batch.get, columns)):
        end = start + length
        rows = (logits[0, end - size - 1 : end - 1] / temperatures[:, None]).log_softmax(-1)
        found.append(rows.gather(1, tokens[-size:, None])[:, 0])
        start = end
    now, old = torch.cat(found), torch.cat(batch["log_probs"])
    mask = torch.cat(batch["loss_masks"])
    ratio = ((now - old) * mask).exp()
    advantages = torch.cat(batch["advantages"])
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return sum_of_sample_mean(loss), {"ratio": sum_of_sample_mean(ratio.detach())}

def mean_of_samples(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(losses):
        parts = losses.split(response_lengths)
        each = [(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in zip(parts, loss_masks)]
        return losses.sum() if calculate_per_token_loss else sum(each)
    return reduce

def no_sum(args, batch, logits, sum_of_sample_mean):
    return logits, {}

def no_metrics(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits.sum() + torch.cat(batch["advantages"]))

def half(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits[0, :3, 0]), {}

def no_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return 3

def post_write(args, version_dir, rollout_engines):
    seen.append(("written", version_dir, rollout_engines))

async def awaited(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    raise ValueError("nobody would see it")
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The section that names functions of a module; its name."""
    name = f"trainer_hooks_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def section(*names, **others):
        paths = {each: f"{name}:{each}" for each in names} | {k: f"{name}.{v}" for k, v in others.items()}
        return TrainerHooksSection(**paths, args={"mine": 7})

    section.module = name
    return section


@needs("native")  # other kernels are further apart than this bound
def test_functions_in_the_trainer_are_called_at_their_points_and_change_the_data(named):
    section = named("init", "before_log_prob", "before_train_step", "advantages", "data_postprocess")
    hooks = load_hooks(section)
    hooks.call("init")
    mb = pack(documents())
    learner = build_learner(policy=build_policy(), loss=PpoLoss(use_rollout_logprobs=False))
    cfg = TrainerSection(loss=PpoLoss(use_rollout_logprobs=False), updates_per_step=2, hooks=section)
    Updates(learner, cfg, hooks=hooks).train([mb])
    seen = __import__(named.module).seen
    policy = type(learner.policy).__name__
    expected = [("init", 0.2, 7), ("log_prob", policy, ""), ("data", 0), ("step", 0, 0), ("step", 0, 1)]
    assert seen == expected
    first = slice(0, int(mb.cu_seqlens[1]))
    mask = mb.loss_mask.copy()
    mask[first] = False
    by_hand = msgspec.structs.replace(mb, loss_mask=mask, advantages=(0.5 * mask).astype(np.float32))
    other = build_learner(policy=build_policy(), loss=PpoLoss(use_rollout_logprobs=False))
    Updates(other, TrainerSection(loss=PpoLoss(use_rollout_logprobs=False), updates_per_step=2)).train([by_hand])
    for ours, theirs in zip(learner.policy.parameters(), other.policy.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_correction_by_a_function_is_the_built_in_one(named):
    loss = PpoLoss(use_rollout_logprobs=False)
    weights = WeightsSection(mode="truncate", low=0.0, high=2.0)
    built_in = PpoLoss(use_rollout_logprobs=False, correction=CorrectionSection(weights=weights))
    found = []
    for section in (TrainerSection(loss=loss, hooks=named("tis")), TrainerSection(loss=built_in)):
        learner = build_learner(policy=build_policy(), loss=section.loss)
        metrics = Updates(learner, section).train([pack(documents())])
        found.append(torch.cat([each.detach().flatten() for each in learner.policy.parameters()]))
        if section.loss is loss:
            assert 0 < metrics["tis/mean"] <= 2
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)


def batch_of(seed):
    """A micro batch whose documents are rollouts of their own."""
    mb = pack(documents(seed))
    ends = zip(mb.cu_seqlens, mb.cu_seqlens[1:])
    return msgspec.structs.replace(mb, rollout_tokens=tuple(int(mb.loss_mask[start:end].sum()) for start, end in ends))


def trained(section, batches):
    """Weights after steps on these batches, and the metrics of the last."""
    optim = AdamWOptim(lr=1e-2, eps=1e-2)  # a large eps: small differences of gradients stay small
    learner = build_learner(policy=build_policy(), loss=section.loss, optim=optim)
    updates = Updates(learner, section)
    metrics = [updates.train(batch) for batch in batches][-1]
    return torch.cat([each.detach().flatten() for each in learner.policy.parameters()]), metrics


@pytest.mark.heavy
@pytest.mark.parametrize("reduction", ["rollout", "token", "sample"])
def test_a_loss_from_logits_is_the_built_in_one(named, reduction):
    loss = PpoLoss(use_rollout_logprobs=False, clip_low=0.2, clip_high=0.2, reduction=reduction)
    batches = [[batch_of(seed), batch_of(seed + 7)] for seed in range(3)]
    several = {"loss": loss, "updates_per_step": 2}
    own, metrics = trained(TrainerSection(**several, hooks=named(loss="whole_loss")), batches)
    built_in, _ = trained(TrainerSection(**several), batches)
    torch.testing.assert_close(own, built_in, rtol=0, atol=1e-6)
    assert metrics["ratio/mean"] == pytest.approx(1, abs=0.5)
    start = torch.cat([each.detach().flatten() for each in build_policy().parameters()])
    assert not torch.allclose(own, start, atol=1e-4), "it has trained"


@pytest.mark.heavy
def test_a_reducer_of_means_is_the_reduction_by_sample_and_one_of_sums_that_by_token(named):
    batches = [[batch_of(seed), batch_of(seed + 7)] for seed in range(3)]
    for reduction in ("sample", "token"):
        loss = PpoLoss(use_rollout_logprobs=False, reduction=reduction)
        hooks = named(pg_loss_reducer="mean_of_samples")
        own, _ = trained(TrainerSection(loss=loss, hooks=hooks), batches)
        built_in, _ = trained(TrainerSection(loss=loss), batches)
        torch.testing.assert_close(own, built_in, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"loss": "no_sum"}, r"loss = '.*no_sum': shape \(1, \d+, \d+\) is no loss; return one number"),
        ({"loss": "no_metrics"}, r"return the loss and a dictionary of metrics"),
        ({"loss": "half"}, r"sum_of_sample_mean got shape \(3,\), and the responses of the batch have \d+ tokens"),
        ({"loss": "mean_of_samples"}, r"mean_of_samples': cannot unpack .*; return the loss and"),
        ({"pg_loss_reducer": "no_reducer"}, r"no_reducer': .*not callable"),
    ],
)
def test_a_loss_that_does_not_fit_is_named(named, hooks, message):
    updates = Updates(build_learner(policy=build_policy()), TrainerSection(hooks=named(**hooks)))
    with pytest.raises(ConfigError, match=message):
        updates.train([pack(documents())])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("short", r"advantages has \d+ entries for \d+ samples"),
        ("broken", r"\.py:\d+: ValueError: no"),
        ("without", r"data_postprocess = '.*without': advantages is NoneType, not a list"),
        ("holes", r"advantages of sample 0 must be \d+ finite numbers, .*, got NoneType"),
        ("not_finite", r"rollout_log_probs of sample 0 must be \d+ finite numbers, .*, got nan"),
        ("longer", r"loss_masks of sample 0 must be \d+ finite numbers, .*, got shape \(999,\)"),
    ],
)
def test_a_function_in_the_trainer_that_fails_is_named(named, path, message):
    section = named(data_postprocess=path)
    updates = Updates(build_learner(policy=build_policy()), TrainerSection(hooks=section))
    with pytest.raises(ConfigError, match=message):
        updates.train([pack(documents())])
    with pytest.raises(ConfigError, match="called with 6"):
        load_hooks(named(before_train_step=path))


def test_a_coroutine_function_in_the_trainer_is_refused_as_nothing_awaits_it(named):
    with pytest.raises(ConfigError, match=r"trainer.hooks.before_train_step = .*`async def`"):
        load_hooks(named(before_train_step="awaited"))
