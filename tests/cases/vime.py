"""Commands of vime's guide, the names of all its flags, and the files that they need."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

GUIDE = """
--actor-num-nodes --actor-num-gpus-per-node --rollout-num-gpus --rollout-num-gpus-per-engine --colocate
--prefill-num-servers --train-backend --num-layers --hidden-size --ffn-hidden-size --swiglu --vocab-size
--disable-bias-linear --num-attention-heads --group-query-attention --num-query-groups --kv-channels --qk-layernorm
--normalization --norm-epsilon --use-rotary-position-embeddings --rotary-base --seq-length --max-positional-embedding
--tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --context-parallel-size
--expert-model-parallel-size --expert-tensor-parallel-size --recompute-granularity --recompute-method
--recompute-num-layers --ckpt-format --ckpt-step --ref-load --load --save --hf-checkpoint --vllm-max-model-len
--vllm-gpu-memory-utilization --router-balance-abs-threshold --input-key --label-key --apply-chat-template
--advantage-estimator --calculate-per-token-loss --use-tis --n-samples-per-prompt --normalize-advantages --eps-clip
--critic-num-nodes --critic-num-gpus-per-node --critic-load --critic-save --critic-lr --critic-lr-warmup-iters
--num-critic-only-steps --value-clip --kl-coef --megatron-config-path --rollout-function-path --eval-function-path
--custom-generate-function-path --custom-rm-path --vllm-enable-expert-parallel --vllm-data-parallel-size
--vllm-router-ip --vllm-router-port --vllm-config --custom-megatron-init-path
--custom-megatron-before-log-prob-hook-path --custom-megatron-before-train-step-hook-path
""".split()  # noqa: SIM905
"""Every flag of the guide, as it stands there."""

MODEL_ARGS = """
   --num-layers 36
   --hidden-size 2560
   --ffn-hidden-size 9728
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   --use-rotary-position-embeddings
   --rotary-base 1000000
"""
DATA = "--input-key prompt --label-key label --apply-chat-template"
BASE = (
    "--hf-checkpoint {dir}/Qwen3-4B --prompt-data {dir}/rows.jsonl --rm-type math --num-rollout 3 "
    "--rollout-batch-size 4 "
    "--n-samples-per-prompt 4 --rollout-max-response-len 256 --rollout-max-context-len 1024"
)
"""What the guide's pieces need to be a whole command."""
SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2"

