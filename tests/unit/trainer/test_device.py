"""What runs on a CPU runs on a GPU: the same numbers from the stand-in for a GPU (device.py)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cases.vision import build_vision_policy, image_batches
from device import DeviceTensor, pretended
from engine_runs import VOCAB, ask, build_core, build_model, run
from learner_cases import build_moe, sampled
from processes.add_ons import needs
from tiny import build_policy, documents, pack, save_checkpoint, scored, with_streams

from stretto.base.errors import EngineError
from stretto.base.paths import RunDir
from stretto.config.sections.algorithm import (
    CispoLoss,
    CorrectionSection,
    DefaultLoss,
    GaeAdvantages,
    GspoLoss,
    IpoLoss,
    PpoLoss,
    ReferenceKlSection,
    RejectSection,
    ShapedAdvantages,
    WeightsSection,
)
from stretto.config.sections.model import LoRASection, ModelSection, VisionSection
from stretto.config.sections.trainer import (
    AdamWOptim,
    ConstantScheduler,
    CriticSection,
    MuonOptim,
    SgdOptim,
    TrainerSection,
)
from stretto.config.sections.transport import FilesystemWeights, ShmWeights
from stretto.families.table import FAMILIES, VISION_FAMILIES
from stretto.models import attention
from stretto.models.lora import Adapter
from stretto.models.value_head import with_value_head
from stretto.records.sample import MicroBatch
from stretto.records.support import Support
from stretto.trainer.batch.metrics import StepSums
from stretto.trainer.learner import Learner
from stretto.trainer.optim import offload
from stretto.trainer.parallel import memory
from stretto.trainer.publish.canary import score_canary
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state import checkpoint
from stretto.trainer.state.checkpoint import Saver
from stretto.trainer.updates import Updates
from stretto.transports.weights import build_publisher, receive

pytestmark = pytest.mark.heavy

Place = Callable[[torch.nn.Module], torch.nn.Module]


@pytest.fixture(autouse=True)
def one_kind_of_attention(monkeypatch):
    """Use the same attention on both: a CPU has another one for short documents."""
    monkeypatch.setattr(attention, "MAX_SHORT_KEYS", 0)


def on_both(work: Callable[[Place], Any]) -> tuple[Any, Any]:
    """Results of `work` on the CPU, and with networks on the device."""
    plain = work(lambda network: network)
    with pretended() as device:
        found = work(lambda network: network.to(device))
    return plain, found


def assert_same(plain: dict[str, Any], found: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        ours, theirs = np.asarray(found[name]), np.asarray(value)
        assert ours.shape == theirs.shape, name
        is_near = np.abs(ours - theirs) <= tolerance * np.maximum(1, np.abs(theirs))
        assert (is_near | (ours == theirs)).all(), name


def build(place: Place, policy: torch.nn.Module | None = None, **settings: Any) -> Learner:
    learner = Learner(
        place(policy or build_policy()),
        model=ModelSection(**settings.pop("model", {})),
        # Sums in another order differ in the last bits; a large eps keeps such differences small in updates.
        optim=settings.pop("optim", AdamWOptim(lr=1e-2, eps=1e-2)),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        **settings,
    )
    # Only a CPU shares prompts, which changes the order of sums.
    learner.network.sharing = "off"
    return learner


def weights(learner: Learner) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().float().numpy().copy() for name, tensor in learner.export_tensors()}


def train(learner: Learner, batches: list[list[Any]]) -> dict[str, Any]:
    """Train on batches; metrics of the last step, and the weights."""
    metrics = {}
    for batch in batches:
        learner.forward_backward(batch)
        metrics = learner.optim_step()
    return metrics | weights(learner)


NARROW = {"num_layers": 4, "sliding_window": 4, "index_topk": 3}
UNLIKE = [name for name in ("deepseek_v32", "gpt_oss", "nemotron_h", "qwen3_5_text") if name in FAMILIES]
"""Families that have between them all mixers, windows and chosen keys."""
SINGLE = sorted(set(FAMILIES) - set(VISION_FAMILIES))
BATCHES = [[pack(documents(seed), envs=["a", "b"] * 6), with_streams(pack(documents(seed + 9)))] for seed in range(2)]

# -- the stand-in itself --


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, number, row: torch.stack([x.sum(), number]),
        lambda x, number, row: torch.cat([x, row]),
        lambda x, number, row: x + row,
        lambda x, number, row: row.add_(x),
        lambda x, number, row: number.add_(x.sum()),
        lambda x, number, row: torch.where(row > 0, x, x),
        lambda x, number, row: x.index_select(0, torch.tensor([0])),
        lambda x, number, row: x.gather(0, torch.tensor([0])),
        lambda x, number, row: x.scatter_(0, torch.tensor([0]), 1.0),
        lambda x, number, row: x.index_add_(0, torch.tensor([0], device="cuda"), row[:1]),
        lambda x, number, row: x.__setitem__(torch.tensor([0, 1]), row[:2]),
        lambda x, number, row: row[torch.tensor([0], device="cuda")],
        lambda x, number, row: torch.nn.functional.embedding(torch.tensor([0]), x[:, None]),
        lambda x, number, row: torch.mm(x[None], row[:, None]),
        lambda x, number, row: torch._foreach_mul_([x, x], number),
        lambda x, number, row: torch.isin(x, row),
        lambda x, number, row: x.numpy(),
        lambda x, number, row: np.asarray(x),
        lambda x, number, row: torch.mm(
            *(x[None].bfloat16().requires_grad_(), x[:, None].bfloat16()), out_dtype=torch.float32
        ).sum().backward(),
    ],
)  # fmt: skip
def test_the_stand_in_refuses_what_cuda_refuses(mix):
    with pretended() as device:
        x, number, row = torch.ones(4, device=device), torch.tensor(2.0), torch.ones(4)
        with pytest.raises((RuntimeError, TypeError)):
            mix(x, number, row)


def test_the_stand_in_allows_what_cuda_allows():
    with pretended() as device:
        x, number = torch.arange(4.0, device=device), torch.tensor(2.0)
        results = [
            x * number, number * x, x.clamp(max=number), torch.where(x > 1, x, number), x[torch.tensor([0, 1])],
            x[torch.tensor([True, False, True, False])], x.masked_fill(x > 1, number), x.new_zeros(3), x.double(),
            torch.zeros_like(x), torch.ones(2).to(x), x.view(2, 2)[1], torch.tensor([1], device="cuda:0"),
        ]  # fmt: skip
        assert all(y.device == x.device and y.is_cuda and isinstance(y, DeviceTensor) for y in results)
        assert not any(y.is_cuda for y in (x.cpu(), x.to("cpu"), x.new_zeros(2, device="cpu"), torch.ones(1)))
        assert x.sum().item() == 6 and x.tolist() == [0, 1, 2, 3] and float(x[1]) == 1
        x[:2].add_(1)
        x[torch.tensor([3])] = torch.full((1,), 9.0, device=device)
        x[torch.tensor([0], device=device)] = 7.0
        assert x.tolist() == [7, 2, 2, 9]
    assert not torch.cuda.is_available() or torch.zeros(1, device="cuda").is_cuda


# -- learning --


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": SgdOptim(lr=0.1, momentum=0.9)},
        pytest.param({"optim": MuonOptim(lr=1e-2)}, marks=needs("optimizers")),
        {"loss": IpoLoss(entropy_coef=0.01)},
        {"loss": PpoLoss(reduction="sample", clip_dual=3.0)},
        {"loss": GspoLoss(reduction="sample")},
        {"loss": CispoLoss(reduction="constant", reduction_tokens=16)},
        {"loss": DefaultLoss(correction=CorrectionSection(weights=WeightsSection(level="token"), veto=1e-4))},
        {"loss": PpoLoss(correction=CorrectionSection(reject=RejectSection(level="geometric", low=0.5, high=2.0)))},
        {"model": {"ac": {}}},
        {"model": {"ac": {"mode": "selective", "targets": ["attn_proj"]}}},
        {"model": {"lora": LoRASection(rank=4)}},
        {"model": {"fused_lm_head_token_chunk_size": 3}},
        {"model": {"fp8": "reference"}},
    ],
    ids=str,
)  # fmt: skip
def test_steps_of_reinforcement_learning(settings):
    plain, found = on_both(lambda place: train(build(place, **deepcopy(settings)), BATCHES))
    is_rough = isinstance(settings.get("optim"), MuonOptim) or "fp8" in settings.get("model", {})
    assert_same(plain, found, 0.05 if is_rough else 1e-4)


def test_a_loss_with_a_reference():
    loss = PpoLoss(reference_kl=ReferenceKlSection(coef=0.1))

    def work(place):
        return train(build(place, loss=loss, reference=place(build_policy(4))), BATCHES)

    assert_same(*on_both(work), 1e-4)


def test_a_loss_over_what_was_left_to_draw_from():
    batches = [[with_support(mb) for mb in batch] for batch in BATCHES]
    loss = PpoLoss(reference_kl=ReferenceKlSection(coef=0.1))

    def work(place):
        learner = build(place, loss=loss, reference=place(build_policy(4)))
        return train(learner, batches) | {"scores": learner.trained_logprobs(batches[0])[0]}

    assert_same(*on_both(work), 1e-4)


def with_support(mb: MicroBatch) -> MicroBatch:
    """The support of some tokens."""
    parts = [[int(token), 3, 7][: i % 3] for i, token in enumerate(mb.token_ids)]
    return msgspec.structs.replace(mb, support=Support.of(parts))


@pytest.mark.parametrize("experts", ["grouped", "one by one", "replayed"])
def test_a_mixture_of_experts(experts):
    batches = [[sampled(build_moe())]] if experts == "replayed" else BATCHES
    model = {"moe_use_grouped_mm": experts != "one by one"}

    def work(place):
        learner = build(place, build_moe(), model=model, enable_router_replay=experts == "replayed")
        return train(learner, batches)

    assert_same(*on_both(work), 1e-4)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in UNLIKE else pytest.mark.slow) for name in SINGLE]
)
def test_a_step_of_every_family(family):
    """Windows and chosen keys are narrower than documents; a second pass scores."""

    def work(place):
        learner = build(place, build_policy(family=family, **NARROW))
        return train(learner, BATCHES[:1]) | {"scores": learner.trained_logprobs(BATCHES[1])[0]}

    assert_same(*on_both(work), 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        "qwen3_vl",
        pytest.param("qwen3_vl_moe", marks=pytest.mark.slow),
        pytest.param("qwen3_5", marks=[pytest.mark.slow, needs("families")]),
    ],
)
def test_a_step_on_images(case):
    mbs = image_batches(1)[0]

    def work(place):
        model = {"vlm": VisionSection(freeze_vision_encoder=False)}
        learner = build(place, build_vision_policy(case), model=model)
        return train(learner, [mbs]) | {f"scores {i}": found for i, found in enumerate(learner.trained_logprobs(mbs))}

    assert_same(*on_both(work), 1e-4)


def test_bfloat16_with_float32_masters():
    def work(place):
        return train(build(place, build_policy().bfloat16(), model={"dtype": "bfloat16"}), BATCHES)

    plain, found = on_both(work)
    assert_same(plain, found, 0.1)


def test_activations_that_wait_in_cpu_memory(monkeypatch):
    monkeypatch.setattr(memory, "MIN_OFFLOAD_BYTES", 256)
    plain = train(build(lambda network: network), BATCHES)
    for more in ({}, {"ac": {"mode": "selective", "targets": ["attn_proj"]}}):
        with pretended() as device:
            model = {"ac_offloading": {"max_inflight_activations": 1}} | more
            found = train(build(lambda network: network.to(device), model=model), BATCHES)
        assert_same(plain, found, 1e-4)


@pytest.mark.parametrize(
    "optim",
    [AdamWOptim(lr=1e-2), pytest.param(MuonOptim(lr=1e-3), marks=needs("optimizers"))],
    ids=lambda optim: optim.type,
)
def test_optimizer_state_that_waits_in_cpu_memory(optim, monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 1 << 14)
    with pretended() as device:
        results = []
        for waits in (False, True):
            learner = build(lambda network: network.to(device), model={"optim_cpu_offload": waits}, optim=optim)
            results.append(train(learner, BATCHES))
            tensors = [t for kept in learner.network.optimizer.state.values() for t in kept.values() if t.dim()]
            assert tensors and all(t.is_cuda != waits for t in tensors)
    assert_same(*results, 1e-6)


@pytest.mark.parametrize(
    "advantages",
    [pytest.param(GaeAdvantages(), marks=needs("critic")), ShapedAdvantages(kl_coef=0.1)],
    ids=lambda a: a.type,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_a_critic_and_several_updates(advantages, dtype):
    has_critic = isinstance(advantages, GaeAdvantages)
    section = CriticSection(num_critic_only_steps=1) if has_critic else None
    number_type = getattr(torch, dtype)

    def work(place):
        critic = None
        if section is not None:
            from stretto_critic.critic import Critic

            network = with_value_head(place(build_policy(3).to(number_type)))
            critic = Critic(
                network, section=section, model=ModelSection(dtype=dtype), optim=AdamWOptim(lr=1e-2, eps=1e-2)
            )
        loss = PpoLoss() if has_critic else PpoLoss(reference_kl=ReferenceKlSection(coef=0.1))
        reference = None if has_critic else place(build_policy(4).to(number_type))
        learner = build(
            place, build_policy().to(number_type), loss=loss, valuer=critic, reference=reference, model={"dtype": dtype}
        )  # fmt: skip
        updates = Updates(
            learner,
            TrainerSection(advantages=advantages, critic=section, loss=loss, updates_per_step=2, epochs_per_step=2),
        )
        metrics = [updates.train([pack(scored(seed), padding=2)]) for seed in range(3)]
        return metrics[-1] | weights(learner)

    plain, found = on_both(work)
    if dtype == "float32":
        assert_same(plain, found, 1e-3)
    else:
        assert plain.keys() == found.keys() and all(np.isfinite(value).all() for value in found.values())


def test_sums_may_be_numbers_beside_tensors_of_a_device():
    with pretended() as device:
        sums = StepSums()
        for _ in range(2):
            sums.add({"loss": torch.ones((), device=device), "max/updates": 3.0, "tokens": 2.0})
        assert sums.pop_sums(Mesh.single_rank(device).reduce) == {"loss": 2.0, "max/updates": 3.0, "tokens": 4.0}


def test_a_gradient_that_is_not_finite_ends_the_step():
    with pretended() as device:
        policy = build_policy()
        with torch.no_grad():
            policy.model.norm.weight.fill_(float("nan"))
        learner = build(lambda network: network.to(device), policy)
        learner.forward_backward(BATCHES[0])
        with pytest.raises(EngineError, match="gradient norm is nan"):
            learner.optim_step()


def test_fine_tuning_and_validation():
    mbs = []
    for mb in BATCHES[0]:
        nothing, mask = np.zeros(len(mb.token_ids), np.float32), mb.loss_mask.astype(np.float32)
        mbs.append(msgspec.structs.replace(mb, ce_weights=mask, rl_weights=nothing))

    def work(place):
        learner = build(place)
        before = learner.evaluate(mbs)["nll"]
        learner.forward_backward(mbs)
        return learner.optim_step() | {"before": before, "after": learner.evaluate(mbs)["nll"]}

    assert_same(*on_both(work))


def test_scores_and_the_canary():
    def work(place):
        learner = build(place)
        logprobs, entropy = learner.logprobs(BATCHES[0][0])
        found = {"scores": learner.trained_logprobs(BATCHES[0])[0], "logprobs": logprobs, "entropy": entropy}
        return found | {"canary": np.array(score_canary(learner, 40).logprobs)}

    assert_same(*on_both(work))


# -- files and wires --


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_checkpoint_of_a_device_goes_on_there(tmp_path: Path, is_async):
    with pretended() as device:
        place = lambda network: network.to(device)
        learner, run_dir = build(place), RunDir(tmp_path)
        train(learner, BATCHES[:1])
        if is_async:
            saver = Saver(run_dir, is_async=True, on_written=lambda step: None)
            saver.save(learner)
            saver.wait()
        else:
            save_checkpoint(run_dir, learner)
        straight = train(learner, BATCHES[1:])
        resumed = build(place, build_policy(7))
        checkpoint.load(run_dir, resumed, 1)
        assert_same(straight, train(resumed, BATCHES[1:]), 0.0)


@pytest.mark.parametrize("cfg", [ShmWeights(), FilesystemWeights()], ids=lambda cfg: cfg.type)
@pytest.mark.parametrize("is_delta", [False, pytest.param(True, marks=needs("broadcast"))], ids=["whole", "delta"])
def test_published_weights_are_loaded_into_an_engine_on_a_device(tmp_path: Path, cfg, is_delta):
    if is_delta:
        cfg = type(cfg).model_validate({"delta": {"directory": tmp_path}})
    with pretended() as device:
        learner = build(lambda network: network.to(device))
        publisher = build_publisher(cfg, RunDir(tmp_path / "run"), "device")
        core = build_core(build_policy(5).to(device))
        for version in range(1, 4):
            train(learner, BATCHES[:1])
            manifest = publisher.publish(version, learner.export_tensors())
            assert core.weights_refusal_reason(manifest) is None
            with receive(manifest, device=device) as tensors:
                core.load_weights(version, tensors)
        publisher.close()
        got = dict(core.model.named_parameters())
        for name, parameter in learner.policy.named_parameters():
            assert torch.equal(parameter.cpu(), got[name].cpu())
            assert got[name].is_cuda


# -- the engine --

PROMPTS = [np.arange(2, 2 + length, dtype=np.int32) % VOCAB for length in (1, 5, 40)]


def sampled_by(core) -> dict[str, np.ndarray]:
    """Prefill, decode, forks, filters, greedy and prompt logprobs."""
    asked = [ask("greedy", PROMPTS[0], temperature=0.0), ask("scored", PROMPTS[2], max_tokens=0, scored=True)]
    asked += [ask(f"n{i}", ids, n=3, scored=True) for i, ids in enumerate(PROMPTS)]
    asked += [ask("cut", PROMPTS[1], top_k=5, top_p=0.8, min_p=0.01, temperature=0.7)]
    found = {}
    for one, completions in zip(asked, run(core, *asked)):
        for member, completion in enumerate(completions):
            name = f"{one.request_id}.{member}"
            found |= {f"{name} tokens": completion.token_ids, f"{name} logprobs": completion.logprobs}
            if completion.prompt_logprobs is not None:
                found[f"{name} prompt"] = completion.prompt_logprobs
            if completion.support is not None:
                found[f"{name} support tokens"] = completion.support.ids
    return found


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_the_engine_draws_the_same_tokens(family):
    settings = {"enable_return_routed_experts": family == "moe", "max_num_batched_tokens": 64}
    settings["enable_return_sampling_mask"] = True

    def work(place):
        return sampled_by(build_core(place(build_moe() if family == "moe" else build_model()), **settings))

    plain, found = on_both(work)
    assert "cut.0 support tokens" in plain
    for name in plain:
        if name.endswith("tokens"):
            assert np.array_equal(plain[name], found[name]), name
    assert_same(plain, found, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", SINGLE)
def test_the_engine_of_every_family(family):
    def work(place):
        return sampled_by(build_core(place(build_model(family=family, **NARROW)), max_num_batched_tokens=64))

    plain, found = on_both(work)
    assert_same(plain, found, 1e-4)


def test_the_engine_in_bfloat16():
    plain, found = on_both(lambda place: sampled_by(build_core(place(build_model().bfloat16()))))
    assert plain.keys() == found.keys()
    prompts = [name for name in plain if name.endswith("prompt")]
    assert max(np.abs(plain[name] - found[name]).mean() for name in prompts) < 0.02


def test_the_engine_with_an_adapter():
    def work(place):
        learner = build(lambda network: network, model={"lora": LoRASection(rank=4)})
        train(learner, BATCHES)
        core = build_core(place(build_policy()))
        core.load_adapter("tuned", Adapter.of(learner.policy))
        asked = [msgspec.structs.replace(ask(f"r{i}", PROMPTS[1]), adapter=a) for i, a in enumerate(("tuned", None))]
        return {str(i): c[0].logprobs for i, c in enumerate(run(core, *asked))}

    plain, found = on_both(work)
    assert_same(plain, found, 1e-4)
