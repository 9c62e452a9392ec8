"""Values of flags that contradict each other, as data; and what is worth a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.vime.flags.flag import Values
from stretto.vime.flags.groups.learning import GROUP_NORMALISED, PLUS_PLUS
from stretto.vime.flags.groups.rollout import ASYNC_ROLLOUT, DEFAULT_ROLLOUT, has_own_source

COMPARED = ("math", "dapo", "deepscaler", "f1")
"""Types of --rm-type that compare a reply with its label."""
NUMBERS = ("math", "deepscaler", "f1", "gpqa", "ifbench", "random")
"""Those whose reward is a number."""


def plain_type(flags: Values) -> str:
    """--rm-type without boxed_."""
    return (flags.rm_type or "").removeprefix("boxed_")


@dataclass(frozen=True)
class Clash:
    """Flags that do not go together; `{0}`, `{1}` in the message are the flags as they were typed."""

    flags: str
    when: Callable[[Values], object]
    say: str

    def message(self, flags: Values) -> str:
        names = self.flags.split()
        return self.say.format(*(typed(flags, name) for name in names))


def typed(flags: Values, name: str) -> str:
    """A flag as it was typed; one that was not, with vime's default."""
    value = getattr(flags, name.removeprefix("--").replace("-", "_"))
    shown = name if value in (None, False) else f"{name} {value}"
    return flags.given.get(name, shown)


def _without_evals(name: str) -> Callable[[Values], object]:
    """Is this flag given, and no data set of evals?"""
    return lambda v: v.has(name) and v.eval_prompt_data is None and v.eval_config is None


def _without(*names: str) -> Callable[[Values], bool]:
    """Is the first flag given, and none of the others?"""
    return lambda flags: flags.has(names[0]) and not flags.has(*names[1:])


def _positive(name: str) -> Clash:
    attribute = name.removeprefix("--").replace("-", "_")
    at_fault = lambda v: getattr(v, attribute) is not None and getattr(v, attribute) <= 0
    return Clash(name, at_fault, "{0}: must be more than 0")


def _not_negative(name: str) -> Clash:
    attribute = name.removeprefix("--").replace("-", "_")
    return Clash(name, lambda v: (getattr(v, attribute) or 0) < 0, "{0}: must be 0 or more")


def _is_ppo(flags: Values) -> bool:
    return flags.advantage_estimator == "ppo"


ONLY_PPO = ("--critic-num-nodes", "--critic-num-gpus-per-node", "--critic-load", "--critic-save", "--critic-lr",
            "--critic-lr-warmup-iters", "--num-critic-only-steps",
            "--value-clip", "--lambd")  # fmt: skip
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

