"""Rules of trainer.backend = "megatron": keys of our own modules do not go with it; its keys go with nothing else."""

from __future__ import annotations

from stretto.config.root import RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, matching
from stretto.config.sections.trainer import TrainerKeys, TrainerSection

OWN = "only our own modules have it; leave it out, or leave trainer.backend out"
BY_MEGATRON = "Megatron has arguments for it; give them in trainer.megatron.overrides"
REFUSED = {
    "model.impl": "Megatron has modules of its own; leave it out",
    "model.lora": "Megatron trains all weights; leave it out, or leave trainer.backend out",
    "model.vlm": OWN,
    "model.fp8": OWN,
    "model.compile": OWN,
    "model.ac_offloading": OWN,
    "model.fsdp_cpu_offload": "Megatron does not shard weights with FSDP2; leave it out",
    "model.optim_cpu_offload": OWN,
    "model.optimization_dtype": "its optimizer keeps float32 weights; leave it out",
    "model.dp_replicate": "the ranks that tp, cp and pp leave all have whole weights of their stage; leave it out",
    "model.cp_style": "Megatron splits each document into two parts per rank; leave it out",
    "model.ep_comm_backend": f"{BY_MEGATRON}, such as moe_token_dispatcher_type",
    "model.indexer_kl_coeff": OWN,
    "model.moe_bias_update_rate": OWN,
    "model.moe_use_grouped_mm": f"{BY_MEGATRON}, such as moe_grouped_gemm",
    "model.reshard_after_forward": "Megatron does not shard weights with FSDP2; leave it out",
    "model.reduce_dtype": "gradients are summed in float32; leave it out",
    "model.shared_prefixes": "Megatron computes each document whole; leave it out",
    "enable_router_replay": OWN,
    "hooks.model": OWN,
    "weight_broadcast.engine_model": "versions of weights in 8 bits are made by our own modules; leave it out",
}
"""Keys that must have their defaults with trainer.backend = "megatron", and why."""


def network(s: TrainerSection, at: At) -> Problems:
    """What Megatron computes is said in its own keys."""
    backend, kind = at("backend"), at("optim.type")
    if s.backend != "megatron":
        return
    for pattern, why in REFUSED.items():
        for path, value, default in matching(s, pattern):
            if value != default:
                yield Problem(at(path), f"{at(path)} with {backend}: {why}")
    if s.optim.type != "adamw":
        yield Problem(kind, f'{kind} with {backend}: its optimizer is AdamW; use type = "adamw"')


def section_in_use(s: TrainerKeys, at: At) -> Problems:
    """Degrees of Megatron do something, unless another backend is named: then one flag has turned a file's off."""
    if s.backend != "megatron" and "backend" not in s.model_fields_set:
        yield from idle(at, "megatron", "backend", 'set backend = "megatron"')


def section_is_off(s: TrainerKeys, at: At) -> Problems:
    """A doubt: degrees of Megatron beside another backend that is named."""
    table, backend = at("megatron"), at("backend")
    if s.backend != "megatron" and "backend" in s.model_fields_set and s.megatron is not None:
        yield Problem(table, f"[{table.path}] is not used with {backend}")


def devices(c: RLConfig, at: At) -> Problems:
    """Who has the trainer's memory, and who trains."""
    backend, shared, service = at("trainer.backend"), at("colocate"), at("service")
    if c.trainer.backend != "megatron":
        return
    if c.colocate is not None:
        what = "memory of Megatron is not put away while engines sample; give engines GPUs of their own"
        yield Problem((shared, backend), f"[{shared.path}] with {backend}: {what}")
    if c.service is not None:
        what = "a training service has a trainer of its own; leave one of them out"
        yield Problem((backend, service), f"{backend} with [{service.path}]: {what}")


RULES: Rules = {TrainerKeys: (section_in_use,), TrainerSection: (network,), RLConfig: (devices,)}
DOUBTS = ((TrainerKeys, section_is_off),)
