"""Config sections become the parts that both training and the verb `eval` need."""

from __future__ import annotations

import inspect
import json
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stretto.base.status import report
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.distill import TeacherSection
from stretto.config.model import RendererSection, ScratchSection
from stretto.config.orchestrator import (
    ClientSection,
    EnvSection,
    EvalEnvSection,
    EvalSection,
    OrchestratorSection,
    SamplingOverrides,
    SamplingSection,
    TrainEnvSection,
)
from stretto.config.roots import EvalConfig, OrchestratorConfig
from stretto.envs.base import Environment, Message, RunInfo, load_environment, needs_worker
from stretto.envs.workers import open_workers
from stretto.transports.engine.chat import ChatClient
from stretto.transports.engine.client import EngineClient


def run_info(
    cfg: OrchestratorConfig | EvalConfig,
    renderer: Renderer | None,
    sampling: SamplingSection,
    tokenizer: str | None,
) -> RunInfo:
    """What environments are told of the run; `tokenizer` is the directory of the policy's."""

    def encode(text: str) -> np.ndarray:
        assert renderer is not None
        return renderer.encode(text)

    def prompt_ids(messages: list[Message], tools: list[dict] | None) -> np.ndarray:
        assert renderer is not None
        return renderer.render_prompt(messages, tools)

    def render(messages: list[Message], tools: list[dict] | None) -> str:
        assert renderer is not None
        return renderer.decode(renderer.render_prompt(messages, tools))

    return RunInfo(
        tokenizer=tokenizer,
        engine_urls=urls_of(cfg.client),
        model_urls=other_models(cfg) if isinstance(cfg, OrchestratorConfig) else {},
        encode=None if renderer is None else encode,
        prompt_ids=None if renderer is None else prompt_ids,
        render=None if renderer is None else render,
        seed=cfg.seed,
        seq_len=cfg.seq_len,
        group_size=cfg.group_size if isinstance(cfg, OrchestratorConfig) else cfg.eval.group_size,
        **_told(sampling),
    )


def run_of_evals(run: RunInfo, section: EvalSection) -> RunInfo:
    """What environments that only an eval has are told of the run."""
    return replace(run, group_size=section.group_size, **_told(section.sampling))


def _told(sampling: SamplingSection | SamplingOverrides) -> dict[str, Any]:
    return sampling.model_dump(include={"temperature", "top_p", "top_k", "max_completion_tokens"})


def _own_run(run: RunInfo, section: TrainEnvSection | EvalEnvSection) -> RunInfo:
    """What the environment of one section is told: with its own sampling and group size, where it has them."""
    own = _told(section.sampling) | {"group_size": section.group_size}
    return replace(run, **{key: value for key, value in own.items() if value is not None})


def urls_of(section: ClientSection | TeacherSection) -> tuple[str, ...]:
    """The addresses of a section."""
    urls = section.base_url or []
    return (urls,) if isinstance(urls, str) else tuple(urls)


def other_models(cfg: OrchestratorSection) -> dict[str, str]:
    """Where the models of a run answer that are not trained, by the names that hooks use."""
    urls = () if cfg.teacher is None else urls_of(cfg.teacher)
    return {"teacher": urls[0]} if urls else {}


def build_env(section: EnvSection, logs: Path | None = None, run: RunInfo | None = None) -> Environment:
    """The environment of a section, under the name metrics use.

    Where it is to run in worker processes they are started; their output goes to the directory `logs`.
    """
    name = section.name or section.id
    if run is not None and isinstance(section, TrainEnvSection | EvalEnvSection):
        run = _own_run(run, section)
    num_workers = section.num_workers or (1 if needs_worker(section.id) else None)
    if num_workers is None:
        return load_environment(section.id, section.args, name, run)
    return open_workers(
        section.id,
        section.args,
        name,
        num_workers=num_workers,
        hang_timeout_s=section.worker_timeout_s,
        log_dir=logs,
    )


def open_env(
    section: EnvSection, logs: Path, stack: AsyncExitStack, run: RunInfo | None = None
) -> Environment:
    """As build_env; `stack` closes what the environment has started."""
    env = build_env(section, logs, run)
    if inspect.iscoroutinefunction(close := getattr(env, "close", None)):
        stack.push_async_callback(close)
    return env


def build_engines(section: ClientSection) -> EngineClient:
    urls = [section.base_url] if isinstance(section.base_url, str) else section.base_url
    return EngineClient(
        urls,
        section.admin_base_url,
        os.environ.get(section.api_key_var),
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
        liveness_interval_s=section.liveness_interval_s,
        liveness_timeout_s=section.liveness_timeout_s,
        recovery_timeout_s=section.recovery_timeout_s,
        on_down=lambda url, reason: report("engine", url=url, state="down", reason=reason),
    )


def build_teacher_client(section: TeacherSection) -> EngineClient:
    """A client of a frozen model's engines, which are never given weights."""
    assert section.base_url is not None, "checked with the config, or filled in by the launcher"
    return EngineClient(
        [section.base_url] if isinstance(section.base_url, str) else section.base_url,
        api_key=os.environ.get(section.api_key_var),
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
        model=section.model,
    )


def build_chat(section: ClientSection) -> ChatClient:
    """A client of any server with /chat/completions, which is its renderer as well."""
    url = section.base_url if isinstance(section.base_url, str) else section.base_url[0]
    return ChatClient(
        url,
        os.environ.get(section.api_key_var),
        model=section.served_model,
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
    )


def build_renderer_of(model: str, tokenizer: str | None, section: RendererSection) -> Renderer:
    """The renderer of a model's tokenizer (or of another one); its family by config.json."""
    model_type = None
    for directory in filter(None, (model, tokenizer)):
        path = Path(directory) / "config.json"
        if model_type is None and path.is_file():
            model_type = json.loads(path.read_text()).get("model_type")
    return build_renderer(load_tokenizer(tokenizer or model), section, model_type)


def build_scratch_renderer(scratch: ScratchSection, section: RendererSection) -> Renderer:
    """The renderer of a model that is made from scratch; its tokenizer is the same wherever it is built."""
    with TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(build_letters_tokenizer(directory, phrases=scratch.phrases))
    return build_renderer(tokenizer, section, scratch.family)
