"""Builds, from config sections, the parts and clients that both training and the verb `eval` need."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.base.runtime import machine_bytes
from stretto.chat.patches import load_image_processor
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.scratch import build_scratch_files
from stretto.chat.tokenizer import find_directory, load_tokenizer
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.config.sections.distill import FrozenModelPlace, TeacherSection
from stretto.config.sections.model import RendererSection, ScratchSection
from stretto.config.sections.orchestrator import (
    ClientSection,
    EnvSection,
    EvalEnvSection,
    EvalSection,
    OrchestratorSection,
    SamplingOverrides,
    SamplingSection,
    TrainEnvSection,
)
from stretto.data.hub_model import find_config, find_local
from stretto.data.model_file import read_model_file
from stretto.data.weight_files import untrained_rows
from stretto.envs.base import Environment, Message, RunInfo, checked_prompt, load_environment, needs_worker
from stretto.envs.models import NO_MODELS, ChatModel
from stretto.envs.workers.handle import WorkerLimits
from stretto.envs.workers.pool import open_workers
from stretto.vime.arguments import attributes_of


def run_info(
    cfg: OrchestratorConfig | EvalConfig,
    renderer: Renderer | None,
    sampling: SamplingSection,
    tokenizer: str | None,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> RunInfo:
    """What environments may know of the run; `tokenizer` is its directory or its name on the Hub."""

    functions: dict[str, Any] = {}
    if renderer is not None:
        functions = {
            "encode": renderer.encode,
            "prompt_ids": _of_messages("run.prompt_ids", renderer.render_prompt),
            "render": _of_messages("run.render", renderer.render_text),
        }
    return RunInfo(
        tokenizer=tokenizer,
        engine_urls=urls_of(cfg.client),
        model_urls=other_models(cfg),
        models=models,
        directory=str(cfg.run_dir.episodes),
        policy_name=cfg.client.name,
        table=table_of(cfg),
        seed=cfg.seed,
        seq_len=cfg.seq_len,
        group_size=cfg.group_size if isinstance(cfg, OrchestratorConfig) else cfg.eval.group_size,
        **functions,
        **_sampling_info(sampling),
    )


def _of_messages(name: str, render: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the renderer for the user's code, which refuses messages that a template would drop in silence."""

    def checked(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Any:
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}: messages of {name}"
        return render(checked_prompt(messages, where), tools)

    return checked


def eval_run_info(run: RunInfo, section: EvalSection) -> RunInfo:
    """The run info of environments that only an eval plays."""
    return replace(run, group_size=section.group_size, **_sampling_info(section.sampling))


def _sampling_info(sampling: SamplingOverrides) -> dict[str, Any]:
    return sampling.model_dump(include={"temperature", "top_p", "top_k", "max_completion_tokens"})


def _env_run_info(run: RunInfo, section: TrainEnvSection | EvalEnvSection) -> RunInfo:
    """The run info of one environment, with the sampling and group size that its section sets."""
    changes = _sampling_info(section.sampling) | {"group_size": section.group_size}
    return replace(run, **{key: value for key, value in changes.items() if value is not None})


def system_prompts(*sections: EnvSection) -> dict[str, str]:
    """The system prompts of environments, by name."""
    return {s.name or s.id: s.system_prompt for s in sections if s.system_prompt is not None}


def model_names(*sections: EnvSection) -> dict[str, dict[str, str]]:
    """By environment: what it calls frozen models, and their names in the run."""
    return {s.name or s.id: s.models for s in sections if s.models}


def table_of(cfg: OrchestratorSection | EvalConfig) -> dict[str, Any]:
    """What add-ons say of the run's resolved config, such as the value of every flag of vime: attributes of `args`."""
    run_dir = getattr(cfg, "run_dir", None)
    if run_dir is not None and not getattr(cfg, "dry_run", False):
        with suppress(OSError, ValueError):  # a process that was started alone has no such file
            return attributes_of(json.loads(run_dir.config("run").read_text()))
    data = cfg.model_dump(mode="json")
    return attributes_of({"orchestrator": data} | data)


def urls_of(section: ClientSection | TeacherSection) -> tuple[str, ...]:
    """The engine addresses of a section."""
    urls = section.base_url or []
    return (urls,) if isinstance(urls, str) else tuple(urls)


def places_of(cfg: OrchestratorSection | EvalConfig) -> dict[str, FrozenModelPlace]:
    """Where the frozen models beside the policy run, by name."""
    if isinstance(cfg, EvalConfig):
        return {name: section.place for name, section in cfg.models.items()}
    return cfg.frozen_models


def other_models(cfg: OrchestratorSection | EvalConfig) -> dict[str, str]:
    """Addresses of the models that are not trained, by the names that hooks use."""
    teacher = getattr(cfg, "teacher", None)
    sections: dict[str, TeacherSection] = {} if teacher is None else {"teacher": teacher}
    sections |= places_of(cfg)
    return {name: urls[0] for name, section in sections.items() if (urls := urls_of(section))}


