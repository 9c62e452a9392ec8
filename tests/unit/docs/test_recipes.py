"""The recipes for models of the Hub: every variant is planned, and what their pages compute is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.check.degrees import find_degrees, read_shape
from stretto.check.models import check_model
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.data.model_file import ModelFile
from stretto.envs.base import load_environment
from stretto.envs.multi_turn import Episode
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.plan import plan
from stretto.launch.run.rl import plan_only
from stretto.models.config import parse_config
from stretto.models.decoder import Decoder
from stretto.records.rollout import Task
from stretto_vllm.command import build_command

GSM8K = Path(__file__).parents[3] / "examples" / "gsm8k"
WIDTHS = {"Qwen/Qwen3-0.6B": (28, 1024, 3072, 16), "Qwen/Qwen3-4B": (36, 2560, 9728, 32)}
"""Layers, hidden and intermediate size, query heads, as the models' config.json has them."""


@pytest.mark.parametrize("overlays", [
    [], ["two_gpus.toml"], ["qwen3_4b.toml"], ["two_gpus.toml", "qwen3_4b.toml"],
], ids=str)  # fmt: skip
def test_every_variant_is_planned_for_its_gpus(overlays, tmp_path):
    words = [word for file in ["qwen3.toml", *overlays] for word in ("@", str(GSM8K / file))]
    cfg = load(RLConfig, [*words, "--dry-run", "--output-dir", str(tmp_path)])
    is_large = "qwen3_4b.toml" in overlays
    assert cfg.model.name == ("Qwen/Qwen3-4B" if is_large else "Qwen/Qwen3-0.6B")
    assert cfg.model.optim_cpu_offload == is_large
    devices = {spec.role: spec.devices for spec in plan(cfg, cfg.run_dir).processes}
    trainer = ("1",) if "two_gpus.toml" in overlays else ("0",)
    assert tuple(devices["inference"]) == ("0",) and tuple(devices["trainer"]) == trainer
    page = (GSM8K / "README.md").read_text()
    assert " ".join(f"@ examples/gsm8k/{file}" for file in ["qwen3.toml", *overlays]) + " " in page


@pytest.mark.parametrize("overlays", [[], [str(GSM8K / "two_gpus.toml")]], ids=len)
def test_the_tools_are_planned_for_one_gpu_and_for_two(overlays, tmp_path):
    files = [str(GSM8K.parent / "multi_turn_tools" / "qwen3.toml"), *overlays]
    words = [word for file in files for word in ("@", file)]
    cfg = load(RLConfig, [*words, "--dry-run", "--output-dir", str(tmp_path)])
    devices = {spec.role: tuple(spec.devices) for spec in plan(cfg, cfg.run_dir).processes}
    assert devices["inference"] == ("0",) and devices["trainer"] == (str(len(overlays)),)


def test_every_order_is_solved_by_the_tools_and_nothing_else_is():
    shop = load_environment("stretto.examples.multi_turn_tools.shop:Shop", {})
    for row in shop.sft_rows(50, seed=1):
        *talk, last = row["messages"]
        task = Task(env="shop", task_id="t", data={"order": talk[0]["content"][8:-6]})
        right = Episode(task, [*talk, last])
        assert shop.prompt(task) == talk[:1]
        assert shop.score(right).reward == 1.0 and shop.score(right).metrics["searches"] == 2.0
        wrong = {"role": "assistant", "content": last["content"].replace("{", "{1")}
        assert shop.score(Episode(task, [*talk, wrong])).reward == 0.0
        assert shop.score(Episode(task, [talk[0], {"role": "assistant", "content": "I do not know."}])).reward == 0.0
    held_out = {shop.tasks("eval").task(i).data["order"] for i in range(200)}
    assert not held_out & {shop.tasks("train").task(i).data["order"] for i in range(2000)}


def test_search_finds_what_is_in_the_documents():
    search, _ = load_environment("stretto.examples.multi_turn_tools.shop:Shop", {}).tools
    assert search("mug") == "A mug costs 7 euros."
    assert search("price of mugs and pens") == "A mug costs 7 euros. A pen costs 3 euros."
    assert search("yacht") == "Nothing found."


def test_the_warm_up_asks_as_the_run_does():
    import importlib.util

    spec = importlib.util.spec_from_file_location("records", GSM8K / "records.py")
    records = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(records)
    rl, sft = (
        load(root, ["@", str(GSM8K / file)]) for root, file in ((RLConfig, "qwen3.toml"), (SFTConfig, "sft.toml"))
    )
    args = rl.orchestrator.env[0].args
    assert args["prompt_template"] == "{prompt}" + records.ASK
    assert sft.data.name == args["path"] and sft.data.convert == "stretto.examples.gsm8k.records:solved"
    row = records.solved({"question": "How many?", "answer": "6 * 12 = <<6*12=72>>72 in all.\n#### 72"})
    assert row == {"prompt": "How many?" + records.ASK, "completion": "6 * 12 = 72 in all.\n\n\\boxed{72}"}


