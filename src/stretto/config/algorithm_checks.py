"""Rules of [trainer.loss] and [orchestrator.algo]: settings that would do nothing are refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.config.algorithm import Algo, CorrectionSection, CreditSection, LossSection
from stretto.config.distill_checks import check_distillation
from stretto.config.section import Section
from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.orchestrator import OrchestratorSection, TrainEnvSection
    from stretto.config.trainer import TrainerSection

COMPARES = {"grpo", "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline", "echo"}
"""Rules whose baseline is the group."""
LATE = {"ppo", "reinforce_plus_plus", "rae"}
"""Rules whose baseline comes with the batch."""
PARTNERS = {"gae": "ppo", "returns": "reinforce_plus_plus", "shaped": "reinforce_plus_plus_baseline"}
"""[trainer.advantages] by type, and the rule of credit that leaves the rest to them."""
WITHOUT_RATIO = {"reinforce", "custom"}
"""Losses that importance weights may multiply."""
RATIO_BOUNDS = ("clip_low", "clip_high", "clip_dual", "dppo_mask_low", "dppo_mask_high", "ipo_threshold")
"""Settings of losses that bound how far the policy may move from the denominator of the ratio."""
DISTILLS = {"opd", "opsd", "sft"}
"""Rules whose tokens have no advantage."""


def check_loss(loss: LossSection, path: str) -> list[Problem]:
    """Settings of the loss that would do nothing, or lack their partner."""
    problems = []
    if loss.reduction == "constant" and loss.reduction_tokens is None:
        message = f'{path}.reduction = "constant" needs {path}.reduction_tokens, such as the longest reply'
        problems.append(Problem((f"{path}.reduction",), message))
    if loss.reduction != "constant" and loss.reduction_tokens is not None:
        paths = (f"{path}.reduction_tokens", f"{path}.reduction")
        rule = f'does nothing with {paths[1]} = "{loss.reduction}"; drop it or use "constant"'
        problems.append(Problem(paths, f"{paths[0]} = {loss.reduction_tokens} {rule}"))
    if getattr(loss, "adv_tau", 1.0) == getattr(loss, "kl_tau", 1.0) == 0:
        paths = (f"{path}.adv_tau", f"{path}.kl_tau")
        problems.append(
            Problem(paths, f"{paths[0]} = {paths[1]} = 0 leave no loss; give one of them a value")
        )
    if (kl := loss.reference_kl) is not None and kl.estimator == "k1" and not kl.is_unbiased:
        paths = (f"{path}.reference_kl.estimator", f"{path}.reference_kl.is_unbiased")
        rule = "the gradient of k1 is zero on average; use k3, or is_unbiased = true"
        problems.append(Problem(paths, f'{paths[0]} = "k1": {rule}'))
    if not loss.use_rollout_logprobs and loss.type == "reinforce" and loss.correction is None:
        paths = (f"{path}.use_rollout_logprobs", f"{path}.type")
        rule = 'does nothing: "reinforce" has no ratio; drop it, add a correction, or take another loss'
        problems.append(Problem(paths, f"{paths[0]} = false {rule}"))
    if loss.correction is not None:
        problems += check_correction(loss, loss.correction, f"{path}.correction")
    return problems


def check_correction(loss: LossSection, correction: CorrectionSection, path: str) -> list[Problem]:
    """A correction that acts, and acts once."""
    if not any(correction.model_dump().values()):
        rule = "does nothing by itself; give weights, reject or veto, or drop it"
        return [Problem((path,), f"{path}: the section {rule}")]
    problems = []
    has_ratio = loss.type not in WITHOUT_RATIO and loss.use_rollout_logprobs
    if correction.weights is not None and has_ratio:
        paths = (f"{path}.weights", path.replace(".correction", ".type"))
        rule = "already contains the ratio of trainer to sampler, which would act twice"
        way = 'use type = "reinforce", or use_rollout_logprobs = false, or reject and veto instead of weights'
        problems.append(Problem(paths, f'{paths[0]}: type = "{loss.type}" {rule}; {way}'))
    for key in ("weights", "reject"):
        section = getattr(correction, key)
        if section is not None and section.low >= section.high:
            paths = (f"{path}.{key}.low", f"{path}.{key}.high")
            rule = f"must be below {paths[1]} = {section.high:g}; lower it"
            problems.append(Problem(paths, f"{paths[0]} = {section.low:g} {rule}"))
        elif section is not None and not section.low <= 1 <= section.high:
            is_low = section.low > 1
            where = f"{path}.{key}.{'low' if is_low else 'high'}"
            value = section.low if is_low else section.high
            rule = "leaves out the ratio 1, which tokens have where trainer and sampler agree"
            way = "1 or less" if is_low else "1 or more"
            problems.append(Problem((where,), f"{where} = {value:g} {rule}; give {way}"))
    return problems


def check_updates(section: TrainerSection, path: str) -> list[Problem]:
    """Bounds that need several updates a step: with one, policy and critic are what they were as it began."""

    def at(key: str) -> str:
        return f"{path}.{key}" if path else key

    if section.updates_per_step * section.epochs_per_step > 1:
        return []
    problems, loss, paths = [], section.loss, (at("loss.use_rollout_logprobs"), at("updates_per_step"))
    why = f"with one update a step ({paths[1]} = epochs_per_step = 1)"
    given = [key for key in RATIO_BOUNDS if getattr(loss, key, None) != default_of(loss, key)]
    if given and not loss.use_rollout_logprobs and loss.correction is None:
        where = at(f"loss.{given[0]}")
        rule = f"does nothing: {paths[0]} = false makes the ratio 1 {why}"
        way = f"raise {paths[1]}, or drop {paths[0]} or the bound"
        problems.append(Problem((where, *paths), f"{where} = {getattr(loss, given[0]):g} {rule}; {way}"))
    critic = section.critic
    if critic is not None and critic.value_clip not in (None, default_of(critic, "value_clip")):
        where = at("critic.value_clip")
        rule = f"does nothing {why}: values are what they were as the step began; raise {paths[1]} or drop it"
        problems.append(Problem((where, paths[1]), f"{where} = {critic.value_clip:g} {rule}"))
    return problems


def default_of(section: Section, key: str) -> Any:
    """A key's value where none is given; None for a key that the section has not."""
    field = type(section).model_fields.get(key)
    return None if field is None else field.default