def build_env(section: EnvSection, logs: Path | None = None, run: RunInfo | None = None) -> Environment:
    """Build the environment of a section, under the name that metrics use.

    Its worker processes are started, if it has any; their output goes to the directory `logs`.
    """
    name = section.name or section.id
    if run is not None and isinstance(section, TrainEnvSection | EvalEnvSection):
        run = _env_run_info(run, section)
    if run is not None and section.models:
        run = replace(run, models={**run.models, **{name: run.model(model) for name, model in section.models.items()}})
    num_workers = section.num_workers or (1 if needs_worker(section.id) else None)
    if num_workers is None:
        return load_environment(section.id, section.args, name, run)
    return open_workers(
        section.id,
        section.args,
        name,
        num_workers=num_workers,
        hang_timeout_s=section.worker_timeout_s,
        worker_limits=WorkerLimits(
            section.worker_memory_bytes or machine_bytes() // 2, section.worker_growth_bytes, section.worker_max_calls
        ),
        log_dir=logs,
        models={} if run is None else run.models,
        directory=None if run is None else run.directory,
    )


def open_env(section: EnvSection, logs: Path, stack: AsyncExitStack, run: RunInfo | None = None) -> Environment:
    """Build the environment of a section; `stack` closes what it has started."""
    env = build_env(section, logs, run)
    if inspect.iscoroutinefunction(close := getattr(env, "close", None)):
        stack.push_async_callback(close)
    return env


def build_policy_renderer(cfg: OrchestratorConfig) -> Renderer:
    """The renderer of the model that is trained.

    Raises: ConfigError for a model directory that holds no model.
    """
    if cfg.model.scratch is not None and cfg.tokenizer.name is None:
        return build_scratch_renderer(cfg.model.scratch, _section(cfg))
    return build_renderer_of(cfg.model.name, cfg.tokenizer.name, _section(cfg))


def _section(cfg: OrchestratorConfig | EvalConfig) -> RendererSection:
    """The renderer's section, with the tokenizer's template if it has none of its own."""
    template = cfg.renderer.template or cfg.tokenizer.chat_template
    return cfg.renderer.model_copy(update={"template": template})


def build_renderer_of(model: str, tokenizer: str | None, section: RendererSection) -> Renderer:
    """Build the renderer of `tokenizer` or of the model; config.json names its family.

    Raises: ConfigError for a model directory that holds no model.
    """
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"[model] name = {model!r}: there is no config.json in that directory")
    model_type = None
    for name in filter(None, (model, tokenizer)):
        if model_type is None and (directory := find_config(name)) is not None:
            model_type = read_model_file(directory).get("model_type")
    source = model if tokenizer is None or Path(model).is_dir() else tokenizer
    images = load_image_processor(find_directory(source))
    return build_renderer(load_tokenizer(tokenizer or model), section, model_type, images)


def untrained_tokens(renderer: Renderer, model: str) -> str:
    """What to know of special tokens of every conversation that the weights have not learned; "" if all are."""
    if (directory := find_local(model)) is None:
        return ""
    prompt = renderer.render_prompt([{"role": "user", "content": "a"}])
    special = set(map(renderer.tokenizer.token_id, renderer.tokenizer.special_tokens))
    used = [int(token) for token in {*prompt.tolist(), *renderer.stop_ids[:1]} if int(token) in special]
    try:
        found = untrained_rows(directory, used)
    except DataError:
        return ""  # the check of the files says what is wrong with them
    if not found:
        return ""
    names = ", ".join(repr(renderer.tokenizer.token_text(token)) for token in found)
    return (
        f"the embedding of {names} looks untrained, and every conversation has it: warm the model up with `sft`, or "
        f'write without such tokens ({renderer.place}.name = "text")'
    )


def build_eval_renderer(cfg: EvalConfig) -> Renderer:
    """Build the renderer of the evaluated model.

    Raises: ConfigError if the config names neither a model nor a tokenizer.
    """
    model = cfg.model or cfg.tokenizer.name
    if model is None:
        raise ConfigError(
            "tokenizer.name: give the tokenizer of the model that runs at client.base_url, or set client.api = "
            '"chat" to evaluate with text alone.'
        )
    return build_renderer_of(model, cfg.tokenizer.name, _section(cfg))


def build_scratch_renderer(scratch: ScratchSection, section: RendererSection) -> Renderer:
    """Build the renderer of a from-scratch model; its tokenizer is the same in every process."""
    with TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(build_scratch_files(directory, scratch))
        images = load_image_processor(directory)
    tokenizer.name_or_path = "[model.scratch]"
    return build_renderer(tokenizer, section, scratch.family, images)
