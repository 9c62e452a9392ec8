"""Learning from another model: the algos `opd`, `opsd` and `sft`, and [orchestrator.teacher]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.config.section import Section

TEACHER_KEY_VAR = "TEACHER_API_KEY"
MODEL_KEY_VAR = "STRETTO_MODELS_API_KEY"
"""Environment variable in which `rl` gives its orchestrator the key of the engines that it starts for [models.NAME]."""

WITHOUT_REWARD = ("opd", "opsd", "sft")
"""Algos that report the reward and do not train on it: their tokens have no policy loss."""

WITHOUT_BEHAVIOR = ("sft",)
"""Algos that learn tokens as given: log-probabilities of their sampling are not used."""


class RequestsSection(Section):
    """Keys of all clients of engines."""

    base_url: list[str] | str | None = None
    """OpenAI-style address of the engine or router; a list spreads requests over several."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the API key, if there is one."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one request, which generates, scores or plays one sample or group."""
    ready_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for an engine to become healthy."""
    max_retries: int = Field(3, ge=0)
    """Retries of a request that failed for reasons of infrastructure."""


class TeacherSection(RequestsSection):
    """A frozen model behind an engine: ours, or vLLM. It must have the policy's tokenizer.

    `rl` starts an engine of its own where there is a model and no base_url.
    """

    base_url: list[str] | str | None = None
    """OpenAI-style address of its engine; a list spreads requests over several. None: `rl` starts one."""
    model: str | None = None
    """Model named in requests; None: the engine's only one. Without base_url: the directory that `rl` serves."""
    api_key_var: str = TEACHER_KEY_VAR


class ModelLimits(Section):
    """How functions may ask a frozen model: `ctx.model(NAME).chat(...)`."""

    max_concurrent: int = Field(64, gt=0)
    """Requests at the same time; others wait for their turn."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Requests begun per minute, as an API may limit them; None: no limit."""
    cache_size: int = Field(10_000, ge=0)
    """Replies that are kept, in memory (the latest used) and in RUN/replies (the latest asked for), where a run that is
    continued finds them. Only requests with temperature = 0 are answered from them."""
    prompt_price: float | None = Field(None, ge=0)
    """Price of a million tokens of prompts, in any currency, for the metric of costs; None: 0."""
    reply_price: float | None = Field(None, ge=0)
    """Price of a million tokens of replies; None: 0."""
    max_cost: float | None = Field(None, gt=0)
    """Most that all requests of a run may cost, over all its starts. Then it stops in order, and saves; requests that
    are under way are still paid. None: no bound."""


class ModelClientSection(ModelLimits):
    """[models.NAME.client]: how a frozen model is asked."""

    api_key_var: str | None = None
    """Environment variable with the API key, for a model at base_url; None: TEACHER_API_KEY, if that is set."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest wait for one reply, retries included, after its turn has come."""
    max_retries: int = Field(4, ge=0)
    """Retries of a request that failed for reasons of infrastructure. A server that says "too many requests" (429) or
    is not available (503) is asked again until timeout_s."""


class FrozenModelPlace(TeacherSection, ModelLimits):
    """Where a frozen model runs, and how it is asked."""

    source: str | None = None
    """What its kept replies are replies of: a digest of settings and files of the run's own engines, which the launcher
    fills in. None: base_url."""


class TaughtAlgo(Section):
    """Keys of the algos with a teacher."""

    type: str
    teacher: TeacherSection | None = None
    """A teacher for these environments only, which runs at its base_url; None: `teachers`, else the run's."""
    teachers: dict[str, float] = Field({})
    """Teachers for these environments only: names of [models.NAME], with weights relative to each other. `opd` learns
    from all of them: what counts is the weighted mean of their log-probabilities. `sft` takes one."""


class ScoredAlgo(Section):
    """Keys of the algos whose teacher scores the policy's rollouts."""

    top_k: int | None = Field(None, ge=1, le=20)
    """Number of tokens that the teacher holds for likeliest, at each sampled one, from which the policy learns besides
    it: a gradient without the noise of one sample. None: from the sampled token alone. vLLM gives at most 20."""
    divergence: Literal["reverse", "forward"] = "reverse"
    """With top_k, what is made small: `reverse`, KL(policy || teacher), where the policy gives up what the teacher
    would not say; `forward`, KL(teacher || policy), where it learns all that the teacher would say."""


class OpdAlgo(TaughtAlgo, ScoredAlgo):
    """On-policy distillation: the policy's own rollouts, pulled token by token to a teacher.

    The reward is reported and not trained on; [trainer.loss] does not touch these tokens.
    """

    type: Literal["opd"] = "opd"


class OpsdAlgo(ScoredAlgo):
    """On-policy self-distillation: as opd, with the policy itself, which is shown a demonstration, as the teacher.

    The reward is reported and not trained on; [trainer.loss] does not touch these tokens.
    """

    type: Literal["opsd"] = "opsd"
    demo_key: str = "demonstration"
    """Key of a task's data that holds its demonstration; without it the environment's `demonstration(task)`."""
    template: str = "Here is how it can be done:\n\n{demonstration}\n\nNow answer in your own words."
    """System message that the teacher sees before everything else; it must have {demonstration} once."""


class SftAlgo(TaughtAlgo):
    """A teacher plays the rollouts, and the policy learns its tokens by cross-entropy.

    The reward is reported; [trainer.loss] does not touch these tokens.
    """

    type: Literal["sft"] = "sft"
    min_reward: float | None = None
    """Rollouts with a lower reward are not trained on; None: all are."""
