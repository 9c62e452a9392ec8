"""Rules of [trainer.loss], [trainer.advantages] and [orchestrator.algo]."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stretto.config.root import OrchestratorConfig, RLConfig
from stretto.config.rules.rule import Each, Idle, Rule, Rules, matching
from stretto.config.sections import algorithm
from stretto.config.sections.algorithm import Algo, CreditSection, KlShapingSection, LossSection
from stretto.config.sections.distill import WITHOUT_REWARD, OpsdAlgo, TaughtAlgo
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection
from stretto.config.sections.trainer import TrainerKeys, TrainerSection

GROUP_BASELINE = {"grpo", "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline", "echo"}
"""Algos whose baseline is the group."""
BATCH_BASELINE = {"ppo", "reinforce_plus_plus", "rae"}
"""Algos whose baseline is known only when a batch is complete."""
PARTNERS = {"gae": "ppo", "returns": "reinforce_plus_plus", "shaped": "reinforce_plus_plus_baseline"}
"""The algo that each type of [trainer.advantages] completes."""
WITHOUT_RATIO = {"reinforce", "custom"}
"""Losses that importance weights may multiply."""
RATIO_BOUNDS = ("clip_low", "clip_high", "clip_dual", "dppo_mask_low", "dppo_mask_high", "ipo_threshold")
"""Keys of losses that bound how far the policy may move from the denominator of the ratio."""


def algos_of(section: OrchestratorKeys) -> dict[str, Algo]:
    """The algos in use by path: those of environments, and the run's if one has none."""
    algos = {f"env.{i}.algo": env.algo for i, env in enumerate(section.env) if env.algo is not None}
    return algos if section.env and len(algos) == len(section.env) else {**algos, "algo": section.algo}


def algo_types(section: OrchestratorKeys) -> set[str]:
    """Types of the environments' algos."""
    return {(env.algo or section.algo).type for env in section.env}


# -- loss --


def is_without_ratio(loss: LossSection) -> bool:
    """Whether both policies of the ratio are the same while a step has one update."""
    return not loss.use_rollout_logprobs and loss.correction is None


def acts_twice(loss: LossSection) -> bool:
    """Whether importance weights multiply a loss that already has the ratio."""
    weights = None if loss.correction is None else loss.correction.weights
    return weights is not None and loss.type not in WITHOUT_RATIO and loss.use_rollout_logprobs


def one_update(section: TrainerKeys) -> str | bool:
    """Why bounds on changes within a step do nothing; False if a step has several updates."""
    is_one = section.updates_per_step * section.epochs_per_step == 1
    return is_one and "one update per step: nothing has moved"


# -- advantages --


def needs_no_shaping(cfg: KlShapingSection) -> bool:
    """Whether discounted returns equal the scores."""
    if not isinstance(cfg, algorithm.ReturnsAdvantages):
        return False
    return cfg.gamma == 1 and not cfg.kl_coef and not cfg.whiten


def credit_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """[trainer.advantages] goes with the algos that send it scores."""
    algos = algos_of(cfg.orchestrator)
    kind = None if cfg.trainer.advantages is None else cfg.trainer.advantages.type
    if kind is not None and all(algo.type in WITHOUT_REWARD for algo in algos.values()):
        what = " and ".join(sorted({algo.type for algo in algos.values()}))
        keys, them = ("{0.path}", "it") if cfg.trainer.critic is None else ("{0.path} and {1.path}", "them")
        rule = f"would do nothing: {what} have no advantages, and no environment has another algo; leave {them} out"
        yield "trainer.advantages" + " trainer.critic" * (them == "them"), f"{keys} {rule}"
        return
    for path, algo in algos.items():
        paths = f"orchestrator.{path}.type trainer.advantages | orchestrator.{path}.whiten"
        if kind is None and algo.type == "ppo":
            yield paths, '{0} sends scores as they are; add [{1.path}] with type = "gae" and [trainer.critic]'
        elif kind is None or algo.type in WITHOUT_REWARD:
            continue
        elif algo.type != PARTNERS[kind]:
            rule = f'ignores [{{1.path}}] of type "{kind}" and its settings; use algo type "{PARTNERS[kind]}"'
            yield paths, f"{{0}} {rule}, or drop that section"
        elif getattr(algo, "whiten", False):
            yield paths, "{2}: [{1.path}] whitens what it makes of the scores; set whiten = false"


