"""Flags about rollouts, and about the data that they and the evals begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.base.errors import ConfigError, StrettoError
from stretto.config.sections.orchestrator import OrchestratorKeys
from stretto.data.records import read_records
from stretto.vime.reward_types import BOXED, LABELLED, RM_TYPES, UNLABELLED, is_rm_type
from stretto_vime.flags.flag import Flag, Setting, Values, copies, equal, noted, part, refused, sets
from stretto_vime.flags.shape import read_shape

ENV, HOOKS = "orchestrator.env.0", "orchestrator.hooks"
DEFAULT_ROLLOUT = "vime.rollout.vllm_rollout.generate_rollout"
ASYNC_ROLLOUT = "vime.rollout.fully_async_rollout.generate_rollout_fully_async"
SFT_ROLLOUT = "vime.rollout.sft_rollout.generate_rollout"
NONZERO_STD = "check_reward_nonzero_std"
"""End of the path of vime's own filter of groups."""
BY_ENGINE, BY_MODEL = ("--vllm-max-model-len",), ("--hf-checkpoint",)
UNSIZED = (BY_ENGINE, BY_MODEL)
"""What bounds a sample where no flag says how many tokens a pass of the trainer may have."""
EVAL_STOP = "orchestrator.eval.sampling.stop"
BATCHES = "Batches travel as [rollout_transport] says, by zmq or as files; they are the same."
IN_LEDGER = "The run's ledger keeps what has been generated."
OF_BUFFER = "It is of --rollout-buffer-url."
NO_BUFFER = "the plugin of an external buffer has no place here; write an environment (docs/environments.md)"

