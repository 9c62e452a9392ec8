"""Values of flags that contradict each other, as a table; and flags that do nothing here, for a note."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.vime.reward_types import RM_TYPES, WITH_ENTRIES
from stretto_vime.flags import mesh
from stretto_vime.flags.flag import Values
from stretto_vime.flags.groups import BY_NAME
from stretto_vime.flags.groups.cluster import CRITIC, is_on_one_node
from stretto_vime.flags.groups.learning import GROUP_NORMALISED, PLUS_PLUS
from stretto_vime.flags.groups.megatron import NOT_SPLIT
from stretto_vime.flags.groups.rollout import (
    ASYNC_ROLLOUT,
    DEFAULT_ROLLOUT,
    has_own_source,
    is_rewarded_by,
    is_unlabelled,
)
from stretto_vime.flags.placement import leaves_idle


@dataclass(frozen=True)
class Clash:
    """Flags that do not go together; `{0}`, `{1}` in the message are the flags as they were typed."""

    flags: str
    when: Callable[[Values], object]
    text: str

    def message(self, flags: Values) -> str:
        return self.text.format(*(_typed(flags, name) for name in self.flags.split()))


def _typed(flags: Values, name: str) -> str:
    """A flag as it was typed; one that was not, with vime's default if it has one."""
    value = flags.value(name)
    default = name if value in (None, False) else f"{name} {value}"
    return flags.given.get(name, default)


def _needs(name: str, other: str, rest: str = "") -> Clash:
    """The first flag is given, and the other is not."""
    return Clash(f"{name} {other}", lambda v: v.has(name) and not v.has(other), "{0} needs {1}" + rest)


def _idle(name: str, other: str, rest: str = "") -> Clash:
    """The first flag is given and does nothing without the other, which is not on."""
    is_on = lambda v: v.has(other) and v.value(other) not in (None, 0)
    return Clash(f"{name} {other}", lambda v: v.has(name) and not is_on(v), "{0} does nothing without {1}" + rest)


def _given(name: str, other: str, when: Callable[[Values], object], text: str) -> Clash:
    """The first flag is given, and `when` holds of the second."""
    return Clash(f"{name} {other}", lambda v: v.has(name) and when(v), text)


def _both(name: str, other: str, text: str) -> Clash:
    """Both flags are given."""
    return Clash(f"{name} {other}", lambda v: v.has(name) and v.has(other), text)


EVAL_DATA = ("--eval-prompt-data", "--eval-config")
OF_EVALS = ("--skip-eval-before-train", "--eval-function-path", "--custom-eval-rollout-log-function-path")


def _needs_evals(name: str) -> Clash:
    """The flag is given, and no data set of evals."""
    is_missing = lambda v: v.has(name) and not v.has(*EVAL_DATA)
    return Clash(f"{name} {EVAL_DATA[0]}", is_missing, "{0} needs {1}, the data")


def _positive(name: str) -> Clash:
    return Clash(name, lambda v: v.value(name) is not None and v.value(name) <= 0, "{0}: must be more than 0")


def _not_negative(name: str) -> Clash:
    return Clash(name, lambda v: (v.value(name) or 0) < 0, "{0}: must be 0 or more")


def _is_ppo(flags: Values) -> bool:
    return flags.advantage_estimator == "ppo"


def _shards(flags: Values) -> int:
    """Ranks of Megatron that together have the whole model and all tokens of a row."""
    degrees = (flags.tensor_model_parallel_size, flags.context_parallel_size, flags.pipeline_model_parallel_size)
    return math.prod(degrees)


def _critic_gpus(flags: Values) -> int:
    pairs = (
        (flags.critic_num_nodes, flags.actor_num_nodes),
        (flags.critic_num_gpus_per_node, flags.actor_num_gpus_per_node),
    )
    return math.prod(actors if own is None else own for own, actors in pairs)


def _compares_groups(flags: Values) -> bool:
    return flags.advantage_estimator in (*GROUP_NORMALISED, "reinforce_plus_plus_baseline")


ONLY_PPO = ("--critic-num-nodes", "--critic-num-gpus-per-node", "--critic-load", "--critic-save", "--critic-lr",
            "--critic-lr-warmup-iters", "--num-critic-only-steps",
            "--value-clip", "--lambd")  # fmt: skip
