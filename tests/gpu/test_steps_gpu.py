"""Training and the engine on a GPU: float32 gives the CPU's numbers, bfloat16 stays near them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_runs import ask, build_core, build_model, packed_logprobs, prompt, run
from processes.add_ons import needs
from tiny import build_policy, documents, pack

from stretto.base.paths import RunDir
from stretto.config.sections.algorithm import CispoLoss, GaeAdvantages, GspoLoss, PpoLoss
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import (
    AdamWOptim,
    ConstantScheduler,
    CriticSection,
    MuonOptim,
    SgdOptim,
    TrainerSection,
)
from stretto.config.sections.transport import ShmWeights
from stretto.models import attention
from stretto.models.lm_head import head_logits
from stretto.models.value_head import with_value_head
from stretto.trainer.learner import Learner
from stretto.trainer.publish.canary import score_canary
from stretto.trainer.state import checkpoint
from stretto.trainer.updates import Updates
from stretto.transports.weights import build_publisher, receive

pytestmark = pytest.mark.gpu
ADAMW = AdamWOptim(lr=1e-2, eps=1e-2)
"""A large eps: small differences of gradients stay small in updates."""


def build(device: str, policy=None, **settings) -> Learner:
    return Learner(
        (policy or build_policy()).to(device),
        model=ModelSection(**settings.pop("model", {})),
        optim=settings.pop("optim", ADAMW),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        **settings,
    )


def train(learner: Learner, num_steps: int = 3) -> dict[str, np.ndarray]:
    """Loss, mismatch and gradient norm of the last step, and the weights."""
    for seed in range(num_steps):
        learner.forward_backward([pack(documents(seed), envs=["a", "b"] * 6), pack(documents(seed + 9))])
        metrics = learner.optim_step()
    kept = {name: metrics[name] for name in ("loss/mean", "mismatch_kl/mean", "optim/grad_norm")}
    return kept | {n: t.detach().float().cpu().numpy().copy() for n, t in learner.export_tensors()}


def furthest(plain: dict, found: dict) -> float:
    assert plain.keys() == found.keys()
    return max(float(np.abs(np.asarray(plain[name]) - np.asarray(found[name])).max()) for name in plain)


SETTINGS = {
    "default": {},
    "sgd": {"optim": SgdOptim(lr=0.1, momentum=0.9)},
    "ppo by sample": {"loss": PpoLoss(reduction="sample")},
    "gspo": {"loss": GspoLoss(reduction="sample")},
    "cispo with entropy": {"loss": CispoLoss(entropy_coef=0.01)},
    "recomputed": {"model": {"ac": {}}},
    "lora": {"model": {"lora": LoRASection(rank=4)}},
    "chunks": {"model": {"fused_lm_head_token_chunk_size": 3}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_in_float32_are_those_of_a_cpu(name, record_property):
    off = furthest(*(train(build(device, **deepcopy(SETTINGS[name]))) for device in ("cpu", "cuda")))
    record_property("largest difference", off)
    assert off < 2e-3


def test_experts_in_float32_are_those_of_a_cpu(record_property):
    shape = {"family": "qwen3_moe", "hidden_size": 64}
    off = furthest(*(train(build(device, build_policy(**shape))) for device in ("cpu", "cuda")))
    record_property("largest difference", off)
    assert off < 2e-3


@needs("optimizers")
def test_muon_moves_weights_as_on_a_cpu(record_property):
    """On a GPU it iterates in bfloat16."""
    plain, found = (train(build(device, optim=MuonOptim(lr=1e-2)), 1) for device in ("cpu", "cuda"))
    off = furthest(plain, found)
    record_property("largest difference", off)
    assert off < 5e-3


def test_bfloat16_with_varlen_attention_stays_near_float32(record_property):
    assert attention._varlen_kernel() is not None, "this torch has no varlen attention of the form used"
    mb, gaps = pack(documents(3, num_groups=8)), []
    for dtype in (torch.float32, torch.bfloat16):
        learner = build("cuda", build_policy().to(dtype), model={"dtype": str(dtype).removeprefix("torch.")})
        gaps.append(learner.logprobs(mb)[0])
        learner.forward_backward([mb])
        assert np.isfinite(learner.optim_step()["optim/grad_norm"])
    off = float(np.abs(gaps[0] - gaps[1]).mean())
    record_property("mean |dlogp|", off)
    assert off < 0.03


@needs("critic")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_learns_beside_the_policy(dtype):
    from stretto_critic.critic import Critic

    number_type, section = getattr(torch, dtype), CriticSection(num_critic_only_steps=1)
    critic = Critic(
        with_value_head(build_policy(3).to("cuda", number_type)),
        section=section, model=ModelSection(dtype=dtype), optim=ADAMW,
    )  # fmt: skip
    learner = build("cuda", build_policy().to(number_type), loss=PpoLoss(), valuer=critic, model={"dtype": dtype})
    section = TrainerSection(
        advantages=GaeAdvantages(), critic=section, loss=PpoLoss(), updates_per_step=2, epochs_per_step=2
    )
    updates = Updates(learner, section)
    metrics = [updates.train([pack(documents(seed))]) for seed in range(3)][-1]
    assert all(np.isfinite(metrics[name]) for name in ("critic/value_loss", "loss/mean", "optim/grad_norm"))


def test_fine_tuning_lowers_the_loss_of_what_it_sees(record_property):
    mb = pack(documents())
    mask = mb.loss_mask.astype(np.float32)
    mb = msgspec.structs.replace(mb, ce_weights=mask, rl_weights=np.zeros_like(mask))
    learner = build("cuda")
    losses = [learner.evaluate([mb])["nll"]]
    for _ in range(5):
        learner.forward_backward([mb])
        learner.optim_step()
    losses.append(learner.evaluate([mb])["nll"])
    record_property("nll", losses)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path, is_async):
    learner, run_dir = build("cuda"), RunDir(tmp_path)
    train(learner, 1)
    saver = checkpoint.Saver(run_dir, is_async=is_async, on_written=lambda step: None)
    saver.save(learner)
    straight = train(learner, 1)
    saver.wait()
    resumed = build("cuda", build_policy(7))
    checkpoint.load(run_dir, resumed, 1)
    assert furthest(straight, train(resumed, 1)) == 0


def test_a_head_in_bfloat16_is_not_rounded_and_has_a_gradient(record_property):
    generator = torch.Generator("cuda").manual_seed(0)
    for vocab in (1, 40, 1301):
        hidden, weight = (
            torch.randn(n, 64, generator=generator, device="cuda").bfloat16().requires_grad_() for n in (33, vocab)
        )
        logits = head_logits(hidden, weight)
        exact = hidden.detach().double() @ weight.detach().double().T
        assert (logits - exact).abs().max() < 1e-4
        logits.sum().backward()
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_the_engine_agrees_with_the_trainer(dtype, bound, record_property):
    model = build_model().to("cuda", getattr(torch, dtype))
    learner = build("cuda", build_model().to(getattr(torch, dtype)), model={"dtype": dtype})
    rng, gaps = np.random.default_rng(0), []
    asked = [ask(f"r{i}", prompt(rng, length), n=2, max_tokens=30, scored=True) for i, length in enumerate((1, 9, 70))]
    for one, completions in zip(asked, run(build_core(model), *asked)):
        for completion in completions:
            tokens = np.concatenate([one.prompt_ids, completion.token_ids])
            count = len(tokens)
            mb = pack([{
                "token_ids": tokens.astype(np.int32), "loss_mask": np.ones(count, bool),
                "logprobs": np.zeros(count, np.float32), "advantages": np.zeros(count, np.float32),
                "temperatures": np.ones(count, np.float32),
            }])  # fmt: skip
            theirs = learner.logprobs(mb)[0]
            ours = np.concatenate([completion.prompt_logprobs, completion.logprobs])
            gaps.append(np.abs(ours - theirs))
    gap = float(np.concatenate(gaps).mean())
    record_property("mean |dlogp|", gap)
    record_property("max |dlogp|", float(np.concatenate(gaps).max()))
    assert gap < bound
    if dtype == "float32":
        reference = packed_logprobs(build_model(), np.concatenate([asked[0].prompt_ids, np.arange(2, 9)]))
        assert np.isfinite(reference).all()


def test_the_canary_logprobs_agree_on_both_devices(record_property):
    plain, found = (np.array(score_canary(build(device), 40).logprobs) for device in ("cpu", "cuda"))
    record_property("mean |dlogp|", float(np.abs(plain - found).mean()))
    assert np.abs(plain - found).max() < 1e-3


def test_published_weights_reach_an_engine_on_the_gpu(tmp_path: Path):
    learner, core = build("cuda"), build_core(build_policy(5).to("cuda"))
    publisher = build_publisher(ShmWeights(), RunDir(tmp_path), "gpu")
    manifest = publisher.publish(1, learner.export_tensors())
    with receive(manifest) as tensors:
        core.load_weights(1, tensors)
    publisher.close()
    got = dict(core.model.named_parameters())
    assert all(torch.equal(p, got[name]) for name, p in learner.policy.named_parameters())


def test_nccl_alone_in_its_world_sums_and_shards(tmp_path: Path):
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=device
    )
    try:
        x = torch.arange(8.0, device=device)
        dist.all_reduce(x)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        assert torch.equal(out.cpu(), torch.arange(8.0))
    finally:
        dist.destroy_process_group()
