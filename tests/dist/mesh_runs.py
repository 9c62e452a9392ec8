"""Three steps of a tiny policy on some mesh; run by every rank, with one process group for all cases.

`python mesh_runs.py OUT CASE...` writes OUT/<case>.pt from rank 0.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases.families import MIXER_CASES
from cases.vision import build_vision_policy, image_batches
from msgspec.structs import replace
from ranks import gather_anything
from tiny import VOCAB, branches, build_policy, documents, pack, with_streams
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from stretto.config.sections.algorithm import GaeAdvantages
from stretto.config.sections.model import LoRASection, ModelSection, VisionSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, CriticSection, MuonOptim, TrainerSection
from stretto.families.table import traits_of
from stretto.models import hub
from stretto.models.config import parse_config
from stretto.models.decoder import Decoder
from stretto.models.value_head import with_value_head
from stretto.records.sample import MicroBatch
from stretto.records.support import Support
from stretto.trainer.learner import Learner
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device
from stretto.trainer.updates import Updates

NUM_STEPS = 3
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MOE = SHAPE | {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "vision": "qwen3_vl", "vision_frozen": "qwen3_vl", "vision_moe": "qwen3_vl_moe", "vision_delta": "qwen3_5",
    "vision_delta_moe": "qwen3_5_moe", "ppo_vision": "qwen3_vl", "lora_vision": "qwen3_vl",
    "lora_vision_moe": "qwen3_vl_moe", "lora_vision_delta": "qwen3_5", "lora_vision_delta_moe": "qwen3_5_moe",
    "ppo_vision_moe": "qwen3_vl_moe", "ppo_vision_delta": "qwen3_5", "ppo_vision_delta_moe": "qwen3_5_moe",
    "replay_vision_moe": "qwen3_vl_moe", "replay_vision_delta_moe": "qwen3_5_moe",
}  # fmt: skip
"""Kinds with images, and their cases."""
MIXERS = ("qwen3_5_moe_text", "nemotron_h", "deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared-choices-biases")
FAMILIES = ("glm4_moe", "gpt_oss", "minimax_m2", "afmoe", "laguna")
"""Families with experts whose meshes are tested with the choices replayed; windows are shorter than documents."""
TRAINED_INDEX = {"trained_index": MIXERS[-1], "trained_wide_index": "deepseek_v32"}
"""Kinds whose indexers are trained, by their family: with torch's operations, and with kernels in C."""
ADAPTED = tuple(f"lora_{name}" for name in (*FAMILIES, *MIXERS))
"""LoRA on all layers and experts of these families."""
REPLAYED = ("replay", *FAMILIES, *(f"lora_{name}" for name in FAMILIES))
"""Kinds whose choices of experts are replayed; so are those that begin with `replay_`, which learn otherwise too."""
KINDS = ("dense", "cut", "untied", "bias", "moe", "replay", "ppo", "lora", "lora_moe")


@dataclass(frozen=True)
class Case:
    """A mesh and a kind of policy."""

    world_size: int
    name: str
    kind: str
    model: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.world_size}-{self.name}-{self.kind}"

    @property
    def is_slow(self) -> bool:
        """Is it a combination of what others show, or another kind on a mesh that others have?"""
        return str(self) not in QUICK


