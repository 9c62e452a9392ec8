"""Checks the user's code and files in a dry run.

Imports functions, reads first records, makes the first task of each environment and renders its prompt as the policy
will get it. No reward is computed, and only what the config names is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from textwrap import indent
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.base.foreign import call_async, load_function, load_object
from stretto.chat.render import Renderer
from stretto.config.root import OrchestratorConfig, SFTConfig
from stretto.config.sections.hooks import ENVIRONMENTS, HooksSection
from stretto.config.sections.orchestrator import EnvSection, OrchestratorKeys
from stretto.config.sections.sft import FileData
from stretto.data.records import read_records
from stretto.envs.base import RunInfo, checked_prompt, needs_worker, tasks_of
from stretto.orchestrator.build import build_policy_renderer, open_env, run_info

NUM_ARGUMENTS = {
    "dynamic_sampling_filter": 2,
    "buffer_filter": 4,
    "sample_filter": 2,
    "reward_post_process": 2,
    "convert_samples_to_train_data": 2,
    "rollout_function": 3,
    "eval_function": 3,
}
"""Number of arguments of each function in [orchestrator.hooks]."""


def check_user_code(cfg: OrchestratorKeys) -> None:
    """Import every function and read every file that the section names.

    Raises: ConfigError or DataError for a path without an object, and for a file that cannot be read.
    """
    _check_hooks(cfg.hooks)
    for place, env in _environments(cfg):
        _check_environment(place, env)
        algo = getattr(env, "algo", None)
        if getattr(algo, "import_path", None) is not None:
            load_function(algo.import_path, algo.kwargs, f"{place}.algo.import_path")
    if getattr(cfg.algo, "import_path", None) is not None:
        load_function(cfg.algo.import_path, cfg.algo.kwargs, "orchestrator.algo.import_path")


def preview(cfg: OrchestratorConfig) -> str:
    """The first task of every environment as the policy will get it, as printable text.

    Raises: ConfigError, DataError, EnvError that name the wrong name, argument, task or prompt.
    """
    try:
        renderer = build_policy_renderer(cfg)
        missing = ""
    except (ConfigError, DataError) as error:  # the model may be the result of a run that has not run yet
        renderer, missing = None, f" (not rendered: {error})"
    info = run_info(cfg, renderer, cfg.train.sampling, cfg.tokenizer.name or cfg.model.name)
    return "\n\n".join(asyncio.run(_preview(section, renderer, missing, info)) for section in cfg.env)


async def _preview(section: EnvSection, renderer: Renderer | None, missing: str, info: RunInfo) -> str:
    name = section.name or section.id
    if section.num_workers or needs_worker(section.id):
        return f"environment {name}: runs in worker processes, which a dry run does not start"
    async with AsyncExitStack() as stack:
        env = open_env(section, Path(), stack, info)
        source = tasks_of(env, "train")
        task = source.task(0)
        count = "without end" if source.num_tasks is None else f"{source.num_tasks} to train on"
        lines = [f"environment {name}: tasks {count}; the first is {task.task_id}"]
        if not hasattr(env, "prompt"):
            return f"{lines[0]}, whose prompt it makes while it is played"
        where = f"environment {name}, task {task.task_id}, prompt"
        messages = checked_prompt(await call_async(lambda: env.prompt(task), where), where)
        if renderer is None:
            text = "\n".join(f"{message['role']}: {message.get('content')}" for message in messages)
            return "\n".join([f"{lines[0]}{missing}:", indent(text, "  | ")])
        tools = env.tool_schemas() if hasattr(env, "tool_schemas") else None
        ids = renderer.render_prompt(messages, tools)
        lines[0] += f", {len(ids)} tokens:"
        return "\n".join([lines[0], indent(renderer.decode(ids), "  | ", lambda line: True)])


def check_sft_records(cfg: SFTConfig) -> None:
    """Read the first record of each file that `sft` trains or validates on.

    Raises: ConfigError or DataError for a file that cannot be read.
    """
    named = [("data.name", cfg.data)] + ([("val.data.name", cfg.val.data)] if cfg.val is not None else [])
    for setting, data in named:
        if isinstance(data, FileData):
            next(read_records(data.name, setting))


def _environments(cfg: OrchestratorKeys) -> Iterator[tuple[str, EnvSection]]:
    for index, env in enumerate(cfg.env):
        yield f"orchestrator.env.{index}", env
    for index, env in enumerate(cfg.eval.env if cfg.eval is not None else ()):
        yield f"orchestrator.eval.env.{index}", env


def _check_hooks(hooks: HooksSection) -> None:
    for key, count in NUM_ARGUMENTS.items():
        if (path := getattr(hooks, key)) is not None and path != ENVIRONMENTS:
            _check_hook(path, f"orchestrator.hooks.{key}", count)


def _check_hook(path: str, setting: str, num_arguments: int) -> None:
    from stretto.vime.calls import Hook

    Hook.load(path, setting, num_arguments)


def _check_environment(place: str, env: EnvSection) -> None:
    if env.id == "dataset":
        _check_dataset(env.args)
    elif ":" in env.id:
        load_object(env.id, f"{place}.id")


def _check_dataset(args: dict[str, Any]) -> None:
    for key in ("path", "eval_path"):
        sources = args.get(key) or []
        for source in [sources] if isinstance(sources, str) else sources:
            next(read_records(source, f"dataset: {key}"))
    for key, count in (("reward", 2), ("generate", 3)):
        path = args.get(key)
        if isinstance(path, str) and (":" in path or "." in path):
            _check_hook(path, f"dataset: {key}", count)
