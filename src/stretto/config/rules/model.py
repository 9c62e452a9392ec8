"""Rules of [model], of the optimizer and its schedule, and of `sft`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.config.root import SFTConfig
from stretto.config.rules.rule import Each, Idle, Rule, Rules, value_of
from stretto.config.rules.slurm import ON_ONE_MACHINE
from stretto.config.sections.model import ActivationCheckpointSection, ModelSection, ScratchSection, VisionSection
from stretto.config.sections.run import RunKeys
from stretto.config.sections.trainer import TrainerSection, num_steps
from stretto.families.table import VISION_FAMILIES, traits_of


def schedule_faults(section: Any) -> Iterator[tuple[str, str]]:
    """A falling schedule needs an end and must fit before it, after steps of the critic alone."""
    scheduler, last = section.scheduler, section.max_steps
    shares = [key for key in ("warmup_steps", "decay_steps") if isinstance(getattr(scheduler, key, None), float)]
    if shares and last is None:
        message = "{0} is a share of max_steps; give {1.path}, or a number of steps"
        yield f"scheduler.{shares[0]} max_steps", message
        return
    if scheduler.type == "constant" or (isinstance(section, SFTConfig) and last is None):
        return
    frozen = value_of(section, "critic.num_critic_only_steps") or 0
    room = "{2}" + f" without the {frozen} of {{3.path}}" * bool(frozen)
    warmup, decay = num_steps(scheduler.warmup_steps, last), None
    if hasattr(scheduler, "decay_steps"):
        decay = num_steps(scheduler.decay_steps, last)
    if decay == 0:
        if warmup == 0:
            message = 'neither rises nor falls with warmup_steps = decay_steps = 0; use type = "constant"'
            yield "scheduler", f"{{0.path}}: a linear schedule {message}"
    elif last is None:
        message = 'falls towards max_steps; give {1.path}, or use type = "constant"'
        yield "scheduler max_steps", f"{{0.path}}: a {scheduler.type} schedule {message}"
    elif warmup + (decay or 0) + (decay is None) > last - frozen:
        message = f"{{0}} must be under {room}, or nothing is left to fall"
        if decay is not None:
            rule = f"warmup_steps + decay_steps = {warmup} + {decay} must fit into {room}"
            message = f"{{4.path}}: {rule}; lower one of them"
        second = "scheduler.warmup_steps" if decay is None else "scheduler.decay_steps"
        yield f"scheduler.warmup_steps {second} max_steps | critic.num_critic_only_steps scheduler", message


def other_count(cfg: SFTConfig) -> int:
    """The number of GPUs in trainer_gpu_ids, if num_train_gpus is another number."""
    ids = cfg.trainer_gpu_ids or ()
    return len(ids) if cfg.deployment.num_train_gpus not in (None, len(ids)) else 0


def other_hosts(cfg: SFTConfig) -> str | None:
    """The number of hosts, if there are not as many nodes."""
    hosts = getattr(cfg.deployment, "hosts", None)
    return str(len(hosts)) if hosts is not None and len(hosts) != cfg.num_nodes else None


# fmt: off
def whole_layers(axis: str) -> Rule:
    """A rule: models of transformers' are not cut along an axis."""
    return Rule(f"impl {axis}", lambda m: m.impl == "hf" and getattr(m, axis) not in (1, "auto"),
                f"{{1}} with {{0}}: only our own modules have {axis}; models of transformers' are sharded only, so "
                f"leave {axis} out")


def fixed_module(key: str) -> Rule:
    """A rule: a key of [model.vlm] names the module that our own models have."""
    place = VisionSection.model_fields[key].default
    return Rule(f"vlm.{key}", lambda m: m.vlm is not None and getattr(m.vlm, key) != place,
                f'{{0}}: in our own modules it is "{place}"; leave {{0.path}} out')


TRAINS = (
    Each(schedule_faults),
    Rule("scheduler.min_lr optim.lr", lambda s: getattr(s.scheduler, "min_lr", 0.0) > s.optim.lr,
         "{0} is above the peak {1}; lower it"),
    Idle("ckpt.weights.save_adapter_separately", "model.lora",
         lambda s: s.model.lora is None and "no adapter is trained", "add [model.lora]"),
    Rule("model.fsdp_cpu_offload optim.type", lambda s: s.model.fsdp_cpu_offload and s.optim.type == "muon",
         "{0} with {1} updates on the CPU, where orthogonalising matrices takes too long; use optim_cpu_offload"),
)