OWN_ADVANTAGES = ("--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path")
"""Functions whose advantages need no second reply to compare with."""
IDLE = (
    "--memory-snapshot-dir --record-memory-history", "--async-save --save", "--no-save-optim --save",
    "--tis-clip --use-tis", "--tis-clip-low --use-tis", "--mask-offpolicy-in-partial-rollout --partial-rollout",
    "--load-debug-rollout-data-subsample --load-debug-rollout-data",
    "--wandb-project --use-wandb", "--wandb-group --use-wandb", "--wandb-team --use-wandb", "--wandb-mode --use-wandb",
    "--lora-alpha --lora-rank", "--lora-dropout --lora-rank", "--target-modules --lora-rank",
    "--recompute-method --recompute-granularity", "--recompute-num-layers --recompute-method",
    "--moe-router-bias-update-rate --moe-router-enable-expert-bias", "--fp8-recipe --fp8-format",
    "--opsm-delta --use-opsm", "--opd-type --use-opd",
    "--opd-kl-coef --use-opd", "--opd-teacher-load --use-opd", "--opd-teacher-ckpt-step --use-opd",
)  # fmt: skip
"""Flags that do nothing without another."""
COUNTS = ("--num-rollout", "--num-epoch", "--rollout-batch-size", "--n-samples-per-prompt", "--num-steps-per-rollout",
          "--rollout-max-context-len", "--rollout-max-prompt-len", "--rollout-max-response-len", "--max-tokens-per-gpu",
          "--save-interval", "--eval-interval", "--lr", "--rollout-temperature", "--n-samples-per-eval-prompt",
          "--vllm-data-parallel-size", "--vllm-pipeline-parallel-size", "--context-parallel-size",
          "--tensor-model-parallel-size", "--over-sampling-batch-size", "--global-batch-size", "--actor-num-nodes",
          "--rollout-num-gpus-per-engine", "--num-gpus-per-node", "--expert-model-parallel-size",
          "--critic-num-nodes")  # fmt: skip
OR_NONE = ("--lr-warmup-iters", "--critic-lr-warmup-iters", "--num-critic-only-steps", "--eps-clip", "--eps-clip-high",
           "--value-clip", "--kl-coef", "--kl-loss-coef", "--lora-rank", "--clip-grad", "--rollout-num-gpus",
           "--actor-num-gpus-per-node", "--critic-num-gpus-per-node")  # fmt: skip

STAGES = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
          "--virtual-pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage")  # fmt: skip
NOT_PASSED = ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion", "--transformer-impl",
              "--attention-backend", "--use-flash-attn")  # fmt: skip
"""Kernels that the backend chooses itself."""