def _cases() -> list[Case]:
    dense = {
        2: {
            "fsdp": {},
            "no_reshard": {"reshard_after_forward": False},
            "hsdp": {"dp_replicate": 2},
            "ulysses": {"cp": 2},
            "ring": {"cp": 2, "cp_style": "ring"},
            "tp": {"tp": 2},
        },
        4: {
            "fsdp": {},
            "hsdp": {"dp_replicate": 2},
            "ulysses": {"cp": 2},
            "ulysses4": {"cp": 4},
            "ring": {"cp": 2, "cp_style": "ring"},
            "ring4": {"cp": 4, "cp_style": "ring"},
            "tp": {"tp": 2},
            "hsdp_tp": {"dp_replicate": 2, "tp": 2},
            "hsdp_ulysses": {"dp_replicate": 2, "cp": 2},
            "tp_ulysses": {"tp": 2, "cp": 2},
            "tp_ring": {"tp": 2, "cp": 2, "cp_style": "ring"},
        },
    }
    moe = {
        2: {"fsdp": {"ep": 1}, "ep": {"ep": 2}, "ep_ulysses": {"ep": 2, "cp": 2}, "tp": {"tp": 2}},
        4: {
            "ep2": {"ep": 2},
            "ep4": {"ep": 4},
            "hsdp_ep": {"ep": 2, "dp_replicate": 2},
            "ep_ulysses": {"ep": 2, "cp": 2},
            "ep4_ring": {"ep": 4, "cp": 2, "cp_style": "ring"},
            "ep_tp": {"ep": 2, "tp": 2},
            "loop_ep": {"ep": 2, "moe_use_grouped_mm": False},
        },
    }
    cases = []
    for world_size in (2, 4):
        cases += [Case(world_size, n, "dense", m) for n, m in dense[world_size].items()]
        for name, model in moe[world_size].items():
            # A ring sums in another order, and a token whose best experts tie within rounding takes another one:
            # with replay there is nothing to choose.
            kinds = ("replay",) if model.get("cp_style") == "ring" else ("moe", "replay")
            cases += [Case(world_size, name, kind, model) for kind in kinds]
    return [
        *cases,
        Case(2, "tp", "bias", {"tp": 2}),
        *_family_cases(),
        *_memory_cases(),
        *_vision_cases(),
        *_lora_cases(),
        *_split_cases(),
        *_tree_cases(),
        Case(2, "fsdp", "fp8"),
        Case(2, "fsdp", "muon"),
        Case(2, "tp", "muon", {"tp": 2}),
        Case(2, "ep", "muon_moe", {"ep": 2}),
        Case(2, "fsdp", "muon_moe", {"ep": 1}),
        Case(4, "hsdp_tp", "muon", {"dp_replicate": 2, "tp": 2}),
        Case(4, "ep2", "muon_moe", {"ep": 2}),
        Case(4, "fsdp", "muon_odd"),
        Case(2, "fsdp", "untied"),
        Case(2, "fsdp", "cut"),
        Case(2, "tp", "cut", {"tp": 2}),
        Case(2, "ulysses", "cut", {"cp": 2}),
        Case(2, "ring", "cut", {"cp": 2, "cp_style": "ring"}),
        Case(4, "tp_ulysses", "untied", {"tp": 2, "cp": 2}),
        Case(2, "tp", "taught", {"tp": 2}),
        Case(2, "ulysses", "taught", {"cp": 2}),
        Case(2, "ring", "taught", {"cp": 2, "cp_style": "ring"}),
        Case(2, "fsdp", "ppo"),
        Case(2, "ring", "ppo", {"cp": 2, "cp_style": "ring"}),
        Case(4, "hsdp_tp", "ppo", {"dp_replicate": 2, "tp": 2}),
        Case(4, "ulysses", "ppo", {"cp": 2}),
    ]


def _tree_cases() -> list[Case]:
    """Samples that begin alike, computed once; on a ring each by itself, as on the one rank."""
    tree, ring = {"shared_prefixes": "tree"}, {"cp": 2, "cp_style": "ring"}
    return [
        Case(2, "tree_fsdp", "branches", tree),
        Case(2, "tree_ulysses", "branches", tree | {"cp": 2}),
        Case(2, "tree_ring", "branches", tree | ring),
        Case(2, "tree_tp", "branches", tree | {"tp": 2}),
        Case(2, "tree_split_ac", "branches", tree | {"tp": 2, "sequence_parallel": True, "ac": {}}),
        Case(2, "tree_ep", "replay_branches_moe", tree | {"ep": 2}),
        Case(4, "tree_ep_ulysses", "replay_branches_moe", tree | {"ep": 2, "cp": 2}),
        Case(4, "tree_tp_ulysses", "branches", tree | {"tp": 2, "cp": 2}),
    ]


