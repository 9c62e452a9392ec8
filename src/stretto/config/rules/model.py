"""Rules of [model], of the optimizer and its schedule."""

from __future__ import annotations

from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.root import SFTConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, value_of
from stretto.config.sections.model import ActivationCheckpointSection, ModelSection, ScratchSection, VisionSection
from stretto.config.sections.run import RunKeys
from stretto.config.sections.trainer import TrainerSection, num_steps
from stretto.families.table import VISION_FAMILIES, check_installed, traits_of

# -- what trains --


def schedule(s: Any, at: At) -> Problems:
    """A falling schedule needs an end and must fit before it, after steps of the critic alone."""
    scheduler, last, end = s.scheduler, s.max_steps, at("max_steps")
    is_counted = isinstance(s, SFTConfig) and s.max_epochs is not None  # the rows say how many steps its epochs are
    for key in ("warmup_steps", "decay_steps"):
        if last is None and not is_counted and isinstance(getattr(scheduler, key, None), float):
            share = at(f"scheduler.{key}")
            yield Problem((share, end), f"{share} is a share of max_steps; give {end.path}, or a number of steps")
            return
    if scheduler.type == "constant" or (isinstance(s, SFTConfig) and last is None):
        return
    frozen, whole = value_of(s, "critic.num_critic_only_steps") or 0, at("scheduler")
    room = f"{end} without the {frozen} of {at('critic.num_critic_only_steps').path}" if frozen else str(end)
    warmup, rise = num_steps(scheduler.warmup_steps, last), at("scheduler.warmup_steps")
    decay = num_steps(scheduler.decay_steps, last) if hasattr(scheduler, "decay_steps") else None
    if decay == 0:
        if warmup == 0:
            rule = 'neither rises nor falls with warmup_steps = decay_steps = 0; use type = "constant"'
            yield Problem(whole, f"{whole.path}: a linear schedule {rule}")
    elif last is None:
        rule = f'a {scheduler.type} schedule falls towards max_steps; give {end.path}, or use type = "constant"'
        yield Problem((whole, end), f"{whole.path}: {rule}")
    elif decay is None:
        if warmup + 1 > last - frozen:
            yield Problem((rise, end), f"{rise} must be under {room}, or nothing is left to fall")
    elif warmup + decay > last - frozen:
        rule = f"warmup_steps + decay_steps = {warmup} + {decay} must fit into {room}; lower one of them"
        yield Problem((rise, at("scheduler.decay_steps"), end), f"{whole.path}: {rule}")


def optimizer(s: Any, at: At) -> Problems:
    """Rates, adapters and where the optimizer computes."""
    lowest, peak = at("scheduler.min_lr"), at("optim.lr")
    if getattr(s.scheduler, "min_lr", 0.0) > s.optim.lr:
        yield Problem((lowest, peak), f"{lowest} is above the peak {peak}; lower it")
    if s.model.lora is None:
        key = "ckpt.weights.save_adapter_separately"
        yield from idle(at, key, "model.lora", "add [model.lora]", why="no adapter is trained")
    offload, kind = at("model.fsdp_cpu_offload"), at("optim.type")
    if s.model.fsdp_cpu_offload and s.optim.type == "muon":
        rule = "updates on the CPU, where orthogonalising matrices takes too long; use optim_cpu_offload"
        yield Problem((offload, kind), f"{offload} with {kind} {rule}")


# -- a network from scratch --


def scratch_length(s: RunKeys, at: At) -> Problems:
    """A network has positions for every token of a row."""
    length, most = at("seq_len"), at("model.scratch.max_position_embeddings")
    if s.model.scratch is not None and s.model.scratch.max_position_embeddings < s.seq_len:
        yield Problem((length, most), f"{length} is longer than {most}; raise the latter or lower seq_len")


