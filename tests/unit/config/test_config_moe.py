"""Settings about experts: what one implies for another process, and what is refused."""

from __future__ import annotations

import json

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import build
from stretto.config.root import RLConfig, TrainerConfig
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import ModelSection

ENV = {"env": [{"id": "reverse-text"}]}


def rl(**settings):
    return build(RLConfig, {"orchestrator": ENV} | settings)


@needs("prime")
def test_replay_has_the_engine_return_its_choices():
    assert not rl().inference.enable_return_routed_experts
    assert rl(trainer={"enable_router_replay": True}).inference.enable_return_routed_experts
    assert rl(trainer={"enable_router_replay": True}, inference={"seed": 3}).inference.enable_return_routed_experts
    alone = rl(inference={"vllm": {"enable_return_routed_experts": True}})
    assert alone.inference.enable_return_routed_experts and not alone.trainer.enable_router_replay


def test_what_is_derived_loads_again():
    cfg = rl(trainer={"enable_router_replay": True})
    assert cfg.trainer_config().enable_router_replay and cfg.inference_config().enable_return_routed_experts
    assert RLConfig.model_validate(cfg.model_dump()).inference.enable_return_routed_experts


def test_replay_without_choices_is_refused():
    with pytest.raises(ConfigError, match="enable_return_routed_experts = false"):
        rl(trainer={"enable_router_replay": True}, inference={"enable_return_routed_experts": False})


def test_engines_that_already_run_are_not_asked():
    cfg = rl(trainer={"enable_router_replay": True}, inference=None)
    assert cfg.inference is None and cfg.trainer.enable_router_replay


def test_more_chosen_experts_than_there_are_is_refused():
    model = {"scratch": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}}
    with pytest.raises(ConfigError, match=r"num_experts_per_tok = 5 is more than .*num_experts = 4"):
        build(TrainerConfig, {"model": model})


def test_defaults_are_those_of_the_spec():
    model = ModelSection()
    assert model.moe_use_grouped_mm and not model.freeze_moe_router and model.moe_bias_update_rate is None
    assert not InferenceSection().enable_return_routed_experts


@needs("vllm")
def test_vllm_is_asked_for_its_choices_on_a_gpu_and_ours_are_captured_on_a_cpu(tmp_path):
    from stretto_vllm.command import build_command

    section = InferenceSection(enable_return_routed_experts=True)
    assert "--enable-return-routed-experts" in build_command(section, tmp_path, is_cpu=False).words
    assert "--enable-return-routed-experts" not in build_command(InferenceSection(), tmp_path, is_cpu=False).words
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    order = build_command(section, tmp_path, is_cpu=True)
    assert "--enable-return-routed-experts" not in order.words
    plain = build_command(InferenceSection(), tmp_path, is_cpu=True)
    patch = "choices.return_choices_on_cpus"
    assert [patch in each.env["STRETTO_PATCHES"].split() for each in (order, plain)] == [True, False]