# fmt: off
CLASHES: tuple[Clash, ...] = (
    *map(_positive, COUNTS),
    *map(_not_negative, OR_NONE),
    Clash("--hf-checkpoint", lambda v: v.hf_checkpoint is None,
          "{0} is missing: the Hugging Face directory of the model"),
    Clash("--prompt-data", lambda v: v.prompt_data is None and not has_own_source(v),
          "{0} is missing: the file of prompts, .jsonl or .parquet"),
    Clash("--prompt-data --data-source-path", lambda v: v.prompt_data is not None and has_own_source(v),
          "{0} is not read with {1}, which gives the prompts; leave one of them out"),
    Clash("--num-epoch --data-source-path", lambda v: v.num_rollout is None and has_own_source(v),
          "{0} counts the prompts of a file, and with {1} there is none; give --num-rollout"),
    *(Clash(f"{name} --colocate", _without(name, "--colocate"),
            "{0} needs {1}: who has GPUs of its own keeps its memory") for name in
      ("--offload", "--offload-train", "--offload-rollout")),
    Clash("--rollout-num-gpus", lambda v: v.rollout_num_gpus is None,
          "{0} is missing: GPUs of all engines; 0 beside --actor-num-gpus-per-node 0 is the CPU"),
    Clash("--actor-num-gpus-per-node --tensor-model-parallel-size --context-parallel-size",
          lambda v: (shards := v.tensor_model_parallel_size * v.context_parallel_size) > 0
          and v.actor_num_nodes * v.actor_num_gpus_per_node % shards,
          "{0}: {1} times {2} must divide the GPUs of the actor; change one of them"),
    Clash("--rollout-batch-size", lambda v: v.rollout_batch_size is None, "{0} is missing: prompts of a rollout"),
    Clash("--num-rollout --num-epoch", lambda v: v.num_rollout is None and v.num_epoch is None,
          "{0} or {1} is missing: how long to train"),
    Clash("--memory-snapshot-dir --record-memory-history",
          lambda v: v.has("--memory-snapshot-dir") and not v.record_memory_history,
          "{0} does nothing without {1}, which records the memory; add that"),
    Clash("--save-interval --save", _without("--save-interval", "--save"), "{0} needs {1}, the directory"),
    Clash("--save-hf --save", _without("--save-hf", "--save"), "{0} needs {1}, the directory"),
    Clash("--async-save --save", _without("--async-save", "--save"), "{0} needs {1}, the directory"),
    Clash("--ckpt-step --load", _without("--ckpt-step", "--load"), "{0} needs {1}, the run that it is a step of"),
    Clash("--save-hf --hf-checkpoint", lambda v: v.save_hf is not None and v.save_hf == v.hf_checkpoint,
          "{0} would write over {1}; name another directory"),
    Clash("--eval-interval --eval-prompt-data", _without_evals("--eval-interval"),
         "{0} needs {1}, the data"),
    Clash("--skip-eval-before-train --eval-prompt-data", _without_evals("--skip-eval-before-train"),
          "{0} needs {1}, the data"),
    Clash("--eval-function-path --eval-prompt-data", _without_evals("--eval-function-path"),
         "{0} needs {1}, the data"),
    Clash("--use-dynamic-batch-size --max-tokens-per-gpu", _without("--use-dynamic-batch-size",
         "--max-tokens-per-gpu"),
          "{0} needs {1}"),
    Clash("--kl-coef --kl-loss-coef", lambda v: v.kl_coef and v.kl_loss_coef,
          "{0} and {1} both hold the policy to the reference, in the reward and in the loss; leave one out"),
    Clash("--kl-coef --advantage-estimator", lambda v: v.kl_coef and v.advantage_estimator in GROUP_NORMALISED,
          "{0} does nothing with {1}; use --use-kl-loss --kl-loss-coef"),
    Clash("--kl-loss-coef --use-kl-loss", lambda v: v.kl_loss_coef and not v.use_kl_loss,
         "{0} does nothing without {1}; add it"),
    Clash("--kl-loss-type --use-unbiased-kl", lambda v: v.use_kl_loss and v.kl_loss_coef and v.kl_loss_type == "k1"
          and not v.use_unbiased_kl, "{0}: its gradient is zero on average; use k3 or low_var_kl, or add {1}"),
    Clash("--kl-coef --ref-load", lambda v: v.kl_coef and v.ref_load is None, "{0} needs {1}, the reference"),
    Clash("--kl-loss-coef --ref-load", lambda v: v.use_kl_loss and v.kl_loss_coef and v.ref_load is None,
         "{0} needs {1}, the reference"),
    Clash("--advantage-estimator --normalize-advantages",
          lambda v: v.advantage_estimator in PLUS_PLUS and not v.normalize_advantages,
               "{0} needs {1}: that is its baseline"),
    Clash("--use-rollout-logprobs --use-tis", lambda v: v.use_rollout_logprobs and v.use_tis,
          "{0} and {1} both correct for the engine's probabilities, which would act twice; leave one out"),
    Clash("--tis-clip --use-tis", _without("--tis-clip", "--use-tis"), "{0} does nothing without {1}"),
    Clash("--tis-clip-low --use-tis", _without("--tis-clip-low", "--use-tis"), "{0} does nothing without {1}"),
    Clash("--eps-clip-c", lambda v: v.eps_clip_c is not None and v.eps_clip_c <= 1, "{0}: must be above 1"),
    Clash("--eps-clip-c --advantage-estimator",
         lambda v: v.eps_clip_c is not None and v.advantage_estimator in ("gspo", "cispo"),
          "{0}: {1} has no dual clip; leave it out"),
    Clash("--disable-rewards-normalization --advantage-estimator",
          lambda v: v.disable_rewards_normalization and v.advantage_estimator in (*GROUP_NORMALISED,
               "reinforce_plus_plus_baseline"),
          "{0}: {1} compares a group's rewards; use --custom-reward-post-process-path to make advantages of your "
               "own"),
    Clash("--n-samples-per-prompt --advantage-estimator",
          lambda v: v.n_samples_per_prompt == 1 and v.advantage_estimator in (*GROUP_NORMALISED,
               "reinforce_plus_plus_baseline"),
          "{0}: every advantage would be 0, for {1} compares the replies to a prompt; use 2 or more"),
    *(Clash(f"{name} --advantage-estimator", lambda v, name=name: v.has(name) and not _is_ppo(v),
            "{0} does nothing with {1}: only ppo has a critic; leave it out") for name in ONLY_PPO),
    Clash("--gamma --advantage-estimator", lambda v: v.has("--gamma") and v.advantage_estimator not in ("ppo",
         "reinforce_plus_plus"),
          "{0} does nothing with {1}, which discounts nothing; leave it out"),
    Clash("--loss-type", lambda v: v.loss_type == "sft_loss",
         "{0}: fine-tuning on conversations is `sft @ sft.toml`"),
    Clash("--loss-type --custom-loss-function-path",
          lambda v: v.loss_type == "custom_loss" and v.custom_loss_function_path is None,
          "{0} needs {1}: give the function that is the loss"),
    Clash("--custom-loss-function-path --loss-type",
          lambda v: v.custom_loss_function_path is not None and v.loss_type != "custom_loss",
          "{0} does nothing with {1}; give --loss-type custom_loss"),
    Clash("--global-batch-size --num-steps-per-rollout",
          lambda v: None not in (v.global_batch_size, v.num_steps_per_rollout, v.rollout_batch_size)
          and v.global_batch_size * v.num_steps_per_rollout != v.rollout_batch_size * v.n_samples_per_prompt,
          "{0} and {1} contradict each other: their product is not the samples of a rollout; leave one out"),
    Clash("--num-steps-per-rollout --rollout-batch-size",
          lambda v: None not in (v.num_steps_per_rollout, v.rollout_batch_size) and v.num_steps_per_rollout > 0
          and v.rollout_batch_size * v.n_samples_per_prompt % v.num_steps_per_rollout,
          "{0} must divide the samples of a rollout, {1} times --n-samples-per-prompt"),
    Clash("--over-sampling-batch-size --rollout-batch-size",
          lambda v: None not in (v.over_sampling_batch_size,
               v.rollout_batch_size) and v.over_sampling_batch_size < v.rollout_batch_size,
          "{0}: must be at least {1}"),
    Clash("--mask-offpolicy-in-partial-rollout --partial-rollout",
          _without("--mask-offpolicy-in-partial-rollout", "--partial-rollout"), "{0} does nothing without {1}"),
    Clash("--rollout-max-prompt-len --rollout-max-context-len",
          lambda v: None not in (v.rollout_max_prompt_len,
               v.rollout_max_context_len) and v.rollout_max_prompt_len >= v.rollout_max_context_len,
          "{0} leaves no room for a reply in {1}; lower it"),
    Clash("--rollout-max-response-len --rollout-max-context-len",
          lambda v: None not in (v.rollout_max_response_len, v.rollout_max_context_len)
          and v.rollout_max_response_len >= v.rollout_max_context_len,
               "{0} leaves no room for a prompt in {1}; lower it"),
    Clash("--eval-prompt-data --eval-config",
          lambda v: v.eval_prompt_data is not None and v.eval_config is not None,
          "{0} and {1} both name the data sets; leave one out"),
    Clash("--vllm-config --prefill-num-servers",
          lambda v: v.vllm_config is not None and v.prefill_num_servers is not None,
          "{0} and {1} both say which engines read prompts; leave one out"),
    Clash("--debug-train-only --load-debug-rollout-data",
          lambda v: v.debug_train_only and v.load_debug_rollout_data is None,
          "{0} needs {1}, the rollouts that were saved"),
    Clash("--debug-rollout-only --debug-train-only", lambda v: v.debug_rollout_only and v.debug_train_only,
          "{0} and {1} leave nothing to run; leave one out"),
    Clash("--debug-rollout-only --load-debug-rollout-data",
          lambda v: v.debug_rollout_only and v.load_debug_rollout_data is not None,
          "{0} and {1} leave nothing to run; leave one out"),
    Clash("--rollout-function-path --load-debug-rollout-data",
          lambda v: v.load_debug_rollout_data is not None and v.has("--rollout-function-path"),
          "{0} and {1} both make the rollouts; leave one out"),
    Clash("--load-debug-rollout-data --eval-interval",
          lambda v: v.load_debug_rollout_data is not None and v.eval_interval is not None,
          "{0} starts no engines, which {1} needs; leave one out"),
    Clash("--load-debug-rollout-data-subsample --load-debug-rollout-data",
          lambda v: v.load_debug_rollout_data_subsample is not None and v.load_debug_rollout_data is None,
          "{0} does nothing without {1}"),
    Clash("--custom-tis-function-path --use-tis",
          lambda v: v.custom_tis_function_path is not None and not (v.use_tis or v.get_mismatch_metrics),
          "{0} needs {1}, or --get-mismatch-metrics"),
    Clash("--rm-type --custom-rm-path", lambda v: v.rm_type is not None and v.custom_rm_path is not None,
          "{0} and {1} both reward a sample; leave one out"),
    Clash("--rm-type --label-key", lambda v: plain_type(v) in COMPARED and v.label_key is None,
         "{0} compares replies with a label; add {1}"),
    Clash("--group-rm --custom-rm-path", lambda v: v.group_rm and v.custom_rm_path is None,
         "{0} needs {1}, the function"),
    Clash("--reward-key --custom-rm-path",
         lambda v: v.reward_key is not None and v.custom_rm_path is None and plain_type(v) in NUMBERS,
          "{0}: the built-in reward is a number; leave it out, or give {1}"),
    Clash("--rollout-function-path --custom-generate-function-path",
          lambda v: v.rollout_function_path not in (DEFAULT_ROLLOUT,
               ASYNC_ROLLOUT) and v.custom_generate_function_path is not None,
          "{0} makes the samples, so that {1} is never called; leave one out"),
    Clash("--vllm-router-ip --vllm-router-port", _without("--vllm-router-ip", "--vllm-router-port"), "{0} needs {1}"),
    Clash("--vllm-router-port --vllm-router-ip", _without("--vllm-router-port", "--vllm-router-ip"), "{0} needs {1}"),
    Clash("--update-weight-mode --update-weight-transport",
          lambda v: v.update_weight_mode == "delta" and v.update_weight_transport != "disk", "{0} needs {1} disk"),
    Clash("--update-weight-local-checkpoint-dir --update-weight-mode",
          lambda v: v.has("--update-weight-local-checkpoint-dir") and v.update_weight_mode != "delta",
               "{0} does nothing with {1}"),
    *(Clash(f"{name} --use-wandb", _without(name, "--use-wandb"), "{0} does nothing without {1}")
      for name in ("--wandb-project", "--wandb-group", "--wandb-team", "--wandb-mode")),
    *(Clash(f"{name} --lora-rank", _without(name, "--lora-rank"), "{0} does nothing without {1}")
      for name in ("--lora-alpha", "--lora-dropout", "--target-modules")),
    *(Clash(f"{name} --recompute-granularity", _without(name, "--recompute-granularity"),
         "{0} does nothing without {1}")
      for name in ("--recompute-method", "--recompute-num-layers")),
    Clash("--lr-warmup-iters --lr-warmup-fraction",
         lambda v: v.has("--lr-warmup-iters") and v.has("--lr-warmup-fraction"),
          "{0} and {1} both say how long the rate rises; leave one out"),
    Clash("--num-critic-only-steps --num-rollout", lambda v: _is_ppo(v) and v.num_rollout is not None
          and v.num_critic_only_steps >= v.num_rollout, "{0}: the policy would never learn in {1}; lower it"),
)

