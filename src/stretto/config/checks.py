"""Rules that hold between keys. Each check takes a valid section and says what is wrong with it, all at once.

A problem names the paths concerned, so that the loader can say where they were given. Rules about one key
alone are in the section's field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stretto.base.errors import ConfigError
from stretto.base.rundir import CHECKPOINT
from stretto.config import vllm_flags
from stretto.config.algorithm_checks import check_advantages, check_algos, check_loss, check_updates
from stretto.config.distill import WITHOUT_REWARD
from stretto.config.hooks import ENVIRONMENTS, HooksSection
from stretto.config.memory_checks import check_memory
from stretto.config.shared import Problem, show

if TYPE_CHECKING:
    from stretto.config.inference import InferenceSection
    from stretto.config.model import ModelSection
    from stretto.config.orchestrator import (
        ClientSection,
        EnvSection,
        EvalSection,
        OrchestratorSection,
        SamplingSection,
    )
    from stretto.config.roots import EvalConfig, RunRoot, SFTConfig
    from stretto.config.trainer import Scheduler, TrainerSection
    from stretto.config.transport import ControlSection

LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")
ENV_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*")
RESERVED_ENV_NAMES = ("all", "agg", "mean")


def at(prefix: str, key: str) -> str:
    """A key's full path; the prefix is empty where the section is the root."""
    return f"{prefix}.{key}" if prefix else key


def check_run(cfg: RunRoot) -> list[Problem]:
    """The run's name is one directory name; one run is resumed or deleted, at one step."""
    problems = []
    if cfg.run.name is not None and not RUN_NAME.fullmatch(cfg.run.name):
        rule = "letters, digits and . _ + = @ - only, for it names a directory"
        problems.append(Problem(("run.name",), f'run.name = "{cfg.run.name}": {rule}'))
    if cfg.clean and cfg.resume is not None and cfg.resume.dir is None:
        problems.append(
            Problem(("resume", "clean"), "resume continues the run and clean deletes it; give one of the two")
        )
    if cfg.resume is not None and cfg.resume.dir is not None and cfg.resume.step is not None:
        named = CHECKPOINT.search(cfg.resume.dir.as_posix())
        if named and int(named[1]) != cfg.resume.step:
            text = f"resume.dir is the checkpoint of step {named[1]}, and resume.step = {cfg.resume.step}; give one"
            problems.append(Problem(("resume.dir", "resume.step"), text))
    return problems


def check_trainer(section: TrainerSection, prefix: str) -> list[Problem]:
    """Schedule against max_steps, model dtypes."""
    problems = check_scheduler(section.scheduler, section.max_steps, prefix) + check_lr(section, prefix)
    problems += check_model(section.model, prefix) + check_scratch_len(section, prefix)
    problems += check_adapter_export(section, prefix) + check_memory(section, prefix)
    problems += check_loss(section.loss, at(prefix, "loss")) + check_advantages(section, prefix)
    problems += check_updates(section, prefix)
    return problems + check_control(section.control, prefix)


def check_control(section: ControlSection, prefix: str) -> list[Problem]:
    """A peer that is alive is not taken for dead between two heartbeats."""
    if section.heartbeat_s * 2 <= section.dead_after_s:
        return []
    paths = (at(prefix, "control.dead_after_s"), at(prefix, "control.heartbeat_s"))
    rule = f"must be at least twice {paths[1]} = {section.heartbeat_s:g}, or one late heartbeat stops the run"
    return [Problem(paths, f"{paths[0]} = {section.dead_after_s:g} {rule}")]


def check_adapter_export(section: TrainerSection | SFTConfig, prefix: str) -> list[Problem]:
    """An adapter that is to be saved is trained."""
    weights = None if section.ckpt is None else section.ckpt.weights
    if weights is None or not weights.save_adapter_separately or section.model.lora is not None:
        return []
    paths = (at(prefix, "ckpt.weights.save_adapter_separately"), at(prefix, "model.lora"))
    return [Problem(paths, f"{paths[0]} = true, but no adapter is trained; add [{paths[1]}] or leave it out")]


