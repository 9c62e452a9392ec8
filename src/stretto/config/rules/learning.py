"""Rules of [trainer.loss], [trainer.advantages] and [orchestrator.algo]."""

from __future__ import annotations

from stretto.config.root import RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, matching
from stretto.config.sections import algorithm
from stretto.config.sections.algorithm import CreditSection, KlShapingSection, LossSection
from stretto.config.sections.distill import WITHOUT_REWARD
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection
from stretto.config.sections.trainer import AdamWOptim, TrainerKeys

GROUP_BASELINE = {"grpo", "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline", "echo"}
"""Algos whose baseline is the group."""
BATCH_BASELINE = {"ppo", "reinforce_plus_plus", "rae"}
"""Algos whose baseline is known only when a batch is complete."""
PARTNERS = {
    "gae": ("ppo",),
    "returns": ("reinforce_plus_plus",),
    "shaped": ("reinforce_plus_plus_baseline", "grpo", "dr_grpo", "rloo", "max_rl"),
}
"""The algos that each type of [trainer.advantages] completes."""
WITHOUT_RATIO = {"reinforce", "custom"}
"""Losses that importance weights may multiply."""
RATIO_BOUNDS = ("clip_low", "clip_high", "clip_dual", "dppo_mask_low", "dppo_mask_high", "ipo_threshold")
"""Keys of losses that bound how far the policy may move from the denominator of the ratio."""


def algo_types(section: OrchestratorKeys) -> set[str]:
    """Types of the environments' algos."""
    return {(env.algo or section.algo).type for env in section.env}


# -- loss --


def is_without_ratio(loss: LossSection) -> bool:
    """Whether both policies of the ratio are the same while a step has one update."""
    return not loss.use_rollout_logprobs and loss.correction is None


def loss_terms(s: LossSection, at: At) -> Problems:
    """Terms of a loss that need another key, or leave no loss."""
    reduction, kind = at("reduction"), at("type")
    if s.reduction == "constant" and s.reduction_tokens is None:
        yield Problem(reduction, f"{reduction} needs {reduction.path}_tokens, such as the longest reply")
    if s.reduction != "constant":
        yield from idle(at, "reduction_tokens", "reduction", 'use "constant"')
    if getattr(s, "adv_tau", 1.0) == getattr(s, "kl_tau", 1.0) == 0:
        scale, pull = at("adv_tau"), at("kl_tau")
        yield Problem((scale, pull), f"{scale.path} = {pull} leave no loss; give one of them a value")
    own = at("use_rollout_logprobs")
    if is_without_ratio(s) and s.type == "reinforce":
        rule = f"{own} does nothing: {kind.value} has no ratio; drop it, add a correction, or take another loss"
        yield Problem((own, kind), rule)


def correction(s: LossSection, at: At) -> Problems:
    """A correction does something, and does not multiply a loss that has the ratio already."""
    if s.correction is None:
        return
    key, weights, kind = at("correction"), at("correction.weights"), at("type")
    if not any(s.correction.model_dump().values()):
        what = "the section does nothing by itself; give weights, reject or veto, or drop it"
        yield Problem(key, f"{key.path}: {what}")
    if s.correction.weights is not None and s.type not in WITHOUT_RATIO and s.use_rollout_logprobs:
        yield Problem(
            (weights, kind),
            f"{weights.path}: type = {kind.value} already contains the ratio of trainer to sampler, which would act "
            'twice; use type = "reinforce", or use_rollout_logprobs = false, or reject and veto instead of weights',
        )


def ratio_range(s: algorithm.RatioSection, at: At) -> Problems:
    """A range of ratios contains 1."""
    low, high = at("low"), at("high")
    if s.low >= s.high:
        yield Problem((low, high), f"{low} must be below {high}; lower it")
    for key, is_wrong, way in ((low, 1 < s.low < s.high, "1 or less"), (high, s.low < s.high < 1, "1 or more")):
        if is_wrong:
            what = "leaves out the ratio 1, which tokens have where trainer and sampler agree"
            yield Problem(key, f"{key} {what}; give {way}")


