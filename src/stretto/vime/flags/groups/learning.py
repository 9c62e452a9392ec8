"""Flags about the algorithm: advantages, loss, corrections, critic, teacher."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.vime.flags.flag import Flag, Setting, Values, acts, equal, part, refused
from stretto.vime.flags.groups.training import reference, rollouts_of

ALGO, LOSS = "orchestrator.algo", "trainer.loss"
GROUP_NORMALISED = ("grpo", "gspo", "cispo")
PLUS_PLUS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
ESTIMATORS = ("grpo", "gspo", "cispo", *PLUS_PLUS, "ppo")
KL_TYPES = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}
NO_TEACHER = (
    'write [orchestrator.teacher] and algo type = "opd" in the TOML of --print-config (docs/algorithms.md)'
)
NO_OPSM = "use trainer.loss.correction.reject, or a custom loss (docs/algorithms.md)"
NOT_CENTRED = "write a custom loss (docs/algorithms.md)"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Hyperparameters for RL training": (
        part("--advantage-estimator", "text", "grpo", f"{ALGO}.type {LOSS}.type trainer.advantages trainer.critic",
             "The algorithm.", choices=ESTIMATORS),
        part("--loss-type", "text", "policy_loss", "", "Loss.", choices=("policy_loss", "sft_loss", "custom_loss"),
             note="Fine-tuning is `sft`; custom_loss is that of --custom-loss-function-path."),
        part("--calculate-per-token-loss", "switch", False, f"{LOSS}.reduction",
             "Mean over all tokens; else over rollouts of each one's mean."),
        part("--normalize-advantages", "switch", False, f"{ALGO}.whiten trainer.advantages.whiten",
             "Advantages of the batch's trained tokens get mean 0 and deviation 1."),
        part("--disable-grpo-std-normalization", "switch", False, f"{ALGO}.normalize_std",
             "Do not divide by the group's deviation."),
        part("--disable-rewards-normalization", "switch", False, "", "Rewards are not compared within their group.",
             note="With estimators that do not compare groups; others: --custom-reward-post-process-path."),
        part("--eps-clip", "number", 0.2, f"{LOSS}.clip_low {LOSS}.clip_high", "Clip range of the ratio."),
        part("--eps-clip-high", "number", None, f"{LOSS}.clip_high", "Its upper side; else --eps-clip."),
        part("--eps-clip-c", "number", None, f"{LOSS}.clip_dual", "Dual clip, above 1."),
        part("--entropy-coef", "number", 0.0, f"{LOSS}.entropy_coef", "Weight of the entropy, which is pushed up."),
        part("--use-kl-loss", "switch", False, f"{LOSS}.reference_kl",
             "Add the divergence from the reference to the loss."),
        part("--kl-loss-coef", "number", 0.0, f"{LOSS}.reference_kl.coef", "Its weight."),
        part("--kl-loss-type", "text", "k1", f"{LOSS}.reference_kl.estimator trainer.advantages.kl_estimator",
             "Estimator of a divergence.",
             choices=tuple(KL_TYPES)),
        part("--use-unbiased-kl", "switch", False, f"{LOSS}.reference_kl.is_unbiased", "Multiply it by the ratio."),
        refused("--ref-update-interval", "integer", None,
             "the reference stays what it was at the start; leave it out",
             "Rollouts between updates of the reference."),
        part("--use-rollout-logprobs", "switch", False, f"{LOSS}.use_rollout_logprobs",
             "The ratio is to the engine's log-probabilities."),
        part("--use-tis", "switch", False, f"{LOSS}.correction.weights",
             "Truncated importance sampling: trainer to engine."),
        part("--tis-clip", "number", 2.0, f"{LOSS}.correction.weights.high", "Greatest weight."),
        part("--tis-clip-low", "number", 0, f"{LOSS}.correction.weights.low", "Least weight."),
        part("--custom-tis-function-path", "text", None, "trainer.hooks.tis", "Function that corrects.",
             note="With --use-tis or --get-mismatch-metrics, in the place of the truncated weights."),
        equal("--get-mismatch-metrics", "switch", False, "`mismatch_kl` is always reported.",
             "Report how far trainer and engine are apart."),
        equal("--use-rollout-entropy", "switch", False, "The entropy is always reported.", "Report the entropy."),
        refused("--use-opsm", "switch", False, NO_OPSM, "Mask sequences that have moved too far."),
        refused("--opsm-delta", "number", 1e-4, NO_OPSM, "How far is too far."),
        refused("--use-routing-replay", "switch", False,
             "use --use-rollout-routing-replay: the engine's choices, or none",
             "Replay the experts of the first pass."),
        part("--use-rollout-routing-replay", "switch", False, "trainer.enable_router_replay",
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
        refused("--score-centering-top-k", "integer", 128, NOT_CENTRED, "Likeliest tokens for it."),
        part("--custom-loss-function-path", "text", None, "trainer.hooks.loss", "Function that is the loss.",
             note="With --loss-type custom_loss."),
        acts("--custom-advantage-function-path", "text", None, "trainer.hooks.advantages",
             "Function that makes advantages."),
        acts("--custom-pg-loss-reducer-function-path", "text", None, "trainer.hooks.pg_loss_reducer",
             "Function that reduces the policy's loss."),
        refused("--disable-compute-advantages-and-returns", "switch", False, "fine-tuning is `sft`; leave it out",
             "No advantages."),
    ),
    "PPO": (
        part("--gamma", "number", 1.0, "trainer.advantages.gamma", "Discount per token.",
             note="With ppo and reinforce_plus_plus."),
        part("--lambd", "number", 1.0, "trainer.advantages.lambd", "Lambda of generalised advantage estimation.",
             note="With ppo."),
        part("--kl-coef", "number", 0.0, "trainer.advantages.kl_coef",
             "Price of a token's divergence from the reference, off its reward.",
             note="With ppo and reinforce_plus_plus(_baseline)."),
        part("--value-clip", "number", 0.2, "trainer.critic.value_clip",
             "Most that a value moves in a rollout of several updates."),
        part("--critic-load", "text", None, "trainer.critic.load",
             "Model that the critic starts from; else the actor's."),
        part("--critic-save", "text", None, "trainer.critic.save", "Directory of its exports; else RUN/critic."),
        part("--critic-lr", "number", None, "trainer.critic.lr", "Learning rate of the critic; else --lr."),
        part("--critic-lr-warmup-iters", "integer", 0, "trainer.critic.lr_warmup_steps", "Updates of linear rise.",
             note="In whole rollouts, rounded up."),
        part("--num-critic-only-steps", "integer", 0, "trainer.critic.num_critic_only_steps",
             "First rollouts, which train the critic only."),
        part("--megatron-config-path", "text", None, "trainer.critic trainer.optim",
             "YAML of what differs for actor and critic.",
             note="The actor's overrides are flags; the critic's are lr, load, save, lr_warmup_iters, value_clip."),
        acts("--custom-megatron-init-path", "text", None, "trainer.hooks.init",
             "Function called after initialisation."),
        acts("--custom-megatron-before-log-prob-hook-path", "text", None, "trainer.hooks.before_log_prob",
             "Function called before log-probabilities."),
        acts("--custom-megatron-before-train-step-hook-path", "text", None, "trainer.hooks.before_train_step",
             "Function called before each update."),
    ),
    "Distillation": (
        refused("--use-opd", "switch", False, NO_TEACHER, "Learn from a teacher's log-probabilities."),
        refused("--opd-type", "text", None, NO_TEACHER, "Where the teacher runs."),
        refused("--opd-kl-coef", "number", 1.0, NO_TEACHER, "Weight of it."),
        refused("--opd-teacher-load", "text", None, NO_TEACHER, "Checkpoint of the teacher."),
        refused("--opd-teacher-ckpt-step", "integer", None, NO_TEACHER, "Step of the teacher's checkpoint."),
        refused("--opd-teacher-model", "text", None, NO_TEACHER, "Name of the teacher's model."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Credit, loss and critic."""
    yield from _credit(flags)
    yield from _loss(flags)
    if flags.advantage_estimator in (*PLUS_PLUS, "ppo"):
        yield from _advantages(flags)
    if flags.advantage_estimator == "ppo":
        yield from _critic(flags)
    if flags.use_rollout_routing_replay:
        yield Setting("trainer.enable_router_replay", True, ("--use-rollout-routing-replay",))