# fmt: off
CLASHES: tuple[Clash, ...] = (
    *map(_positive, COUNTS),
    *map(_not_negative, OR_NONE),
    Clash("--hf-checkpoint", lambda v: v.hf_checkpoint is None,
          "{0} is missing: the Hugging Face directory of the model"),
    Clash("--prompt-data", lambda v: v.prompt_data is None and not has_own_source(v),
          "{0} is missing: the file of prompts, .jsonl or .parquet"),
    Clash("--num-epoch --data-source-path", lambda v: v.num_rollout is None and has_own_source(v),
          "{0} counts the prompts of a file, and with {1} there is none; give --num-rollout"),
    Clash("--rollout-num-gpus", lambda v: v.rollout_num_gpus is None,
          "{0} is missing: GPUs of all engines; 0 with --actor-num-gpus-per-node 0 means the CPU"),
    Clash("--actor-num-gpus-per-node --tensor-model-parallel-size --context-parallel-size",
          lambda v: (shards := v.tensor_model_parallel_size * v.context_parallel_size) > 0
          and v.actor_num_nodes * v.actor_num_gpus_per_node % shards,
          "{0}: {1} times {2} must divide the GPUs of the actor; change one of them"),
    Clash("--actor-num-gpus-per-node --pipeline-model-parallel-size --tensor-model-parallel-size "
          "--context-parallel-size",
          lambda v: mesh.has_megatron(v) and (shards := _shards(v)) > 0
          and v.actor_num_nodes * v.actor_num_gpus_per_node % shards,
          "{0}: {1} times {2} times {3} must divide the GPUs of the actor; change one of them"),
    Clash("--critic-num-nodes --critic-num-gpus-per-node --pipeline-model-parallel-size --tensor-model-parallel-size "
          "--context-parallel-size", lambda v: _is_ppo(v) and any(map(v.has, CRITIC)) and mesh.has_megatron(v)
          and (shards := _shards(v)) > 0 and _critic_gpus(v) % shards,
          "{0}, {1}: {2} times {3} times {4} must divide the GPUs of the critic; leave its own out for as many as the "
          "actor's"),
    *(_given(name, "--pipeline-model-parallel-size", lambda v: mesh.has_megatron(v)
             and v.pipeline_model_parallel_size == 1, "{0} needs {1}") for name in STAGES),
    Clash("--rollout-batch-size", lambda v: v.rollout_batch_size is None, "{0} is missing: prompts of a rollout"),
    Clash("--num-rollout --num-epoch", lambda v: v.num_rollout is None and v.num_epoch is None,
          "{0} or {1} is missing: how long to train"),
    *(_needs(name, "--save", ", the directory") for name in ("--save-interval", "--save-hf")),
    Clash("--critic-save --save", lambda v: _is_ppo(v) and v.has("--critic-save") and not v.has("--save"),
          "{0} needs {1}, the directory"),
    _needs("--ckpt-step", "--load", ", the run that it is a step of"),
    *(_needs(f"--{name}-ckpt-step", f"--{name}-load", ", the checkpoint that it is a step of")
      for name in ("ref", "opd-teacher")),
    Clash("--save-hf --hf-checkpoint", lambda v: v.save_hf is not None and v.save_hf == v.hf_checkpoint,
          "{0} would write over {1}; name another directory"),
    _needs_evals("--eval-interval"),
    Clash("--eval-max-context-len --rollout-max-context-len",
          lambda v: v.eval_max_context_len not in (None, v.rollout_max_context_len),
          "{0}: evals take as many tokens as training; give the value of {1}, or leave it out"),
    _needs("--use-dynamic-batch-size", "--max-tokens-per-gpu"),
    Clash("--kl-coef --kl-loss-coef", lambda v: v.kl_coef and v.kl_loss_coef,
          "{0} and {1} both hold the policy to the reference, in the reward and in the loss; leave one out"),
    Clash("--kl-coef --ref-load", lambda v: v.kl_coef and v.advantage_estimator not in GROUP_NORMALISED
          and v.ref_load is None, "{0} needs {1}, the reference"),
    Clash("--kl-loss-coef --ref-load", lambda v: v.use_kl_loss and v.kl_loss_coef and v.ref_load is None,
          "{0} needs {1}, the reference"),
    Clash("--advantage-estimator --normalize-advantages",
          lambda v: v.advantage_estimator in PLUS_PLUS and not v.normalize_advantages,
          "{0} needs {1}: that is its baseline"),
    _both("--use-rollout-logprobs", "--use-tis",
          "{0} and {1} both correct for the engine's probabilities, which would act twice; leave one out"),
    Clash("--eps-clip-c", lambda v: v.eps_clip_c is not None and v.eps_clip_c <= 1, "{0}: must be above 1"),
    Clash("--eps-clip-c --advantage-estimator",
         lambda v: v.eps_clip_c is not None and v.advantage_estimator in ("gspo", "cispo"),
          "{0}: {1} has no dual clip; leave it out"),
    Clash("--disable-rewards-normalization --advantage-estimator",
          lambda v: v.disable_rewards_normalization and _compares_groups(v),
          "{0}: {1} compares a group's rewards; use --custom-reward-post-process-path to make advantages of your own"),
    Clash("--n-samples-per-prompt --advantage-estimator",
          lambda v: v.n_samples_per_prompt == 1 and _compares_groups(v) and not v.has(*OWN_ADVANTAGES)
          and v.teacher is None,
          "{0}: every advantage would be 0, for {1} compares the replies to a prompt; use 2 or more"),
    Clash("--disable-compute-advantages-and-returns --loss-type",
          lambda v: v.disable_compute_advantages_and_returns,
          "{0}: {1} needs advantages; leave it out, or use --loss-type sft_loss"),
    Clash("--loss-type --custom-loss-function-path",
          lambda v: v.loss_type == "custom_loss" and v.custom_loss_function_path is None,
          "{0} needs {1}: give the function that is the loss"),
    Clash("--global-batch-size --num-steps-per-rollout",
          lambda v: None not in (v.global_batch_size, v.num_steps_per_rollout, v.rollout_batch_size)
          and v.global_batch_size * v.num_steps_per_rollout != v.rollout_batch_size * v.n_samples_per_prompt,
          "{0} and {1} contradict each other: their product is not the samples of a rollout; leave one out"),
    Clash("--num-steps-per-rollout --rollout-batch-size",
          lambda v: None not in (v.num_steps_per_rollout, v.rollout_batch_size) and v.num_steps_per_rollout > 0
          and v.rollout_batch_size * v.n_samples_per_prompt % v.num_steps_per_rollout,
          "{0} must divide the samples of a rollout, {1} times --n-samples-per-prompt"),
    Clash("--over-sampling-batch-size --rollout-batch-size",
          lambda v: None not in (v.over_sampling_batch_size, v.rollout_batch_size)
          and v.over_sampling_batch_size < v.rollout_batch_size, "{0}: must be at least {1}"),
    Clash("--rollout-max-prompt-len --rollout-max-context-len",
          lambda v: None not in (v.rollout_max_prompt_len, v.rollout_max_context_len)
          and v.rollout_max_prompt_len >= v.rollout_max_context_len, "{0} leaves no room for a reply in {1}; lower it"),
    Clash("--rollout-max-response-len --rollout-max-context-len",
          lambda v: None not in (v.rollout_max_response_len, v.rollout_max_context_len)
          and v.rollout_max_response_len >= v.rollout_max_context_len,
          "{0} leaves no room for a prompt in {1}; lower it"),
    _both("--eval-prompt-data", "--eval-config", "{0} and {1} both name the data sets; leave one out"),
    _both("--vllm-config", "--prefill-num-servers", "{0} and {1} both say which engines read prompts; leave one out"),
    _needs("--debug-train-only", "--load-debug-rollout-data", ", the rollouts that were saved"),
    *(_both("--debug-rollout-only", other, "{0} and {1} leave nothing to run; leave one out")
      for other in ("--debug-train-only", "--load-debug-rollout-data")),
    _both("--rollout-function-path", "--load-debug-rollout-data", "{0} and {1} both make the rollouts; leave one out"),
    _both("--load-debug-rollout-data", "--eval-interval", "{0} starts no engines, which {1} needs; leave one out"),
    Clash("--custom-tis-function-path --use-tis",
          lambda v: v.custom_tis_function_path is not None and not (v.use_tis or v.get_mismatch_metrics),
          "{0} needs {1}, or --get-mismatch-metrics"),
    Clash("--reward-key --custom-rm-path", lambda v: v.has("--reward-key") and v.custom_rm_path is None
          and is_rewarded_by(v, *(set(RM_TYPES) - set(WITH_ENTRIES))),
          "{0}: the built-in reward is a number; leave it out, or give {1}"),
    _needs("--vllm-router-ip", "--vllm-router-port"),
    _needs("--vllm-router-port", "--vllm-router-ip"),
    Clash("--update-weight-mode --update-weight-transport",
          lambda v: v.update_weight_mode == "delta" and v.update_weight_transport != "disk", "{0} needs {1} disk"),
    Clash("--lr-warmup-iters --lr-warmup-fraction", lambda v: v.lr_warmup_iters and v.lr_warmup_fraction,
          "{0} and {1} both say how long the rate rises; leave one out"),
    Clash("--use-routing-replay --use-rollout-routing-replay",
          lambda v: v.use_routing_replay and not v.use_rollout_routing_replay,
          "{0}: experts are replayed as the engine chose them, or not; add {1}, or leave it out"),
    Clash("--num-critic-only-steps --num-rollout", lambda v: _is_ppo(v) and v.num_rollout is not None
          and v.num_critic_only_steps >= v.num_rollout, "{0}: the policy would never learn in {1}; lower it"),
)