def check_advantages(section: TrainerSection, path: str) -> list[Problem]:
    """Advantages of tokens and the critic need one another; settings of one without the other do nothing."""

    def at(key: str) -> str:
        return f"{path}.{key}" if path else key

    cfg, problems = section.advantages, []
    is_gae = cfg is not None and cfg.type == "gae"
    if is_gae and section.critic is None:
        rule = f"needs values; add [{at('critic')}]"
        problems.append(Problem((at("advantages.type"),), f'{at("advantages.type")} = "gae" {rule}'))
    if section.critic is not None and not is_gae:
        rule = f'trains values that nobody uses; add [{at("advantages")}] with type = "gae", or drop it'
        problems.append(Problem((at("critic"),), f"{at('critic')} {rule}"))
    if section.critic is not None and section.model.impl == "hf":
        paths = (at("critic"), at("model.impl"))
        rule = f'{paths[1]} = "hf" has no value output; use impl = "custom"'
        problems.append(Problem(paths, f"{paths[0]} needs a network of our own: {rule}"))
    critic_only = 0 if section.critic is None else section.critic.num_critic_only_steps
    if section.max_steps is not None and critic_only >= section.max_steps:
        paths = (at("critic.num_critic_only_steps"), at("max_steps"))
        rule = f"must be below {paths[1]} = {section.max_steps}, or the policy never learns; lower it"
        problems.append(Problem(paths, f"{paths[0]} = {critic_only} {rule}"))
    if cfg is None:
        return problems
    defaults = type(cfg).model_fields
    given = [key for key in ("kl_estimator", "kl_model") if getattr(cfg, key) != defaults[key].default]
    if not cfg.kl_coef and given:
        paths = (at(f"advantages.{given[0]}"), at("advantages.kl_coef"))
        problems.append(Problem(paths, f"{paths[0]} does nothing with {paths[1]} = 0; raise that or drop it"))
    if cfg.type == "shaped" and not cfg.kl_coef:
        paths = (at("advantages.type"), at("advantages.kl_coef"))
        rule = f"does nothing with {paths[1]} = 0; raise that, or leave [{at('advantages')}] out"
        problems.append(Problem(paths, f'{paths[0]} = "shaped" {rule}'))
    if cfg.type == "returns" and cfg.gamma == 1 and not cfg.kl_coef and not cfg.whiten:
        all_of_them = tuple(at(f"advantages.{key}") for key in ("type", "gamma", "kl_coef", "whiten"))
        rule = "does nothing with gamma = 1, kl_coef = 0 and whiten = false"
        way = f"change one of them, or leave [{at('advantages')}] out"
        problems.append(Problem(all_of_them, f'{all_of_them[0]} = "returns" {rule}; {way}'))
    if cfg.kl_coef and section.loss.reference_kl is not None:
        paths = (at("advantages.kl_coef"), at("loss.reference_kl"))
        rule = "both hold the policy to a reference, one in the reward and one in the loss; give one of them"
        problems.append(Problem(paths, f"{paths[0]} and {paths[1]} {rule}"))
    return problems


