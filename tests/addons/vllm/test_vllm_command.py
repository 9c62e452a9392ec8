"""[inference] as vLLM's command line: options, environment, and settings that are refused before it starts."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.section import has_key
from stretto.config.sections.inference import InferenceSection
from stretto_vllm.command import COMPUTES_POLICY, PATCHES_VAR, build_command
from stretto_vllm.install import cpu_requirements, link_rdma_library
from stretto_vllm.plan.flags import VLLM, split_vllm_flags
from stretto_vllm.worker import num_workers, worker_index


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def words_of(section: InferenceSection, model: Path, *, is_cpu: bool) -> dict[str, str | None]:
    """Options and their values; a switch has None."""
    found: dict[str, str | None] = {}
    for word in build_command(section, model, is_cpu=is_cpu).words:
        if word.startswith("--"):
            found[word] = None
            last = word
        else:
            found[last] = word
    return found


def taken(*words: str):
    return split_vllm_flags(words, lambda option: has_key(InferenceConfig, option))


def test_first_class_keys_become_their_options(model):
    section = InferenceSection.model_validate(
        {
            "model": "some/model",
            "parallel": {"tp": 2, "dp": 4},
            "enable_expert_parallel": True,
            "enable_dbo": True,
            "enable_eplb": True,
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.8,
            "server": {"host": "0.0.0.0", "port": 8100},
        }
    )
    words = words_of(section, model, is_cpu=False)
    expected = {
        "--model": str(model),
        "--served-model-name": "some/model",
        "--host": "0.0.0.0",
        "--port": "8100",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "4",
        "--gpu-memory-utilization": "0.8",
        "--enable-expert-parallel": None,
        "--enable-dbo": None,
        "--enable-eplb": None,
        "--enable-prefix-caching": None,
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "stretto"}',
    }
    assert expected.items() <= words.items()
    assert not {"--enforce-eager", "--block-size", "--kv-cache-memory-bytes"} & set(words)


@pytest.mark.parametrize(
    "section, expected",
    [
        ({"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 4}),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5},
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5},
        ),
        ({"method": "mtp"}, {"method": "mtp", "num_speculative_tokens": 1}),
        ({"suffix_decoding_max_tree_depth": 8}, {"method": "suffix", "suffix_decoding_max_tree_depth": 8}),
        ({"method": "eagle3", "model": "d"}, {"method": "eagle3", "model": "d", "num_speculative_tokens": 3}),
    ],
)
def test_drafts_become_the_speculative_config(model, section, expected):
    cfg = InferenceSection.model_validate({"model": "some/model", "engine": "vllm", "speculation": section})
    assert json.loads(words_of(cfg, model, is_cpu=False)["--speculative-config"]) == expected
    assert "--speculative-config" not in words_of(InferenceSection(model="some/model"), model, is_cpu=False)


def test_one_process_answers_for_all_ranks_of_an_engine_and_none_on_a_headless_node(model):
    """vLLM's default is one HTTP process per rank, and it refuses adapters with several."""
    for dp in (1, 4):
        section = InferenceSection.model_validate({"model": str(model), "parallel": {"dp": dp}})
        assert words_of(section, model, is_cpu=False)["--api-server-count"] == "1"
    headless = InferenceSection(model=str(model), vllm_extra={"headless": True})
    assert "--api-server-count" not in words_of(headless, model, is_cpu=False)


@pytest.mark.parametrize(("has_server_per_node", "counts", "indices"), [(False, 16, 10), (True, 8, 2)])
def test_workers_are_counted_behind_their_own_server(has_server_per_node, counts, indices):
    """The second of two nodes of an engine with tp 2, dp 8: its second rank's first worker."""
    parallel = SimpleNamespace(
        world_size=2,
        rank=0,
        data_parallel_size=8,
        data_parallel_size_local=4,
        data_parallel_index=5,
        data_parallel_rank_local=1,
        local_engines_only=has_server_per_node,
    )
    assert (num_workers(parallel), worker_index(parallel)) == (counts, indices)


def test_requests_that_may_wait_are_counted_beside_those_that_run(model):
    settings = {"model": str(model), "parallel": {"dp": 2}, "max_num_seqs": 10, "server": {"max_waiting_requests": 5}}
    assert words_of(InferenceSection.model_validate(settings), model, is_cpu=False)["--max-num-queued-reqs"] == "25"