RULES: Rules = {
    TrainerSection: TRAINS,
    SFTConfig: (
        *TRAINS,
        Rule("max_steps max_epochs", lambda s: s.max_steps is None and s.max_epochs is None,
             "the run would never end; give max_steps or max_epochs"),
        Rule("loss_mask", lambda s: not any(s.loss_mask.model_dump().values()),
             "{0.path} trains no role; set at least {0.path}.assistant = true"),
        Rule("trainer_gpu_ids",
             lambda s: s.trainer_gpu_ids and len(set(s.trainer_gpu_ids)) < len(s.trainer_gpu_ids),
             "{0.path} = {0.value}: a GPU is named twice"),
        Rule("trainer_gpu_ids deployment.num_train_gpus",
             other_count,
             "{0.path} = {0.value} are {it}, not {1}"),
        Rule("eval.retrigger_on_resume", lambda s: s.eval is not None and s.eval.retrigger_on_resume,
             "{0} is for `rl`: here a version that was evaluated is not published again; leave it out"),
        Rule("trainer_gpu_ids deployment.type",
             lambda s: s.deployment.type == "multi_node" and s.trainer_gpu_ids is not None, ON_ONE_MACHINE),
        Rule("deployment.hosts deployment.num_train_nodes", other_hosts,
             "{0.path}: {it} are given, and {1}; make them agree"),
    ),
    RunKeys: (
        Rule("seq_len model.scratch.max_position_embeddings",
             lambda s: s.model.scratch is not None and s.model.scratch.max_position_embeddings < s.seq_len,
             "{0} is longer than {1}; raise the latter or lower seq_len"),
    ),
    ScratchSection: (
        Rule("family vision", lambda s: s.vision is None and s.family in VISION_FAMILIES,
             "{0} has a vision tower; add [{1.path}], or choose a family of text"),
        Rule("vision family", lambda s: s.vision is not None and s.family not in VISION_FAMILIES,
             f"[{{0.path}}] is for {', '.join(VISION_FAMILIES)}, and {{1}}; leave it out"),
        Rule("vision.hidden_size vision.num_heads",
             lambda s: s.vision is not None and s.vision.hidden_size % (4 * s.vision.num_heads),
             "{0} must be a multiple of 4 x {1}"),
        Rule("moe_intermediate_size hidden_size family",
             lambda s: traits_of(s.family).may_be_transposed
             and s.hidden_size in (s.moe_intermediate_size, 2 * s.moe_intermediate_size),
             "{0} with {1}: experts of {2} may be stored either way round, and a square matrix does not say which; "
             "{1.path} must be neither {0.path} nor twice that"),
        Rule("num_heads num_kv_heads", lambda s: s.num_heads % s.num_kv_heads, "{0} must be a multiple of {1}"),
        Rule("num_experts_per_tok num_experts", lambda s: s.num_experts_per_tok > s.num_experts,
             "{0} is more than {1}; lower the one or raise the other"),
    ),
    ModelSection: (
        Idle("trust_remote_code", "impl", lambda m: m.impl == "custom", 'use impl = "hf"'),
        Idle("deepep_num_sms deepep_token_chunk_size", "ep_comm_backend", lambda m: m.ep_comm_backend != "deepep",
             'use "deepep"'),
        Idle("ep_comm_backend", "ep", lambda m: m.ep == 1, "raise ep"),
        Rule("ep_comm_backend dtype", lambda m: m.ep_comm_backend == "deepep" and m.dtype == "float32",
             '{0} carries bfloat16, and {1}; use dtype = "bfloat16", or "torch"'),
        Rule("moe_bias_update_rate lora", lambda m: m.lora is not None and m.moe_bias_update_rate is not None,
             "{0} moves a weight of the base model, and with {1} only the adapter changes; leave one of them out"),
        Rule("indexer_kl_coeff lora", lambda m: m.lora is not None and m.indexer_kl_coeff is not None,
             "{0} trains weights of the base model, and with {1} only the adapter changes; leave one of them out"),
        *map(whole_layers, ("tp", "cp", "ep")),
        Rule("ac.mode impl", lambda m: m.ac is not None and m.ac.mode == "selective" and m.impl == "hf",
             '{0} knows the parts of our own modules only, not {1}; use mode = "full"'),
        Rule("scratch.family vlm",
             lambda m: m.vlm is None and m.scratch is not None and m.scratch.family in VISION_FAMILIES,
             "{0} has a vision tower; add [{1.path}], which says whether to train it"),
        Rule("vlm scratch.family",
             lambda m: m.vlm is not None and m.scratch is not None and m.scratch.family not in VISION_FAMILIES,
             "[{0.path}] is for models with a vision tower, and {1}; leave it out"),
        Rule("vlm impl", lambda m: m.vlm is not None and m.impl == "hf",
             "{0.path} is for models that our own modules compute; {1} trains models of text only"),
        *map(fixed_module, ("vision_encoder_attr", "language_model_attr")),
        Rule("vlm.freeze_vision_encoder lora",
             lambda m: m.vlm is not None and m.lora is not None and not m.vlm.freeze_vision_encoder,
             "{0} with {1.path}: an adapter leaves all other weights as they are, so the vision tower would not be "
             "trained; leave one of them out"),
        Rule("fp8 impl", lambda m: m.fp8 and m.impl == "hf",
             "{0.path} replaces layers of our own modules, not {1}"),
        Rule("fp8 moe_use_grouped_mm", lambda m: m.fp8 and not m.moe_use_grouped_mm,
             "{0.path} computes experts in grouped products; leave {1} out"),
        Rule("fp8 compile.fullgraph", lambda m: m.fp8 and m.compile is not None and m.compile.fullgraph,
             "{0.path} multiplies outside of compiled graphs; leave {1} out"),
        Rule("fsdp_cpu_offload optim_cpu_offload", lambda m: m.fsdp_cpu_offload and m.optim_cpu_offload,
             "{0} keeps optimizer state on the CPU already; drop {1.path}"),
    ),
    ActivationCheckpointSection: (
        Idle("targets", "mode", lambda ac: ac.mode == "full" and "whole blocks are computed again",
             'use "selective"'),
        Rule("targets", lambda ac: ac.mode == "selective" and not ac.targets,
             "{0.path} is empty: nothing would be computed again; name some parts"),
    ),
}
# fmt: on