def control_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Loss terms that would still train an environment whose algo is "zero"."""
    zeros = [path for path, algo in algos_of(cfg.orchestrator).items() if algo.type == "zero"]
    if not zeros:
        return
    blamed = " orchestrator.algo.type" if "algo" in zeros else ""
    extra = [key for key in ("entropy_coef", "reference_kl") if getattr(cfg.trainer.loss, key) is not None]
    why = "would be learned from its tokens"
    if algo_types(cfg.orchestrator) <= {"zero"}:
        why = "would be the only gradient, and an optimizer that ignores its size takes full steps"
    for key in extra[:1] or ["kl_tau"] * bool(getattr(cfg.trainer.loss, "kl_tau", 0.0)):
        what = "{0.path}: its gradient would be learned; drop it"
        if key == "kl_tau":
            what = f"{{0}}: the pull towards the sampling policy {why}; set kl_tau = 0"
        zero = "{2}" if blamed else "{1}"
        yield f"trainer.loss.{key}{blamed} | orchestrator.{zeros[0]}.type", f"{zero} with {what}"


def loss_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Settings of [trainer.loss] that do nothing, because no environment trains on rewards."""
    kinds, loss = algo_types(cfg.orchestrator), cfg.trainer.loss
    if not kinds or not kinds <= set(WITHOUT_REWARD):
        return
    rule = f"does nothing: {' and '.join(sorted(kinds))} have a loss of their own, and no environment has another algo"
    given = sorted(key for key, value, default in matching(loss, "*") if value != default)
    for key in ["type"] if loss.type != "default" else given:
        yield f"trainer.loss.{key}", f"{{0.path}} {rule}; drop it"


# -- credit --


def algo_faults(section: OrchestratorKeys) -> Iterator[tuple[str, str]]:
    """Algos that no environment uses, and filters and gates of advantages that are not known."""
    algos = algos_of(section)
    if "algo" not in algos and section.algo != type(section).model_fields["algo"].default:
        rule = "every environment has an `algo` of its own; drop it or one of those"
        yield "algo", f"{{0.path}} does nothing: {rule}"
        return
    kinds = {algo.type for algo in algos.values()}
    late = next((path for path, algo in algos.items() if algo.type in BATCH_BASELINE), "")
    for index, each in enumerate(section.filters):
        where = f"filters.{index}.type"
        if each.type != "zero_advantage":
            continue
        if kinds <= set(WITHOUT_REWARD):
            rule = f"{' and '.join(sorted(kinds))} have no advantages; drop the filter"
            yield where, f"{{0}} does nothing: {rule}"
        elif late:
            rule = f"the baseline of {algos[late].type} is known only when the batch is made; drop the filter"
            yield f"{where} {late}.type", f"{{0}} with {{1}} flags rewards of 0, for {rule}"
            break
    for index, env in enumerate(section.env):
        kind = (env.algo or section.algo).type
        table = "curriculum" if env.curriculum is None else f"env.{index}.curriculum"
        for name, gate in section.curriculum_of(env).gates.items():
            where = f"{table}.gates.{name}.type"
            if gate.type == "advantage_range" and kind in BATCH_BASELINE:
                rule = f"the baseline of {kind} is known only when the batch is made"
                yield where, f'{{0}} sees rewards, for {rule}; use "reward_range"'
            elif gate.type == "advantage_range" and kind in WITHOUT_REWARD:
                is_covered = gate.reject_min <= 0 <= gate.reject_max
                what = "every group would be rejected" if is_covered else "it would never reject"
                rule = f"{kind} has no advantages, they are all 0: {what}"
                yield where, f'{{0}}: {rule}; drop it or use "reward_range"'


def overlong_faults(section: OrchestratorSection) -> Iterator[tuple[str, str]]:
    """A penalty must begin at a length that rollouts can have."""
    for path, algo in algos_of(section).items():
        overlong = algo.overlong if isinstance(algo, CreditSection) else None
        if overlong and 0 <= (begin := overlong.max_tokens - overlong.buffer_tokens) >= section.seq_len:
            rule = f"the penalty would begin at {begin} tokens, which no rollout has with {{1}}"
            yield f"{path}.overlong.max_tokens | seq_len", f"{{0}}: {rule}; lower it"