def acting_losses(cfg: RLConfig, at: At) -> Problems:
    """Settings of [trainer.loss] do something, because an environment trains on rewards."""
    kinds, loss = algo_types(cfg.orchestrator), cfg.trainer.loss
    if not kinds or not kinds <= set(WITHOUT_REWARD):
        return
    given = sorted(key for key, value, default in matching(loss, "*") if value != default)
    for name in ["type"] if loss.type != "default" else given:
        key, algos = at(f"trainer.loss.{name}"), " and ".join(sorted(kinds))
        rule = f"does nothing: {algos} have a loss of their own, and no environment has another algo; drop it"
        yield Problem(key, f"{key.path} {rule}")


def untrained_environments(cfg: RLConfig, at: At) -> Problems:
    """Loss terms that would still train an environment whose algo is "zero"."""
    zeros = [path for path, algo in cfg.orchestrator.algos.items() if algo.type == "zero"]
    if not zeros:
        return
    zero, loss = at(f"orchestrator.{zeros[0]}.type"), cfg.trainer.loss
    blamed = (at("orchestrator.algo.type"),) if "algo" in zeros else ()
    for name in ("entropy_coef", "reference_kl"):
        if getattr(loss, name) is not None:
            key = at(f"trainer.loss.{name}")
            yield Problem((key, *blamed), f"{zero} with {key.path}: its gradient would be learned; drop it")
            return
    if getattr(loss, "kl_tau", 0.0):
        key, why = at("trainer.loss.kl_tau"), "would be learned from its tokens"
        if algo_types(cfg.orchestrator) <= {"zero"}:
            why = "would be the only gradient, and an optimizer that ignores its size takes full steps"
        what = f"the pull towards the sampling policy {why}; set kl_tau = 0"
        yield Problem((key, *blamed), f"{zero} with {key}: {what}")


# -- advantages --


def scored_algos(cfg: RLConfig, at: At) -> Problems:
    """[trainer.advantages] goes with the algos that send it scores."""
    algos, shaping = cfg.orchestrator.algos, cfg.trainer.advantages
    table, critic = at("trainer.advantages"), at("trainer.critic")
    if shaping is not None and all(algo.type in WITHOUT_REWARD for algo in algos.values()):
        kinds = " and ".join(sorted({algo.type for algo in algos.values()}))
        why = f"would do nothing: {kinds} have no advantages, and no environment has another algo"
        if cfg.trainer.critic is None:
            yield Problem(table, f"{table.path} {why}; leave it out")
        else:
            yield Problem((table, critic), f"{table.path} and {critic.path} {why}; leave them out")
        return
    for path, algo in algos.items():
        kind, whiten = at(f"orchestrator.{path}.type"), at(f"orchestrator.{path}.whiten")
        if shaping is None and algo.type == "ppo":
            way = f'add [{table.path}] with type = "gae" and [trainer.critic]'
            yield Problem((kind, table), f"{kind} sends scores as they are; {way}")
        elif shaping is None or algo.type in WITHOUT_REWARD:
            continue
        elif algo.type not in PARTNERS[shaping.type]:
            what = f'ignores [{table.path}] of type "{shaping.type}" and its settings'
            way = f'use algo type "{" or ".join(PARTNERS[shaping.type])}", or drop that section'
            yield Problem((kind, table), f"{kind} {what}; {way}")
        elif getattr(algo, "whiten", False):
            what = f"[{table.path}] whitens what it makes of the scores; set whiten = false"
            yield Problem((kind, table), f"{whiten}: {what}")