@pytest.mark.parametrize(("has_experts", "setting", "is_spread"), [
    (True, None, True), (False, None, False), (True, False, False), (True, True, True),
])  # fmt: skip
def test_experts_are_spread_where_the_plan_names_their_wire_and_the_model_has_some(
    model, has_experts, setting, is_spread
):
    if has_experts:
        shape = json.loads((model / "config.json").read_text()) | {"n_routed_experts": 4}
        (model / "config.json").write_text(json.dumps(shape))
    extra = {"all2all_backend": "deepep_low_latency"}
    section = InferenceSection(model=str(model), vllm_extra=extra, enable_expert_parallel=setting)
    words = words_of(section, model, is_cpu=False)
    assert ("--enable-expert-parallel" in words) == ("--all2all-backend" in words) == is_spread
    assert "--enable-expert-parallel" not in words_of(InferenceSection(model=str(model)), model, is_cpu=False)


def test_a_cpu_gets_the_recipe_that_starts_fastest(model):
    section = InferenceSection(model=str(model), dtype="bfloat16", kv_cache_tokens=1000)
    words = words_of(section, model, is_cpu=True)
    assert words["--kv-cache-memory-bytes"] == str(1000 * 2 * 2 * 2 * 64 * 2)
    assert words["--block-size"] == "32" and words["--distributed-executor-backend"] == "uni"
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(words)
    env = build_command(section, model, is_cpu=True).env
    assert env["TORCH_COMPILE_DISABLE"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env


def test_every_worker_of_a_cpu_has_a_core_of_its_own(model):
    section = InferenceSection.model_validate({"model": str(model), "parallel": {"tp": 2}})
    assert build_command(section, model, is_cpu=True).env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "--distributed-executor-backend" not in words_of(section, model, is_cpu=True)


def patches_of(section, model, *, is_cpu):
    return build_command(section, model, is_cpu=is_cpu).env["STRETTO_PATCHES"].split()


def test_every_patch_is_a_function_of_a_module_in_patches(model):
    section = InferenceSection.model_validate(
        {
            "parallel": {"pp": 2},
            "enable_expert_parallel": True,
            "enable_return_routed_experts": True,
            "enable_return_sampling_mask": True,
            "lora": {},
            "speculation": {"method": "ngram"},
            "vllm_extra": {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
        }
    )
    patches = {patch for is_cpu in (True, False) for patch in patches_of(section, model, is_cpu=is_cpu)}
    assert len(patches) == 14
    for module, _, function in (patch.partition(".") for patch in patches):
        assert callable(getattr(import_module(f"stretto_vllm.patches.{module}"), function))


def test_stages_of_a_pipeline_on_cpus_get_their_patch(model):
    section = InferenceSection.model_validate({"model": str(model), "parallel": {"pp": 2}})
    assert words_of(section, model, is_cpu=True)["--pipeline-parallel-size"] == "2"
    assert "stages.allocate_stage_buffers" in patches_of(section, model, is_cpu=True)
    assert patches_of(section, model, is_cpu=False) == ["caches.follow_weights"]


def test_the_key_is_no_word_that_everybody_can_read(model):
    command = build_command(InferenceSection(model=str(model), api_key="secret"), model, is_cpu=True)
    assert "secret" not in " ".join(command.words) and command.env["VLLM_API_KEY"] == "secret"


def test_extra_options_follow_and_replace_a_default_of_ours(model):
    extra = {
        "max_num_seqs": 7,
        "headless": True,
        "enable_prefix_caching": False,
        "kv_transfer_config": {"kv_connector": "X"},
        "compilation_config": None,
    }
    words = words_of(InferenceSection(model=str(model), vllm_extra=extra), model, is_cpu=False)
    assert words["--max-num-seqs"] == "7" and "--headless" in words
    assert "--no-enable-prefix-caching" in words and "--enable-prefix-caching" not in words
    assert words["--kv-transfer-config"] == '{"kv_connector": "X"}' and "--compilation-config" not in words


@pytest.mark.parametrize("name", ["port", "logprobs_mode", "weight_transfer_config", "model", "api_key"])
def test_what_training_relies_on_is_not_the_users_to_set(name, model):
    extra = {name: "8000" if name == "port" else "x"}
    section = InferenceSection(model=str(model), vllm_extra=extra, api_key="k")
    with pytest.raises(ConfigError, match="is not yours to set"):
        build_command(section, model, is_cpu=False)


def test_sizes_that_vllm_cannot_run_on_a_cpu_are_refused(model):
    with pytest.raises(ConfigError, match="multiples of 32"):
        build_command(InferenceSection(model=str(model), block_size=16), model, is_cpu=True)
    shape = json.loads((model / "config.json").read_text()) | {"head_dim": 16}
    (model / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match="heads have 16 dimensions"):
        build_command(InferenceSection(model=str(model)), model, is_cpu=True)


def test_flags_of_vllm_on_the_command_line_are_parted_from_ours():
    rest, extra = taken(
        "--model", "m", "--data-parallel-size", "4", "--tensor-parallel-size", "2", "--data-parallel-size-local",
        "2", "--data-parallel-address=10.0.0.1", "--headless", "--no-enable-chunked-prefill", "@", "f.toml",
        "--cuda-graph-sizes" if has_option("--cuda-graph-sizes") else "--cudagraph-capture-sizes", "1", "2",
    )  # fmt: skip
    assert rest == ["--model", "m", "--data-parallel-size", "4", "--tensor-parallel-size", "2", "@", "f.toml"]
    assert extra.pop("data_parallel_address") == "10.0.0.1"
    assert extra.pop("data_parallel_size_local") == 2
    assert extra.pop("headless") is True and extra.pop("enable_chunked_prefill") is False
    assert list(extra.values()) == [[1, 2]]


def has_option(name: str) -> bool:
    return any(flag.name == name for flag in VLLM.table.flags)


def test_the_deployment_pages_commands_load(tmp_path):
    line = (
        "--model m --data-parallel-size 4 --tensor-parallel-size 4 --data-parallel-size-local 2 "
        "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 5555 --data-parallel-start-rank 2 --headless"
    )
    rest, extra = taken(*line.split())
    cfg = load(InferenceConfig, [*rest, "--vllm-extra", json.dumps(extra)])
    assert (cfg.parallel.dp, cfg.parallel.tp, cfg.engine) == (4, 4, "auto")
    assert cfg.chosen_engine(has_gpu=False) == "vllm"
    assert cfg.vllm_extra["data_parallel_start_rank"] == 2 and cfg.vllm_extra["headless"] is True


def test_flags_of_vllm_beside_the_file_of_a_whole_run_are_those_of_its_engine(tmp_path):
    (tmp_path / "rl.toml").write_text("[inference.vllm_extra]\nheadless = true\n")
    rest, extra = taken("--data-parallel-size", "4", "--data-parallel-start-rank", "2")
    words = ["@", str(tmp_path / "rl.toml"), *rest, "--vllm-extra", json.dumps(extra)]
    cfg = load(InferenceConfig, words)
    assert cfg.parallel.dp == 4 and cfg.vllm_extra == {"headless": True, "data_parallel_start_rank": 2}
    with pytest.raises(ConfigError, match="is a process without a server"):
        load(RLConfig, [*words[:2], "--orchestrator.env.0.id", "sort-letters"])


@pytest.mark.parametrize("words", [["--headless=1"], ["--all2all-backend"], ["--all2all-backend", "--headless"]])
def test_a_flag_without_its_value_or_with_one_too_many_is_refused(words):
    with pytest.raises(ConfigError, match=r"takes a value|takes no value"):
        taken(*words)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="--max-modle-len; did you mean --max-model-len"):
        VLLM.arguments("max_modle_len", 3, "inference.vllm_extra")


def test_auto_is_embedded_without_a_gpu_and_vllm_where_only_vllm_can():
    assert InferenceSection().chosen_engine(has_gpu=False) == "embedded"
    assert InferenceSection(engine="embedded").chosen_engine(has_gpu=True) == "embedded"
    for only in ({"parallel": {"dp": 2}}, {"vllm_extra": {"headless": True}}, {"enable_eplb": True}):
        assert InferenceSection.model_validate(only).chosen_engine(has_gpu=False) == "vllm"


def test_the_cpu_install_leaves_out_what_is_built_for_cuda():
    found = cpu_requirements(
        [
            "torch==2.13.0+cpu",
            "torchvision",
            "triton>=3",
            "fastapi[standard]>=0.115",
            "ray; extra == 'ray'",
            "uvloop; sys_platform == 'linux'",
            "winloop; sys_platform == 'win32'",
        ]
    )
    assert found == ["fastapi[standard]>=0.115", "uvloop"]


def test_mooncake_is_lent_the_rdma_library_of_nixl(tmp_path):
    source, target = tmp_path / "nixl_cu12.libs", tmp_path / "mooncake_transfer_engine_non_cuda.libs"
    source.mkdir()
    target.mkdir()
    assert not link_rdma_library(tmp_path)
    for name in ("libibverbs-1de1.so.1.14", "libnl-3-47cd.so.200", "libucp-12.so"):
        (source / name).write_text(name)
    for _ in range(2):
        assert link_rdma_library(tmp_path)
    assert {link.name for link in target.iterdir()} == {"libibverbs.so.1", "libnl-3-47cd.so.200"}
    assert (target / "libibverbs.so.1").read_text() == "libibverbs-1de1.so.1.14"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")
def test_the_table_is_that_of_the_installed_vllm():
    import subprocess
    import sys

    words = [sys.executable, "-m", "stretto_vllm.plan.flags"]
    made = subprocess.run(words, capture_output=True, check=True, timeout=300)
    shipped = VLLM.file.read_bytes()
    assert json.loads(made.stdout) == json.loads(shipped)


def test_adapters_have_one_slot_more_than_may_be_loaded(model):
    section = InferenceSection.model_validate({"lora": {"max_loras": 3, "max_lora_rank": 20}})
    words = words_of(section, model, is_cpu=True)
    assert "--enable-lora" in words
    assert (words["--max-loras"], words["--max-cpu-loras"], words["--max-lora-rank"]) == ("4", "7", "32")
    targets = build_command(section, model, is_cpu=True).words
    at = targets.index("--lora-target-modules")
    assert tuple(targets[at + 1 : at + 8]) == section.lora.target_modules
    assert "--enable-lora" not in words_of(InferenceSection(), model, is_cpu=True)


def test_the_runs_own_adapter_has_a_slot_of_its_own(model):
    """With it no request is for the base model, which would need one more."""
    section = InferenceSection.model_validate({"lora": {"max_loras": 3, "compute_policy": True}})
    command = build_command(section, model, is_cpu=True)
    assert words_of(section, model, is_cpu=True)["--max-loras"] == "4"
    assert COMPUTES_POLICY in command.env[PATCHES_VAR].split()


@pytest.mark.parametrize(
    ("settings", "is_cpu", "message"),
    [
        ({"lora": {"target_modules": ["q_proj", "experts"]}}, True, "no adapters of experts"),
        ({"lora": {"target_modules": ["lm_head"]}}, False, "output head"),
        ({"lora": {}, "speculation": {}}, False, "max_num_batched_tokens = 25600 or more"),
        ({"vllm_extra": {"enable_lora": True}}, False, "the section is inference.lora"),
        ({"vllm_extra": {"max_loras": 4}}, False, "inference.lora.max_loras"),
    ],
)
def test_adapters_that_vllm_would_get_wrong_are_refused(model, settings, is_cpu, message):
    with pytest.raises(ConfigError, match=message):
        build_command(InferenceSection.model_validate(settings), model, is_cpu=is_cpu)


@pytest.mark.parametrize(("is_cpu", "where"), [(True, "cpu"), (False, "gpu")])
def test_sampling_masks_are_vllms_own_on_gpus_and_ours_on_a_cpu(model, is_cpu, where):
    section = InferenceSection(enable_return_sampling_mask=True)
    assert ("--return-sampling-mask" in words_of(section, model, is_cpu=is_cpu)) == (not is_cpu)
    patch = f"supports.return_supports_on_{where}s"
    assert patch in patches_of(section, model, is_cpu=is_cpu)
    assert patch not in patches_of(InferenceSection(), model, is_cpu=is_cpu)


@pytest.mark.parametrize(
    ("given", "is_cpu", "dtype", "head"),
    [
        ({}, False, "bfloat16", '{"head_dtype": "float32"}'),
        ({}, True, "float32", None),
        ({"dtype": "float32"}, False, "float32", None),
        ({"dtype": "bfloat16"}, True, "bfloat16", None),
        ({"vllm_extra": {"hf_overrides": {"a": 1}}}, False, "bfloat16", '{"a": 1}'),
    ],
    ids=str,
)
def test_numbers_are_bfloat16_on_gpus_with_a_head_that_does_not_round_and_float32_on_cpus(
    model, given, is_cpu, dtype, head
):
    section = InferenceSection.model_validate({"model": str(model), **given})
    words = words_of(section, model, is_cpu=is_cpu)
    assert words["--dtype"] == dtype and words.get("--hf-overrides") == head


@pytest.mark.parametrize("given", [{"speculation": {"method": "ngram"}}, {"vllm_extra": {"spec-method": "ngram"}}])
def test_drafts_on_a_cpu_get_their_patch(model, given):
    section = InferenceSection.model_validate({"model": "some/model", "engine": "vllm", **given})
    assert "drafts.expand_settings_on_cpus" in build_command(section, model, is_cpu=True).env[PATCHES_VAR]
    assert "drafts." not in build_command(section, model, is_cpu=False).env[PATCHES_VAR]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")
def test_settings_of_requests_are_repeated_for_their_drafts():
    import torch

    from stretto_vllm.patches.drafts import _repeat

    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert torch.equal(_repeat(torch.tensor([0.5, 1.0, 0.0]), ends, 5, 0, 1), torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0]))
    assert _repeat(torch.tensor([5, 6, 7], dtype=torch.int32), ends, 5).tolist() == [5, 5, 7, 7, 7]
