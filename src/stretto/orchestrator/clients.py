"""Builds, from config sections, the clients of the policy's engines."""

from __future__ import annotations

import os

from stretto.base.errors import ConfigError
from stretto.base.status import report
from stretto.config.sections.orchestrator import ClientSection
from stretto.data.pictures import openai_messages
from stretto.orchestrator.build import urls_of
from stretto.transports.engine.chat import ChatClient
from stretto.transports.engine.client import EngineClient


def build_engines(section: ClientSection, key: str | None = None) -> EngineClient:
    """Build the client of a run's engines; the default API key is in an environment variable."""
    return EngineClient(
        list(urls_of(section)),
        section.admin_base_url,
        key or os.environ.get(section.api_key_var),
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
        liveness_interval_s=section.liveness_interval_s,
        liveness_timeout_s=section.liveness_timeout_s,
        recovery_timeout_s=section.recovery_timeout_s,
        session_headers=tuple(section.extra_headers_from_state),
        splits_samples=section.split_samples,
        headers=headers_of(section),
        on_down=lambda url, reason: report("engine", url=url, state="down", reason=reason),
    )


def headers_of(section: ClientSection) -> dict[str, str]:
    """Headers of every request.

    Raises: ConfigError for an environment variable that is not set.
    """
    if missing := [name for name in section.headers_from_env.values() if name not in os.environ]:
        raise ConfigError(
            f"orchestrator.client.headers_from_env: the environment variable {missing[0]} is not set; set it, or "
            "remove the header"
        )
    return section.headers | {header: os.environ[name] for header, name in section.headers_from_env.items()}


def build_chat(section: ClientSection) -> ChatClient:
    """Build the client of any server with /chat/completions; it is also the renderer."""
    return ChatClient(
        urls_of(section)[0],
        os.environ.get(section.api_key_var),
        model=section.served_model,
        timeout_s=section.timeout_s,
        max_retries=section.max_retries,
        prepare=openai_messages,
    )
