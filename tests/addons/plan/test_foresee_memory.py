"""Predicted memory against what torch's allocator hands out for the same step."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import ask, build_core, submit
from foresee_rows import rows_of
from processes.add_ons import families

from stretto.config.load import build
from stretto.config.root import RLConfig
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, CriticSection
from stretto.models import hub
from stretto.models.config import scratch_config
from stretto.trainer.learner import Learner
from stretto_plan.memory import Memory, all_memory, engine_memory, state_bytes, trainer_memory
from stretto_plan.setup import Setup, build_setup

DENSE = ScratchSection(
    hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4, head_dim=32, max_position_embeddings=4096
)
MIXTURE = DENSE.model_copy(update={"family": "qwen3_moe", "num_layers": 3, "moe_intermediate_size": 128})
NARROW = MIXTURE.model_copy(update={"moe_intermediate_size": 64})
MANY = MIXTURE.model_copy(update={"num_experts": 16})
SHARED = MIXTURE.model_copy(update={"family": "glm4_moe"})
VOCAB, TOKENS = 2048, 512
SMALL_VOCAB = 128  # the blocks decide, not the head


def config_of(shape: ScratchSection, directory, settings, vocab: int = VOCAB) -> RLConfig:
    (directory / "config.json").write_text(json.dumps(scratch_config(shape, vocab).hf))
    values = {"model": {"name": str(directory), **settings}, "seq_len": TOKENS}
    return build(RLConfig, values | {"orchestrator": {"env": [{"id": "sort-letters"}]}})


def measured_peak(shape: ScratchSection, settings, vocab: int) -> float:
    """Bytes over weights and optimizer state that a forward and a backward pass of one row take at most."""
    section = ModelSection(**settings)
    policy = hub.random_model(shape, vocab).to(hub.dtype_of(section.dtype, "cpu"))
    learner = Learner(
        policy, model=section, optim=AdamWOptim(lr=1e-4), scheduler=ConstantScheduler(warmup_steps=0), max_steps=None
    )
    rows = rows_of(TOKENS, TOKENS // 4, vocab)
    learner.forward_backward(rows)
    learner.optim_step()
    gc.collect()  # what earlier tests left would be freed while it is measured
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        learner.forward_backward(rows)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, settings, vocab",
    [
        (DENSE, {}, VOCAB),
        (DENSE, {"ac": {}}, VOCAB),
        (DENSE, {"ac": {}}, SMALL_VOCAB),
        (DENSE, {"ac": {"mode": "selective", "targets": ["mlp"]}}, VOCAB),
        (DENSE, {"fused_lm_head_token_chunk_size": 1024}, VOCAB),
        (MIXTURE, {}, VOCAB),
        (MIXTURE, {"ac": {}}, VOCAB),
        (MIXTURE, {"ac": {}}, SMALL_VOCAB),
        (MIXTURE, {"ac": {"mode": "selective", "targets": ["routed_experts"]}}, SMALL_VOCAB),
        (NARROW, {}, SMALL_VOCAB),
        (NARROW, {"ac": {}}, SMALL_VOCAB),
        (NARROW.model_copy(update={"moe_intermediate_size": 96}), {"ac": {}}, SMALL_VOCAB),
        (MANY, {"ac": {}}, SMALL_VOCAB),
        (SHARED, {}, SMALL_VOCAB),
        (SHARED, {"ac": {}}, SMALL_VOCAB),
    ],
)
def test_peak_of_a_pass_is_the_allocators(shape, settings, vocab, tmp_path) -> None:
    setup = build_setup(config_of(shape, tmp_path, settings, vocab))
    memory = trainer_memory(setup, TOKENS, num_rows=1)
    steady = ("before the first tensor", "weights", "float32 masters", "optimizer")
    passes = [phase for phase in memory.phases if phase.name != "update"]
    predicted = max(phase.total - sum(phase.parts.get(name, 0) for name in steady) for phase in passes)
    assert predicted == pytest.approx(measured_peak(shape, settings, vocab), rel=0.03)


@pytest.mark.heavy
@pytest.mark.parametrize("family", families("qwen3_5_text", "nemotron_h"))
@pytest.mark.parametrize("num_seqs", [9, 20, 24])
def test_states_of_sequences_are_those_of_the_engine(family, num_seqs, tmp_path) -> None:
    """As many as rollouts in flight, or as max_num_seqs allows; they begin one after the other."""
    shape = DENSE.model_copy(update={"family": family})
    batch = {"batch_size": 10, "rollouts_per_example": 2, "max_async_level": 1, "env": [{"id": "sort-letters"}]}
    config_of(shape, tmp_path, {})
    cfg = build(
        RLConfig,
        {
            "model": {"name": str(tmp_path), "dtype": "float32"},
            "seq_len": TOKENS,
            "orchestrator": batch,
            "inference": {"max_num_seqs": num_seqs, "dtype": "float32"},
        },
    )
    setup = build_setup(cfg, gpu="CPU")
    [engine] = setup.engines
    core = build_core(hub.random_model(shape, VOCAB), max_num_seqs=num_seqs)
    for number in range(20):
        submit(core, ask(str(number), np.arange(2, 9), max_tokens=60))
        core.step()
    assert core.states is not None and core.states.num_bytes > 0
    assert state_bytes(setup, engine) == core.states.num_bytes
    assert engine_memory(setup, engine).peak.parts["states of sequences"] == core.states.num_bytes


def test_a_critic_with_ranks_of_its_own_takes_nothing_of_the_policys(tmp_path) -> None:
    config = config_of(DENSE, tmp_path, {})

    def planned(critic: dict[str, Any] | None) -> tuple[Setup, dict[str, Memory]]:
        section = None if critic is None else CriticSection.model_validate(critic)
        trainer = config.trainer.model_copy(update={"critic": section})
        setup = build_setup(config.model_copy(update={"trainer": trainer}), gpu="H100")
        return setup, {memory.who: memory for memory in all_memory(setup)}

    without, alone = planned(None)
    beside, shared = planned({})
    own, apart = planned({"placement": {"num_workers": 1}, "optim": {"type": "sgd"}})
    assert shared["trainer rank"].peak.total > alone["trainer rank"].peak.total and "critic rank" not in shared
    assert apart["trainer rank"] == alone["trainer rank"]
    policy, critic = (apart[who].phases[0].parts for who in ("trainer rank", "critic rank"))
    assert critic["weights"] == policy["weights"] and critic["optimizer"] == policy["optimizer"] / 2  # one moment
    assert own.num_devices == beside.num_devices + 1 == without.num_devices + 1


def test_sharding_divides_what_a_rank_holds(tmp_path) -> None:
    one = trainer_memory(build_setup(config_of(DENSE, tmp_path, {}), gpu="H100"), TOKENS)
    config = config_of(DENSE, tmp_path, {})
    four = config.model_copy(update={"orchestrator": config.orchestrator.model_copy(update={"num_train_workers": 4})})
    sharded = trainer_memory(build_setup(four, gpu="H100"), TOKENS)
    held = ("optimizer", "gradients")
    before, after = (
        {name: phase.parts[name] for phase in memory.phases for name in held if name in phase.parts}
        for memory in (one, sharded)
    )
    assert after["optimizer"] == pytest.approx(before["optimizer"] / 4)
    assert after["gradients"] == pytest.approx(before["gradients"] / 4)


def test_split_tokens_and_groups_of_blocks_are_kept_less(tmp_path) -> None:
    def kept(shape, **model) -> float:
        memory = trainer_memory(build_setup(config_of(shape, tmp_path, {"tp": 2, **model}), gpu="H100"), TOKENS)
        return memory.phases[0].parts["activations"]

    for shape in (DENSE, MIXTURE):
        whole, split = kept(shape), kept(shape, sequence_parallel=True)
        assert 0.5 * whole < split < 0.95 * whole, "tp halves the rest without it, too"
        again, split_again = kept(shape, ac={}), kept(shape, ac={}, sequence_parallel=True)
        assert split_again == pytest.approx(again / 2, rel=0.1)
        assert kept(shape, ac={"group_size": 2}) < again < kept(shape, ac={"num_blocks": 2}) < whole


def test_experts_over_ranks_of_tp_are_a_part_of_each(tmp_path) -> None:
    def gathered(**model) -> float:
        memory = trainer_memory(build_setup(config_of(MIXTURE, tmp_path, {"tp": 2, **model}), gpu="H100"), TOKENS)
        return memory.phases[0].parts["gathered weights"]

    assert gathered(sequence_parallel=True, ep=2) < gathered(sequence_parallel=True, ep=1) == gathered()