def check_model(model: ModelSection, prefix: str) -> list[Problem]:
    """Shapes that a network can have."""
    problems = []
    path = at(prefix, "model")
    if model.impl == "custom" and model.trust_remote_code:
        paths = (f"{path}.trust_remote_code", f"{path}.impl")
        rule = f'has no effect with {paths[1]} = "custom"; drop it or use impl = "hf"'
        problems.append(Problem(paths, f"{paths[0]} = true {rule}"))
    fields, deep = type(model).model_fields, model.ep_comm_backend == "deepep"
    given = [
        k for k in ("deepep_num_sms", "deepep_token_chunk_size") if getattr(model, k) != fields[k].default
    ]
    if given and not deep:
        paths = (f"{path}.{given[0]}", f"{path}.ep_comm_backend")
        problems.append(
            Problem(paths, f'{paths[0]} does nothing with {paths[1]} = "torch"; drop it or use "deepep"')
        )
    if deep and model.dtype != "bfloat16":
        paths = (f"{path}.ep_comm_backend", f"{path}.dtype")
        rule = f'carries bfloat16, and {paths[1]} = "{model.dtype}"; use dtype = "bfloat16", or "torch"'
        problems.append(Problem(paths, f'{paths[0]} = "deepep" {rule}'))
    if deep and model.ep == 1:
        paths = (f"{path}.ep_comm_backend", f"{path}.ep")
        problems.append(
            Problem(paths, f'{paths[0]} = "deepep" does nothing with {paths[1]} = 1; raise ep or drop it')
        )
    scratch = model.scratch
    if scratch is not None and scratch.num_heads % scratch.num_kv_heads:
        paths = (f"{path}.scratch.num_heads", f"{path}.scratch.num_kv_heads")
        rule = f"must be a multiple of {paths[1]} = {scratch.num_kv_heads}"
        problems.append(Problem(paths, f"{paths[0]} = {scratch.num_heads} {rule}"))
    if model.lora is not None and model.moe_bias_update_rate is not None:
        paths = (f"{path}.moe_bias_update_rate", f"{path}.lora")
        rule = f"moves a weight of the base model, and with {paths[1]} only the adapter changes; leave one of them out"
        problems.append(Problem(paths, f"{paths[0]} = {model.moe_bias_update_rate:g} {rule}"))
    if scratch is not None and scratch.num_experts_per_tok > scratch.num_experts:
        paths = (f"{path}.scratch.num_experts_per_tok", f"{path}.scratch.num_experts")
        rule = f"is more than {paths[1]} = {scratch.num_experts}; lower the one or raise the other"
        problems.append(Problem(paths, f"{paths[0]} = {scratch.num_experts_per_tok} {rule}"))
    return problems


def check_scratch_len(section: TrainerSection | OrchestratorSection, prefix: str) -> list[Problem]:
    """A new network has positions for the longest sequence."""
    scratch = section.model.scratch
    if scratch is None or scratch.max_position_embeddings >= section.seq_len:
        return []
    paths = (at(prefix, "seq_len"), at(prefix, "model.scratch.max_position_embeddings"))
    rule = f"is longer than {paths[1]} = {scratch.max_position_embeddings}; raise the latter or lower seq_len"
    return [Problem(paths, f"{paths[0]} = {section.seq_len} {rule}")]


def check_lr(section: TrainerSection | SFTConfig, prefix: str) -> list[Problem]:
    """A schedule cannot end above its peak."""
    min_lr = getattr(section.scheduler, "min_lr", 0.0)
    if min_lr <= section.optim.lr:
        return []
    paths = (at(prefix, "scheduler.min_lr"), at(prefix, "optim.lr"))
    return [
        Problem(
            paths, f"{paths[0]} = {min_lr:g} is above the peak {paths[1]} = {section.optim.lr:g}; lower it"
        )
    ]