def check_credit_fits(trainer: TrainerSection, orchestrator: OrchestratorSection) -> list[Problem]:
    """The trainer's advantages are made of what the orchestrator's rule sends."""
    kind = None if trainer.advantages is None else trainer.advantages.type
    places = {f"orchestrator.env.{i}.algo": env.algo for i, env in enumerate(orchestrator.env) if env.algo}
    if len(places) < len(orchestrator.env) or not orchestrator.env:
        places["orchestrator.algo"] = orchestrator.algo
    if kind is not None and all(algo.type in DISTILLS for algo in places.values()):
        what = " and ".join(sorted({algo.type for algo in places.values()}))
        given = ["trainer.advantages", *(["trainer.critic"] if trainer.critic is not None else [])]
        rule = f"would do nothing: {what} have no advantages, and no environment has another algo"
        return [
            Problem(tuple(given), f"{' and '.join(given)} {rule}; leave {'them' if given[1:] else 'it'} out")
        ]
    problems = []
    for place, algo in places.items():
        paths = (f"{place}.type", "trainer.advantages")
        if kind is None and algo.type == "ppo":
            rule = 'sends scores as they are; add [trainer.advantages] with type = "gae" and [trainer.critic]'
            problems.append(Problem(paths, f'{paths[0]} = "ppo" {rule}'))
        elif kind is None or algo.type in DISTILLS or (algo.type == PARTNERS[kind] and is_raw(algo)):
            continue
        elif algo.type == PARTNERS[kind]:
            rule = f"[{paths[1]}] whitens what it makes of the scores; set whiten = false"
            problems.append(Problem(paths, f"{place}.whiten = true: {rule}"))
        else:
            rule = f'ignores [{paths[1]}] of type "{kind}" and its settings; use algo type "{PARTNERS[kind]}"'
            problems.append(Problem(paths, f'{paths[0]} = "{algo.type}" {rule}, or drop that section'))
    return problems


def is_raw(algo: Algo) -> bool:
    """Does the rule send scores that nothing has whitened?"""
    return not getattr(algo, "whiten", False)