NOTES: tuple[Clash, ...] = (
    Clash("--eps-clip-high", lambda v: v.eps_clip_high is not None and v.num_updates == 1
          and not (v.use_rollout_logprobs or (v.use_tis and v.custom_tis_function_path is None)),
          "{0} does nothing while a rollout is one update: the ratio is 1; --global-batch-size makes several"),
    Clash("--kl-loss-coef", lambda v: v.use_kl_loss and not v.kl_loss_coef,
          "{0}: no reference is loaded, and no divergence reported"),
    Clash("--kl-loss-type --use-unbiased-kl", lambda v: v.use_kl_loss and v.kl_loss_coef and v.kl_loss_type == "k1"
          and not v.use_unbiased_kl, "{0}: its gradient is zero on average, so that it does not hold the policy to the "
          "reference; k3 and low_var_kl do, and {1}"),
    Clash("--kl-coef --advantage-estimator", lambda v: v.kl_coef and v.advantage_estimator in GROUP_NORMALISED,
          "{0} does nothing with {1}; --use-kl-loss --kl-loss-coef holds the policy to the reference"),
    Clash("--kl-loss-coef --use-kl-loss", lambda v: v.kl_loss_coef and not v.use_kl_loss,
          "{0} does nothing without {1}"),
    *(_idle(*pair.split()) for pair in IDLE),
    *(_idle(name, "--colocate", ": a process with GPUs of its own keeps its memory")
      for name in ("--offload", "--offload-train", "--offload-rollout")),
    *(_given(name, "--advantage-estimator", lambda v: not _is_ppo(v),
             "{0} does nothing with {1}: only ppo has a critic") for name in ONLY_PPO),
    Clash("--megatron-config-path --advantage-estimator", lambda v: v.critic and not _is_ppo(v),
          "{0}: what it says of a critic does nothing with {1}: only ppo has one"),
    Clash("--gamma --advantage-estimator",
          lambda v: v.has("--gamma") and v.advantage_estimator not in ("ppo", "reinforce_plus_plus"),
          "{0} does nothing with {1}, which discounts nothing"),
    Clash("--custom-loss-function-path --loss-type",
          lambda v: v.custom_loss_function_path is not None and v.loss_type != "custom_loss",
          "{0} does nothing with {1}; --loss-type custom_loss calls it"),
    Clash("--update-weight-local-checkpoint-dir --update-weight-mode",
          lambda v: v.has("--update-weight-local-checkpoint-dir") and v.update_weight_mode != "delta",
          "{0} does nothing with {1}"),
    _both("--rm-type", "--custom-rm-path", "{0} is not used: {1} rewards a sample"),
    Clash("--use-opd --opd-type", lambda v: v.teacher is not None,
          "{0}, {1}: the run asks the teacher itself, and the loss is that of algo \"opd\" (docs/algorithms.md), "
          "without clips; rewards are only reported"),
    Clash("--rm-type --label-key", lambda v: is_unlabelled(v) and v.custom_rm_path is None,
          "{0} compares replies with a label, and without {1} there is none: every reward is 0"),
    _idle("--group-rm", "--custom-rm-path", ": a built-in reward sees one sample"),
    Clash("--rollout-function-path --custom-generate-function-path",
          lambda v: v.rollout_function_path not in (DEFAULT_ROLLOUT, ASYNC_ROLLOUT)
          and v.custom_generate_function_path is not None,
          "{0} makes the samples: {1} is called only by that function, if it does so"),
    Clash("--prompt-data --data-source-path", lambda v: v.prompt_data is not None and has_own_source(v),
          "{0} is read only by {1}, which gives the prompts: it is args.prompt_data"),
    Clash("--min-lr --lr-decay-style", lambda v: v.min_lr and v.lr_decay_style == "constant",
          "{0} does nothing with {1}: the rate does not fall"),
    Clash("--lr-decay-iters --lr-decay-style",
          lambda v: v.lr_decay_iters is not None and v.lr_decay_style == "constant",
          "{0} does nothing with {1}: the rate does not fall"),
    *(_given(name, "--optimizer", lambda v: v.optimizer == "sgd",
             "{0} does nothing with {1}, which has none") for name in ("--adam-beta1", "--adam-beta2", "--adam-eps")),
    Clash("--apply-chat-template-kwargs --apply-chat-template",
          lambda v: v.apply_chat_template_kwargs and not v.apply_chat_template, "{0} does nothing without {1}"),
    *(_given(name, "--eval-prompt-data", lambda v: not v.has(*EVAL_DATA),
             "{0} does nothing without {1}, the data") for name in OF_EVALS),
    *(_given(name, "--eval-interval", lambda v: v.eval_interval is None,
             "{0} is not used without {1}: there are no evals") for name in EVAL_DATA),
    Clash("--over-sampling-batch-size", lambda v: v.has("--over-sampling-batch-size") and not v.partial_rollout,
          "{0} is not used: groups that are refused are replaced one by one"),
    Clash("--update-weights-interval", lambda v: v.update_weights_interval > 1 and not v.is_async,
          "{0} is not used: engines get every version, as by vime's train.py; train_async.py uses it"),
    _both("--num-epoch", "--num-rollout", "{0} is not used, for there is {1}"),
)
# fmt: on