# -- teachers --


def uses_run_teacher(algo: Algo) -> bool:
    """Whether it learns from [orchestrator.teacher]."""
    return isinstance(algo, TaughtAlgo) and algo.teacher is None


def teacher_faults(section: OrchestratorSection) -> Iterator[tuple[str, str]]:
    """There is a teacher if, and only if, an algo needs one."""
    taught = {path: algo for path, algo in algos_of(section).items() if isinstance(algo, TaughtAlgo)}
    users = [path for path, algo in taught.items() if uses_run_teacher(algo)]
    if users and section.teacher is None:
        rule = "needs [{1.path}] with the base_url of an engine that serves the teacher"
        yield f"{users[0]}.type | teacher", f"{{0}} {rule}"
    elif section.teacher is not None and not users:
        rule = 'does nothing: no algo has type = "opd" or "sft" without a teacher of its own; drop it'
        yield "teacher", f"{{0.path}} {rule}"
    for path, algo in taught.items():
        if algo.teacher is not None and algo.teacher.base_url is None:
            rule = "give the address of a teacher that runs; `rl` starts only [{1.path}]"
            yield f"{path}.teacher.base_url | teacher", f"{{0.path}}: {rule}"


# fmt: off
AGREED = "{0} leaves out the ratio 1, which tokens have where trainer and sampler agree"
HIGH_RATE = Rule("lr", lambda s: s.lr > 0.05,
    "{0} is far above what AdamW takes: a step moves every weight by about as much. Usual are 1e-6 for a large model "
    "and 1e-3 for a tiny one; lower it")


def provided_whole(axis: str) -> Rule:
    """A rule: layers that a user's function makes are not cut along an axis."""
    return Rule(f"hooks.model model.{axis}",
                lambda s: s.hooks.model is not None and getattr(s.model, axis) not in (1, "auto"),
                "{0} changes whole layers, and {1} cuts them; use ranks of their own instead, num_train_workers")