def _vision_cases() -> list[Case]:
    """Models with images; in every step some ranks have none."""
    return [
        Case(2, "fsdp", "vision"),
        Case(2, "fsdp", "vision_frozen"),
        Case(2, "fsdp_ac", "vision", {"ac": {}}),
        Case(2, "ulysses", "vision", {"cp": 2}),
        Case(2, "ring", "vision", {"cp": 2, "cp_style": "ring"}),
        Case(2, "tp", "vision", {"tp": 2}),
        Case(2, "fsdp", "vision_delta"),
        Case(2, "ep", "vision_moe", {"ep": 2}),
        Case(2, "ulysses", "vision_moe", {"cp": 2}),
        Case(2, "ring", "vision_moe", {"cp": 2, "cp_style": "ring"}),
        Case(2, "tp", "vision_moe", {"tp": 2}),
        Case(2, "ep", "vision_delta_moe", {"ep": 2}),
        Case(2, "ulysses", "vision_delta", {"cp": 2}),
        Case(2, "ring", "vision_delta", {"cp": 2, "cp_style": "ring"}),
        Case(2, "ep_ulysses", "replay_vision_delta_moe", {"ep": 2, "cp": 2}),
        Case(2, "ring", "replay_vision_delta_moe", {"cp": 2, "cp_style": "ring"}),
        Case(2, "ep", "replay_vision_moe", {"ep": 2}),
        Case(2, "fsdp", "ppo_vision"),
        Case(2, "ring", "ppo_vision", {"cp": 2, "cp_style": "ring"}),
        Case(2, "ep", "ppo_vision_moe", {"ep": 2}),
        Case(2, "fsdp", "ppo_vision_delta"),
        Case(2, "ep", "ppo_vision_delta_moe", {"ep": 2}),
        Case(2, "fsdp", "lora_vision"),
        Case(2, "tp", "lora_vision", {"tp": 2}),
        Case(2, "ep", "lora_vision_moe", {"ep": 2}),
        Case(2, "fsdp", "lora_vision_delta"),
        Case(2, "ep", "lora_vision_delta_moe", {"ep": 2}),
        Case(4, "hsdp_ring", "vision", {"dp_replicate": 2, "cp": 2, "cp_style": "ring"}),
    ]


def _memory_cases() -> list[Case]:
    """Recomputed blocks, on meshes that exchange tokens inside of them."""
    full, experts = ({"ac": {}}, {"ac": {"mode": "selective", "targets": ("norm", "attn_proj", "routed_experts")}})
    projections = {"ac": {"mode": "selective", "targets": ("attn_proj", "mlp")}}
    return [
        Case(2, "fsdp_ac", "dense", full),
        Case(2, "fsdp_groups", "dense", {"ac": {"group_size": 2}}),
        Case(2, "ulysses_ac", "dense", full | {"cp": 2}),
        Case(2, "ring_ac", "dense", full | {"cp": 2, "cp_style": "ring"}),
        Case(2, "tp_parts", "dense", projections | {"tp": 2}),
        Case(2, "ep_ac", "moe", full | {"ep": 2}),
        Case(2, "ep_experts", "moe", experts | {"ep": 2}),
        Case(2, "ep_ulysses_ac", "replay", full | {"ep": 2, "cp": 2}),
        Case(4, "ep2_ac", "moe", full | {"ep": 2}),
        Case(4, "ep2_experts", "replay", experts | {"ep": 2, "cp": 2, "cp_style": "ring"}),
    ]