def check_scheduler(scheduler: Scheduler, max_steps: int | None, prefix: str) -> list[Problem]:
    """Schedules that fall must know where the end is, and fit before it."""
    path, steps = at(prefix, "scheduler"), at(prefix, "max_steps")
    if scheduler.type == "constant":
        return []
    if scheduler.type == "linear" and scheduler.warmup_steps == scheduler.decay_steps == 0:
        message = 'neither rises nor falls with warmup_steps = decay_steps = 0; use type = "constant"'
        return [Problem((path,), f"{path}: a linear schedule {message}")]
    if scheduler.type == "linear" and scheduler.decay_steps == 0:
        return []
    if max_steps is None:
        rule = f'a {scheduler.type} schedule falls towards max_steps; give {steps}, or use type = "constant"'
        return [Problem((path, steps), f"{path}: {rule}")]
    if scheduler.type == "cosine" and scheduler.warmup_steps >= max_steps:
        rule = f"must be under {steps} = {max_steps}, or nothing is left to fall"
        return [
            Problem((f"{path}.warmup_steps", steps), f"{path}.warmup_steps = {scheduler.warmup_steps} {rule}")
        ]
    if scheduler.type == "linear" and scheduler.warmup_steps + scheduler.decay_steps > max_steps:
        total = f"{scheduler.warmup_steps} + {scheduler.decay_steps}"
        rule = f"warmup_steps + decay_steps = {total} must fit into {steps} = {max_steps}; lower one of them"
        return [Problem((f"{path}.warmup_steps", f"{path}.decay_steps", steps), f"{path}: {rule}")]
    return []