def check_algos(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Every rule of credit that is used: something to compare, and shaping that can act."""

    def path(key: str) -> str:
        return f"{prefix}.{key}" if prefix else key

    algos = {path(f"env.{i}.algo"): env.algo for i, env in enumerate(section.env) if env.algo is not None}
    if len(algos) < len(section.env) or not section.env:
        algos[path("algo")] = section.algo
    elif section.algo != type(section).model_fields["algo"].default:
        rule = "does nothing: every environment has an `algo` of its own; drop it or one of those"
        return [Problem((path("algo"),), f"{path('algo')} {rule}")]
    problems = check_groups(section, prefix) + check_distillation(section, prefix)
    filters = [i for i, each in enumerate(section.filters) if each.type == "zero_advantage"]
    late = [place for place, algo in algos.items() if algo.type in LATE]
    if filters and late:
        kind = algos[late[0]].type
        paths = (path(f"filters.{filters[0]}.type"), f"{late[0]}.type")
        rule = f"flags rewards of 0, for the baseline of {kind} is known only when the batch is made; drop the filter"
        problems.append(Problem(paths, f'{paths[0]} = "zero_advantage" with {paths[1]} = "{kind}" {rule}'))
    for index, env in enumerate(section.env):
        kind = (env.algo or section.algo).type
        gates = env.curriculum.gates.items() if kind in LATE else ()
        for where in (
            path(f"env.{index}.curriculum.gates.{name}.type")
            for name, gate in gates
            if gate.type == "advantage_range"
        ):
            rule = f"sees rewards, for the baseline of {kind} is known only when the batch is made"
            problems.append(Problem((where,), f'{where} = "advantage_range" {rule}; use "reward_range"'))
    for place, algo in algos.items():
        problems += check_shaping(algo, place, section.seq_len) + check_roles(algo, place)
    return problems


def check_groups(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Groups of every environment whose members are several and can differ, where they are compared."""

    def path(key: str) -> str:
        return f"{prefix}.{key}" if prefix else key

    found: dict[str, str] = {}  # the message by the place of the value
    envs: list[TrainEnvSection | None] = [*section.env] or [None]
    for index, env in enumerate(envs):
        algo = (env and env.algo) or section.algo
        own_size = env.group_size if env is not None else None
        place = path("group_size" if own_size is None else f"env.{index}.group_size")
        if (own_size or section.group_size) == 1 and algo.type in COMPARES:
            rule = f"every advantage would be zero, for {algo.type} subtracts the group's mean and one is its own mean"
            found.setdefault(place, f"{place} = 1: {rule}; use 2 or more (8 is the default)")
        own = env.sampling.temperature if env is not None else None
        place = path("train.sampling.temperature" if own is None else f"env.{index}.sampling.temperature")
        temperature = section.train.sampling.temperature if own is None else own
        if temperature == 0 and algo.type not in {"zero", *(() if own is None else DISTILLS)}:
            rule = "the rollouts of a group would be equal and teach nothing; use more, such as 1.0"
            found.setdefault(place, f"{place} = 0 is greedy: {rule}")
    return [Problem((place,), message) for place, message in found.items()]


def check_roles(algo: Algo, path: str) -> list[Problem]:
    """Roles are named without the number of a player."""
    numbered = [role for role in getattr(algo, "episode_agents", ()) if "/" in role]
    if not numbered:
        return []
    where, role = f"{path}.episode_agents", numbered[0].partition("/")[0]
    rule = f'"{numbered[0]}" is one player of a role; name the role, "{role}"'
    return [Problem((where,), f"{where}: {rule}")]


def check_shaping(algo: Algo, path: str, seq_len: int) -> list[Problem]:
    """Penalties that some rollout can incur."""
    if not isinstance(algo, CreditSection):
        return []
    problems = []
    if (section := algo.length_penalty) is not None and not any(section.model_dump().values()):
        rule = "all its weights are 0, so it does nothing; drop it or give one a value"
        problems.append(Problem((f"{path}.length_penalty",), f"{path}.length_penalty: {rule}"))
    if algo.overlong is not None:
        limit, buffer = algo.overlong.max_tokens, algo.overlong.buffer_tokens
        paths = (f"{path}.overlong.buffer_tokens", f"{path}.overlong.max_tokens")
        if buffer > limit:
            rule = f"is longer than {paths[1]} = {limit}: even an empty reply would pay; lower it"
            problems.append(Problem(paths, f"{paths[0]} = {buffer} {rule}"))
        elif limit - buffer >= seq_len:
            rule = f"the penalty would begin at {limit - buffer} tokens, which no rollout has with seq_len = "
            problems.append(Problem(paths[1:], f"{paths[1]} = {limit}: {rule}{seq_len}; lower it"))
    return problems