def _split_cases() -> list[Case]:
    """Ranks of tp that split tokens, and may have different experts."""
    split = {"tp": 2, "sequence_parallel": True}
    ring = {"cp": 2, "cp_style": "ring"}
    return [
        Case(2, "split", "dense", split),
        Case(2, "split", "bias", split),
        Case(2, "split_reshard", "cut", split | {"reshard_after_forward": False}),
        Case(2, "split_ac", "dense", split | {"ac": {}}),
        Case(2, "split_groups", "dense", split | {"ac": {"group_size": 2}}),
        Case(2, "split_parts", "dense", split | {"ac": {"mode": "selective", "targets": ("attn_proj", "mlp", "norm")}}),
        Case(2, "split", "moe", split | {"ep": 1}),
        Case(2, "split_ep", "moe", split | {"ep": 2}),
        Case(2, "split_ep", "replay", split | {"ep": 2}),
        Case(2, "split_ep_ac", "moe", split | {"ep": 2, "ac": {}}),
        Case(2, "split", "ppo", split),
        Case(2, "split", "muon", split),
        Case(2, "split_ep", "muon_moe", split | {"ep": 2}),
        Case(2, "split", "lora", split),
        Case(2, "split_ep", "lora_moe", split | {"ep": 2}),
        Case(2, "split", "vision", split),
        Case(2, "split_ep", "vision_moe", split | {"ep": 2}),
        *(Case(2, "split_ep", kind, split | {"ep": 2}) for kind in ("glm4_moe", "afmoe", "laguna")),
        Case(2, "split", "glm4", split),
        Case(4, "split_ep4", "moe", split | {"ep": 4}),
        Case(4, "split_ep2", "replay", split | {"ep": 2}),
        Case(4, "split4_ep4", "heads_moe", split | {"tp": 4, "ep": 4}),
        Case(4, "hsdp_split_ep", "moe", split | {"dp_replicate": 2, "ep": 2}),
        Case(4, "split_ulysses", "untied", split | {"cp": 2}),
        Case(4, "split_ring_ep4", "replay", split | ring | {"ep": 4}),
        Case(4, "split_ulysses_ep2", "moe", split | {"cp": 2, "ep": 2}),
        Case(4, "split_ep4", "lora_moe", split | {"ep": 4}),
        Case(8, "split4_ep8", "heads_moe", split | {"tp": 4, "ep": 8}),
    ]


def _lora_cases() -> list[Case]:
    """LoRA on meshes that cut the weights, and on meshes that cut the adapter too."""
    return [
        Case(2, "fsdp", "lora"),
        Case(2, "tp", "lora", {"tp": 2}),
        Case(2, "ulysses", "lora", {"cp": 2}),
        Case(2, "ring", "lora", {"cp": 2, "cp_style": "ring"}),
        Case(2, "ep", "lora_moe", {"ep": 2}),
        Case(4, "hsdp_tp", "lora", {"dp_replicate": 2, "tp": 2}),
        Case(4, "ep2", "lora_moe", {"ep": 2}),
        Case(4, "ep_tp", "lora_moe", {"ep": 2, "tp": 2}),
        *(Case(2, "ep", kind, {"ep": 2}) for kind in ADAPTED),
        *(Case(2, "ring", f"lora_{kind}", {"cp": 2, "cp_style": "ring"}) for kind in MIXERS[2:]),
    ]


def _family_cases() -> list[Case]:
    """Every family on each axis that it may be spread over."""
    meshes = {"ep": {"ep": 2}, "ulysses": {"cp": 2}, "ring": {"cp": 2, "cp_style": "ring"}, "tp": {"tp": 2}}
    cases = [Case(2, name, family, model) for family in FAMILIES for name, model in meshes.items()]
    cases += [Case(2, name, "glm4", model) for name, model in meshes.items() if name != "ep"]
    cases = [case for case in cases if case.name != "tp" or not traits_of(case.kind).undivided_heads]
    cases += [Case(2, name, kind, model) for kind in MIXERS for name, model in (("fsdp", {}), ("ep", meshes["ep"]))]
    cases += [Case(2, name, "deepseek_v3", meshes[name]) for name in ("ulysses", "ring")]
    cases += [Case(2, name, kind, meshes[name]) for kind in ("llama", "bias") for name in ("ulysses", "ring")]
    cases += [Case(2, "fsdp", kind) for kind in ("llama", "bias", "qwen3_5_text")] + [
        Case(2, "tp", "llama", meshes["tp"])
    ]
    shared, ring = MIXERS[-1], meshes["ring"]
    delta, latent = "qwen3_5_moe_text", "deepseek_v3"
    cases += [Case(2, "ep", f"replay_{kind}", meshes["ep"]) for kind in MIXERS]
    cases += [Case(2, "ring", f"replay_{kind}", ring) for kind in (delta, *MIXERS[2:])]
    cases += [
        Case(2, "fsdp", "replay_nemotron_h", {"ep": 1}),
        Case(2, "ulysses", f"replay_{latent}", meshes["ulysses"]),
    ]
    return [
        *cases,
        *(Case(2, name, "qwen3_5_text", meshes[name]) for name in ("ulysses", "ring")),
        Case(2, "ring_ac", "qwen3_5_text", ring | {"ac": {"mode": "selective", "targets": ("attn_proj",)}}),
        Case(2, "ep_ulysses", f"replay_{delta}", {"ep": 2, "cp": 2}),
        Case(4, "hsdp_ulysses", "qwen3_5_text", {"dp_replicate": 2, "cp": 2}),
        Case(2, "ring", "deepseek_v32", ring),
        Case(2, "ring", shared, ring),
        *(Case(2, "fsdp_indexer", kind) for kind in TRAINED_INDEX),
        *(Case(2, "ring_indexer", kind, ring | {"ac": {}}) for kind in TRAINED_INDEX),
        Case(4, "ring4", "deepseek_v32", ring | {"cp": 4}),
        Case(4, "ring4", shared, ring | {"cp": 4}),
        Case(4, "ep_ring_ac", shared, ring | {"ep": 4, "ac": {}}),
    ]


