"""prime-rl's keys of [orchestrator], and of the file of `orchestrator`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.config.spelling import (
    NO_DEFAULT,
    GivenName,
    Instead,
    KeyPath,
    Nothing,
    Table,
    all_same,
    idle,
    moved,
    old,
    refused,
    same,
)
from stretto_prime.run import NO_EXPERIMENTS, NO_PROGRESS, RUN_KEYS

ALL = {-1: None}
ADAPTIVE = (("concurrency.type", "adaptive"),)
VERIFIERS = (("id", "verifiers"),)
DISTILLED = (("algo.type", "sft"),)
WORKERS = "its environments run in worker processes of the run: write num_workers = N"
ELASTIC = "as many processes as num_workers says, and one for verifiers"
POOL = 'write orchestrator.curriculum.sampler: type = "difficulty_pool" with easy_threshold, hard_weight and so on'
POOLS = (("curriculum.sampler.type", "difficulty_pool"),)
NO_PLATFORM = "there is no monitor of that platform; `[monitors.wandb]` and others are there"

ORCHESTRATOR = Table("orchestrator", "OrchestratorKeys", (
    moved("model.client", NO_DEFAULT, "client"),
    moved("model.name", "Qwen/Qwen3-0.6B", "/model.name", "the engines' alone where the trainer's is another"),
    *(moved(key, NO_DEFAULT, f"/{key}") for key in (*RUN_KEYS, "ckpt", "output_dir", "run", "resume")),
    same("batch_size", 128),
    same("token_batch_size", None, "give batch_size too, the most rollouts of a batch"),
    same("group_size", 1),
    same("max_off_policy_steps", 8, "`max_async_level = 1` bounds how far generation is ahead"),
    moved("concurrency.initial_inflight", None, "concurrency.initial_rollouts", sets=ADAPTIVE),
    moved("concurrency.min_inflight", 1, "concurrency.min_rollouts", sets=ADAPTIVE),
    moved("concurrency.max_inflight", 1024, "concurrency.max_rollouts",
          "without the table as many as max_inflight_rollouts allows", sets=ADAPTIVE),
    same("tasks_per_minute", None, "of the run, whatever the number of environments"),
    idle("env_server_base_port", 5000, "environments have no ports"),
    same("num_train_workers", 1),
    idle("pad_to_multiple_of", 1, "rows are padded to what model.cp needs"),
    idle("ckpt.wait_for_weights_timeout", None, "a checkpoint is complete or absent"),
    moved("ckpt.skip_progress", False, "/resume.skip_progress", NO_PROGRESS, values={False: Nothing}),
    idle("collect_inference_metrics", True, "engines are always asked"),
    idle("inference_metrics_roles", None, "engines say their role"),
    moved("heartbeat.url", None, "/monitors.heartbeat.url"),
    same("env_vars", {}),
    *old(
        moved("student.client", NO_DEFAULT, "client"),
        moved("student.model", NO_DEFAULT, "/model"),
        moved("student.model.name", NO_DEFAULT, "/model.name"),
        moved("rollouts_per_example", 1, "group_size"),
        moved("async_level", 1, "max_async_level"),
        *all_same({"max_async_level": 1, "max_inflight_rollouts": None}),
        moved("max_inflight_requests", None, "max_inflight_rollouts"),
        moved("max_inflight_episodes", None, "max_inflight_rollouts"),
        same("oversampling_factor", 1.0),
        moved("wandb", None, "/monitors.wandb"),
        idle("prime_monitor", None, NO_PLATFORM),
        idle("lora_name", None, "engines serve the adapter under the run's name"),
        idle("use_token_client", True, "rollouts are tokens, and a teacher gives text"),
        moved("need_sft_loss", False, "algo.type", values={True: "sft", False: Nothing}),
        moved("teacher_rollout_model.client", NO_DEFAULT, "algo.teacher", sets=DISTILLED),
        moved("teacher_rollout_model.model.name", NO_DEFAULT, "algo.teacher.model", sets=DISTILLED),
        idle("ckpt.skip_buffer", False, "pools are in the checkpoint, and a run that begins at another's draws anew"),
        refused("bench", False, "give it on the command line: rl @ FILE --bench"),
        refused("optim.lr", 1e-4, "the rate is trainer.optim.lr", unless=()),
        idle("env_install_prerelease", False, "environments are installed with pip before the run"),
        idle("pool_size", None, "one renderer serves all rollouts"),
        NO_EXPERIMENTS,
        idle("micro_batch_size", None, "a pass is one packed row of seq_len tokens, whose gradients are added up"),
        same("mask_truncated_completions", False, "their rewards stay in the group's mean; a group of such rollouts "
             "alone is replaced"),
        moved("environment", None, "env.0"),
        refused("algorithms", None, 'credit is `[orchestrator.algo]` with type = "grpo" and so on', unless=()),
        refused("models", {}, "a teacher is `[orchestrator.teacher]`", unless=()),
        refused("actor", "policy", 'a teacher plays with algo.type = "sft"'),
    ),
))  # fmt: skip
DATASET_SFT = "the verb `sft` trains replies of a data set: write data.name = DATASET there, and [eval] for evals"
ONLY_GIVEN_ROLES = (("algo.tool", None),)
"""A table of roles replaces their default, in which tool messages are learned."""
ALGO_ROWS = (
    moved("type", "grpo", "algo.type", values={"dataset_sft": Instead(DATASET_SFT)}),
    refused("dataset", None, DATASET_SFT, unless=()),
    moved("length_penalty.type", None, "algo.length_penalty", values={"linear": {}}),
    *old(
        moved("length_penalty.num_output_tokens_weight", 0.25, "algo.length_penalty.output_weight"),
        moved("length_penalty.num_input_tokens_weight", 0.1, "algo.length_penalty.input_weight"),
        moved("length_penalty.num_turns_weight", 0.1, "algo.length_penalty.turns_weight"),
    ),
    *all_same({"length_penalty.output_weight": 0.25, "length_penalty.input_weight": 0.1,
               "length_penalty.turns_weight": 0.1, "decay": 0.95, "episode_agents": NO_DEFAULT,
               "demo_key": "demonstration", "template": NO_DEFAULT}),
    moved("teacher.name", NO_DEFAULT, "algo.teacher.model"),
    moved("teacher.client", NO_DEFAULT, "algo.teacher"),
    moved("source.name", NO_DEFAULT, "algo.teacher.model"),
    moved("source.client", NO_DEFAULT, "algo.teacher"),
    *(moved(f"{model}.base_url", NO_DEFAULT, "algo.teacher.base_url") for model in ("teacher", "source")),
    moved("filter.import_path", NO_DEFAULT, "algo.filter", "`module:function`, which is given a message"),
    refused("filter.kwargs", {}, "the function is given the message alone; bind others in your module"),
    refused("sampling.source", "policy", 'a model that plays is `algo.type = "sft"` with `algo.teacher`'),
    *(moved(f"sampling.source.{key}", NO_DEFAULT, f"algo.teacher.{name}".removesuffix("."), sets=DISTILLED)
      for key, name in (("name", "model"), ("base_url", "base_url"), ("api_key_var", "api_key_var"), ("client", ""))),
    moved("roles.tool.alpha", 0.1, "algo.tool"),
    moved("roles.user.alpha", None, "algo.user", sets=ONLY_GIVEN_ROLES),
    moved("roles.system.alpha", None, "algo.system", sets=ONLY_GIVEN_ROLES),
    *old(same("tool", 0.1), same("user", None), same("system", None)),
)  # fmt: skip
ALGO = Table("orchestrator.algo", "OrchestratorKeys", ALGO_ROWS, below="algo")
ENV_ALGO = Table("orchestrator.train.source.0.algo", "TrainEnvSection", ALGO_ROWS, below="algo", is_listed=False)
CLIENT = Table("orchestrator.model.client", "ClientSection", (
    *all_same({"base_url": "http://localhost:8000/v1", "admin_base_url": None, "api_key_var": "VLLM_API_KEY"}),
    moved("wait_for_ready_timeout", 1800, "ready_timeout_s"),
    *all_same({"headers": {}, "headers_from_env": {}, "extra_headers_from_state": {"X-Session-ID": "trajectory_id"}}),
    idle("skip_model_check", False, "requests name no model"),
    *old(
        moved("timeout", 1200, "timeout_s"),
        refused("elastic", None, "engines register with the router; leave it out"),
    ),
))  # fmt: skip
STOPS = ("stop", "stop_token_ids", "min_tokens", "bad_words", "logit_bias")
SAMPLING_ROWS = (
    *all_same({"temperature": 1.0, "max_completion_tokens": None}),
    moved("extra_body.top_k", None, "top_k", values=ALL),
    moved("extra_body.min_p", None, "min_p"),
    moved("extra_body.top_p", None, "top_p"),
    *(moved(f"extra_body.{name}", None, name) for name in STOPS),
    refused("extra_body", {}, "requests have no further fields; top_k, top_p, min_p and what ends a reply are keys of "
            "their own"),
    *old(
        moved("max_tokens", None, "max_completion_tokens"),
        same("min_tokens", 0, "in training with `train.replay` only"),
        refused("seed", None, "the run's seed is `seed`; leave it out"),
    ),
)  # fmt: skip
TRAIN = Table("orchestrator.train", "OrchestratorKeys", (
    moved("source", [], "env"),
    moved("sampling.extra_body.top_k", None, "train.sampling.top_k", "sets `train.replay`, without which the trainer's "
          "log-probabilities would be of other tokens; -1 is all", values={-1: Nothing}, sets=(("train.replay", {}),)),
    moved("sampling.extra_body.chat_template_kwargs.enable_thinking", None, "renderer.enable_thinking"),
    moved("sampling.extra_body.chat_template_kwargs.clear_thinking", None, "renderer.clear_thinking"),
    moved("filter_zero_advantages", True, "filter_zero_advantages",
          "groups without signal are replaced; theirs shrink the batch"),
    *old(
        moved("env", [], "env"),
        moved("group_size", 1, "group_size"),
        moved("max_retries", 3, "max_rollout_retries"),
    ),
), below="train")  # fmt: skip
TRAIN_SAMPLING = Table("orchestrator.train.sampling", "SamplingOverrides", SAMPLING_ROWS)
SHORTHANDS = Table("orchestrator", "OrchestratorKeys", (moved("sampling", NO_DEFAULT, "train.sampling"),),
                   is_listed=False)  # fmt: skip
ENV_ROWS = (
    same("name", None),
    moved("env.taskset.id", NO_DEFAULT, "args.taskset.id", "a taskset of verifiers, which must be installed",
          sets=(*VERIFIERS, ("name", GivenName))),
    moved("env.*.harness.runtime", NO_DEFAULT, "args.*.runtime", sets=VERIFIERS),
    moved("env.*.harness", NO_DEFAULT, "args.*.harness", sets=VERIFIERS),
    moved("env.*.runtime", NO_DEFAULT, "args.*.runtime", "`subprocess` where none is given, not a cloud",
          sets=VERIFIERS),
    moved("env", NO_DEFAULT, "args", "all other settings of a verifiers environment", sets=VERIFIERS),
    moved("serve.pool.num_workers", None, "num_workers"),
    idle("serve.pool.type", "elastic", ELASTIC),
    refused("serve.address", None, WORKERS),
    refused("serve", NO_DEFAULT, WORKERS, unless=({},)),
    *old(
        moved("taskset.id", NO_DEFAULT, "args.taskset.id", sets=(*VERIFIERS, ("name", GivenName))),
        moved("taskset", NO_DEFAULT, "args.taskset", sets=VERIFIERS),
        moved("harness.runtime", NO_DEFAULT, "args.agent.runtime", sets=VERIFIERS),
        moved("harness", NO_DEFAULT, "args.agent.harness", sets=VERIFIERS),
        same("id", note="a bundled environment, or one of your own; a module of verifiers v0 must be ported"),
        same("args", {}),
        moved("pool.num_workers", None, "num_workers"),
        idle("pool.type", "elastic", ELASTIC),
        refused("address", None, WORKERS),
        same("num_workers", None, values={"auto": "None"}),
        moved("max_retries", 3, "max_rollout_retries"),
        refused("extra_env_kwargs", {}, "they are settings of verifiers v0; its environments must be ported"),
    ),
)  # fmt: skip
SOURCE = Table("orchestrator.train.source.0", "TrainEnvSection", (
    *ENV_ROWS,
    *all_same({"ratio": 1.0, "sampling": NO_DEFAULT, "group_size": None, "algo": None,
               "curriculum.sampler.type": "standard"}),
    idle("curriculum.sampler.seed", 42, "the run's seed"),
    *all_same({"curriculum.sampler.pools.*.threshold": NO_DEFAULT, "curriculum.sampler.pools.*.weight": 1.0}),
    *all_same({"curriculum.gates.*.type": "advantage_range", "curriculum.gates.*.reject_min": 0.0,
               "curriculum.gates.*.reject_max": 0.0}),
    *old(moved("rollouts_per_example", 1, "group_size"), moved("timeout", None, "rollout_timeout_s")),
))  # fmt: skip
EVAL_SOURCE = Table("orchestrator.eval.source.0", "EvalEnvSection", (
    *ENV_ROWS,
    same("interval", None),
    same("num_examples", None, values=ALL),
    moved("select.limit", None, "num_examples"),
    *all_same({"group_size": None, "sampling": NO_DEFAULT}),
    *old(moved("rollouts_per_example", 1, "group_size"), moved("timeout", None, "rollout_timeout_s")),
))  # fmt: skip
EVAL = Table("orchestrator.eval", "EvalSection", (
    moved("source", [], "env", "without any the training environments' held-out tasks are evaluated"),
    same("interval", 100),
    same("num_examples", -1, "-1, all, is \"None\" here", values=ALL),
    *all_same({"group_size": 1, "skip_first_step": False, "retrigger_on_resume": False}),
    moved("select.limit", None, "num_examples"),
    *old(
        moved("rollouts_per_example", 1, "group_size"),
        moved("max_retries", 3, "max_rollout_retries"),
    ),
))  # fmt: skip
EVAL_SAMPLING = Table("orchestrator.eval.sampling", "SamplingOverrides", (
    *all_same({"temperature": None, "top_p": None}),
    same("top_k", None, values=ALL),
    *all_same({"min_p": None, "max_completion_tokens": None}),
    refused("reasoning_effort", None, "whether and how long a model thinks is said for training and evals "
            "alike: orchestrator.renderer.enable_thinking, or renderer.reasoning_effort"),
))  # fmt: skip
RENDERER = Table("orchestrator.renderer", "RendererSection", (
    same("name", "auto", "`default` and None are refused; `template` is the model's own, and `auto` finds out"),
    same("tool_parser", None, values={None: "auto", "None": "auto"}),
    *old(
        idle("reasoning_parser", None, "how a thought is written is found in the template"),
    ),
    *all_same({"clear_thinking": None, "enable_thinking": None}),
    *(moved(name, None, f"settings.{name}") for name in (
        "thinking_retention", "preserve_thinking", "truncate_history_thinking", "reasoning_effort",
    )),
))  # fmt: skip
FILTERS = Table("orchestrator", "OrchestratorKeys", old(
    moved("pre_batch_filters", NO_DEFAULT, "filters", "flagged rollouts are replaced by others"),
    moved("post_batch_filters", NO_DEFAULT, "filters", "one list for both: flagged rollouts are replaced"),
    moved("buffer.online_difficulty_filtering", False, "filter_zero_advantages", values={False: Nothing}),
    moved("buffer.easy_threshold", None, "curriculum.sampler.easy_threshold", "tasks from it on are not drawn again",
          sets=POOLS),
    moved("buffer.hard_threshold", None, "curriculum.sampler.hard_threshold", "tasks up to it are not drawn again",
          sets=POOLS),
    idle("buffer.seed", None, "the run's seed"),
    refused("buffer.easy_fraction", 0.0, POOL),
    refused("buffer.hard_fraction", 0.0, POOL),
    refused("buffer", NO_DEFAULT, POOL, unless=({},)),
))  # fmt: skip


_BELOW = 1e-6
"""Our pools end at a threshold and those of prime-rl's buffer began at it: with 1, a mean reward of 1 is easy."""