COMMANDS = {
    "grpo": f"--advantage-estimator grpo --eps-clip 0.2 --normalize-advantages {SPLIT}",
    "gspo": f"--advantage-estimator gspo --calculate-per-token-loss --use-tis {SPLIT}",
    "ppo": f"--advantage-estimator ppo --critic-lr 1e-5 --critic-lr-warmup-iters 1 --num-critic-only-steps 1 {SPLIT}",
    "actor, critic and rollout": (
        "--advantage-estimator ppo --actor-num-nodes 1 --actor-num-gpus-per-node 4 --critic-num-nodes 1 "
        "--critic-num-gpus-per-node 4 --rollout-num-gpus 8"
    ),
    "several updates of ppo": (
        f"--advantage-estimator ppo --value-clip 0.3 --eps-clip 0.1 --global-batch-size 8 {SPLIT}"
    ),
    "taking turns": "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2 --rollout-num-gpus 4",
    "taking turns on two nodes": (
        "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 4"
    ),
    "taking turns with an engine over two nodes": (
        "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 16"
    ),
    "taking turns with experts over two nodes": (
        "--colocate --actor-num-nodes 4 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 16 "
        "--tensor-model-parallel-size 2 "
        "--vllm-enable-expert-parallel --vllm-data-parallel-size 4"
    ),
    "reinforce++": f"--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages {SPLIT}",
    "parallelism": (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 2 "
        "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full "
        f"--recompute-method uniform --recompute-num-layers 1 --ckpt-format torch_dist {SPLIT}"
    ),
    "a launch script": (
        "--load runs/q --save runs/q --save-interval 20 --rollout-shuffle --global-batch-size 16 --balance-data "
        "--rollout-temperature 1 --eval-interval 20 --eval-prompt-data aime {dir}/rows.jsonl --eval-top-p 1 "
        "--n-samples-per-eval-prompt 16 --eval-max-response-len 512 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
        "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 "
        "--eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 "
        "--adam-beta1 0.9 --adam-beta2 0.98 --vllm-gpu-memory-utilization 0.7 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
        f"--attention-backend flash {SPLIT}"
    ),
    "two nodes": "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4",
    "an engine over two nodes": "--actor-num-gpus-per-node 8 --rollout-num-gpus 32 --rollout-num-gpus-per-engine 16",
    "experts of one engine over two nodes": (
        "--actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 "
        "--vllm-enable-expert-parallel --vllm-data-parallel-size 16"
    ),
    "prefill and decode over nodes": (
        "--actor-num-gpus-per-node 8 --rollout-num-gpus 24 --rollout-num-gpus-per-engine 4 --prefill-num-servers 2"
    ),
    "prefill and decode of two sizes": (
        "--actor-num-gpus-per-node 8 --rollout-num-gpus 24 --vllm-config {dir}/two_sizes.yaml"
    ),
    "prefill and decode of two sizes on a node": (
        "--actor-num-gpus-per-node 2 --rollout-num-gpus 6 --vllm-config {dir}/two_sizes_on_a_node.yaml"
    ),
    "an actor and a reference": (
        "--actor-num-gpus-per-node 8 --rollout-num-gpus 12 --vllm-config {dir}/two_models.yaml"
    ),
    "prefill and decode": (
        "--actor-num-gpus-per-node 2 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 2 --prefill-num-servers 1"
    ),
    "engines": (
        "--vllm-max-model-len 1024 --vllm-gpu-memory-utilization 0.7 --router-balance-abs-threshold 0 "
        f"--vllm-enable-chunked-prefill {SPLIT}"
    ),
}
"""The guide's flags by section, as whole commands with BASE, DATA and MODEL_ARGS."""

TWO_MODELS = """
vllm:
  - name: actor
    update_weights: true
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4
  - name: ref
    model_path: /path/to/ref_model
    update_weights: false
    server_groups:
      - worker_type: regular
        num_gpus: 4
        num_gpus_per_engine: 2
"""
"""The guide's models for --vllm-config."""

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "hidden_size": 2560,
    "intermediate_size": 9728, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "attention_bias": False,
}  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "label": str(n + 1)} for n in range(8)]


def put_files(directory: Path) -> None:
    """The files that BASE names: the config of a model, and prompts."""
    (directory / "Qwen3-4B").mkdir()
    (directory / "Qwen3-4B" / "config.json").write_text(json.dumps(CONFIG))
    for name, prefill, decode in (("two_sizes", (8, 4), (16, 16)), ("two_sizes_on_a_node", (2, 1), (4, 4))):
        groups = [
            {"worker_type": kind, "num_gpus": total, "num_gpus_per_engine": each}
            for kind, (total, each) in (("prefill", prefill), ("decode", decode))
        ]
        groups[1]["overrides"] = {"max_num_seqs": 96}
        (directory / f"{name}.yaml").write_text(json.dumps({"vllm": [{"name": "actor", "server_groups": groups}]}))
    (directory / "two_models.yaml").write_text(TWO_MODELS)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def put_megatron(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python where `make megatron` makes one; it is not run."""
    python = directory / "prefix" / "opt" / "megatron" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(sys, "prefix", str(directory / "prefix"))


def words_of(directory: Path, *parts: str) -> list[str]:
    """The words of a command out of pieces of the guide, in which {dir} is the directory."""
    return shlex.split(" ".join((BASE, DATA, *parts)).replace("{dir}", str(directory)))
