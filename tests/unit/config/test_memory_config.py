"""Settings that trade memory for time: how they are spelt, and what is refused."""

from __future__ import annotations

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import build, load
from stretto.config.root import RLConfig, SFTConfig, TrainerConfig

SFT = {"max_steps": 2, "data": {"type": "file", "name": "rows.jsonl"}}


def problem(tmp_path, toml: str) -> str:
    file = tmp_path / "c.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(TrainerConfig, ["@", str(file)], verb="trainer")
    head, *lines = str(caught.value).split("\n")
    assert head.startswith("1 problem") and len(lines) == 1
    return lines[0]


def test_empty_sections_turn_things_on():
    model = TrainerConfig.model_validate(
        {"model": {"ac": {}, "compile": {}, "ac_offloading": {"pin_memory": False}}}
    ).model
    assert model.ac.mode == "full" and model.ac.freq == 1
    assert model.ac_offloading.max_inflight_activations == 5 and not model.compile.fullgraph
    off = TrainerConfig.model_validate({"model": {"ac": "None"}}).model
    assert off.ac is off.ac_offloading is off.compile is None and not off.optim_cpu_offload


def test_what_is_written_out_loads_again():
    model = {"ac": {}, "ac_offloading": {}, "compile": {"fullgraph": True}, "optim_cpu_offload": True}
    cfg = RLConfig.model_validate(
        {"model": model, "trainer": {"optim": {"type": "muon"}}, "orchestrator": {"env": [{"id": "x"}]}}
    )
    assert RLConfig.model_validate(cfg.model_dump()).trainer == cfg.trainer
    assert cfg.trainer_config().model.ac.mode == "full" and cfg.trainer_config().optim.mu == 0.95


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ('[model.ac]\ntargets = ["mlp"]\n', ['model.ac.targets = ["mlp"] does nothing', 'model.ac.mode = "full"']),
        ('[model]\nimpl = "hf"\n[model.ac]\nmode = "selective"\n', ["knows the parts of our own modules only"]),
        ('[model.ac]\nmode = "selective"\ntargets = ["attention"]\n', ["attention", "attn_proj"]),
        ('[model.ac]\nmode = "selective"\ntargets = []\n', ["model.ac.targets is empty"]),
        ("[model.ac]\ngroup_size = 2\nfreq = 2\n", ["model.ac.group_size = 2", "both choose blocks"]),
        ('[model.ac]\ngroup_size = 2\nmode = "selective"\n', ["model.ac.group_size = 2 does nothing"]),
        ('[model]\nimpl = "hf"\n[model.ac]\ngroup_size = 2\n', ["only blocks of our own modules are grouped"]),
        ("[model.ac]\ngroup_size = 2\n[model.ac_offloading]\n", ["keeps nothing between blocks"]),
        ("[model]\nsequence_parallel = true\n", ["model.sequence_parallel = true does nothing with model.tp = 1"]),
        ("[model]\nfsdp_cpu_offload = true\noptim_cpu_offload = true\n", ["drop model.optim_cpu_offload"]),
        (
            '[model]\nfsdp_cpu_offload = true\n[optim]\ntype = "muon"\n',
            ['optim.type = "muon"', "use optim_cpu_offload"],
        ),
    ],
    ids=[
        "targets of full",
        "selective of transformers",
        "unknown target",
        "no target",
        "two choices of blocks",
        "groups of parts",
        "groups of transformers",
        "groups that are offloaded",
        "split tokens of one rank",
        "offloaded twice",
        "muon on a CPU",
    ],
)
def test_what_does_not_go_together_is_one_message(tmp_path, toml, parts):
    message = problem(tmp_path, toml)
    assert all(part in message for part in parts), message


def test_sft_checks_the_same():
    with pytest.raises(ConfigError, match=r"model\.ac\.targets = \[.mlp.\] does nothing"):
        build(SFTConfig, SFT | {"model": {"ac": {"targets": ["mlp"]}}})


@pytest.mark.parametrize(
    ("toml", "part"),
    [
        ('impl = "hf"', 'not model.impl = "hf"'),
        ("moe_use_grouped_mm = false", "leave model.moe_use_grouped_mm = false out"),
        ("compile = { fullgraph = true }", "leave model.compile.fullgraph = true out"),
    ],
)
def test_8_bit_products_go_with_grouped_experts_of_our_own(tmp_path, toml, part):
    assert part in problem(tmp_path, f"[model]\nfp8 = true\n{toml}\n")
    assert TrainerConfig.model_validate({"model": {"fp8": "reference"}}).model.fp8 == "reference"
    assert "reference" in problem(tmp_path, '[model]\nfp8 = "slow"\n')
