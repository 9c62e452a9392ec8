"""Which adapters vLLM 0.32 computes beside its weights, for the adapter that a run trains.

Engines decide with it at their start, and a dry run says what they will do. What vLLM cannot do is a fault; what it may
do and no test here has tried is a doubt, and only `inference.lora.compute_policy = true` has it done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.inference import (
    MAX_LORA_RANK,
    SERVED_LORA_TARGETS,
    InferenceSection,
    ServedAdaptersSection,
)
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.data.model_file import ModelFile, find_model_file
from stretto.families.table import FAMILIES, traits_of

KEY = "inference.lora.compute_policy"
LATENT_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Layers of latent attention, which vLLM fuses, or multiplies with others before it computes."""
LAYERS_OF_SOME = ("fc1_latent_proj", "fc2_latent_proj")
"""Default targets of an adapter that only some mixtures of experts have."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys of config.json that hold the number of experts."""
WITHOUT_ADAPTERS = ("embed_tokens", "lm_head")
"""Layers that never have an adapter, so a run ignores their names in target_modules."""
DRAFTS = {"mtp": 1, "ngram": 4, "eagle": 3, "eagle3": 3}
"""Tokens of a draft where [inference.speculation] does not say; vLLM has no default for these methods, and does not
start with `mtp` alone."""
SUFFIX_DRAFT = 24
"""vLLM's default for suffixes."""


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of the model of a config.json; 0 for one without."""
    found = dict(config) | (config.get("text_config") or {})
    return next((int(found[key]) for key in EXPERT_COUNTS if found.get(key)), 0)


def drafted_tokens(section: InferenceSection) -> int:
    """Tokens of a draft, at most; 0 without [inference.speculation] and vLLM's own options for it."""
    drafts = section.speculation
    if drafts is None:
        return _tokens_of_options({name.replace("-", "_"): value for name, value in section.vllm_extra.items()})
    if drafts.num_speculative_tokens is None and drafts.method == "suffix":
        return drafts.suffix_decoding_max_tree_depth or SUFFIX_DRAFT
    return drafts.num_speculative_tokens or DRAFTS[drafts.method]


