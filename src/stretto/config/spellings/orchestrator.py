"""prime-rl's keys of the orchestrator: [orchestrator] of `rl`, and the file of `orchestrator`."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.config.spellings.row import (
    NO_DEFAULT,
    Given,
    Nothing,
    Path,
    Table,
    idle,
    moved,
    old,
    refused,
    same,
)
from stretto.config.spellings.run import NO_EXPERIMENTS, RUN_KEYS

ALL = {-1: None}
ADAPTIVE = (("concurrency.type", "adaptive"),)
VERIFIERS = (("id", "verifiers"),)
WORKERS = "its environments run in worker processes of the run: write num_workers = N"
POOL = 'write orchestrator.env.curriculum.sampler: type = "difficulty_pool" with easy_threshold, hard_weight and so on'

ORCHESTRATOR = Table("orchestrator", "OrchestratorKeys", (
    moved("model.client", NO_DEFAULT, "client"),
    moved("model.name", "Qwen/Qwen3-0.6B", "/model.name", "the engines' alone where the trainer's is another"),
    *(moved(key, NO_DEFAULT, f"/{key}") for key in (*RUN_KEYS, "ckpt", "output_dir")),
    same("batch_size", 128),
    refused("token_batch_size", None, "a batch is a number of rollouts: write batch_size", unless=("None",)),
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
    refused("ckpt.skip_progress", False, "a run that begins anew from weights: give model.name that directory",
            unless=(False,)),
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
        same("max_async_level", 1),
        same("max_inflight_rollouts", None),
        moved("max_inflight_requests", None, "max_inflight_rollouts"),
        moved("max_inflight_episodes", None, "max_inflight_rollouts"),
        same("oversampling_factor", 1.0),
        moved("wandb", None, "/monitors.wandb"),
        refused("prime_monitor", None, "there is no monitor of that platform; leave it out", unless=("None",)),
        refused("bench", False, "give it on the command line: rl @ FILE --bench", unless=(False,)),
        refused("optim.lr", 1e-4, "the rate is trainer.optim.lr"),
        idle("env_install_prerelease", False, "environments are installed with pip before the run"),
        idle("pool_size", None, "one renderer serves all rollouts"),
        NO_EXPERIMENTS,
        refused("micro_batch_size", None, "samples are packed into rows of seq_len tokens; leave it out"),
        refused("mask_truncated_completions", False, "rollouts that are cut are trained; "
                "`algo.overlong` takes reward from long ones", unless=(False,)),
        refused("environment", None, "an environment is `[[orchestrator.env]]` with id and args"),
        refused("algorithms", None, 'credit is `[orchestrator.algo]` with type = "grpo" and so on'),
        refused("models", {}, "a teacher is `[orchestrator.teacher]`"),
        refused("actor", "policy", 'a teacher plays with algo.type = "sft"', unless=("policy",)),
    ),
))  # fmt: skip
ALGO = Table("orchestrator.algo", "OrchestratorKeys", (
    same("type", "grpo"),
    moved("length_penalty.type", None, "algo.length_penalty", values={"linear": {}}),
    same("length_penalty.output_weight", 0.25),
    same("length_penalty.input_weight", 0.1),
    same("length_penalty.turns_weight", 0.1),
    same("decay", 0.95),
    same("episode_agents"),
    same("demo_key", "demonstration"),
    same("template"),
    moved("teacher.name", NO_DEFAULT, "algo.teacher.model"),
    moved("teacher.client", NO_DEFAULT, "algo.teacher"),
    moved("source.name", NO_DEFAULT, "algo.teacher.model"),
    moved("source.client", NO_DEFAULT, "algo.teacher"),
    moved("roles.tool.alpha", 0.1, "algo.tool"),
    moved("roles.user.alpha", None, "algo.user"),
    moved("roles.system.alpha", None, "algo.system"),
    *old(same("tool", 0.1), same("user", None), same("system", None)),
), below="algo")  # fmt: skip
CLIENT = Table("orchestrator.model.client", "ClientSection", (
    same("base_url", "http://localhost:8000/v1"),
    same("admin_base_url", None),
    same("api_key_var", "VLLM_API_KEY"),
    moved("wait_for_ready_timeout", 1800, "ready_timeout_s"),
    same("headers", {}),
    same("headers_from_env", {}),
    same("extra_headers_from_state", {"X-Session-ID": "trajectory_id"}),
    idle("skip_model_check", False, "requests name no model"),
    *old(
        moved("timeout", 1200, "timeout_s"),
        refused("elastic", None, "engines register with the router; leave it out", unless=("None",)),
    ),
))  # fmt: skip
SAMPLING_ROWS = (
    same("temperature", 1.0),
    same("max_completion_tokens", None),
    moved("extra_body.top_k", None, "top_k", values=ALL),
    moved("extra_body.min_p", None, "min_p"),
    moved("extra_body.top_p", None, "top_p"),
    refused("extra_body", {}, "requests have no further fields; top_k, top_p and min_p are keys of their own",
            unless=({},)),
    *old(
        moved("max_tokens", None, "max_completion_tokens"),
        refused("min_tokens", 0, "replies may be as short as they are; leave it out", unless=(0,)),
        refused("seed", None, "the run's seed is `seed`; leave it out", unless=("None",)),
    ),
)  # fmt: skip
TRAIN = Table("orchestrator.train", "OrchestratorKeys", (
    moved("source", [], "env"),
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
          sets=(*VERIFIERS, ("name", Given))),
    moved("env.*.harness.runtime", NO_DEFAULT, "args.*.runtime", sets=VERIFIERS),
    moved("env.*.harness", NO_DEFAULT, "args.*.harness", sets=VERIFIERS),
    moved("env.*.runtime", NO_DEFAULT, "args.*.runtime", "`subprocess` where none is given, not a cloud",
          sets=VERIFIERS),
    moved("env", NO_DEFAULT, "args", "all other settings of a verifiers environment", sets=VERIFIERS),
    moved("serve.pool.num_workers", None, "num_workers"),
    refused("serve.pool.type", "elastic", WORKERS, unless=("static",)),
    refused("serve.address", None, WORKERS, unless=("None",)),
    refused("serve", NO_DEFAULT, WORKERS, unless=({},)),
    *old(
        moved("taskset.id", NO_DEFAULT, "args.taskset.id", sets=(*VERIFIERS, ("name", Given))),
        moved("taskset", NO_DEFAULT, "args.taskset", sets=VERIFIERS),
        moved("harness.runtime", NO_DEFAULT, "args.agent.runtime", sets=VERIFIERS),
        moved("harness", NO_DEFAULT, "args.agent.harness", sets=VERIFIERS),
        same("id", note="a bundled environment, or one of your own; a module of verifiers v0 must be ported"),
        same("args", {}),
        moved("pool.num_workers", None, "num_workers"),
        refused("pool.type", "elastic", WORKERS, unless=("static",)),
        refused("address", None, WORKERS, unless=("None",)),
        same("num_workers", None, values={"auto": "None"}),
        refused("max_retries", 3, "write orchestrator.max_rollout_retries"),
        refused("extra_env_kwargs", {}, "they are settings of verifiers v0; its environments must be ported",
                unless=({},)),
    ),
)  # fmt: skip
SOURCE = Table("orchestrator.train.source.0", "TrainEnvSection", (
    *ENV_ROWS,
    same("ratio", 1.0),
    same("sampling", NO_DEFAULT),
    same("group_size", None),
    same("algo", None),
    same("curriculum.sampler.type", "standard"),
    idle("curriculum.sampler.seed", 42, "the run's seed"),
    same("curriculum.gates.*.type", "advantage_range"),
    same("curriculum.gates.*.reject_min", 0.0),
    same("curriculum.gates.*.reject_max", 0.0),
    *old(moved("rollouts_per_example", 1, "group_size"), moved("timeout", None, "rollout_timeout_s")),
))  # fmt: skip
EVAL_SOURCE = Table("orchestrator.eval.source.0", "EvalEnvSection", (
    *ENV_ROWS,
    same("interval", None),
    same("num_examples", None, values=ALL),
    moved("select.limit", None, "num_examples"),
    same("group_size", None),
    same("sampling", NO_DEFAULT),
    *old(moved("rollouts_per_example", 1, "group_size"),
         refused("timeout", None, "write orchestrator.rollout_timeout_s")),
))  # fmt: skip
EVAL = Table("orchestrator.eval", "EvalSection", (
    moved("source", [], "env", "without any the training environments' held-out tasks are evaluated"),
    same("interval", 100),
    same("num_examples", -1, "-1, all, is \"None\" here", values=ALL),
    same("group_size", 1),
    same("skip_first_step", False),
    same("retrigger_on_resume", False),
    moved("select.limit", None, "num_examples"),
    *old(
        moved("rollouts_per_example", 1, "group_size"),
        refused("max_retries", 3, "write orchestrator.max_rollout_retries"),
    ),
))  # fmt: skip
EVAL_SAMPLING = Table("orchestrator.eval.sampling", "SamplingOverrides", (
    same("temperature", None),
    same("top_p", None),
    same("top_k", None, values=ALL),
    same("min_p", None),
    same("max_completion_tokens", None),
    refused("reasoning_effort", None, "whether a model thinks is orchestrator.renderer.enable_thinking",
            unless=("None",)),
))  # fmt: skip
RENDERER = Table("orchestrator.renderer", "RendererSection", (
    same("name", "auto", "`default` and None are refused: they cannot tell sampled tokens from the template's"),
    *old(
        refused("tool_parser", None, "the family's renderer reads tool calls; leave it out", unless=("None",)),
        refused("reasoning_parser", None, "the family's renderer reads thinking; leave it out", unless=("None",)),
    ),
    same("clear_thinking", None),
))  # fmt: skip
FILTERS = Table("orchestrator", "OrchestratorKeys", old(
    moved("pre_batch_filters", NO_DEFAULT, "filters", "flagged rollouts are replaced by others"),
    moved("post_batch_filters", NO_DEFAULT, "filters", "one list for both: flagged rollouts are replaced by others"),
    moved("buffer.online_difficulty_filtering", False, "filter_zero_advantages", values={False: Nothing}),
    refused("buffer.easy_threshold", None, POOL, unless=("None",)),
    refused("buffer.hard_threshold", None, POOL, unless=("None",)),
    refused("buffer.easy_fraction", 0.0, POOL, unless=(0, 0.0)),
    refused("buffer.hard_fraction", 0.0, POOL, unless=(0, 0.0)),
    refused("buffer", NO_DEFAULT, POOL, unless=({},)),
))  # fmt: skip


def joined_filters(paths: Sequence[Path]) -> list[Path]:
    """The paths of a file, with the items of post_batch_filters behind those of pre_batch_filters: one list here."""
    pre, post = "pre_batch_filters", "post_batch_filters"
    num_before = len({path[: path.index(pre) + 2] for path in paths if pre in path[:-1]})
    return [
        tuple(
            part + num_before if isinstance(part, int) and path[at - 1 : at] == (post,) else part
            for at, part in enumerate(path)
        )
        for path in paths
    ]


FILTER = Table("orchestrator.post_batch_filters.0", "OrchestratorKeys", old(
    same("type"),
    same("enforce", False),
    same("token_id_threshold", 100_000),
    same("logprob_offset", 2.0),
    same("window", 3000),
    same("prob_threshold", 0.99),
))  # fmt: skip
ALONE = Table("orchestrator", "OrchestratorConfig", (
    idle("ckpt", None, "checkpoints are the trainer's to order"),
), is_listed=False)  # fmt: skip
TABLES = (
    ORCHESTRATOR, ALONE, ALGO, CLIENT, RENDERER, TRAIN, TRAIN_SAMPLING, SHORTHANDS, SOURCE, EVAL, EVAL_SAMPLING,
    EVAL_SOURCE, FILTERS, FILTER,
)  # fmt: skip