@pytest.mark.parametrize("model", WIDTHS)
def test_parameters_and_cache_of_the_page_are_those_of_the_model(model):
    layers, hidden, intermediate, heads = WIDTHS[model]
    hf = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    with torch.device("meta"):
        network = Decoder(parse_config(hf, model))
    count = sum(parameter.numel() for parameter in network.parameters())
    page = (GSM8K / "README.md").read_text()
    assert f"{count:,}" in page and f"{2 * layers * 8 * 128 * 2:,} B" in page
    for per_parameter in (2, 4):
        assert f"{per_parameter * count / 1e9:.1f} |" in page


# -- one run for each size of model --

EXAMPLES = GSM8K.parent
SHAPES = {
    "Qwen/Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, {}),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 6144, 32, 4, {"num_experts": 128, "num_experts_per_tok": 8}),
    "zai-org/GLM-4.5-Air": ("glm4_moe", 46, 4096, 10944, 96, 8, {"n_routed_experts": 128, "num_experts_per_tok": 8}),
    "lmsys/gpt-oss-20b-bf16": ("gpt_oss", 24, 2880, 2880, 64, 8, {"num_local_experts": 32, "num_experts_per_tok": 4}),
    "zai-org/GLM-5": ("glm_moe_dsa", 78, 6144, 12288, 64, 64, {"n_routed_experts": 256, "num_experts_per_tok": 8}),
}
"""model_type, layers, hidden and intermediate size, heads, key and value heads, and more, as in their config.json."""
PLANS = {
    # GPUs of the trainer, of engines, nodes of engines; degrees of the mesh
    "qwen3_0.6b": (1, 1, 1, {}),
    "qwen3_30b_a3b": (4, 4, 1, {"dp_shard": 4, "ep": 4}),
    "qwen3_vl_4b": (4, 4, 1, {"dp_shard": 4}),
    "glm4.5_air": (24, 8, 1, {"dp_shard": 24, "ep": 8}),
    "gpt_oss_20b": (4, 4, 1, {"dp_shard": 2, "cp": 2, "ep": 4}),
    "glm5_pd_disag": (128, 96, 12, {"dp_shard": 32, "cp": 4, "ep": 8}),
    "glm5_llmd": (128, 128, 16, {"dp_shard": 32, "cp": 4, "ep": 8}),
}


@pytest.mark.parametrize("example", PLANS)
def test_each_size_of_model_is_planned_as_its_file_says(example, tmp_path):
    path = EXAMPLES / example / "rl.toml"
    cfg = load(RLConfig, ["@", str(path), "--dry-run", "--output-dir", str(tmp_path)])
    train_gpus, engine_gpus, engine_nodes, degrees = PLANS[example]
    processes = plan_only(cfg)[0].processes
    engines = [spec for spec in processes if spec.role == "inference"]
    assert sum(len(spec.devices) for spec in processes if spec.role == "trainer") == train_gpus
    assert sum(len(spec.devices) for spec in engines) == engine_gpus and len(engines) == engine_nodes
    assert cfg.num_train_ranks == train_gpus
    if (shape := SHAPES.get(cfg.model.name)) is not None:
        family, layers, hidden, intermediate, heads, kv_heads, more = shape
        hf = {
            "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": intermediate, **more,
        }  # fmt: skip
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(hf))
        section = cfg.model.model_copy(update={"name": str(tmp_path / "model")})
        check_model(section, train_gpus, "model", has_replay=cfg.trainer.enable_router_replay)
        found = find_degrees(section, train_gpus, read_shape(ModelFile.read(tmp_path / "model")))
        assert {axis: getattr(found, axis) for axis in degrees} == degrees
    text = path.read_text()
    assert "Not yet run on" in text.partition("max_steps")[0]
    assert f"rl @ examples/{example}/rl.toml" in text


def test_a_job_of_slurm_has_a_router_that_sees_its_engines(tmp_path, caplog):
    words = ["@", str(EXAMPLES / "glm5_llmd" / "rl.toml"), "--output-dir", str(tmp_path), "--dry-run"]
    plan = plan_nodes(load(RLConfig, words), RunDir(tmp_path / "run"))
    (router,) = (spec for spec in plan.processes if spec.role == "router")
    assert plan.config.orchestrator.client.base_url == f"http://{plan.hosts[router.node]}:8000/v1"
    assert "vllm-router is used instead" in caplog.text
    for cluster in ([], ["--slurm", "None", "--ray.wait-s", "9"]):
        with pytest.raises(ConfigError, match="does not see those of this job; leave it out"):
            load(RLConfig, [*words, *cluster, "--inference.router.address", "http://gateway:80"])


@pytest.mark.parametrize("example", ["glm5_pd_disag", "glm5_llmd"])
def test_engines_of_glm5_get_the_8_bit_checkpoint_and_its_switches(example, tmp_path):
    cfg = load(RLConfig, ["@", str(EXAMPLES / example / "rl.toml"), "--output-dir", str(tmp_path)])
    assert (cfg.model.name, cfg.inference.model) == ("zai-org/GLM-5", "zai-org/GLM-5-FP8")
    told = cfg.trainer_config()
    assert told.weight_broadcast.engine_model == "zai-org/GLM-5-FP8" and told.model.fp8 is True
    (tmp_path / "config.json").write_text("{}")
    command = build_command(cfg.inference, tmp_path, is_cpu=False)
    assert command.env["VLLM_USE_DEEP_GEMM"] == "1"
    assert command.words[command.words.index("--kv-cache-dtype") + 1] == "fp8"