def values(s: TrainerKeys, at: At) -> Problems:
    """Advantages that need values have what estimates them; one thing holds the policy to a reference."""
    kind, critic = at("advantages.type"), at("critic")
    if s.advantages is not None and s.advantages.type == "gae" and s.critic is None:
        yield Problem((kind, critic), f"{kind} needs values; add [{critic.path}]")
    in_reward, in_loss = at("advantages.kl_coef"), at("loss.reference_kl")
    if s.advantages is not None and s.advantages.kl_coef and s.loss.reference_kl is not None:
        what = "both hold the policy to a reference, in the reward and in the loss; drop one"
        yield Problem((in_reward, in_loss), f"{in_reward.path} and {in_loss.path} {what}")


def updates(s: TrainerKeys, at: At) -> Problems:
    """Bounds on changes within a step need several updates."""
    if s.updates_per_step * s.epochs_per_step == 1 and is_without_ratio(s.loss):
        bounds, why = [f"loss.{key}" for key in RATIO_BOUNDS], "one update per step: nothing has moved"
        yield from idle(at, bounds, "loss.use_rollout_logprobs", "raise updates_per_step", why=why)


def shaping(s: KlShapingSection, at: At) -> Problems:
    """Advantages made of scores differ from them."""
    kind, coefficient = at("type"), at("kl_coef")
    if not s.kl_coef:
        yield from idle(at, ("kl_estimator", "kl_model"), "kl_coef", "raise that")
        if s.type == "shaped":
            what = f"{kind} does nothing with {coefficient}; raise that, or leave the section out"
            yield Problem((kind, coefficient), what)
    is_plain = isinstance(s, algorithm.ReturnsAdvantages) and s.gamma == 1 and not s.kl_coef and not s.whiten
    if is_plain:
        what = (
            f"{kind} does nothing with gamma = 1, kl_coef = 0 and whiten = false; change one, or leave the section out"
        )
        yield Problem((kind, at("gamma"), coefficient, at("whiten")), what)


# -- credit --


def credited_turns(cfg: RLConfig, at: At) -> Problems:
    """Nothing replaces the advantages of turns afterwards."""
    shaping = cfg.trainer.advantages
    for path, algo in cfg.orchestrator.algos.items():
        turns = algo.turns if isinstance(algo, CreditSection) else None
        key, table = at(f"orchestrator.{path}.turns"), at("trainer.advantages")
        if turns is not None and shaping is not None and shaping.type in ("gae", "returns"):
            what = f"does nothing with [{table.path}]: the trainer makes advantages of the rewards, those of turns too"
            yield Problem((key, table), f"{key.path} {what}; drop it")


def credit_weights(s: algorithm.TurnCredit, at: At) -> Problems:
    """Some advantage is left."""
    turn, rollout = at("weight"), at("rollout_weight")
    if s.weight == s.rollout_weight == 0:
        yield Problem((turn, rollout), f"{turn} and {rollout}: no advantage is left; give one of them a weight")


def length_penalty(s: CreditSection, at: At) -> Problems:
    """A penalty has a weight."""
    key = at("length_penalty")
    if s.length_penalty is not None and not any(s.length_penalty.model_dump().values()):
        yield Problem(key, f"{key.path}: all its weights are 0, so it does nothing; drop it or give one a value")


def overlong_buffer(s: algorithm.OverlongSection, at: At) -> Problems:
    """An empty reply pays nothing."""
    buffer, longest = at("buffer_tokens"), at("max_tokens")
    if s.buffer_tokens > s.max_tokens:
        yield Problem((buffer, longest), f"{buffer} is longer than {longest}: even an empty reply would pay; lower it")


def overlong_length(s: OrchestratorSection, at: At) -> Problems:
    """A penalty must begin at a length that rollouts can have."""
    for path, algo in s.algos.items():
        overlong = algo.overlong if isinstance(algo, CreditSection) else None
        if overlong and 0 <= (begin := overlong.max_tokens - overlong.buffer_tokens) >= s.seq_len:
            longest = at(f"{path}.overlong.max_tokens")
            what = f"the penalty would begin at {begin} tokens, which no rollout has with {at('seq_len')}; lower it"
            yield Problem(longest, f"{longest}: {what}")


