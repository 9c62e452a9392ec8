"""GPUs, routers and vLLM's options of a whole run: what is counted, what is one key, and what is refused."""

from __future__ import annotations

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig

RUN = ["--orchestrator.env", '[{"id": "sort-letters"}]']


def rl(*words: str) -> RLConfig:
    return load(RLConfig, [*RUN, *words], verb="rl")


def complaint(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        rl(*words)
    [line] = str(caught.value).splitlines()[1:]
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--deployment.num-infer-gpus 4 --inference.parallel.dp 1 --inference.engine vllm",
         "deployment.num_infer_gpus gives 4 GPUs and inference takes tp 1 = 1, so 3 would be idle; give 1, set "
         "inference.deployment.num_replicas = 4, or set inference.parallel.dp = 4"),
        ("--deployment.num-infer-gpus 4 --inference.parallel.tp 8",
         "deployment.num_infer_gpus gives 4 GPUs and inference takes tp 8 = 8, so 4 are missing; give 8, or lower"),
        pytest.param(
            "--inference-gpu-ids 0,1,2 --inference.parallel.tp 2 --inference.deployment.num-replicas 2 "
            '--inference.vllm-extra {"pipeline_parallel_size":2}',
            "inference_gpu_ids gives 3 GPUs and inference takes tp 2 x pp 2 x 2 engines = 8, so 5 are missing",
            marks=needs("vllm")),
        ("--inference-gpu-ids 0,1,2,3,4,5 --inference.deployment.type disaggregated --inference.deployment.is-local "
         "--inference.parallel.dp 2", "inference takes dp 2 x 2 engines = 4, so 2 would be idle"),
        ("--inference-gpu-ids 0,1 --inference.engine embedded --inference.deployment.num-replicas 1",
         "inference takes tp 1 = 1, so 1 would be idle; give 1, set inference.deployment.num_replicas = 2"),
        pytest.param(
            "--deployment.type multi_node --inference.parallel.tp 16 --weight-broadcast.type collective",
            "inference.parallel: tp 16 = 16 GPUs, and a node has deployment.gpus_per_node = 8", marks=needs("vllm")),
        pytest.param("--inference.vllm-extra.headless true",
                     "inference.vllm_extra.headless = true is a process without a server", marks=needs("vllm")),
        pytest.param('--inference.vllm-extra {"logprobs_mode":"raw_logprobs"}',
                     "inference.vllm_extra.logprobs_mode is not yours to set", marks=needs("vllm")),
        pytest.param(
            '--inference.gpu-memory-utilization 0.5 --inference.vllm-extra {"gpu_memory_utilization":0.7}',
            "gpu-memory-utilization = 0.5 but --inference.vllm-extra.gpu_memory_utilization = 0.7; give it once",
            marks=needs("vllm")),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_one_line_with_the_arithmetic(words, expected):
    assert expected in complaint(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        ("--inference-gpu-ids", "0,1,2,3,4,5", "--trainer-gpu-ids", "6,7", "--inference.parallel.dp", "6"),
        ("--deployment.num-infer-gpus", "8", "--inference.parallel.tp", "2", "--inference.parallel.pp", "4"),
        ("--deployment.num-infer-gpus", "2", "--inference.deployment.num-replicas", "2"),
        ("--inference-gpu-ids", "2", "--trainer-gpu-ids", "3"),
        ("--deployment.num-infer-gpus", "0"),
    ],
)
def test_gpus_that_are_as_many_as_engines_take_are_taken(words):
    rl(*words)


@needs("vllm")
def test_an_option_of_vllm_that_has_a_key_is_that_key():
    cfg = load(
        InferenceConfig,
        ["--model", "m", "--vllm-extra", '{"tensor_parallel_size": 2, "max_num_seqs": 7, "headless": true}'],
    )
    assert (cfg.parallel.tp, cfg.max_num_seqs, cfg.vllm_extra) == (2, 7, {"headless": True})
    assert rl("--inference.vllm-extra.pipeline_parallel_size", "4").inference.parallel.num_gpus == 4


@pytest.mark.parametrize("words", [(), ("--inference.router.policy", "cache_aware")])
def test_options_of_one_policy_choose_it(words):
    cfg = rl(*words, "--inference.router.extra", '{"balance_abs_threshold": 0}')
    assert cfg.inference.router.policy == "cache_aware"
    assert rl().inference.router.policy == "consistent_hash"


def test_one_complaint_about_a_wire_that_does_not_fit_the_deployment():
    """What is wrong with the tag of a table is not followed by complaints about the rest of the table."""
    words = ("--deployment.type", "multi_node", "--deployment.num-train-nodes", "4")
    line = complaint(*words, "--weight-broadcast.type", "shm")
    assert 'weight_broadcast.type = "shm": shared memory ends at one machine' in line


@needs("prime")
@pytest.mark.parametrize("typed", [("norm", "mlp"), ("norm,mlp",), ('["norm", "mlp"]',)])
def test_lists_of_fixed_length_are_typed_like_others(typed):
    cfg = rl("--trainer.model.ac.mode", "selective", "--trainer.model.ac.targets", *typed)
    assert cfg.model.ac.targets == ("norm", "mlp")
    assert rl("--inference.lora.target-modules", "q_proj").inference.lora.target_modules == ("q_proj",)


def test_rows_without_a_type_are_those_of_a_file():
    cfg = load(SFTConfig, ["--data.name", "x.jsonl", "--max-steps", "1"])
    assert (cfg.data.type, cfg.data.name) == ("file", "x.jsonl")