def _credit(flags: Values) -> Iterator[Setting]:
    name = ("--advantage-estimator",)
    if flags.advantage_estimator not in GROUP_NORMALISED:
        yield Setting(f"{ALGO}.type", flags.advantage_estimator, name)
        return
    yield Setting(f"{ALGO}.type", "grpo", name)
    is_divided = not flags.disable_grpo_std_normalization and flags.n_samples_per_prompt > 1
    yield Setting(
        f"{ALGO}.normalize_std", "unbiased" if is_divided else False, ("--disable-grpo-std-normalization",)
    )
    yield Setting(f"{ALGO}.whiten", flags.normalize_advantages, ("--normalize-advantages",))


def _loss(flags: Values) -> Iterator[Setting]:
    kind = flags.advantage_estimator if flags.advantage_estimator in ("gspo", "cispo") else "ppo"
    yield Setting(f"{LOSS}.type", kind, ("--advantage-estimator",))
    reduction = "token" if flags.calculate_per_token_loss else "rollout"
    yield Setting(f"{LOSS}.reduction", reduction, ("--calculate-per-token-loss",))
    yield Setting(f"{LOSS}.use_rollout_logprobs", flags.use_rollout_logprobs, ("--use-rollout-logprobs",))
    # With one update per rollout the ratio to the trainer's own log-probabilities is 1, and nothing is clipped.
    if flags.use_rollout_logprobs or flags.use_tis or flags.num_updates > 1:
        high = flags.eps_clip if flags.eps_clip_high is None else flags.eps_clip_high
        low = min(flags.eps_clip, 1.0)
        yield Setting(f"{LOSS}.clip_low", low, ("--eps-clip",))
        yield Setting(f"{LOSS}.clip_high", high, ("--eps-clip-high", "--eps-clip"))
        if flags.eps_clip_c is not None:
            yield Setting(f"{LOSS}.clip_dual", flags.eps_clip_c, ("--eps-clip-c",))
    if flags.loss_type == "custom_loss":
        names = ("--custom-loss-function-path", "--loss-type")
        yield Setting("trainer.hooks.loss", flags.custom_loss_function_path, names)
    own = flags.custom_tis_function_path
    if own is not None:
        yield Setting("trainer.hooks.tis", own, ("--custom-tis-function-path",))
    if flags.use_tis and own is None:
        at = f"{LOSS}.correction.weights"
        yield Setting(f"{at}.high", flags.tis_clip, ("--tis-clip",))
        yield Setting(f"{at}.low", float(flags.tis_clip_low), ("--tis-clip-low",))
    if flags.entropy_coef:
        yield Setting(f"{LOSS}.entropy_coef", flags.entropy_coef, ("--entropy-coef",))
    if flags.use_kl_loss and flags.kl_loss_coef:
        at = f"{LOSS}.reference_kl"
        yield Setting(f"{at}.coef", flags.kl_loss_coef, ("--kl-loss-coef",))
        yield Setting(f"{at}.estimator", KL_TYPES[flags.kl_loss_type], ("--kl-loss-type",))
        yield Setting(f"{at}.is_unbiased", flags.use_unbiased_kl, ("--use-unbiased-kl",))
        yield Setting(f"{at}.model", reference(flags), ("--ref-load",))