def clashes(flags: Values) -> Iterator[str]:
    """A message for each contradiction."""
    yield from dict.fromkeys(each.message(flags) for each in CLASHES if each.when(flags))


def notes(flags: Values) -> Iterator[str]:
    """A message for each flag that does nothing here, or is met in another way."""
    for name, typed in flags.given.items():
        flag, value = BY_NAME[name], flags.value(name)
        if flag.is_told and value is not False and value not in flag.allowed:
            is_word = flag.note[1:2].islower() or flag.note[1:2] == " "
            yield f"{typed}: {flag.note[0].lower() if is_word else flag.note[0]}{flag.note[1:-1]}"
    yield from (each.message(flags) for each in NOTES if each.when(flags))
    yield from mesh.notes(flags)
    if flags.has(mesh.BACKEND) and (why := mesh.why_not_megatron(flags)) is not None:
        yield f"{flags.given[mesh.BACKEND]}: stretto's own trainer trains, with the same results: {why}"
    if mesh.has_megatron(flags):
        yield from _kernels_of_megatron(flags)
    elif stages := _stages(flags):
        yield f"{', '.join(stages)}: {NOT_SPLIT[0].lower()}{NOT_SPLIT[1:-1]}"
    if mesh.has_plugin(flags):
        yield f"{flags.given['--custom-model-provider-path']}: each family has modules of its own"
    if not is_on_one_node(flags):
        yield from _moved_placeholders(flags)