OWN_SOURCE = "vime.rollout.data_source.RolloutDataSourceWithBuffer"
BATCH_HOOKS = (
    "--buffer-filter-path", "--rollout-sample-filter-path", "--custom-reward-post-process-path",
    "--custom-convert-samples-to-train-data-path", "--rollout-all-samples-process-path",
    "--custom-rollout-log-function-path",
)  # fmt: skip
EVAL_HOOKS = ("--eval-function-path", "--custom-eval-rollout-log-function-path")
TRAINER_HOOKS = (
    "--custom-megatron-init-path", "--custom-megatron-before-log-prob-hook-path",
    "--custom-megatron-before-train-step-hook-path", "--custom-advantage-function-path",
    "--rollout-data-postprocess-path", "--custom-tis-function-path", "--custom-loss-function-path",
    "--custom-pg-loss-reducer-function-path", "--custom-update-weight-post-write-path",
)  # fmt: skip

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Data": (
        sets("--prompt-data", "text", None, f"{ENV}.args.path",
             "File of prompts, .jsonl or .parquet; FILE@[a:b] is a part of it."),
        sets("--input-key", "text", "input", f"{ENV}.args.input_key", "Key of the prompt: text or messages."),
        sets("--label-key", "text", None, f"{ENV}.args.label_key", "Key of the label."),
        sets("--metadata-key", "text", "metadata", f"{ENV}.args.metadata_key",
             "Key of an object for your functions."),
        sets("--tool-key", "text", "tools", f"{ENV}.args.tool_key", "Key of the tools that the template shows."),
        sets("--apply-chat-template", "switch", False, f"{ENV}.args.apply_chat_template",
             "Render messages with the chat template."),
        part("--apply-chat-template-kwargs", "object", {}, "orchestrator.renderer.enable_thinking",
             "Variables of the template.", note="enable_thinking is true if it is not among them."),
        sets("--rollout-shuffle", "switch", False, f"{ENV}.args.shuffle", "A new order in every epoch."),
        part("--multimodal-keys", "object", None, f"{ENV}.args.image_key", "Keys of images, videos and sounds.",
             note="Of images only, as {\"image\": KEY}."),
        sets("--data-source-path", "text", OWN_SOURCE, f"{ENV}.args.data_source", "Class of a data source.",
             note="Its get_samples(len(source)) is read once, at the start, in the place of --prompt-data; the run "
                  "keeps its own place in it, and groups that are put back."),
        refused("--disable-rollout-global-dataset", "switch", False,
                "an environment may make its tasks without a file (docs/environments.md)", "No file of prompts."),
        equal("--loss-mask-type", "text", "qwen", "Sampled tokens are trained, and no others.",
              "Where replies are in conversations, for fine-tuning."),
        equal("--data-pad-size-multiplier", "integer", 128, "Rows have no padding.", "Padding of packed rows."),
        refused("--rollout-buffer-url", "text", None, NO_BUFFER, "Address of a buffer."),
        equal("--fetch-trajectory-retry-times", "integer", -1, OF_BUFFER, "Retries of fetching from it."),
        equal("--min-batch-collection-ratio", "number", 1, OF_BUFFER, "Share of a batch that is enough."),
        equal("--rollout-task-type", "text", "math", OF_BUFFER, "Kind of its tasks."),
    ),
    "Rollout": (
        sets("--num-rollout", "integer", None, "max_steps", "Rollouts (batches of prompts) to train on."),
        part("--num-epoch", "integer", None, "max_steps",
             "The same as passes over the prompts; if both are given, --num-rollout is used."),
        part("--rollout-batch-size", "integer", None, "orchestrator.batch_size", "Prompts of a rollout."),
        sets("--n-samples-per-prompt", "integer", 1, "orchestrator.group_size orchestrator.batch_size",
             "Replies to a prompt."),
        part("--global-batch-size", "integer", None, "trainer.updates_per_step",
             "Samples of one update of the weights."),
        sets("--num-steps-per-rollout", "integer", None, "trainer.updates_per_step", "Updates per rollout."),
        equal("--micro-batch-size", "integer", 1, "Rows are packed by tokens.", "Samples of a pass."),
        equal("--use-dynamic-batch-size", "switch", False, "Rows are always packed by tokens.",
              "Pack passes by tokens."),
        part("--max-tokens-per-gpu", "integer", None, "orchestrator.row_tokens seq_len",
             "Tokens of a pass, times --context-parallel-size.",
             note="A row holds one whole sample at least. Where no other flag says how long that may be, this does."),
        equal("--log-probs-max-tokens-per-gpu", "integer", None, "Log-probabilities are computed by the same rows.",
              "The same without gradients."),
        equal("--balance-data", "switch", False, "Rows are balanced over ranks by their cost.", "Balance ranks."),
        equal("--balance-by-flops", "switch", False, "Rows are balanced over ranks by their cost.",
              "Balance ranks by FLOPs."),
        copies("--rollout-temperature", "number", 1.0, "orchestrator.train.sampling.temperature",
               "Temperature of sampling and of log-probabilities."),
        sets("--rollout-top-p", "number", 1.0, "orchestrator.train.sampling.top_p orchestrator.train.replay",
             "Nucleus sampling: share of the probability to sample from."),
        part("--rollout-top-k", "integer", -1, "orchestrator.train.sampling.top_k orchestrator.train.replay",
             "Number of most likely tokens to sample from; -1: all."),
        sets("--rollout-max-context-len", "integer", None, "seq_len", "Tokens of prompt and reply."),
        sets("--rollout-max-prompt-len", "integer", None, f"{ENV}.args.max_prompt_tokens seq_len",
             "Longer prompts are skipped."),
        sets("--rollout-max-response-len", "integer", None,
             "orchestrator.train.sampling.max_completion_tokens seq_len orchestrator.row_tokens", "Tokens of a reply.",
             note="Of a trainer's row too, where only the model or vLLM bounds a sample: a longer one is a row alone."),
        copies("--rollout-seed", "integer", 42, "seed", "Seed of the order of prompts and of sampling."),
        sets("--rollout-stop", "list", None, f"orchestrator.train.sampling.stop {EVAL_STOP}", "Texts that end a reply.",
             note="A reply ends with the token that completes one, which is trained; rewards get the text up to and "
                  "including it."),
        sets("--rollout-stop-token-ids", "integers", None,
             f"orchestrator.train.sampling.stop_token_ids {EVAL_STOP}_token_ids", "Tokens that end a reply.",
             note="Besides the model's own end tokens."),
        equal("--rollout-skip-special-tokens", "switch", False,
              "The text of a reply has no special tokens; its ids are complete.",
              "Leave special tokens out of the text."),
        part("--over-sampling-batch-size", "integer", None, "orchestrator.oversampling_factor",
             "Prompts that are started at a time.",
             note="With --partial-rollout. Without it groups that a filter rejects are replaced one by one, and no "
                  "surplus is made."),
        part("--partial-rollout", "switch", False, "orchestrator.max_async_level",
             "Replies that are not finished when a batch is full go on later.",
             note="They go on under the new weights, each token with its own version."),
        sets("--mask-offpolicy-in-partial-rollout", "switch", False,
               "orchestrator.mask_offpolicy_in_partial_rollout", "Tokens of older weights are not trained."),
        part("--update-weights-interval", "integer", 1,
             "weight_broadcast.interval orchestrator.max_async_level orchestrator.max_off_policy_steps",
             "Rollouts between updates of the engines.",
             note="With train_async.py, where engines go on with the next rollout meanwhile: tokens are up to so many "
                  "versions old."),
        refused("--start-rollout-id", "integer", None, "a run continues where it stopped: --load, --ckpt-step",
                "Number of the first rollout.", allowed=(0,)),
        refused("--rollout-external-engine-addrs", "list", None,
                "engines that run already are orchestrator.client.base_url with inference = \"None\" in the TOML of "
                "--print-config", "Engines that run already."),
        noted("--rollout-backend", "text", "vllm", "Engines are vLLM.", "Engines."),
        noted("--rollout-data-transport", "text", "object-store", BATCHES, "How batches travel."),
        noted("--transfer-backend", "text", "ray", BATCHES, "How batches travel."),
        noted("--rollout-data-dir", "text", None, IN_LEDGER, "Directory of a durable queue."),
        noted("--rollout-queue-run-id", "text", None, IN_LEDGER, "Name in a durable queue."),
        equal("--flush-cache-interval", "integer", 1, "Caches are kept apart by version.",
              "Updates between flushes of the cache."),
        equal("--use-fault-tolerance", "switch", False, "Engines that fail are left out and started again.",
              "Restart engines that fail."),
        equal("--rollout-health-check-interval", "number", 30, "Engines are watched always.",
              "Seconds between checks."),
        equal("--rollout-health-check-timeout", "number", 30, "Engines are watched always.", "Deadline of a check."),
        equal("--rollout-health-check-first-wait", "number", 0, "Engines are watched always.",
              "Seconds before the first check."),
        equal("--use-distributed-post", "switch", False, "One process sends all requests.",
              "Spread requests over processes."),
        refused("--http-proxy", "text", None, "engines are reached directly; leave it out", "Proxy of requests."),
    ),
    "Custom functions": (
        sets("--rollout-function-path", "text", DEFAULT_ROLLOUT,
             f"{HOOKS}.rollout_function orchestrator.max_async_level", "Function that makes whole rollouts.",
             note="vime's fully_async_rollout is max_async_level = 1."),
        sets("--eval-function-path", "text", None, f"{HOOKS}.eval_function", "Function that makes whole evals."),
        sets("--custom-generate-function-path", "text", None, f"{ENV}.args.generate",
             "Function that makes one sample."),
        part("--custom-rm-path", "text", None, f"{ENV}.args.reward", "Function that rewards one sample."),
        sets("--dynamic-sampling-filter-path", "text", None,
             f"{HOOKS}.dynamic_sampling_filter orchestrator.filter_zero_advantages",
             "Function that keeps or refuses a group."),
        copies("--buffer-filter-path", "text", None, f"{HOOKS}.buffer_filter",
               "Function that chooses groups of the buffer."),
        copies("--rollout-sample-filter-path", "text", None, f"{HOOKS}.sample_filter",
               "Function that marks samples not to train."),
        copies("--custom-reward-post-process-path", "text", None, f"{HOOKS}.reward_post_process",
               "Function that makes advantages of rewards."),
        copies("--custom-convert-samples-to-train-data-path", "text", None, f"{HOOKS}.convert_samples_to_train_data",
               "Function that makes the batch."),
        copies("--rollout-all-samples-process-path", "text", None, f"{HOOKS}.all_samples_process",
               "Function that sees all groups.", note="Its data_source is None."),
        part("--rollout-sample-hook-path", "list", None, f"{ENV}.args.sample_hooks",
             "Functions that see each sample."),
        copies("--rollout-data-postprocess-path", "text", None, "trainer.hooks.data_postprocess",
               "Function that sees the batch in the trainer."),
        copies("--custom-rollout-log-function-path", "text", None, f"{HOOKS}.rollout_log",
               "Function that logs rollouts."),
        sets("--custom-eval-rollout-log-function-path", "text", None, f"{HOOKS}.eval_log",
             "Function that logs evals."),
        equal("--buffer-sort-by-staleness", "switch", False, "Batches take the earliest drawn groups.",
              "Oldest samples first."),
        part("--custom-config-path", "text", None, f"{HOOKS}.args {ENV}.args.hook_args trainer.hooks.args",
             "YAML of further arguments.",
             note="Those of flags are checked as if they were typed; all others are attributes of `args`."),
    ),
    "Reward": (
        part("--rm-type", "text", None, f"{ENV}.args.reward", "Reward by name.",
             note="math, dapo, deepscaler, f1, gpqa, ifbench, remote_rm or random; boxed_ before it: the last box is "
                  "the reply. Without it each record's metadata names its own as rm_type."),
        sets("--group-rm", "switch", False, f"{ENV}.args.group_reward", "The function gets all samples of a group."),
        sets("--reward-key", "text", None, f"{ENV}.args.reward_key", "Entry of a reward that is a dictionary."),
        part("--rm-url", "text", None, f"{ENV}.args.hook_args", "Address of a reward model, of remote_rm."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Batches, sampling, environments and hooks.

    Raises: ConfigError for what is missing or cannot be.
    """
    yield from _batches(flags)
    yield from _sampling(flags)
    yield from _freshness(flags)
    yield from _environment(flags)
    yield from _hooks(flags)


def _batches(flags: Values) -> Iterator[Setting]:
    samples = flags.rollout_batch_size * flags.n_samples_per_prompt
    both = ("--rollout-batch-size", "--n-samples-per-prompt")
    yield Setting("max_steps", flags.num_rollout, ("--num-rollout", "--num-epoch"))
    yield Setting("orchestrator.batch_size", samples, both)
    yield from flags.settings("--n-samples-per-prompt")
    updates = flags.num_steps_per_rollout
    if updates is None:
        size = samples if flags.global_batch_size is None else flags.global_batch_size
        if samples % size:
            raise ConfigError(
                f"{flags.given['--global-batch-size']}: must divide the {samples} samples of a rollout "
                f"({flags.given['--rollout-batch-size']}, --n-samples-per-prompt {flags.n_samples_per_prompt}); "
                "the rest would not be trained"
            )
        updates = samples // size
    yield Setting("trainer.updates_per_step", updates, ("--global-batch-size", "--num-steps-per-rollout"))
    length, source = _longest(flags)
    yield Setting("seq_len", length, source)
    row = (flags.max_tokens_per_gpu or 0) * flags.context_parallel_size
    if row and row != length:
        yield Setting("orchestrator.row_tokens", row, ("--max-tokens-per-gpu", "--context-parallel-size"))
    reply = flags.rollout_max_response_len
    if not row and reply is not None and reply < length and source in UNSIZED:  # a longer sample is a row of its own
        yield Setting("orchestrator.row_tokens", reply, ("--rollout-max-response-len",))


def _longest(flags: Values) -> tuple[int, tuple[str, ...]]:
    """Tokens of the longest sample: what the flags say, else what the model takes."""
    if flags.rollout_max_context_len is not None:
        return flags.rollout_max_context_len, ("--rollout-max-context-len",)
    if flags.rollout_max_prompt_len is not None and flags.rollout_max_response_len is not None:
        names = ("--rollout-max-prompt-len", "--rollout-max-response-len", "--eval-max-response-len")
        return flags.rollout_max_prompt_len + _longest_reply(flags), names
    if (row := row_of_tokens(flags)) is not None:
        return row, ("--max-tokens-per-gpu", "--context-parallel-size")
    if flags.vllm_max_model_len is not None:
        return flags.vllm_max_model_len, BY_ENGINE
    found = read_shape(flags.hf_checkpoint).get("max_position_embeddings")
    if isinstance(found, int):
        return found, BY_MODEL
    raise ConfigError("--rollout-max-context-len is missing: how many tokens prompt and reply may have together")


def _longest_reply(flags: Values) -> int:
    return max(flags.rollout_max_response_len or 0, flags.eval_max_response_len or 0)


def row_of_tokens(flags: Values) -> int | None:
    """Tokens of the row of --max-tokens-per-gpu; None if another flag bounds a sample, or replies are longer."""
    is_bounded = flags.rollout_max_context_len is not None or flags.rollout_max_prompt_len is not None
    row = (flags.max_tokens_per_gpu or 0) * flags.context_parallel_size
    is_longer = flags.vllm_max_model_len is not None and row > flags.vllm_max_model_len
    return row if row > _longest_reply(flags) and not is_bounded and not is_longer else None


def _sampling(flags: Values) -> Iterator[Setting]:
    yield from flags.settings("--rollout-top-p", "--rollout-max-response-len")
    yield from flags.settings("--rollout-stop", "--rollout-stop-token-ids")
    if flags.rollout_top_k != -1:
        yield from flags.settings("--rollout-top-k")
    if flags.rollout_top_p < 1 or flags.rollout_top_k != -1:
        yield Setting("orchestrator.train.replay", {}, ("--rollout-top-p", "--rollout-top-k"))


def _freshness(flags: Values) -> Iterator[Setting]:
    """How far generation may be ahead: not at all, but for asynchronous training and partial rollouts."""
    is_ahead = flags.is_async or flags.partial_rollout or flags.rollout_function_path == ASYNC_ROLLOUT
    interval = flags.update_weights_interval
    if interval < 1:
        raise ConfigError(f"{flags.given['--update-weights-interval']}: give 1 or more")
    if flags.is_async and interval > 1:
        yield Setting("weight_broadcast.interval", interval, ("--update-weights-interval",))
        yield Setting("orchestrator.max_async_level", interval, ("--update-weights-interval",))
        if interval > OrchestratorKeys.model_fields["max_off_policy_steps"].default:
            yield Setting("orchestrator.max_off_policy_steps", interval, ("--update-weights-interval",))
    else:
        yield Setting("orchestrator.max_async_level", int(is_ahead), ("--partial-rollout",))
    if flags.partial_rollout and flags.mask_offpolicy_in_partial_rollout:
        yield from flags.settings("--mask-offpolicy-in-partial-rollout")
    started, trained = flags.over_sampling_batch_size, flags.rollout_batch_size
    if flags.partial_rollout and started is not None and started > 2 * trained:
        yield Setting("orchestrator.oversampling_factor", started / trained, ("--over-sampling-batch-size",))


def _environment(flags: Values) -> Iterator[Setting]:
    yield Setting(f"{ENV}.id", "dataset", ("--prompt-data",))
    yield from flags.settings("--data-source-path" if has_own_source(flags) else "--prompt-data")
    for key, value, name in arguments(flags):
        yield Setting(f"{ENV}.args.{key}", value, (name,))
    thinking = dict(flags.apply_chat_template_kwargs)
    if flags.apply_chat_template:
        is_thinking = thinking.pop("enable_thinking", True)
        yield Setting("orchestrator.renderer.enable_thinking", is_thinking, ("--apply-chat-template-kwargs",))
        for key, value in thinking.items():
            yield Setting(f"orchestrator.renderer.settings.{key}", value, ("--apply-chat-template-kwargs",))


def has_own_source(flags: Values) -> bool:
    """Do prompts come from a user's class?"""
    path = flags.data_source_path
    return not (path.startswith("vime.") and path.rpartition(".")[2].startswith("RolloutDataSource"))


def arguments(flags: Values, *, is_labelled: bool = False) -> Iterator[tuple[str, Any, str]]:
    """Arguments of the environment `dataset`: key, value, flag.

    is_labelled: the records have labels though --label-key is not given.
    """
    copied = (
        "--input-key", "--label-key", "--metadata-key", "--tool-key", "--apply-chat-template", "--reward-key",
        "--rollout-max-prompt-len", "--rollout-shuffle", "--custom-generate-function-path",
        "--rollout-sample-hook-path", *(["--group-rm"] if flags.group_rm and flags.custom_rm_path else []),
    )  # fmt: skip
    for each in flags.settings(*copied):
        yield each.path.removeprefix(f"{ENV}.args."), each.value, *each.flags
    if flags.multimodal_keys is not None:
        yield "image_key", _image_key(flags), "--multimodal-keys"
    reward = _reward(flags, is_labelled=is_labelled)
    yield "reward", reward, "--rm-type" if flags.custom_rm_path is None else "--custom-rm-path"
    own = dict(flags.extra)
    if flags.rm_url is not None:
        own["rm_url"] = flags.rm_url
    if has_own_source(flags) and flags.prompt_data is not None:
        own["prompt_data"] = flags.prompt_data
    if own:
        yield "hook_args", own, "--rm-url" if flags.custom_config_path is None else "--custom-config-path"


def _image_key(flags: Values) -> str:
    """Raises: ConfigError for keys of anything but images."""
    keys = flags.multimodal_keys
    if list(keys) != ["image"] or not isinstance(keys["image"], str):
        typed = flags.given["--multimodal-keys"]
        raise ConfigError(f'{typed}: prompts have text and images; write {{"image": KEY}} alone')
    return str(keys["image"])


def is_rewarded_by(flags: Values, *names: str) -> bool:
    """Is --rm-type one of these built-in rewards?"""
    return (flags.rm_type or "").removeprefix(BOXED) in names


def is_unlabelled(flags: Values) -> bool:
    """Is the built-in reward one that compares with a label, while records have none?"""
    return is_rewarded_by(flags, *LABELLED) and flags.label_key is None


def _reward(flags: Values, *, is_labelled: bool) -> str:
    if flags.custom_rm_path is not None:
        return flags.custom_rm_path
    if (is_unlabelled(flags) and not is_labelled) or (flags.teacher is not None and flags.rm_type is None):
        return UNLABELLED
    if flags.rm_type is not None and is_rm_type(flags.rm_type):
        return flags.rm_type
    if flags.rm_type is not None:
        raise ConfigError(
            f"{flags.given['--rm-type']}: there is no such reward; use {', '.join(RM_TYPES)}, or name a function as "
            "--custom-rm-path"
        )
    if flags.has("--custom-generate-function-path", "--rollout-function-path"):
        return "given"
    if flags.prompt_data is not None and _names_rewards(flags.prompt_data):
        return "by_record"
    raise ConfigError(
        "nothing rewards a sample; give --rm-type math, a function: --custom-rm-path, or records with metadata.rm_type"
    )


def _names_rewards(path: str) -> bool:
    """Does the first record say how it is rewarded?"""
    try:
        _, record = next(iter(read_records(path, "--prompt-data")))
    except (StrettoError, StopIteration):  # the environment reports it when it reads the file
        return False
    metadata = record.get("metadata")
    return isinstance(metadata, dict) and "rm_type" in metadata


def _hooks(flags: Values) -> Iterator[Setting]:
    path = flags.rollout_function_path
    if path == SFT_ROLLOUT:
        raise ConfigError(f"{flags.given['--rollout-function-path']}: fine-tuning on conversations is `sft @ sft.toml`")
    if path not in (DEFAULT_ROLLOUT, ASYNC_ROLLOUT):
        yield Setting(f"{HOOKS}.rollout_function", path, ("--rollout-function-path",))
    if has_evals(flags):
        if flags.eval_function_path is not None:
            name = "environments" if flags.eval_function_path == DEFAULT_ROLLOUT else flags.eval_function_path
            yield Setting(f"{HOOKS}.eval_function", name, ("--eval-function-path",))
        yield from flags.settings("--custom-eval-rollout-log-function-path")
    chosen = flags.dynamic_sampling_filter_path
    is_nonzero_std = _is_nonzero_std(chosen)
    yield Setting("orchestrator.filter_zero_advantages", is_nonzero_std, ("--dynamic-sampling-filter-path",))
    if chosen is not None and not is_nonzero_std:
        yield Setting(f"{HOOKS}.dynamic_sampling_filter", chosen, ("--dynamic-sampling-filter-path",))
    for table in argument_tables(flags):
        if flags.extra and table != f"{ENV}.args.hook_args":
            yield Setting(table, dict(flags.extra), ("--custom-config-path",))


def has_evals(flags: Values) -> bool:
    """Whether the run evaluates its policy."""
    return flags.eval_interval is not None and flags.has("--eval-prompt-data", "--eval-config")


def _is_nonzero_std(path: str | None) -> bool:
    """Is this vime's own filter of groups with equal rewards?"""
    return path is not None and path.startswith("vime.") and path.endswith(NONZERO_STD)


def argument_tables(flags: Values) -> list[str]:
    """Where further attributes of `args` go: to the functions that are named."""
    chosen = flags.dynamic_sampling_filter_path
    has_filter = chosen is not None and not _is_nonzero_std(chosen)
    has_rollout_function = flags.rollout_function_path not in (DEFAULT_ROLLOUT, ASYNC_ROLLOUT)
    tables = []
    has_eval_function = has_evals(flags) and flags.has(*EVAL_HOOKS)
    if flags.has(*BATCH_HOOKS) or has_eval_function or has_filter or has_rollout_function:
        tables.append(f"{HOOKS}.args")
    if flags.has(*TRAINER_HOOKS):
        tables.append("trainer.hooks.args")
    if flags.has("--custom-generate-function-path", "--custom-rm-path"):
        tables.append(f"{ENV}.args.hook_args")
    return tables
