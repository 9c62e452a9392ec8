"""Flags about the algorithm: advantages, loss, corrections, critic, teacher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto_megatron.places import is_megatron
from stretto_vime.flags.flag import Flag, Setting, Values, copies, equal, part, refused, sets
from stretto_vime.flags.groups.megatron import RECOMPUTED, recomputed
from stretto_vime.flags.groups.training import OPTIMIZER, optimizer_settings, reference, rollouts_of, weights

ALGO, LOSS = "orchestrator.algo", "trainer.loss"
GROUP_NORMALISED = ("grpo", "gspo", "cispo")
PLUS_PLUS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
ESTIMATORS = ("grpo", "gspo", "cispo", *PLUS_PLUS, "ppo")
KL_TYPES = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}
SERVED_BY = ("vllm", "sglang")
"""Values of --opd-type for a teacher that is served."""
OF_SERVED = {"custom_rm_path": "reward_func", "custom_reward_post_process_path": "post_process_rewards"}
"""vime's functions that ask it, in a module on_policy_distillation; here the run does."""
NO_OPSM = "use trainer.loss.correction.reject, or a custom loss (docs/algorithms.md)"
NOT_CENTRED = "write a custom loss (docs/algorithms.md)"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Hyperparameters for RL training": (
        part("--advantage-estimator", "text", "grpo", f"{ALGO}.type {LOSS}.type trainer.advantages trainer.critic",
             "The algorithm.", choices=ESTIMATORS),
        part("--loss-type", "text", "policy_loss", "", "Loss.", choices=("policy_loss", "sft_loss", "custom_loss"),
             note="sft_loss is the verb `sft`; custom_loss is that of --custom-loss-function-path."),
        part("--calculate-per-token-loss", "switch", False, f"{LOSS}.reduction",
             "Mean over all tokens; else over rollouts of each one's mean."),
        sets("--normalize-advantages", "switch", False, f"{ALGO}.whiten trainer.advantages.whiten",
             "Advantages of the batch's trained tokens get mean 0 and deviation 1."),
        part("--disable-grpo-std-normalization", "switch", False, f"{ALGO}.normalize_std",
             "Do not divide by the group's deviation."),
        part("--disable-rewards-normalization", "switch", False, "", "Rewards are not compared within their group.",
             note="With estimators that do not compare groups; others: --custom-reward-post-process-path."),
        sets("--eps-clip", "number", 0.2, f"{LOSS}.clip_low {LOSS}.clip_high", "Clip range of the ratio."),
        sets("--eps-clip-high", "number", None, f"{LOSS}.clip_high", "Upper clip range; without it --eps-clip."),
        sets("--eps-clip-c", "number", None, f"{LOSS}.clip_dual", "Dual clip, above 1."),
        sets("--entropy-coef", "number", 0.0, f"{LOSS}.entropy_coef", "Weight of the entropy bonus."),
        part("--use-kl-loss", "switch", False, f"{LOSS}.reference_kl",
             "Add the divergence from the reference to the loss."),
        sets("--kl-loss-coef", "number", 0.0, f"{LOSS}.reference_kl.coef", "Weight of that divergence."),
        part("--kl-loss-type", "text", "k1", f"{LOSS}.reference_kl.estimator trainer.advantages.kl_estimator",
             "Estimator of a divergence.", choices=tuple(KL_TYPES)),
        part("--use-unbiased-kl", "switch", False, f"{LOSS}.reference_kl.is_unbiased",
             "Multiply the divergence by the importance ratio."),
        refused("--ref-update-interval", "integer", None,
                "the reference stays what it was at the start; leave it out",
                "Rollouts between updates of the reference."),
        sets("--use-rollout-logprobs", "switch", False, f"{LOSS}.use_rollout_logprobs",
             "The ratio is to the engine's log-probabilities."),
        part("--use-tis", "switch", False, f"{LOSS}.correction.weights",
             "Truncated importance sampling, of the trainer over the engine."),
        sets("--tis-clip", "number", 2.0, f"{LOSS}.correction.weights.high", "Largest importance weight."),
        sets("--tis-clip-low", "number", 0, f"{LOSS}.correction.weights.low", "Smallest importance weight."),
        copies("--custom-tis-function-path", "text", None, "trainer.hooks.tis", "Function that corrects.",
               note="With --use-tis or --get-mismatch-metrics, instead of the truncated weights."),
        equal("--get-mismatch-metrics", "switch", False, "`mismatch_kl` is always reported.",
              "Report how far trainer and engine are apart."),
        equal("--use-rollout-entropy", "switch", False, "The entropy is always reported.", "Report the entropy."),
        refused("--use-opsm", "switch", False, NO_OPSM, "Mask sequences that have moved too far."),
        equal("--opsm-delta", "number", 1e-4, "It is of --use-opsm.", "Threshold of --use-opsm."),
        part("--use-routing-replay", "switch", False, "", "Replay the experts of the first pass.",
             note="Only with --use-rollout-routing-replay, the engine's choices, which are replayed instead."),
        copies("--use-rollout-routing-replay", "switch", False, "trainer.enable_router_replay",
               "Replay the experts of the engine."),
        equal("--routing-replay-prefetch-microbatches", "integer", 1, "Choices travel with the batch.",
              "Batches of choices that are fetched early."),
        equal("--keep-old-actor", "switch", False,
              "Log-probabilities of the policy as the step began are computed when they are needed.",
              "Keep a copy of the policy that sampled."),
        refused("--pg-loss-type", "text", "ppo",
                "set trainer.loss.type = \"reinforce\" with a correction in the TOML of --print-config",
                "Kind of surrogate."),
        refused("--use-score-centering", "switch", False, NOT_CENTRED, "Centre scores."),
        equal("--score-centering-top-k", "integer", 128, "It is of --use-score-centering.", "Likeliest tokens for it."),
        sets("--custom-loss-function-path", "text", None, "trainer.hooks.loss", "Function that is the loss.",
               note="With --loss-type custom_loss."),
        copies("--custom-advantage-function-path", "text", None, "trainer.hooks.advantages",
               "Function that makes advantages."),
        copies("--custom-pg-loss-reducer-function-path", "text", None, "trainer.hooks.pg_loss_reducer",
               "Function that reduces the policy's loss."),
        part("--disable-compute-advantages-and-returns", "switch", False, "", "No advantages.",
             note="With --loss-type sft_loss, which has none."),
    ),
    "PPO": (
        sets("--gamma", "number", 1.0, "trainer.advantages.gamma", "Discount per token.",
             note="With ppo and reinforce_plus_plus."),
        sets("--lambd", "number", 1.0, "trainer.advantages.lambd", "Lambda of generalised advantage estimation.",
             note="With ppo."),
        sets("--kl-coef", "number", 0.0, "trainer.advantages.kl_coef",
             "Weight of a token's divergence from the reference, which is subtracted from its reward.",
             note="With ppo and reinforce_plus_plus(_baseline)."),
        sets("--value-clip", "number", 0.2, "trainer.critic.value_clip",
             "Clip range of values, if a rollout is several updates."),
        sets("--critic-load", "text", None, "trainer.critic.load",
             "Model that the critic starts from; without it the actor's."),
        sets("--critic-save", "text", None, "trainer.critic.save",
             "Directory of the critic's exports; without it RUN/critic."),
        sets("--critic-lr", "number", None, "trainer.critic.lr", "Learning rate of the critic; without it --lr."),
        sets("--critic-lr-warmup-iters", "integer", 0, "trainer.critic.lr_warmup_steps", "Updates of linear rise.",
             note="In whole rollouts, rounded up."),
        sets("--num-critic-only-steps", "integer", 0, "trainer.critic.num_critic_only_steps",
             "First rollouts, which train the critic only."),
        part("--megatron-config-path", "text", None, "trainer.critic trainer.optim",
             "YAML file of overrides for actor and critic.",
             note="The actor's overrides are flags. The critic has a load, save, lr, lr_warmup_iters and value_clip of "
                  "its own, and an optimizer with its moments, weight decay and clipping; all else is the actor's, and "
                  "only the same value is accepted. A value of the file holds, whatever was typed."),
        copies("--custom-megatron-init-path", "text", None, "trainer.hooks.init",
               "Function called after initialisation."),
        copies("--custom-megatron-before-log-prob-hook-path", "text", None, "trainer.hooks.before_log_prob",
               "Function called before log-probabilities."),
        copies("--custom-megatron-before-train-step-hook-path", "text", None, "trainer.hooks.before_train_step",
               "Function called before each update."),
    ),
    "Distillation": (
        part("--use-opd", "switch", False, f"trainer.advantages.kl_model {ALGO}.type",
             "A token's advantage loses its divergence from a teacher."),
        part("--opd-type", "text", None, "", "Where the teacher runs.", choices=("megatron", "vllm", "sglang"),
             note="megatron: in the trainer, beside the policy. Otherwise the run asks the engine at --rm-url."),
        sets("--opd-kl-coef", "number", 1.0, "trainer.advantages.kl_coef", "Weight of that divergence."),
        part("--opd-teacher-load", "text", None, "trainer.advantages.kl_model", "The teacher.",
             note="Hugging Face weights, or a checkpoint of Megatron's."),
        part("--opd-teacher-ckpt-step", "integer", None, "trainer.advantages.kl_model",
             "Iteration of the teacher's checkpoint.", note="For a checkpoint of Megatron's."),
        equal("--opd-teacher-model", "text", None, "It is the directory of --opd-teacher-load.",
              "Name of the teacher's model."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Credit, loss and critic."""
    if flags.teacher is not None:
        yield from _taught(flags)
        return
    yield from _credit(flags)
    yield from _loss(flags)
    if flags.use_opd:
        yield from _distillation(flags)
    elif flags.advantage_estimator in (*PLUS_PLUS, "ppo"):
        yield from _advantages(flags)
    if flags.advantage_estimator == "ppo":
        yield from _critic(flags)


def _credit(flags: Values) -> Iterator[Setting]:
    name = ("--advantage-estimator",)
    if flags.advantage_estimator not in GROUP_NORMALISED:
        yield Setting(f"{ALGO}.type", flags.advantage_estimator, name)
        return
    yield Setting(f"{ALGO}.type", "grpo", name)
    is_divided = not flags.disable_grpo_std_normalization and flags.n_samples_per_prompt > 1
    deviation = "unbiased" if is_divided else False
    yield Setting(f"{ALGO}.normalize_std", deviation, ("--disable-grpo-std-normalization",))
    if not flags.use_opd:
        yield from flags.settings("--normalize-advantages")


def _loss(flags: Values) -> Iterator[Setting]:
    kind = flags.advantage_estimator if flags.advantage_estimator in ("gspo", "cispo") else "ppo"
    yield Setting(f"{LOSS}.type", kind, ("--advantage-estimator",))
    reduction = "token" if flags.calculate_per_token_loss else "rollout"
    yield Setting(f"{LOSS}.reduction", reduction, ("--calculate-per-token-loss",))
    yield from flags.settings("--use-rollout-logprobs")
    if flags.loss_type == "custom_loss":
        yield from flags.settings("--custom-loss-function-path")
    # With one update per rollout the ratio to the trainer's own log-probabilities is 1, and nothing is clipped.
    is_corrected = flags.use_tis and flags.custom_tis_function_path is None
    if flags.use_rollout_logprobs or is_corrected or flags.num_updates > 1:
        high = flags.eps_clip if flags.eps_clip_high is None else flags.eps_clip_high
        yield Setting(f"{LOSS}.clip_low", min(flags.eps_clip, 1.0), ("--eps-clip",))
        yield Setting(f"{LOSS}.clip_high", high, ("--eps-clip-high", "--eps-clip"))
        yield from flags.settings("--eps-clip-c")
    if is_corrected:
        yield from flags.settings("--tis-clip", "--tis-clip-low")
    if flags.entropy_coef:
        yield from flags.settings("--entropy-coef")
    if flags.use_kl_loss and flags.kl_loss_coef:
        yield from flags.settings("--kl-loss-coef", "--use-unbiased-kl")
        yield Setting(f"{LOSS}.reference_kl.estimator", KL_TYPES[flags.kl_loss_type], ("--kl-loss-type",))
        yield Setting(f"{LOSS}.reference_kl.model", reference(flags), ("--ref-load",))


def _advantages(flags: Values) -> Iterator[Setting]:
    kind = {"ppo": "gae", "reinforce_plus_plus": "returns"}.get(flags.advantage_estimator, "shaped")
    at, name = "trainer.advantages", ("--advantage-estimator",)
    if kind == "shaped" and not flags.kl_coef:  # whitened where it is made
        return
    yield Setting(f"{at}.type", kind, name)
    yield Setting(f"{at}.whiten", flags.normalize_advantages, ("--normalize-advantages",))
    if kind != "shaped":
        yield from flags.settings("--gamma")
    if kind == "gae":
        yield from flags.settings("--lambd")
    if flags.kl_coef:
        yield from flags.settings("--kl-coef")
        yield Setting(f"{at}.kl_estimator", KL_TYPES[flags.kl_loss_type], ("--kl-loss-type",))
        yield Setting(f"{at}.kl_model", reference(flags), ("--ref-load",))


def resolve_teacher(flags: Values) -> None:
    """`teacher` of the flags: the address of one that is served, which the run asks instead of vime's functions.

    Raises: ConfigError for what such a teacher cannot have.
    """
    flags.teacher = None
    if not flags.use_opd or flags.opd_type not in SERVED_BY:
        return
    typed = flags.given["--opd-type"]
    if flags.rm_url is None:
        raise ConfigError(f"{typed} needs --rm-url, the address of the teacher's engine")
    for attribute, function in OF_SERVED.items():
        path, name = getattr(flags, attribute), f"--{attribute.replace('_', '-')}"
        if path is not None and not path.endswith(f"on_policy_distillation.{function}"):
            raise ConfigError(
                f"{flags.given[name]}: {typed} learns from the teacher alone, which the run asks itself; leave it out, "
                "or hold the teacher in the trainer, --opd-type megatron"
            )
        setattr(flags, attribute, None)
        flags.given = {each: text for each, text in flags.given.items() if each != name}
    for name, value in (("--opd-kl-coef", 1.0), ("--entropy-coef", 0.0), ("--kl-coef", 0.0)):
        if flags.value(name) != value:
            raise ConfigError(f"{flags.given[name]}: with {typed} only {value} is there; change it, or --lr")
    if flags.use_kl_loss and flags.kl_loss_coef:
        raise ConfigError(f"{flags.given['--kl-loss-coef']}: {typed} has no reference beside the teacher; use 0")
    root = flags.rm_url.rstrip("/").removesuffix("/inference/v1/generate").removesuffix("/generate")
    flags.teacher, flags.rm_url = root.removesuffix("/v1") + "/v1", None


def _taught(flags: Values) -> Iterator[Setting]:
    """On-policy distillation from a teacher that is served; rewards are only reported.

    Raises: ConfigError for estimators that make advantages of sums over tokens.
    """
    _check_distilled(flags)
    yield Setting(f"{ALGO}.type", "opd", ("--use-opd",))
    yield Setting("orchestrator.teacher.base_url", flags.teacher, ("--rm-url", "--opd-type"))


def _check_distilled(flags: Values) -> None:
    if flags.advantage_estimator in ("ppo", "reinforce_plus_plus"):
        raise ConfigError(
            f"{flags.given['--use-opd']}: {flags.typed('--advantage-estimator')} sums over the tokens "
            "that follow; use grpo, gspo, cispo or reinforce_plus_plus_baseline"
        )


def _distillation(flags: Values) -> Iterator[Setting]:
    """The teacher of on-policy distillation, whose divergence each token's advantage loses.

    Raises: ConfigError without a teacher, and for estimators that make advantages of sums over tokens.
    """
    if flags.opd_type is None:
        raise ConfigError(
            f"{flags.given['--use-opd']} needs --opd-type: megatron, or vllm for a teacher that is served"
        )
    if flags.opd_teacher_load is None:
        raise ConfigError(f"{flags.given['--use-opd']} needs --opd-teacher-load, the teacher")
    _check_distilled(flags)
    if flags.kl_coef or (flags.use_kl_loss and flags.kl_loss_coef):
        name = "--kl-coef" if flags.kl_coef else "--kl-loss-coef"
        raise ConfigError(
            f"{flags.given['--use-opd']} and {flags.given[name]}: the trainer has one frozen model "
            "beside the policy, a teacher or a reference; leave one out"
        )
    at, source = "trainer.advantages", ("--use-opd",)
    yield Setting(f"{at}.type", "shaped", source)
    yield Setting(f"{at}.whiten", flags.normalize_advantages, ("--normalize-advantages",))
    yield from flags.settings("--opd-kl-coef")
    yield Setting(f"{at}.kl_estimator", "k1", source)
    yield Setting(f"{at}.kl_model", weights(flags, "--opd-teacher-load"), ("--opd-teacher-load",))


def _critic(flags: Values) -> Iterator[Setting]:
    """The critic.

    Raises: ConfigError for a value of a file that the critic cannot have for itself.
    """
    warmup = rollouts_of(flags, flags.critic_lr_warmup_iters)
    yield Setting("trainer.critic.lr_warmup_steps", warmup, ("--critic-lr-warmup-iters",))
    yield from flags.settings("--num-critic-only-steps", "--critic-save")
    if flags.critic_load is not None:
        is_foreign = is_megatron(Path(flags.critic_load).expanduser())
        load = weights(flags, "--critic-load") if is_foreign else flags.critic_load
        yield Setting("trainer.critic.load", load, ("--critic-load",))
    own = {name: value for name, (value, _) in flags.critic.items() if name in OPTIMIZER}
    if any(value != getattr(flags, name) for name, value in own.items()):
        lr = flags.lr if flags.critic_lr is None else flags.critic_lr
        of_both = {name: getattr(flags, name) for name in OPTIMIZER} | own | {"lr": lr}
        yield from optimizer_settings(of_both, "trainer.critic.optim", ("--megatron-config-path",))
    else:
        yield from flags.settings("--critic-lr")
    again = {name: value for name, (value, _) in flags.critic.items() if name in RECOMPUTED}
    if any(value != getattr(flags, name) for name, value in again.items()):
        values = {name: getattr(flags, name) for name in RECOMPUTED} | again
        source = ("--megatron-config-path",)
        yield from recomputed(values, flags.pipeline_model_parallel_size, "trainer.critic.ac", source)
    _check_critic(flags)
    if flags.num_updates > 1:
        yield from flags.settings("--value-clip")


def _check_critic(flags: Values) -> None:
    """Raises: ConfigError for a value of the critic that it has in common with the actor, and that differs."""
    for name, (value, source) in flags.critic.items():
        if name in (*OPTIMIZER, *RECOMPUTED) or value == getattr(flags, name):
            continue
        if name == "lr_decay_style":
            if value != "constant":
                raise ConfigError(f"{source}: the critic's rate stays after its rise; use constant")
            continue
        raise ConfigError(
            f"{source}: the critic has the actor's, {getattr(flags, name)}; leave it out. Its own are load, save, lr, "
            f"lr_warmup_iters, value_clip, {', '.join((*OPTIMIZER, *RECOMPUTED))}"
        )
