"""Learning from another model: `type = "opd"` in [orchestrator.algo], and [orchestrator.teacher]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.config.section import Section


class OpdAlgo(Section):
    """On-policy distillation: the policy's own rollouts, pulled token by token to [orchestrator.teacher].

    The reward is reported and not trained on; [trainer.loss] does not touch these tokens.
    """

    type: Literal["opd"] = "opd"


class TeacherSection(Section):
    """A frozen model behind any engine that returns prompt_logprobs: ours, or vLLM.

    It must have the policy's tokenizer, and a context of at least seq_len + 1 tokens.
    """

    base_url: list[str] | str
    """OpenAI-style address of its engine; a list spreads requests over several."""
    model: str | None = None
    """Model named in requests; None: the engine's only one."""
    api_key_var: str = "TEACHER_API_KEY"
    """Environment variable that holds the API key, when there is one."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one request, which scores one sample."""
    ready_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for it to become healthy."""
    max_retries: int = Field(3, ge=0)
    """Retries of a request that failed for reasons of infrastructure."""