def scratch_shape(s: ScratchSection, at: At) -> Problems:
    """Numbers of a network that must divide each other, and its vision tower."""
    family, vision = at("family"), at("vision")
    try:
        check_installed(s.family, str(family))
    except ConfigError as missing:
        yield Problem(family, str(missing))
        return
    if s.vision is None and s.family in VISION_FAMILIES:
        way = f"add [{vision.path}], or choose a family of text"
        yield Problem((family, vision), f"{family} has a vision tower; {way}")
    if s.vision is not None and s.family not in VISION_FAMILIES:
        rule = f"[{vision.path}] is for {', '.join(VISION_FAMILIES)}, and {family}; leave it out"
        yield Problem((vision, family), rule)
    width, num_heads = at("vision.hidden_size"), at("vision.num_heads")
    if s.vision is not None and s.vision.hidden_size % (4 * s.vision.num_heads):
        yield Problem((width, num_heads), f"{width} must be a multiple of 4 x {num_heads}")
    inner, hidden = at("moe_intermediate_size"), at("hidden_size")
    is_square = s.hidden_size in (s.moe_intermediate_size, 2 * s.moe_intermediate_size)
    if traits_of(s.family).may_be_transposed and is_square:
        yield Problem(
            (inner, hidden, family),
            f"{inner} with {hidden}: experts of {family} may be stored either way round, and a square matrix does not "
            f"say which; {hidden.path} must be neither {inner.path} nor twice that",
        )
    heads, kv_heads = at("num_heads"), at("num_kv_heads")
    if s.num_heads % s.num_kv_heads:
        yield Problem((heads, kv_heads), f"{heads} must be a multiple of {kv_heads}")
    chosen, experts = at("num_experts_per_tok"), at("num_experts")
    if s.num_experts_per_tok > s.num_experts:
        yield Problem((chosen, experts), f"{chosen} is more than {experts}; lower the one or raise the other")


# -- [model] --


def expert_backend(m: ModelSection, at: At) -> Problems:
    """Code of a model's authors, how tokens are split, and how experts travel."""
    if m.impl == "custom":
        yield from idle(at, "trust_remote_code", "impl", 'use impl = "hf"')
    backend, dtype = at("ep_comm_backend"), at("dtype")
    if m.ep_comm_backend != "deepep":
        yield from idle(at, ("deepep_num_sms", "deepep_token_chunk_size"), "ep_comm_backend", 'use "deepep"')
    if m.tp == 1:
        yield from idle(at, "sequence_parallel", "tp", "raise tp")
    if m.ep == 1:
        yield from idle(at, "ep_comm_backend", "ep", "raise ep")
    if m.ep_comm_backend == "deepep" and m.dtype == "float32":
        yield Problem((backend, dtype), f'{backend} carries bfloat16, and {dtype}; use dtype = "bfloat16", or "torch"')


def frozen_base(m: ModelSection, at: At) -> Problems:
    """An adapter leaves all other weights as they are."""
    lora, moved, taught = at("lora"), at("moe_bias_update_rate"), at("indexer_kl_coeff")
    if m.lora is not None and m.moe_bias_update_rate is not None:
        rule = f"moves a weight of the base model, and with {lora} only the adapter changes; leave one of them out"
        yield Problem((moved, lora), f"{moved} {rule}")
    if m.lora is not None and m.indexer_kl_coeff is not None:
        rule = f"trains weights of the base model, and with {lora} only the adapter changes; leave one of them out"
        yield Problem((taught, lora), f"{taught} {rule}")


def whole_layers(m: ModelSection, at: At) -> Problems:
    """Models of transformers' are not cut."""
    impl = at("impl")
    for axis in ("tp", "cp", "ep"):
        if m.impl == "hf" and getattr(m, axis) not in (1, "auto"):
            what = f"only our own modules have {axis}; models of transformers' are sharded only, so leave {axis} out"
            yield Problem((impl, at(axis)), f"{at(axis)} with {impl}: {what}")
    mode = at("ac.mode")
    if m.ac is not None and m.ac.mode == "selective" and m.impl == "hf":
        yield Problem((mode, impl), f'{mode} knows the parts of our own modules only, not {impl}; use mode = "full"')
    size = at("ac.group_size")
    if m.ac is not None and m.ac.group_size > 1 and m.impl == "hf":
        yield Problem((size, impl), f"{size}: only blocks of our own modules are grouped, not those of {impl}")
    if m.ac is not None and m.ac.group_size > 1 and m.ac_offloading is not None:
        offload = at("ac_offloading")
        yield Problem(
            (size, offload), f"{size} keeps nothing between blocks that {offload.path} could move; leave one out"
        )