NOTES: tuple[Clash, ...] = (
    Clash("--eps-clip-high", lambda v: v.eps_clip_high is not None and v.num_updates == 1
          and not (v.use_tis or v.use_rollout_logprobs),
          "{0} does nothing while a rollout is one update: the ratio is 1; --global-batch-size makes several"),
    Clash("--kl-loss-coef", lambda v: v.use_kl_loss and not v.kl_loss_coef,
         "{0}: no reference is loaded, and no divergence reported"),
    Clash("--max-tokens-per-gpu --rollout-max-context-len",
          lambda v: v.max_tokens_per_gpu is not None and v.rollout_max_context_len is not None
          and v.max_tokens_per_gpu * v.context_parallel_size < v.rollout_max_context_len,
          "{0} is not used: a row is as long as the longest sample may be, {1}"),
    Clash("--eval-prompt-data --eval-interval", lambda v: v.eval_prompt_data is not None and v.eval_interval is None,
          "{0} is not used without {1}: there are no evals"),
    Clash("--over-sampling-batch-size", lambda v: v.has("--over-sampling-batch-size") and not v.partial_rollout,
          "{0} is not used: groups that are refused are replaced one by one"),
    Clash("--num-epoch --num-rollout", lambda v: v.has("--num-epoch") and v.has("--num-rollout"),
         "{0} is not used, for there is {1}"),
)
# fmt: on


def clashes(flags: Values) -> Iterator[str]:
    """A message for each contradiction."""
    yield from dict.fromkeys(each.message(flags) for each in CLASHES if each.when(flags))


def notes(flags: Values) -> Iterator[str]:
    """What was taken and does nothing here."""
    yield from (each.message(flags) for each in NOTES if each.when(flags))