QUICK = frozenset(
    """
    2-fsdp-dense 2-no_reshard-dense
    2-ep-moe 2-ep_ulysses-replay 2-tp-replay 2-tp-bias 2-ring-cut
    2-ulysses_ac-dense 2-tp_parts-dense 2-ep_experts-moe 2-tp-lora 2-fsdp-fp8
    2-ring-taught 2-tp-muon 2-ep-muon_moe 2-fsdp-ppo 2-ep-gpt_oss 2-ring-gpt_oss 2-ulysses-laguna
    2-fsdp-vision 2-fsdp-vision_frozen 2-ring-vision 2-ep-vision_moe
    2-ep-qwen3_5_moe_text 2-ulysses-qwen3_5_text 2-ring-deepseek_v3 2-ring_indexer-trained_wide_index
    4-ep_ring_ac-glm_moe_dsa-shared-choices-biases
    4-hsdp_tp-ppo 4-hsdp_ulysses-dense 4-hsdp_ep-moe 4-ep4_ring-replay 4-ep_tp-lora_moe
    4-fsdp-muon_odd
    2-tree_ulysses-branches 2-tree_split_ac-branches 2-tree_ep-replay_branches_moe
    2-split_parts-dense 2-split_ep-replay 4-split_ep4-moe 4-split_ulysses-untied
    """.split()  # noqa: SIM905
)
"""The cases of `make test`: every axis, every pair of axes and every kind; `make test-all` has all products."""
OF_ADD_ONS = {"muon": "stretto_optimizers", "ppo": "stretto_critic"}
"""Kinds, and the add-on that they need."""
CASES = [case for case in _cases() if find_spec(OF_ADD_ONS.get(case.kind.split("_")[0], "stretto"))]
assert {str(case) for case in _cases()} >= QUICK


def batches(kind: str) -> list[list]:
    """Micro batches of every step: few and of different sizes, so that ranks get unequal shares."""
    if kind in VISION:
        steps = image_batches(NUM_STEPS)
        return [[_replayed(kind, n, mb) for mb in row] for n, row in enumerate(steps)] if is_replayed(kind) else steps
    steps = []
    for step in range(NUM_STEPS):
        docs = documents(seed=step, num_groups=2, group_size=3)
        if kind.endswith(("branches", "branches_moe")):
            docs = branches(step, width=4, turns=2)
        micro_batches = [pack(docs[:1]), pack(docs[1:4]), pack(docs[4:])]
        micro_batches = [_with_ages(mb, step, seed) for seed, mb in enumerate(micro_batches)]
        if step == 1:  # all that the second of two ranks has is without a signal, and it updates with the others
            nothing = np.zeros_like(micro_batches[1].advantages)
            micro_batches[1] = replace(micro_batches[1], advantages=nothing)
        if is_replayed(kind):
            micro_batches = [_replayed(kind, step, mb) for mb in micro_batches]
        if kind == "cut":
            rng = np.random.default_rng(step)
            micro_batches = [replace(mb, support=_support(rng, mb)) for mb in micro_batches]
        if kind == "taught":
            micro_batches = [with_streams(mb, seed=step) for mb in micro_batches]
        steps.append(micro_batches)
    return steps