RULES: Rules = {
    LossSection: (
        Rule("reduction", lambda s: s.reduction == "constant" and s.reduction_tokens is None,
             "{0} needs {0.path}_tokens, such as the longest reply"),
        Idle("reduction_tokens", "reduction", lambda s: s.reduction != "constant", 'use "constant"'),
        Rule("adv_tau kl_tau", lambda s: getattr(s, "adv_tau", 1.0) == getattr(s, "kl_tau", 1.0) == 0,
             "{0.path} = {1} leave no loss; give one of them a value"),
        Rule("use_rollout_logprobs type", lambda s: is_without_ratio(s) and s.type == "reinforce",
             "{0} does nothing: {1.value} has no ratio; drop it, add a correction, or take another loss"),
        Rule("correction", lambda s: s.correction is not None and not any(s.correction.model_dump().values()),
             "{0.path}: the section does nothing by itself; give weights, reject or veto, or drop it"),
        Rule("correction.weights type", acts_twice,
             "{0.path}: type = {1.value} already contains the ratio of trainer to sampler, which would act twice;"
             ' use type = "reinforce", or use_rollout_logprobs = false, or reject and veto instead of weights'),
    ),
    algorithm.RatioSection: (
        Rule("low high", lambda s: s.low >= s.high, "{0} must be below {1}; lower it"),
        Rule("low", lambda s: 1 < s.low < s.high, f"{AGREED}; give 1 or less"),
        Rule("high", lambda s: s.low < s.high < 1, f"{AGREED}; give 1 or more"),
    ),
    TrainerKeys: (
        Idle(" ".join(f"loss.{key}" for key in RATIO_BOUNDS), "loss.use_rollout_logprobs",
             lambda s: is_without_ratio(s.loss) and one_update(s), "raise updates_per_step"),
        Idle("critic.value_clip", "updates_per_step", one_update, "raise that"),
        Idle("hooks.tis hooks.pg_loss_reducer loss.entropy_coef loss.reference_kl loss.correction", "hooks.loss",
             lambda s: s.hooks.loss is not None and "it is the whole loss", "leave that out"),
        Rule("hooks.loss loss.type", lambda s: s.hooks.loss is not None and s.loss.type == "custom",
             "{0} and {1} are two losses of your own; leave one of them out"),
        Rule("critic.lr critic.optim", lambda s: s.critic is not None and s.critic.lr and s.critic.optim is not None,
             "{0} beside [{1.path}]: give the rate there, as {1.path}.lr"),
        Rule("advantages.type critic",
             lambda s: s.advantages is not None and s.advantages.type == "gae" and s.critic is None,
             "{0} needs values; add [{1.path}]"),
        Rule("critic advantages",
             lambda s: s.critic is not None and (s.advantages is None or s.advantages.type != "gae"),
             '{0.path} trains values that are not used; add [{1.path}] with type = "gae", or drop it'),
        Rule("advantages.kl_coef loss.reference_kl",
             lambda s: s.advantages is not None and s.advantages.kl_coef and s.loss.reference_kl is not None,
             "{0.path} and {1.path} both hold the policy to a reference, in the reward and in the loss; drop one"),
    ),
    TrainerSection: (
        Rule("hooks.post_write weight_broadcast.type",
             lambda s: s.hooks.post_write is not None and s.weight_broadcast.type != "filesystem",
             '{0} is called when the files of a version are written, and {1} writes none; use type = "filesystem"'),
        *map(provided_whole, ("tp", "cp", "ep")),
        Rule("hooks.model critic", lambda s: s.hooks.model is not None and s.critic is not None,
             "{0} changes the policy, and [{1.path}] would be another model; leave one of them out"),
        Rule("critic model.impl", lambda s: s.critic is not None and s.model.impl == "hf",
             '{0.path} needs a network of our own: {1} has no value output; use impl = "custom"'),
        Rule("critic.num_critic_only_steps max_steps",
             lambda s: s.critic and s.critic.num_critic_only_steps >= (s.max_steps or math.inf),
             "{0} must be below {1}, or the policy never learns; lower it"),
    ),
    KlShapingSection: (
        Idle("kl_estimator kl_model", "kl_coef", lambda s: not s.kl_coef, "raise that"),
        Rule("type kl_coef", lambda s: s.type == "shaped" and not s.kl_coef,
             "{0} does nothing with {1}; raise that, or leave the section out"),
        Rule("type gamma kl_coef whiten", needs_no_shaping,
             "{0} does nothing with gamma = 1, kl_coef = 0 and whiten = false; change one, or leave the section "
             "out"),
    ),
    CreditSection: (
        Rule("length_penalty",
             lambda s: s.length_penalty is not None and not any(s.length_penalty.model_dump().values()),
             "{0.path}: all its weights are 0, so it does nothing; drop it or give one a value"),
    ),
    algorithm.OverlongSection: (
        Rule("buffer_tokens max_tokens", lambda s: s.buffer_tokens > s.max_tokens,
             "{0} is longer than {1}: even an empty reply would pay; lower it"),
    ),
    algorithm.HierarchicalGrpoAlgo: (
        Rule("episode_agents",
             lambda s: next( ((role, role.partition("/")[0]) for role in s.episode_agents if "/" in role), None ),
             '{0.path}: "{it[0]}" is one player of a role; name the role, "{it[1]}"'),
    ),
    algorithm.EchoAlgo: (
        Rule("type", lambda s: s.tool is s.user is s.system is None,
             "{0}: no role has a weight, so that it would be grpo; give tool, user or system one"),
    ),
    OpsdAlgo: (
        Rule("template", lambda s: s.template.count("{demonstration}") != 1,
             "{0.path} must hold {{demonstration}} once: that is what it shows"),
    ),
    OrchestratorKeys: (Each(algo_faults),),
    OrchestratorConfig: (
        Rule("teacher.base_url",
             lambda s: s.teacher and s.teacher.base_url is None and any(map(uses_run_teacher, algos_of(s).values())),
             "{0.path}: give the address of the engine that serves it; only `rl` starts one"),
    ),
    OrchestratorSection: (Each(teacher_faults), Each(overlong_faults)),
    RLConfig: (Each(credit_faults), Each(control_faults), Each(loss_faults)),
}
# fmt: on