def roles(s: algorithm.HierarchicalGrpoAlgo, at: At) -> Problems:
    """Agents of episodes are named by their role."""
    key = at("episode_agents")
    player = next((role for role in s.episode_agents if "/" in role), None)
    if player is not None:
        role = player.partition("/")[0]
        yield Problem(key, f'{key.path}: "{player}" is one player of a role; name the role, "{role}"')


def echoed_roles(s: algorithm.EchoAlgo, at: At) -> Problems:
    """Some role has a weight."""
    kind = at("type")
    if s.tool is s.user is s.system is None:
        yield Problem(kind, f"{kind}: no role has a weight, so that it would be grpo; give tool, user or system one")


def used_algos(s: OrchestratorKeys, at: At) -> Problems:
    """The run's algo is one that an environment uses."""
    default = type(s).model_fields["algo"].default
    if "algo" not in s.algos and s.algo != default:
        key, what = at("algo"), "every environment has an `algo` of its own; drop it or one of those"
        yield Problem(key, f"{key.path} does nothing: {what}")
    else:
        yield from filtered_advantages(s, at)
        yield from gated_advantages(s, at)


def filtered_advantages(s: OrchestratorKeys, at: At) -> Problems:
    """Filters of advantages see some."""
    algos = s.algos
    kinds = {algo.type for algo in algos.values()}
    late = next((path for path, algo in algos.items() if algo.type in BATCH_BASELINE), "")
    for index, each in enumerate(s.filters):
        key = at(f"filters.{index}.type")
        if each.type != "zero_advantage":
            continue
        if kinds <= set(WITHOUT_REWARD):
            what = f"{' and '.join(sorted(kinds))} have no advantages; drop the filter"
            yield Problem(key, f"{key} does nothing: {what}")
        elif late:
            algo, rule = at(f"{late}.type"), "is known only when the batch is made; drop the filter"
            what = f"flags rewards of 0, for the baseline of {algos[late].type} {rule}"
            yield Problem((key, algo), f"{key} with {algo} {what}")
            break


def gated_advantages(s: OrchestratorKeys, at: At) -> Problems:
    """Gates of advantages see some."""
    for index, env in enumerate(s.env):
        kind = (env.algo or s.algo).type
        table = "curriculum" if env.curriculum is None else f"env.{index}.curriculum"
        for name, gate in s.curriculum_of(env).gates.items():
            key = at(f"{table}.gates.{name}.type")
            if gate.type == "advantage_range" and kind in BATCH_BASELINE:
                why = f"the baseline of {kind} is known only when the batch is made"
                yield Problem(key, f'{key} sees rewards, for {why}; use "reward_range"')
            elif gate.type == "advantage_range" and kind in WITHOUT_REWARD:
                is_covered = gate.reject_min <= 0 <= gate.reject_max
                what = "every group would be rejected" if is_covered else "it would never reject"
                why = f"{kind} has no advantages, they are all 0: {what}"
                yield Problem(key, f'{key}: {why}; drop it or use "reward_range"')


def high_rate(s: AdamWOptim, at: At) -> Problems:
    """A rate moves weights by a small part."""
    rate = at("lr")
    if s.lr > 0.05:
        what = "is far above what AdamW takes: a step moves every weight by about as much"
        way = "Usual are 1e-6 for a large model and 1e-3 for a tiny one; lower it"
        yield Problem(rate, f"{rate} {what}. {way}")


RULES: Rules = {
    LossSection: (loss_terms, correction),
    algorithm.RatioSection: (ratio_range,),
    TrainerKeys: (updates, values),
    KlShapingSection: (shaping,),
    CreditSection: (length_penalty,),
    algorithm.TurnCredit: (credit_weights,),
    algorithm.OverlongSection: (overlong_buffer,),
    algorithm.HierarchicalGrpoAlgo: (roles,),
    algorithm.EchoAlgo: (echoed_roles,),
    OrchestratorKeys: (used_algos,),
    OrchestratorSection: (overlong_length,),
    RLConfig: (scored_algos, credited_turns, untrained_environments, acting_losses),
}
