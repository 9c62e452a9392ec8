"""Loads, trains, saves, exports and resumes transformers models; run by every rank.

`python hf_runs.py FOLDER STAGE`: models lie in FOLDER/models, results go to FOLDER/results.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from mesh_runs import batches, optim_of, whole_tensors
from ranks import gather_anything
from safetensors.torch import load_file, save_file
from tiny import save_checkpoint

from stretto.base.paths import RunDir
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import ConstantScheduler
from stretto.trainer.learner import Learner, load_policy
from stretto.trainer.publish.export import export_weights
from stretto.trainer.ranks.mesh import build_mesh, process_group
from stretto.trainer.state import checkpoint

STEP = 2  # checkpoints are of it
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    # kind: (model_type, its settings)
    "tied": ("llama", {"tie_word_embeddings": True}),
    "padded": ("mistral", {"tie_word_embeddings": False}),
    "packed": ("qwen3", {"tie_word_embeddings": False}),
    "moe": ("qwen3_moe", MOE | {"tie_word_embeddings": False}),
    "biased": (
        "glm4_moe",
        MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
    ),
    "lora": ("qwen3", {"tie_word_embeddings": False}),
    "other_names": ("llama", {"tie_word_embeddings": True}),
}
STAGES = {
    # name: (ranks, [model] of all kinds, stage whose checkpoint it continues)
    "one": (1, {}, None),
    "two": (2, {}, None),
    "hsdp": (2, {"dp_replicate": 2, "ac": {}}, None),
    "one_again": (1, {}, "two"),
    "two_again": (2, {}, "one"),
}


def section_of(kind: str, folder: Path, **model) -> ModelSection:
    lora = LoRASection(rank=4, alpha=12.0) if kind == "lora" else None
    return ModelSection(name=str(folder / "models" / kind), impl="hf", lora=lora, **model)


def build(kind: str, folder: Path, model: dict) -> Learner:
    torch.manual_seed(0)
    section = section_of(kind, folder, **model)
    policy = load_policy(section, may_be_meta=True)
    return Learner(
        policy,
        model=section,
        optim=optim_of(kind),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        mesh=build_mesh(section, policy.config),
    )


def run_of(folder: Path, stage: str, kind: str) -> RunDir:
    return RunDir(folder / "runs" / f"{stage}-{kind}")


def step(learner: Learner) -> dict[str, float]:
    micro_batches = batches("dense")[learner.step]
    learner.forward_backward(learner.mesh.local_items(micro_batches))
    return learner.optim_step()


def play(kind: str, folder: Path, stage: str) -> dict:
    """Train to STEP or load its checkpoint, save and export, then train one more step."""
    _, model, before = STAGES[stage]
    learner, metrics = build(kind, folder, model), []
    is_on_meta = hasattr(learner.policy, "checkpoint_reader")
    if before is None:
        metrics = [step(learner) for _ in range(STEP)]
    else:
        checkpoint.load(run_of(folder, before, kind), learner, STEP)
    run = run_of(folder, stage, kind)
    save_checkpoint(run, learner)
    section = section_of(kind, folder, **model)
    export_weights(run, learner.network.weights, STEP, folder / "models" / kind, section if section.lora else None)
    metrics.append(step(learner))
    owned = {name: tensor.clone() for name, tensor in learner.export_tensors()}
    parts = gather_anything(owned)
    return {
        "metrics": metrics,
        "tensors": whole_tensors(learner),
        "published": {name: tensor for part in parts for name, tensor in part.items()},
        "num_published": sum(map(len, parts)),
        "is_on_meta": is_on_meta,
        "logprobs": learner.logprobs(batches("dense")[0][1])[0],
    }


def make_models(folder: Path) -> None:
    """Write random models with transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind, (family, settings) in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SHAPE, **settings)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / "models" / kind)
        (folder / "models" / kind / "tokenizer.json").write_text("{}")
        # As files of the bare model have them, which transformers knows how to load.
        if kind == "other_names":
            path = folder / "models" / kind / "model.safetensors"
            tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "pt"})


def main(folder: Path, stage: str) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        for kind in FAMILIES:
            played = play(kind, folder, stage)
            if os.environ["RANK"] == "0":
                torch.save(played, folder / "results" / f"{stage}-{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