def vision(m: ModelSection, at: At) -> Problems:
    """[model.vlm] goes with a model that has a vision tower, of our own modules."""
    vlm, family, impl, lora = at("vlm"), at("scratch.family"), at("impl"), at("lora")
    if m.scratch is not None:
        if m.vlm is None and m.scratch.family in VISION_FAMILIES:
            what = f"{family} has a vision tower; add [{vlm.path}], which says whether to train it"
            yield Problem((family, vlm), what)
        if m.vlm is not None and m.scratch.family not in VISION_FAMILIES:
            what = f"[{vlm.path}] is for models with a vision tower, and {family}; leave it out"
            yield Problem((vlm, family), what)
    if m.vlm is None:
        return
    if m.impl == "hf":
        what = f"{vlm.path} is for models that our own modules compute; {impl} trains models of text only"
        yield Problem((vlm, impl), what)
    for name in ("vision_encoder_attr", "language_model_attr"):
        module, place = at(f"vlm.{name}"), VisionSection.model_fields[name].default
        if getattr(m.vlm, name) != place:
            yield Problem(module, f'{module}: in our own modules it is "{place}"; leave {module.path} out')
    frozen = at("vlm.freeze_vision_encoder")
    if m.lora is not None and not m.vlm.freeze_vision_encoder:
        yield Problem(
            (frozen, lora),
            f"{frozen} with {lora.path}: an adapter leaves all other weights as they are, so the vision tower would "
            "not be trained; leave one of them out",
        )


def eight_bits(m: ModelSection, at: At) -> Problems:
    """What does not go with products in 8 bits, and what keeps state on the CPU twice."""
    fp8, impl, grouped, graph = at("fp8"), at("impl"), at("moe_use_grouped_mm"), at("compile.fullgraph")
    if m.fp8 and m.impl == "hf":
        yield Problem((fp8, impl), f"{fp8.path} replaces layers of our own modules, not {impl}")
    if m.fp8 and not m.moe_use_grouped_mm:
        yield Problem((fp8, grouped), f"{fp8.path} computes experts in grouped products; leave {grouped} out")
    if m.fp8 and m.compile is not None and m.compile.fullgraph:
        yield Problem((fp8, graph), f"{fp8.path} multiplies outside of compiled graphs; leave {graph} out")
    weights, state = at("fsdp_cpu_offload"), at("optim_cpu_offload")
    if m.fsdp_cpu_offload and m.optim_cpu_offload:
        yield Problem((weights, state), f"{weights} keeps optimizer state on the CPU already; drop {state.path}")


def checkpointed_parts(ac: ActivationCheckpointSection, at: At) -> Problems:
    """The parts that are computed again are named where parts are chosen."""
    parts = at("targets")
    size, freq = at("group_size"), at("freq")
    if ac.group_size > 1 and ac.freq > 1:
        yield Problem((size, freq), f"{size} and {freq} both choose blocks; leave one of them out")
    if ac.mode == "full":
        yield from idle(at, "targets", "mode", 'use "selective"', why="whole blocks are computed again")
    else:
        yield from idle(at, "group_size", "mode", 'use "full"', why="parts of each block are computed again")
    if ac.mode == "selective" and not ac.targets:
        yield Problem(parts, f"{parts.path} is empty: nothing would be computed again; name some parts")


RULES: Rules = {
    TrainerSection: (schedule, optimizer),
    SFTConfig: (schedule, optimizer),
    RunKeys: (scratch_length,),
    ScratchSection: (scratch_shape,),
    ModelSection: (expert_backend, frozen_base, whole_layers, vision, eight_bits),
    ActivationCheckpointSection: (checkpointed_parts,),
}