def _with_ages(mb, step: int, seed: int):
    """Documents of several ages, of which some ranks have none."""
    ages = np.random.default_rng(seed).integers(0, 12, mb.num_samples)
    return replace(mb, first_versions=tuple((step - ages).tolist()))


def _support(rng: np.random.Generator, mb) -> Support:
    """A support of a third of the vocabulary for trained tokens; for some tokens all of it."""
    is_cut = mb.loss_mask & (rng.random(len(mb.token_ids)) < 0.8)
    return Support.of([rng.permutation(40)[:13] if cut else [] for cut in is_cut])


def is_replayed(kind: str) -> bool:
    return kind in REPLAYED or kind.startswith("replay_")


def _replayed(kind: str, step: int, mb: MicroBatch) -> MicroBatch:
    """With experts to replay: only the first ones, so that some ranks get no token; some tokens have none."""
    num_tokens, num_layers = len(mb.token_ids), policy_of(kind).config.num_layers
    rng = np.random.default_rng(1000 * step + num_tokens)
    layers = [rng.permuted(np.arange(3)[None].repeat(num_tokens, 0), axis=1)[:, :2] for _ in range(num_layers)]
    choices = np.stack(layers, 1).astype(np.uint8)
    choices[rng.random(num_tokens) < 0.1] = 255
    return replace(mb, routed_experts=choices)


def family_of(kind: str) -> str:
    """The `model_type` of a kind of policy."""
    kind = kind if kind in ("lora", "lora_moe") else kind.removeprefix("lora_").removeprefix("replay_")
    kind = TRAINED_INDEX.get(kind, kind)
    if kind in MIXER_CASES:
        return MIXER_CASES[kind][0]
    if kind in VISION or f"lora_{kind}" in VISION:
        return VISION.get(kind) or VISION[f"lora_{kind}"]
    if kind in (*FAMILIES, "glm4", "llama"):
        return kind
    return {"bias": "qwen2", "moe": "qwen3_moe", "replay": "qwen3_moe", "lora_moe": "qwen3_moe"}.get(
        kind, "qwen3_moe" if kind.endswith("_moe") else "qwen3"
    )


def policy_of(kind: str):
    if kind in ADAPTED:
        kind = kind.removeprefix("lora_")
    if kind not in VISION:
        kind = kind.removeprefix("replay_")
    match kind:
        case "dense" | "cut" | "ppo" | "muon" | "fp8" | "lora" | "branches":
            return build_policy(**SHAPE)
        case "muon_odd":
            return build_policy(**SHAPE | {"intermediate_size": 70})
        case "untied":
            return build_policy(**SHAPE, tie_word_embeddings=False)
        case "bias":
            return build_policy(**SHAPE, family="qwen2")
        case "glm4" | "llama":
            return build_policy(**SHAPE, family=kind)
    if kind in VISION:
        return build_vision_policy(VISION[kind])
    if kind in TRAINED_INDEX:
        return _mixer_policy(TRAINED_INDEX[kind])
    if kind in MIXER_CASES:
        return _mixer_policy(kind)
    if kind in FAMILIES:
        return build_policy(**MOE | {"family": kind, "sliding_window": 7})
    heads = {"num_kv_heads": 4} if kind == "heads_moe" else {}
    return build_policy(**MOE | heads, has_expert_bias=kind == "moe")


