"""A mixture of experts from nothing to `rl`: warm-up, then engine, orchestrator and trainer with replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes.add_ons import needs
from runs import Ended, merged, rl, sorting

NUM_STEPS = 6


@pytest.fixture(scope="module")
def model(warmed_up: Callable[..., Path]) -> Path:
    """0.2M parameters, 8 experts per block, 2 of them per token; after so few steps its choices still change."""
    scratch = {"family": "qwen3_moe", "moe_intermediate_size": 32}
    return warmed_up(max_steps=60, seq_len=1024, model={"scratch": scratch})


def run(directory: Path, model: Path, **more: Any) -> Ended:
    return rl(directory, merged(sorting(model, NUM_STEPS), more))


@pytest.mark.slow
def test_a_mixture_trains_with_replay_and_is_what_transformers_loads(model: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, model, trainer={"enable_router_replay": True})
    assert all(0 <= value < 1e-6 for value in ended.column("mismatch_kl/max"))
    assert len(ended.column("max_vio/mean", "trainer")) == NUM_STEPS
    with ended.ledger() as ledger:
        row = next(iter(ledger.trained_rollouts(1)))
        branch = ledger.group(row["group_id"]).rollouts[row["member"]].branches[0]
        assert branch.routed_experts.shape == (len(branch.token_ids), 2, 2)
        assert branch.routed_experts[:-1].max() < 8
    from transformers import AutoModelForCausalLM

    before, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    after = AutoModelForCausalLM.from_pretrained(ended.run.weights_step(NUM_STEPS))
    changed = [not a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)


@pytest.mark.slow
def test_replay_lowers_the_mismatch_of_an_engine_in_bfloat16(model: Path, tmp_path: Path) -> None:
    means = []
    for replay in (False, True):
        directory = tmp_path / str(replay)
        directory.mkdir()
        more = {"inference": {"dtype": "bfloat16"}, "trainer": {"enable_router_replay": replay}}
        ended = run(directory, model, **more)
        values = ended.column("mismatch_kl/mean")
        means.append(sum(values) / len(values))
    assert 0 < means[1] < means[0], means


@pytest.mark.slow
def test_dialogues_are_replayed_turn_by_turn(model: Path, tmp_path: Path) -> None:
    """Later turns send only what is new of their choices; put together they are those of the whole."""
    env = {"env": [{"id": "envs:Dialogue"}]}
    ended = run(tmp_path, model, trainer={"enable_router_replay": True}, orchestrator=env)
    assert all(0 <= value < 1e-6 for value in ended.column("mismatch_kl/max"))
    with ended.ledger() as ledger:
        several = [
            branch
            for row in ledger.trained_rollouts(1)
            for branch in ledger.group(row["group_id"]).rollouts[row["member"]].branches
            if len(branch.versions) > 1
        ]
    assert several, "a branch must hold several turns for this test to say anything"
    for branch in several:
        assert len(branch.routed_experts) == len(branch.token_ids)
        assert branch.routed_experts[:-1].max() < 8 and branch.routed_experts[-1].min() == 255


@needs("optimizers")
@pytest.mark.slow
def test_experts_that_are_computed_again_replay_too(model: Path, tmp_path: Path) -> None:
    """Under Muon, in the same processes: the policy is still the one the engine sampled from."""
    memory = {"ac": {"mode": "selective", "targets": ["attn_proj", "routed_experts"]}}
    trainer = {"enable_router_replay": True, "model": memory, "optim": {"type": "muon", "lr": 1e-3}}
    ended = run(tmp_path, model, max_steps=2, trainer=trainer)
    assert all(0 <= value < 1e-6 for value in ended.column("mismatch_kl/max"))
    assert len(ended.column("optim/grad_norm", "trainer")) == 2
