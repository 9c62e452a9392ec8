"""LoRA: which weights are trained, how they are merged, and that PEFT computes the same from saved files."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch
from tiny import build_policy, documents, pack, randomly_adapted

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.lora import CONFIG, TENSORS, Adapter, attach_adapters, load_adapter, save_adapter, with_adapter
from stretto.models.moe import Experts
from stretto.models.parts.router import Routing
from stretto.trainer.learner import Learner

SHAPES = {"dense": {}, "moe": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}}
LORA = LoRASection(rank=4, alpha=12.0)


def build_learner(policy=None, lora=LORA, **model) -> Learner:
    optim = AdamWOptim(lr=model.pop("lr", 1e-2))
    section = ModelSection(lora=lora, **model)
    return Learner(
        policy or build_policy(),
        model=section,
        optim=optim,
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )


def trained(policy, lora=LORA, steps=3, **model) -> Learner:
    learner = build_learner(policy, lora, **model)
    for step in range(steps):
        learner.forward_backward([pack(documents(step))])
        learner.optim_step()
    return learner


def with_random_adapter(policy, lora=LORA, seed=3):
    return randomly_adapted(policy, lora, seed, 0.1)


def logits(policy, length=20) -> torch.Tensor:
    ids = torch.arange(length) % 30 + 2
    with torch.no_grad():
        hidden = policy.hidden(ids, PackedLayout((0, length), ids.device))
        return hidden @ policy.output_weight.T


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(shape):
    policy, base = build_policy(**shape), build_policy(**shape)
    before = dict(base.named_parameters())
    learner = build_learner(policy)
    torch.testing.assert_close(logits(policy), logits(base), rtol=0, atol=0)
    for step in range(3):
        learner.forward_backward([pack(documents(step))])
        learner.optim_step()
    assert (logits(policy) - logits(base)).abs().max() > 0.01
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            assert parameter.requires_grad
        else:
            assert not parameter.requires_grad and torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_merged_weights_compute_the_same(shape, tmp_path):
    policy = with_random_adapter(build_policy(**shape))
    hub.save_hf(policy, tmp_path)
    merged = hub.load_model(tmp_path, dtype=torch.float32)
    assert (logits(policy) - logits(build_policy(**shape))).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(policy), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(shape):
    """Slow reference: W(A, B) = W + scaling * B A is built by autograd and put into the base model."""
    policy = with_random_adapter(build_policy(**shape))
    ids = torch.arange(24) % 30 + 2
    layout = PackedLayout((0, 10, 24), ids.device)
    (policy.hidden(ids, layout) ** 2).mean().backward()
    base = build_policy(**shape)
    adapter = Adapter.of(policy)
    halves = {name: (a.clone().requires_grad_(), b.clone().requires_grad_()) for name, (a, b) in adapter.pairs.items()}
    weights = {n: p.detach() for n, p in base.named_parameters()}
    for name, (a, b) in halves.items():
        weights[name] = weights[name] + adapter.scaling * (b @ a)
    hidden = torch.func.functional_call(_Hidden(base), {f"model.{n}": w for n, w in weights.items()}, (ids, layout))
    (hidden**2).mean().backward()
    found = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    assert len(found) == 2 * len(halves)
    for name, (a, b) in halves.items():
        stem = name.removesuffix(".weight") + "." if name.endswith(".weight") else name + "_"
        torch.testing.assert_close(found[stem + "lora_A"], a.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[stem + "lora_B"], b.grad, rtol=1e-4, atol=1e-6)


class _Hidden(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, layout):
        return self.model.hidden(ids, layout)


def test_grouped_experts_equal_the_loop():
    policy = with_random_adapter(build_policy(**SHAPES["moe"]))
    grouped = logits(policy)
    for module in policy.modules():
        if hasattr(module, "use_grouped_mm"):
            module.use_grouped_mm = False
    torch.testing.assert_close(grouped, logits(policy), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_adapter", [True, False])
def test_experts_take_a_pass_without_rows_and_give_zero_gradients(has_adapter):
    policy = build_policy(**SHAPES["moe"])
    if has_adapter:
        with_random_adapter(policy)
    (experts, *_) = [module for module in policy.modules() if isinstance(module, Experts)]
    for use_grouped_mm in (True, False):
        experts.use_grouped_mm = use_grouped_mm
        experts.zero_grad()
        x = torch.zeros(0, experts.gate_up_proj.shape[2], requires_grad=True)
        out = experts(x, torch.zeros(4, dtype=torch.int64), Routing(), torch.zeros(0, dtype=torch.int64))
        out.sum().backward()
        assert not len(out) and not any(p.grad.any() for p in experts.parameters() if p.requires_grad)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_saved_is_what_peft_computes(shape, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = build_policy(**shape)
    hub.save_hf(base, tmp_path / "base")
    policy = trained(base).policy
    save_adapter(policy, tmp_path / "adapter", LORA, str(tmp_path / "base"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ids = torch.arange(20) % 30 + 2
    with torch.no_grad():
        found = theirs(input_ids=ids[None]).logits[0]
    assert (found - logits(hub.load_model(tmp_path / "base", dtype=torch.float32))).abs().max() > 0.01
    torch.testing.assert_close(found, logits(policy), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_adapter_is_read_back_and_merges_into_a_checkpoint(shape, tmp_path):
    base = build_policy(**shape)
    hub.save_hf(base, tmp_path / "base")
    policy = with_random_adapter(base)
    save_adapter(policy, tmp_path / "adapter", LORA)
    adapter = load_adapter(tmp_path / "adapter")
    ours = Adapter.of(policy)
    assert adapter.scaling == ours.scaling == 3.0 and adapter.pairs.keys() == ours.pairs.keys()
    for name, pair in ours.pairs.items():
        for half, again in zip(pair, adapter.pairs[name]):
            assert torch.equal(half, again), name
    table = hub.load_model(tmp_path / "base", dtype=torch.float32).tensor_map
    base = dict(hub.map_tensors(tmp_path / "base"))
    merged = {name: with_adapter(name, tensor, table, adapter) for name, tensor in base.items()}
    for name, tensor in hub.export_tensors(policy):
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    again = dict(hub.map_tensors(tmp_path / "base"))
    assert all(torch.equal(base[name], again[name]) for name in base), "the files' pages are not written to"


@pytest.mark.heavy
def test_a_bfloat16_policy_has_float32_masters_of_its_adapter():
    policy = build_policy().to(torch.bfloat16)
    learner = trained(policy, dtype="bfloat16", lr=1e-3)
    weights = {n: t for n, t in learner.state().tensors.items() if n.startswith("model.")}
    assert weights and all("lora_" in n and t.dtype is torch.float32 for n, t in weights.items())
    assert dict(learner.policy.named_parameters())["model.layers.0.self_attn.q_proj.lora_A"].dtype is torch.bfloat16


def test_a_checkpoint_holds_the_adapter_only_and_continues_bit_for_bit():
    def fresh():
        torch.manual_seed(0)
        return build_learner(lora=LoRASection(rank=4, alpha=12.0, dropout=0.2))

    through, first = fresh(), fresh()
    for learner in (through, first):
        for step in range(2):
            learner.forward_backward([pack(documents(step))])
            learner.optim_step()
    state = first.state()
    assert all("lora_" in name for name in state.slices if not name.startswith("rng."))
    torch.manual_seed(99)
    resumed = fresh()
    resumed.load_state(state)
    through.load_state(state)  # puts the random state back as well
    for learner in (through, resumed):
        torch.set_rng_state(state.slices["rng.cpu"].tensor)
        learner.forward_backward([pack(documents(5))])
        learner.optim_step()
    for (name, one), (_, other) in zip(through.policy.named_parameters(), resumed.policy.named_parameters()):
        assert torch.equal(one, other), name
    other = build_learner(lora=LoRASection(rank=4, alpha=1.0))
    with pytest.raises(DataError, match="alpha / rank = 3, but"):
        other.load_state(state)
    other = build_learner(lora=LoRASection(rank=8, alpha=24.0))
    with pytest.raises(DataError, match=r"lora_A.*shape"):
        other.load_state(state)


def test_dropout_is_for_learning_only():
    learner = build_learner(lora=LoRASection(rank=4, dropout=0.5))
    policy = with_random_values(learner.policy)
    assert torch.equal(logits(policy), logits(policy))
    ids = torch.arange(20) + 2
    layout = PackedLayout((0, 20), ids.device)
    assert not torch.equal(policy.hidden(ids, layout), policy.hidden(ids, layout))


def with_random_values(policy):
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return policy


def test_names_without_a_layer_are_listed_once(caplog):
    with caplog.at_level("INFO", logger="stretto.models.lora"):
        attach_adapters(build_policy(), LoRASection())
    [line] = [r.message for r in caplog.records if "does not have" in r.message]
    assert "experts" in line and "fc1_latent_proj" in line and "q_proj" not in line


def test_a_model_without_any_of_the_names_is_refused():
    with pytest.raises(ConfigError, match="in_proj"):
        attach_adapters(build_policy(), LoRASection(target_modules=("in_proj",)))


def test_published_tensors_are_the_adapters():
    learner = build_learner()
    names = [name for name, _ in learner.export_tensors()]
    assert all(".lora_" in name and name.startswith("base_model.model.model.layers.") for name in names)
    assert learner.adapter_info().rank == 4 and learner.adapter_info().scaling == 3.0
    plain = build_learner(lora=None)
    assert plain.adapter_info() is None and "model.norm.weight" in dict(plain.export_tensors())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"r": 3}, "not a pair of rank 3"),
    ],
)
def test_adapters_of_another_kind_are_refused(tmp_path, change, message):
    save_adapter(with_random_adapter(build_policy()), tmp_path, LORA)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=message):
        load_adapter(tmp_path)


def test_damaged_adapters_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_adapter(tmp_path)
    save_adapter(with_random_adapter(build_policy()), tmp_path, LORA)
    whole = (tmp_path / TENSORS).read_bytes()
    (tmp_path / TENSORS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="truncated"):
        load_adapter(tmp_path)
    (tmp_path / TENSORS).unlink()
    with pytest.raises(DataError, match="no such file"):
        load_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused():
    shapes = {name: tuple(p.shape) for name, p in build_policy().named_parameters()}
    adapter = Adapter.of(with_random_adapter(build_policy(hidden_size=32)))
    with pytest.raises(DataError, match="do not fit"):
        adapter.check(shapes)
    adapter = Adapter.of(with_random_adapter(build_policy(num_layers=3)))
    with pytest.raises(DataError, match=r"no model.layers.2"):
        adapter.check(shapes)
    Adapter.of(with_random_adapter(build_policy())).check(shapes)


@pytest.mark.heavy
def test_training_with_an_adapter_lowers_the_loss():
    learner = build_learner(build_policy(), lr=3e-2)
    batch = [pack([doc | {"ce_weights": doc["loss_mask"].astype(np.float32)} for doc in documents(1)])]
    batch = [msgspec.structs.replace(mb, loss_mask=np.zeros_like(mb.loss_mask)) for mb in batch]
    likelihoods = []
    for _ in range(12):
        learner.forward_backward(batch)
        learner.optim_step()
        scored, _ = learner.logprobs(batch[0])
        likelihoods.append(float(scored[batch[0].ce_weights > 0].mean()))
    assert likelihoods[-1] > likelihoods[0] + 0.1


def test_a_model_of_transformers_has_an_adapter_of_the_same_names(tmp_path):
    from stretto.models.hf import load_hf_model

    hub.save_hf(build_policy(), tmp_path / "base")
    theirs = load_hf_model(tmp_path / "base", dtype=torch.float32)
    ours = build_policy()
    base = logits(theirs)
    for policy in (theirs, ours):
        with_random_adapter(policy)
    names = dict(Adapter.of(ours).tensors())
    assert dict(Adapter.of(theirs).tensors()).keys() == names.keys()
    merged = dict(hub.export_tensors(theirs))
    assert merged.keys() == dict(hub.export_tensors(ours)).keys()
    again = build_policy()
    hub.load_tensors(again, merged.items())
    assert (logits(theirs) - base).abs().max() > 0.1
    torch.testing.assert_close(logits(again), logits(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ckpt": {"weights": {"save_adapter_separately": True}}}, "no adapter is trained"),
        ({"model": {"lora": {}, "moe_bias_update_rate": 0.1}}, "only the adapter changes"),
        ({"model": {"lora": {"rank": 0}}}, "rank"),
        ({"model": {"lora": {"dropout": 1.0}}}, "dropout"),
        ({"model": {"lora": {"target_modules": []}}}, "target_modules"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings, message):
    from stretto.config.load import load
    from stretto.config.root import SFTConfig

    path = tmp_path / "sft.json"
    path.write_text(json.dumps(settings | {"max_steps": 1, "data": {"type": "file", "name": "rows.jsonl"}}))
    with pytest.raises(ConfigError, match=message):
        load(SFTConfig, ["@", str(path)])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_step_says_that_its_passes_leave_out_inputs_by_chance(dropout):
    """The mismatch of such a pass is not that of numerics alone."""
    learner = build_learner(lora=LoRASection(rank=4, dropout=dropout))
    learner.forward_backward([pack(documents())])
    assert learner.optim_step().get("optim/dropout", 0.0) == dropout