def _stages(flags: Values) -> list[str]:
    """Flags about stages of a pipeline, as they were typed; a pipeline of one stage is none."""
    name = "--pipeline-model-parallel-size"
    names = (name, *STAGES) if flags.pipeline_model_parallel_size > 1 else STAGES
    return [flags.given[each] for each in names if flags.has(each)]


def _kernels_of_megatron(flags: Values) -> Iterator[str]:
    """A message for typed flags that Megatron has, and that are not passed on to it."""
    typed = [flags.given[name] for name in NOT_PASSED if flags.has(name)]
    if typed:
        each = "is" if len(typed) == 1 else "are"
        yield f"{', '.join(typed)} {each} not passed on: Transformer Engine has it where it is there"
    if flags.has(name := "--use-precision-aware-optimizer"):
        yield f"{name} is not passed on: the optimizer's state is float32"


def _moved_placeholders(flags: Values) -> Iterator[str]:
    """A message for each model whose idle GPUs are not where its file has them."""
    for model in flags.models:
        is_last = [group.worker_type for group in model.groups][: len(model.engines)].count("placeholder") == 0
        if len(model.engines) < len(model.groups) and not leaves_idle(flags, model) and not is_last:
            yield (
                f"{flags.given['--vllm-config']}: model {model.name}: its engines have the first GPUs of their node, "
                "and those of its placeholders are the last"
            )