def _mixer_policy(kind: str) -> Decoder:
    """A family that is not made from scratch, with weights that are not as at the start."""
    from transformers import AutoConfig

    keys = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8,
    }  # fmt: skip
    family, settings = MIXER_CASES[kind]
    groups = {} if kind.startswith("qwen3_5") else {"n_group": 2, "topk_group": 1}
    experts = {"num_experts" if not groups else "n_routed_experts": 8}
    config = AutoConfig.for_model(family, **keys | settings | groups | experts).to_dict()
    policy = hub.build_model(parse_config(config, kind), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(values + (parameter.dim() == 1))
    return policy


def section_of(kind: str, **model) -> ModelSection:
    rate, fp8 = 1e-2 if kind == "moe" else None, "reference" if kind == "fp8" else False
    lora = LoRASection(rank=4, alpha=12.0) if kind.startswith("lora") else None
    is_frozen = kind == "vision_frozen" or lora is not None
    vlm = VisionSection(freeze_vision_encoder=is_frozen) if kind in VISION else None
    index = {"indexer_kl_coeff": 3.0} if kind in TRAINED_INDEX else {}
    return ModelSection(**({"fp8": fp8} | index | model), vlm=vlm, lora=lora, moe_bias_update_rate=rate)


def optim_of(kind: str) -> AdamWOptim | MuonOptim:
    if kind.startswith("muon"):
        return MuonOptim(lr=1e-3, max_norm=0.5, eps=1e-3)
    return AdamWOptim(lr=1e-3, max_norm=0.5, eps=1e-3)


def build(kind: str, model: dict, mesh: Mesh | None = None) -> Learner:
    torch.manual_seed(0)  # adapters begin with it
    section, optim = section_of(kind, **model), optim_of(kind)
    critic = None
    if kind.startswith("ppo"):
        from stretto_critic.critic import Critic

        is_text = kind == "ppo"
        network = with_value_head(build_policy(seed=1, **SHAPE) if is_text else build_vision_policy(VISION[kind], 1))
        critic = Critic(network, section=CriticSection(), model=section, optim=optim, mesh=mesh)
    return Learner(
        policy_of(kind),
        model=section,
        optim=optim,
        valuer=critic,
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        enable_router_replay=is_replayed(kind),
        mesh=mesh,
    )


def train(learner: Learner, kind: str) -> dict:
    """Metrics of each step, log-probabilities before and after, and the whole state of the learner."""
    scored = batches(kind)[0][1]
    out = {"before": learner.logprobs(scored)[0]}
    section = TrainerSection()
    if learner.valuer is not None:
        advantages = GaeAdvantages(gamma=0.9, lambd=0.9)
        section = TrainerSection(advantages=advantages, critic=learner.valuer.section)
    updates = Updates(learner, section)
    out["metrics"] = [updates.train(learner.mesh.local_items(micro_batches)) for micro_batches in batches(kind)]
    out["after"] = learner.logprobs(scored)[0]
    out["state"], out["tensors"] = learner.state(), whole_tensors(learner)
    owned = {name: tensor.clone() for name, tensor in learner.export_tensors()}
    everybodys = gather_anything(owned)
    out["owned"] = [sorted(mine) for mine in everybodys]
    out["exported"] = {name: tensor for mine in everybodys for name, tensor in mine.items()}
    return out


def whole_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """The learner's state as whole tensors, assembled from the slices of all ranks."""
    found = {}
    for parts in gather_anything(learner.state().slices):
        for name, part in parts.items():
            tensor = found.setdefault(name, torch.full(part.shape, 99, dtype=part.tensor.dtype))
            tensor[part.region] = part.tensor
    return found


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        for case in CASES:
            if str(case) not in names:
                continue
            start = time.perf_counter()
            others = set(distributed_c10d._world.pg_map)
            degrees = find_degrees(section_of(case.kind, **case.model), case.world_size, policy_of(case.kind).config)
            mesh = Mesh(degrees, training_device())
            learner = build(case.kind, case.model, mesh)
            result = train(learner, case.kind)
            again = build(case.kind, case.model, mesh)
            again.load_state(result.pop("state"))
            result["reloaded"] = whole_tensors(again)
            if mesh.is_lead:
                torch.save(result, out / f"{case}.pt")
                print(f"{case} {time.perf_counter() - start:.2f}s", flush=True)
            del learner, again, mesh
            _leave_groups(others)


def _leave_groups(but: set[dist.ProcessGroup]) -> None:
    """End all groups but these: each has three threads that wake all the time, and a case makes a dozen.

    What torch keeps of shardings goes too: for an equal mesh it would return the one whose groups have ended.
    """
    for group in set(distributed_c10d._world.pg_map) - but:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