def _tokens_of_options(extra: Mapping[str, Any]) -> int:
    """Tokens of a draft by these options of vLLM; 0 where they do not say, or say it wrongly, as vLLM reports."""
    config = extra.get("speculative_config") or {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return 0
    number = config.get("num_speculative_tokens") if isinstance(config, dict) else None
    number = extra.get("spec_tokens", number)
    return number if isinstance(number, int) else 0


def missing_room(section: InferenceSection) -> str | None:
    """What a batch lacks for drafts in an engine with adapters; None if nothing."""
    length = drafted_tokens(section) + 1
    tokens = section.max_num_seqs * length
    if length == 1 or section.max_num_batched_tokens >= tokens:
        return None
    return (
        f"with adapters and drafts it needs inference.max_num_batched_tokens = {tokens} or more (max_num_seqs = "
        f"{section.max_num_seqs} x {length} tokens); raise it, or lower max_num_seqs or num_speculative_tokens"
    )


def faults(section: InferenceSection, lora: LoRASection, model: ModelFile, *, is_cpu: bool) -> Iterator[str]:
    """Why vLLM cannot compute this adapter beside its weights; sentences that say the way out."""
    if lora.rank > MAX_LORA_RANK:
        yield f"its kernels have ranks up to {MAX_LORA_RANK}, and model.lora.rank = {lora.rank}; lower it"
    if latent := [name for name in lora.target_modules if name in LATENT_LAYERS]:
        yield f"it multiplies {', '.join(latent)} with other layers; leave them out of model.lora.target_modules"
    if (fault := missing_room(section)) is not None:
        yield fault
    if "experts" not in lora.target_modules or not num_experts(model.found):
        return
    if is_cpu:
        yield "on a CPU it has no kernels for adapters of experts; leave experts out of model.lora.target_modules"
    if not traits_of(model.family).vllm.adapts_experts:
        yield f"it does not adapt experts like those of {model.family}; leave experts out of model.lora.target_modules"
    if section.enable_eplb:
        yield "inference.enable_eplb moves experts and not their adapters; leave one of them out"
    for name, value in section.vllm_extra.items():
        key = name.replace("-", "_")
        if key == "all2all_backend" and value != "allgather_reducescatter":
            yield f"its experts have adapters with all2all_backend = allgather_reducescatter only, not {value}"
        if key == "moe_backend" and value not in ("auto", "triton"):
            yield f"its experts have adapters with moe_backend = triton only, not {value}"


def doubts(section: InferenceSection, lora: LoRASection, model: ModelFile) -> Iterator[str]:
    """What nobody has tried, so that it is not done without being asked for."""
    if not traits_of(model.family).vllm.adapts:
        yield f"its kernels were not tried with {model.family or 'a model without model_type'}"
    latent = () if model.found.get("moe_latent_size") else LAYERS_OF_SOME
    known = {*SERVED_LORA_TARGETS, "experts", *WITHOUT_ADAPTERS, *latent}
    if others := [name for name in lora.target_modules if name not in known]:
        yield f"its kernels were not tried with adapters of {', '.join(others)}"
    if num_experts(model.found) and "experts" in lora.target_modules:
        yield "its kernels for adapters of experts run on GPUs only, and were not tried"
    if section.enable_dbo:
        yield "its kernels were not tried with inference.enable_dbo"


def why_merged(section: InferenceSection, lora: LoRASection, model: ModelFile | None, *, is_cpu: bool) -> str | None:
    """Why vLLM merges this adapter into its weights; None if its kernels compute it beside them.

    model: what the engine serves; None if it is not here.
    """
    served = section.lora or ServedAdaptersSection()
    if served.compute_policy is False:
        return f"{KEY} = false"
    if served.compute_policy is True:
        return None
    if model is None:
        return "the model is not here, so whether its kernels know it is not known"
    found = next(faults(section, lora, model, is_cpu=is_cpu), None)
    if found is None and (found := next(doubts(section, lora, model), None)) is not None:
        found = f"{found}; {KEY} = true has it try"
    return found


def check_policy_adapter(cfg: RLConfig, *, is_cpu: bool) -> None:
    """Check that vLLM can compute the adapter that a run trains, if it is told to.

    Raises: ConfigError with the reason.
    """
    section, lora = cfg.inference, cfg.model.lora
    if section is None or lora is None or section.lora is None or section.lora.compute_policy is not True:
        return
    model = served_file(section, cfg.model)
    if model is None or chosen(section, model, is_cpu=is_cpu) != "vllm":
        return
    for fault in faults(section, lora, model, is_cpu=is_cpu):
        raise ConfigError(f"{KEY} = true: vLLM cannot compute the adapter of [model.lora]: {fault}; or leave it out")


def served_file(section: InferenceSection, model: ModelSection) -> ModelFile | None:
    """The config.json of the model that engines serve, or of one that is made from scratch; None if there is none."""
    if (made := model.scratch) is not None:
        is_mixture = any(key in EXPERT_COUNTS for key in FAMILIES[made.family].required)
        number = made.num_experts if is_mixture else 0
        return ModelFile(Path(model.name), {"model_type": made.family, "num_experts": number})
    return find_model_file(section.model or model.name)


def chosen(section: InferenceSection, model: ModelFile | None, *, is_cpu: bool) -> str:
    """The engine that serves this model."""
    return section.chosen_engine(has_gpu=not is_cpu, is_own=model is None or model.is_own)


def with_policy_adapter(cfg: InferenceConfig, directory: Path, *, is_cpu: bool) -> tuple[InferenceConfig, str | None]:
    """The config of a vLLM with room for the adapter that its run trains, and why it is merged, if it is.

    Without a run that trains an adapter the config is as it was, with nothing left to decide.

    Raises: ConfigError if vLLM is told to compute what it cannot.
    """
    lora, given = cfg.policy_lora, cfg.lora
    if lora is None:
        if given is None or given.compute_policy is True:
            return cfg, None
        return cfg.model_copy(update={"lora": given.model_copy(update={"compute_policy": False})}), None
    model = ModelFile.read(directory)
    if given is not None and given.compute_policy is True:
        for fault in faults(cfg, lora, model, is_cpu=is_cpu):
            raise ConfigError(f"{KEY} = true: vLLM cannot compute the adapter of [model.lora]: {fault}")
    if (reason := why_merged(cfg, lora, model, is_cpu=is_cpu)) is not None:
        served = None if given is None or not given.max_loras else given.model_copy(update={"compute_policy": False})
        return cfg.model_copy(update={"lora": served}), reason
    own = () if given is None else given.target_modules
    trained = (name for name in lora.target_modules if name not in WITHOUT_ADAPTERS)
    targets = dict.fromkeys((*own, *trained))
    given = given or ServedAdaptersSection(max_loras=0)
    if not num_experts(model.found):
        targets.pop("experts", None)
    update = {
        "compute_policy": True,
        "max_lora_rank": max(given.max_lora_rank if given is cfg.lora else 1, lora.rank),
        "target_modules": tuple(targets),
    }
    return cfg.model_copy(update={"lora": given.model_copy(update=update)}), None