def pools_of_buffer(values: Mapping[KeyPath, Any], spelled: Mapping[KeyPath, str]) -> dict[KeyPath, Any]:
    """Pools for the thresholds of a buffer: tasks beyond them are not drawn again, others alike.

    spelled: how each value was written.
    """
    at: KeyPath = ("orchestrator", "curriculum", "sampler")
    given = {side: (*at, f"{side}_threshold") for side in ("easy", "hard")}
    if not any(".buffer." in spelled.get(path, "") for path in given.values()):
        return {}
    found: dict[KeyPath, Any] = {(*at, f"{side}_weight"): float(path not in values) for side, path in given.items()}
    easy = values.get(given["easy"])
    return found | ({given["easy"]: easy - _BELOW} if isinstance(easy, int | float) else {})


def merge_filters(paths: Sequence[KeyPath]) -> list[KeyPath]:
    """The paths of a file, with its two lists of filters as one: pre_batch_filters first."""
    pre, post = "pre_batch_filters", "post_batch_filters"
    num_before = len({path[: path.index(pre) + 2] for path in paths if pre in path[:-1]})
    return [
        tuple(
            part + num_before if isinstance(part, int) and path[at - 1 : at] == (post,) else part
            for at, part in enumerate(path)
        )
        for path in paths
    ]


FILTER = Table("orchestrator.post_batch_filters.0", "FilterSection", old(
    *all_same({"type": NO_DEFAULT, "enforce": False}),
    moved("action", "monitor", "enforce", "`drop` is true", values={"drop": True, "monitor": False}),
    *all_same({"token_id_threshold": 100_000, "logprob_offset": 2.0, "window": 3000, "prob_threshold": 0.99}),
))  # fmt: skip
ALONE = Table("orchestrator", "OrchestratorConfig", (
    idle("ckpt", None, "checkpoints are the trainer's to order"),
), is_listed=False)  # fmt: skip
TABLES = (
    ORCHESTRATOR, ALONE, ALGO, ENV_ALGO, CLIENT, RENDERER, TRAIN, TRAIN_SAMPLING, SHORTHANDS, SOURCE, EVAL,
    EVAL_SAMPLING, EVAL_SOURCE, FILTERS, FILTER,
)  # fmt: skip