def _advantages(flags: Values) -> Iterator[Setting]:
    kind = {"ppo": "gae", "reinforce_plus_plus": "returns"}.get(flags.advantage_estimator, "shaped")
    at, name = "trainer.advantages", ("--advantage-estimator",)
    if kind == "shaped" and not flags.kl_coef:  # whitened where it is made
        return
    yield Setting(f"{at}.type", kind, name)
    yield Setting(f"{at}.whiten", flags.normalize_advantages, ("--normalize-advantages",))
    if kind != "shaped":
        yield Setting(f"{at}.gamma", flags.gamma, ("--gamma",))
    if kind == "gae":
        yield Setting(f"{at}.lambd", flags.lambd, ("--lambd",))
    if flags.kl_coef:
        yield Setting(f"{at}.kl_coef", flags.kl_coef, ("--kl-coef",))
        yield Setting(f"{at}.kl_estimator", KL_TYPES[flags.kl_loss_type], ("--kl-loss-type",))
        yield Setting(f"{at}.kl_model", reference(flags), ("--ref-load",))


def _critic(flags: Values) -> Iterator[Setting]:
    at = "trainer.critic"
    warmup = rollouts_of(flags, flags.critic_lr_warmup_iters)
    yield Setting(f"{at}.lr_warmup_steps", warmup, ("--critic-lr-warmup-iters",))
    yield Setting(f"{at}.num_critic_only_steps", flags.num_critic_only_steps, ("--num-critic-only-steps",))
    if flags.num_updates > 1:
        yield Setting(f"{at}.value_clip", flags.value_clip, ("--value-clip",))
    for key in ("load", "save", "lr"):
        if (value := getattr(flags, f"critic_{key}")) is not None:
            yield Setting(f"{at}.{key}", value, (f"--critic-{key}",))
