"""Config sections become the parts that both training and the verb `eval` need."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import load_tokenizer
from stretto.config.model import RendererSection
from stretto.config.orchestrator import ClientSection, EnvSection
from stretto.envs.base import Environment, load_environment
from stretto.transports.engine.client import EngineClient


def build_env(section: EnvSection) -> Environment:
    """The environment of a section, under the name metrics use."""
    return load_environment(section.id, section.args, section.name or section.id)


def build_engines(section: ClientSection) -> EngineClient:
    urls = [section.base_url] if isinstance(section.base_url, str) else section.base_url
    return EngineClient(
        urls,
        section.admin_base_url,
        os.environ.get(section.api_key_var),
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
    )


def build_renderer_of(tokenizer: str, model: str, section: RendererSection) -> Renderer:
    """The renderer of a tokenizer; which family by the model's (or the tokenizer's) config.json."""
    model_type = None
    for directory in (Path(model), Path(tokenizer)):
        path = directory / "config.json"
        if model_type is None and path.is_file():
            model_type = json.loads(path.read_text()).get("model_type")
    return build_renderer(load_tokenizer(tokenizer), section, model_type)