def check_orchestrator(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Batches and groups, staleness, room for replies, environments, and what a remote engine rules out."""
    problems = check_groups(section, prefix) + check_selection(section, prefix)
    problems += check_hooks(section, prefix)
    if section.max_async_level > section.max_off_policy_steps:
        paths = (at(prefix, "max_async_level"), at(prefix, "max_off_policy_steps"))
        message = (
            f"{paths[0]} = {section.max_async_level} lets rollouts start that many versions early, and "
            f"{paths[1]} = {section.max_off_policy_steps} drops what is so old, so that most would be lost; "
            f"raise {paths[1]} or lower {paths[0]}"
        )
        problems.append(Problem(paths, message))
    if not section.env:
        example = f'[[{at(prefix, "env")}]] id = "sort-letters"'
        problems.append(
            Problem(
                (at(prefix, "env"),),
                f"{at(prefix, 'env')}: no environment to train on; add one, such as {example}",
            )
        )
    problems += check_env_names(section.env, at(prefix, "env"))
    if not prefix:
        # Under `rl` these keys are shared with the trainer, whose check speaks for both.
        problems += check_model(section.model, prefix) + check_scratch_len(section, prefix)
        problems += check_control(section.control, prefix)
    problems += check_room(section.train.sampling, section.seq_len, prefix, "train.sampling")
    problems += check_algos(section, prefix)
    if section.eval is not None:
        problems += check_env_names(section.eval.env, at(prefix, "eval.env"))
        problems += check_room(section.eval.sampling, section.seq_len, prefix, "eval.sampling")
        problems += check_eval_steps(section.eval, section.max_steps, prefix)
    problems += check_base_url(section.client, prefix)
    if section.client.api == "chat":
        path = at(prefix, "client.api")
        rule = 'gives no tokens to train on; use "tokens" with the `inference` verb or vLLM'
        problems.append(Problem((path,), f'{path} = "chat" {rule}'))
    addresses = [url for url in urls(section.client) if is_address(url)]
    remote = [url for url in addresses if urlsplit(url).hostname not in LOCAL_HOSTS]
    if remote and section.weight_broadcast.type == "shm":
        paths = (at(prefix, "weight_broadcast.type"), at(prefix, "client.base_url"))
        rule = f'shared memory ends at this host and {remote[0]} is another; use type = "filesystem"'
        problems.append(Problem(paths, f'{paths[0]} = "shm": {rule}'))
    return problems


def check_groups(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Whole groups fill a batch."""
    batch, group = at(prefix, "batch_size"), at(prefix, "group_size")
    problems = []
    if section.batch_size % section.group_size:
        low = section.batch_size // section.group_size * section.group_size
        fits = " or ".join(str(size) for size in (low, low + section.group_size) if size)
        rule = f"must be a multiple of {group} = {section.group_size}; use {fits}"
        problems.append(Problem((batch, group), f"{batch} = {section.batch_size} {rule}"))
    if section.max_inflight_rollouts is not None and section.max_inflight_rollouts < section.group_size:
        path = at(prefix, "max_inflight_rollouts")
        rule = f"cannot hold one group of {group} = {section.group_size}; raise it"
        problems.append(Problem((path, group), f"{path} = {section.max_inflight_rollouts} {rule}"))
    if section.num_train_workers > section.batch_size:
        path = at(prefix, "num_train_workers")
        rule = (
            f"ranks cannot share {batch} = {section.batch_size} rollouts: some would have none; raise {batch}"
        )
        problems.append(Problem((path, batch), f"{path} = {section.num_train_workers} {rule}"))
    return problems


def check_hooks(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Hooks that would never be called, or whose answer nobody would use."""
    hooks, path = section.hooks, at(prefix, "hooks")
    problems = []
    if hooks.args and hooks.is_empty:
        rule = "is for the functions named beside it, and none is; those of `dataset` have hook_args"
        problems.append(Problem((f"{path}.args",), f"{path}.args {rule}"))
    if hooks.eval_function is not None and section.eval is None:
        paths = (f"{path}.eval_function", at(prefix, "eval"))
        problems.append(Problem(paths, f"{paths[0]}: there are no evals; add [{paths[1]}]"))
    elif section.eval is not None:
        problems += check_eval_hook(hooks, section.eval, path, at(prefix, "eval"))
    names = [env.name or env.id for env in section.env]
    without = {
        name: section.algo_of(name).type for name in names if section.algo_of(name).type in WITHOUT_REWARD
    }
    for name, algo in without.items():
        for key in ("reward_post_process", "rollout_function"):
            if getattr(hooks, key) is not None:
                rule = (
                    f'does nothing for {name}: its algo "{algo}" learns from a teacher, and not from rewards'
                )
                problems.append(Problem((f"{path}.{key}",), f"{path}.{key} {rule}; leave one of them out"))
    if hooks.rollout_function is not None:
        for index, env in enumerate(section.env):
            if env.group_size is not None and env.group_size != section.group_size:
                own = at(prefix, f"env.{index}.group_size")
                rule = "gets groups of one size; leave it out"
                problems.append(Problem((own,), f"{own} = {env.group_size}: {path}.rollout_function {rule}"))
    return problems


def check_eval_hook(hooks: HooksSection, section: EvalSection, path: str, eval_path: str) -> list[Problem]:
    """What of [eval] a function that makes the evals would never hear of."""
    if hooks.eval_function == ENVIRONMENTS and hooks.rollout_function is None:
        own = f"{path}.eval_function"
        rule = f"is what happens without {path}.rollout_function; leave it out"
        return [Problem((own,), f"{own} = {ENVIRONMENTS!r} {rule}")]
    if (key := hooks.eval_setting) is None:
        return []
    unused = []
    for index, env in enumerate(section.env):
        for name in ("group_size", "sampling"):
            if getattr(env, name) != type(env).model_fields[name].default:
                unused.append(f"{eval_path}.env.{index}.{name}")
    rule = f"does nothing: {path}.{key} makes the evals; leave it out"
    return [Problem((own,), f"{own} {rule}") for own in unused]


def check_selection(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Groups in flight, pools and gates: what would do nothing, or throw most of the work away."""
    problems = []
    factor, level = at(prefix, "oversampling_factor"), at(prefix, "max_async_level")
    if section.oversampling_factor > 1 and section.max_async_level == 0:
        rule = f"starts groups early and {level} = 0 forbids it; raise {level} or leave it out"
        problems.append(Problem((factor, level), f"{factor} = {section.oversampling_factor:g} {rule}"))
    ahead = section.oversampling_factor * (section.max_async_level + 1) - 1
    if section.oversampling_factor > 1 and ahead > section.max_off_policy_steps:
        old = at(prefix, "max_off_policy_steps")
        rule = f"starts groups {ahead:g} steps early and {old} = {section.max_off_policy_steps} drops what is so old"
        problems.append(
            Problem((factor, old), f"{factor} = {section.oversampling_factor:g} {rule}; raise {old}")
        )
    for index, env in enumerate(section.env):
        path = at(prefix, f"env.{index}.curriculum")
        sampler = env.curriculum.sampler
        if sampler.type == "difficulty_pool" and sampler.hard_threshold > sampler.easy_threshold:
            low, high = f"{path}.sampler.hard_threshold", f"{path}.sampler.easy_threshold"
            rule = f"is above {high} = {sampler.easy_threshold:g}; no task would be normal: swap them"
            problems.append(Problem((low, high), f"{low} = {sampler.hard_threshold:g} {rule}"))
        for name, gate in env.curriculum.gates.items():
            if gate.reject_min > gate.reject_max:
                low, high = f"{path}.gates.{name}.reject_min", f"{path}.gates.{name}.reject_max"
                rule = f"is above {high} = {gate.reject_max:g}; it would reject nothing: swap them"
                problems.append(Problem((low, high), f"{low} = {gate.reject_min:g} {rule}"))
    kinds = [each.type for each in section.filters]
    for kind in sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        path = at(prefix, "filters")
        problems.append(Problem((path,), f'{path}: "{kind}" stands there twice; give it once'))
    return problems


def check_room(sampling: SamplingSection, seq_len: int, prefix: str, where: str) -> list[Problem]:
    """A reply must leave room for at least one prompt token."""
    if sampling.max_completion_tokens is None or sampling.max_completion_tokens < seq_len:
        return []
    paths = (at(prefix, f"{where}.max_completion_tokens"), at(prefix, "seq_len"))
    rule = f"leaves no room for a prompt in {paths[1]} = {seq_len}; lower it or raise seq_len"
    return [Problem(paths, f"{paths[0]} = {sampling.max_completion_tokens} {rule}")]


def check_env_names(envs: Sequence[EnvSection], path: str) -> list[Problem]:
    """Names are keys of metrics: unique, and none that an aggregate has."""
    names = [env.name or env.id for env in envs]
    problems = []
    for index, (env, name) in enumerate(zip(envs, names, strict=True)):
        own = f"{path}.{index}.{'name' if env.name else 'id'}"
        if env.name and not ENV_NAME.fullmatch(env.name):
            problems.append(
                Problem(
                    (own,), f'{own} = "{name}": letters, digits and . _ : @ + - only, for it names metrics'
                )
            )
        elif name in RESERVED_ENV_NAMES:
            problems.append(
                Problem((own,), f'{own} = "{name}" is the name of an aggregate in metrics; choose another')
            )
    for name, count in Counter(names).items():
        if count > 1:
            paths = tuple(f"{path}.{index}" for index, other in enumerate(names) if other == name)
            problems.append(
                Problem(paths, f'{path}: {count} environments are called "{name}"; give each its own `name`')
            )
    return problems


def check_eval_steps(section: EvalSection, max_steps: int | None, prefix: str) -> list[Problem]:
    """An eval that never comes is a mistake."""
    if section.interval is None or max_steps is None or section.interval <= max_steps:
        return []
    paths = (at(prefix, "eval.interval"), at(prefix, "max_steps"))
    rule = f"is beyond {paths[1]} = {max_steps}; lower it, or leave it out to evaluate only before and after"
    return [Problem(paths, f"{paths[0]} = {section.interval} {rule}")]


def urls(client: ClientSection) -> list[str]:
    """Every address of the client."""
    return [client.base_url] if isinstance(client.base_url, str) else client.base_url


def check_base_url(client: ClientSection, prefix: str) -> list[Problem]:
    """Addresses are complete."""
    problems = []
    path = at(prefix, "client.base_url")
    if not urls(client):
        problems.append(
            Problem(
                (path,), f"{path} is empty; give the address of an engine, such as http://127.0.0.1:8000/v1"
            )
        )
    for url in urls(client):
        if not is_address(url):
            rule = "is not an address; write it like http://127.0.0.1:8000/v1"
            problems.append(Problem((path,), f'{path} = "{url}" {rule}'))
    return problems


def is_address(url: str) -> bool:
    """Whether a URL names a scheme, a host and, if any, a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def check_inference(section: InferenceSection, prefix: str) -> list[Problem]:
    """What an engine does not do, options vLLM does not have, and sizes that cannot work together."""
    problems = []
    if section.engine == "embedded":
        for key, value in section.vllm_only().items():
            path = at(prefix, key)
            rule = "the embedded engine has no such thing and runs on one device; leave it out, or take vLLM"
            problems.append(Problem((path, at(prefix, "engine")), f"{path} = {show(value)}: {rule}"))
    problems += check_shape(section, prefix)
    for key, value in section.vllm_extra.items():
        path = at(prefix, f"vllm_extra.{key}")
        try:
            vllm_flags.arguments(key, value, path)
        except ConfigError as error:
            problems.append(Problem((path,), str(error)))
    if section.kv_cache_tokens is not None and section.kv_cache_tokens < (section.block_size or 16):
        paths = (at(prefix, "kv_cache_tokens"), at(prefix, "block_size"))
        rule = f"is less than one block of {paths[1]} = {section.block_size or 16}; raise it"
        problems.append(Problem(paths, f"{paths[0]} = {section.kv_cache_tokens} {rule}"))
    cache, longest = section.kv_cache_tokens, section.max_model_len
    if cache is not None and longest is not None and cache < longest:
        paths = (at(prefix, "kv_cache_tokens"), at(prefix, "max_model_len"))
        rule = f"cannot hold one sequence of {paths[1]} = {longest}; raise it or lower {paths[1]}"
        problems.append(Problem(paths, f"{paths[0]} = {cache} {rule}"))
    if section.max_num_batched_tokens < section.max_num_seqs:
        paths = (at(prefix, "max_num_batched_tokens"), at(prefix, "max_num_seqs"))
        rule = f"cannot hold one token of each of {paths[1]} = {section.max_num_seqs} sequences; raise it"
        problems.append(Problem(paths, f"{paths[0]} = {section.max_num_batched_tokens} {rule}"))
    return problems


def check_shape(section: InferenceSection, prefix: str) -> list[Problem]:
    """Combinations of deployment, router, offload and replay that no engine has."""
    problems = []
    shape, path = section.deployment, at(prefix, "deployment.type")
    if shape.type != "single_node" and section.router is None:
        rule = "has several engines, and only a router can tell which one reads and which one writes"
        if shape.type == "multi_node":
            rule = "has several engines, which one address must stand for"
        problems.append(
            Problem((at(prefix, "router"), path), f'{path} = "{shape.type}" {rule}; keep the router')
        )
    if section.enable_return_routed_experts and section.kv_cache_offload is not None:
        paths = (at(prefix, "enable_return_routed_experts"), at(prefix, "kv_cache_offload"))
        rule = "a cache that comes back from memory or disk comes without its experts; drop one of the two"
        problems.append(Problem(paths, f"{paths[0]} = true with {paths[1]}: {rule}"))
    if section.enable_eplb and not section.enable_expert_parallel:
        paths = (at(prefix, "enable_eplb"), at(prefix, "enable_expert_parallel"))
        problems.append(
            Problem(paths, f"{paths[0]} = true moves experts between devices; set {paths[1]} = true")
        )
    is_wide = shape.type == "multi_node" and section.enable_expert_parallel
    if is_wide and section.parallel.dp % shape.num_nodes:
        paths = (at(prefix, "parallel.dp"), at(prefix, "deployment.num_nodes"))
        rule = f"is divided among {paths[1]} = {shape.num_nodes} nodes; give a multiple"
        problems.append(Problem(paths, f"{paths[0]} = {section.parallel.dp} {rule}"))
    gpus = section.parallel.tp * section.parallel.dp
    if shape.type == "multi_node" and not is_wide and gpus > shape.gpus_per_node:
        paths = (at(prefix, "parallel"), at(prefix, "deployment.gpus_per_node"))
        rule = f"need {gpus} GPUs and a node has {paths[1]} = {shape.gpus_per_node}; lower one of the degrees"
        problems.append(Problem(paths, f"{paths[0]}: tp x dp {rule}"))
    if shape.type == "disaggregated" and not shape.is_local and shape.gpus_per_node % section.parallel.tp:
        paths = (at(prefix, "parallel.tp"), at(prefix, "deployment.gpus_per_node"))
        rule = f"does not divide the GPUs of a node, {paths[1]} = {shape.gpus_per_node}"
        problems.append(Problem(paths, f"{paths[0]} = {section.parallel.tp} {rule}"))
    if shape.type == "disaggregated" and shape.prefill_port == shape.decode_port and shape.is_local:
        paths = (at(prefix, "deployment.prefill_port"), at(prefix, "deployment.decode_port"))
        problems.append(Problem(paths, f"{paths[0]} = {paths[1]} = {shape.prefill_port}: give each its own"))
    return problems


def check_sft(cfg: SFTConfig) -> list[Problem]:
    """An end, a schedule that fits, something to train on."""
    problems = check_lr(cfg, "") + check_model(cfg.model, "") + check_adapter_export(cfg, "")
    problems += check_memory(cfg, "")
    if cfg.max_steps is None and cfg.max_epochs is None:
        problems.append(
            Problem(("max_steps", "max_epochs"), "the run would never end; give max_steps or max_epochs")
        )
    elif cfg.max_steps is not None or cfg.scheduler.type == "constant":
        problems += check_scheduler(cfg.scheduler, cfg.max_steps, "")
    if not any((cfg.loss_mask.system, cfg.loss_mask.user, cfg.loss_mask.assistant, cfg.loss_mask.tool)):
        problems.append(
            Problem(("loss_mask",), "loss_mask trains no role; set at least loss_mask.assistant = true")
        )
    ids, count = cfg.trainer_gpu_ids, cfg.deployment.num_train_gpus
    if ids is not None and len(set(ids)) < len(ids):
        problems.append(Problem(("trainer_gpu_ids",), f"trainer_gpu_ids = {ids}: a GPU stands there twice"))
    elif ids is not None and count not in (None, len(ids)):
        paths = ("trainer_gpu_ids", "deployment.num_train_gpus")
        problems.append(Problem(paths, f"{paths[0]} = {ids} are {len(ids)}, not {paths[1]} = {count}"))
    if cfg.eval is not None:
        problems += check_env_names(cfg.eval.env, "eval.env") + check_eval_steps(cfg.eval, cfg.max_steps, "")
        problems += check_room(cfg.eval.sampling, cfg.seq_len, "", "eval.sampling")
        if cfg.eval.retrigger_on_resume:
            rule = "is for `rl`: here a version that was evaluated is not published again; leave it out"
            problems.append(Problem(("eval.retrigger_on_resume",), f"eval.retrigger_on_resume = true {rule}"))
        if not cfg.eval.env:
            rule = 'no environment to evaluate on; add one, such as [[eval.env]] with id = "sort-letters"'
            problems.append(Problem(("eval.env",), f"eval.env: {rule}"))
    return problems


def check_once(section: EvalSection) -> list[Problem]:
    """The verb `eval` evaluates once, now: what says when is not for it."""
    given: dict[str, object] = {"eval.interval": section.interval}
    given |= {f"eval.env.{index}.interval": env.interval for index, env in enumerate(section.env)}
    given |= {
        f"eval.{key}": getattr(section, key) or None for key in ("skip_first_step", "retrigger_on_resume")
    }
    rule = "is for evals of a run that trains, and `eval` evaluates once; leave it out"
    return [
        Problem((path,), f"{path} = {show(value)} {rule}")
        for path, value in given.items()
        if value is not None
    ]


def check_eval(cfg: EvalConfig) -> list[Problem]:
    """Something to evaluate, with room for replies."""
    problems = check_env_names(cfg.eval.env, "eval.env") + check_room(
        cfg.eval.sampling, cfg.seq_len, "", "eval.sampling"
    )
    if not cfg.eval.env:
        example = '[[eval.env]] id = "sort-letters"'
        problems.append(
            Problem(("eval.env",), f"eval.env: no environment to evaluate; add one, such as {example}")
        )
    if cfg.model is not None and cfg.client.api == "chat":
        rule = "starts an engine of our own, which has tokens; leave client.api out, or model"
        problems.append(Problem(("model", "client.api"), f"model = {cfg.model!r} {rule}"))
    if cfg.model is None:
        problems += check_base_url(cfg.client, "")
    else:
        problems += check_inference(cfg.inference, "inference")
    return problems
