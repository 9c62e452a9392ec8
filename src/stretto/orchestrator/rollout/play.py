"""The draw that is played, and the settings, requests and checks of its turns.

Both a turn of one member (recorder.py) and the one request of a single-turn group (player.py) go this way. `Echo` has
the weights of the environment's messages, if these are learned too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stretto.base.errors import ConfigError, DataError, EngineError, EnvError, StrettoError, boundary
from stretto.base.foreign import call, load_function
from stretto.chat.backend import Message
from stretto.chat.placeholders import has_image
from stretto.chat.render import Renderer
from stretto.config.sections.algorithm import EchoAlgo
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import Environment, OutOfContext, SingleTurnEnv
from stretto.envs.models import ChatModel
from stretto.orchestrator.rollout.continuation import Interruption
from stretto.records.generate import Completion, GenerateRequest, SamplingParams, VersionSpan
from stretto.records.images import Image
from stretto.records.outcomes import Reason
from stretto.records.partial import ABORTED, PartialRollout
from stretto.records.rollout import Task

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32

POLICY = "policy"
"""Name of the agent if an episode has only one."""
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
UNRESTRICTED = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "min_tokens": 0, "bad_words": ()}
BIASED = "logit_bias: the engine's log-probabilities would be of the changed logits, and the trainer's of the model's"


WARN_AFTER_MESSAGES = 64
"""Messages of an environment after which a warning is logged if none had a weighted role."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Echo:
    """The weights of an environment's messages, which are learned too, by cross-entropy.

    An agent that can predict what a tool or a user will say has a model of its world. The renderer finds the tokens of
    the messages' text; algorithms/losses.py (`ce`) adds them to the loss.
    """

    weights: Mapping[str, float]
    """By role."""
    is_learned: Callable[[Message], bool] | None = None
    """The user's filter."""
    env: str = ""
    path: str = "orchestrator.algo"
    """Config path of the section, for messages."""
    _num_messages: Counter[str] = field(default_factory=Counter, compare=False)
    """Messages of the environment so far, by role."""

    def weight_of(self, message: Message) -> float:
        """Weight of the text of a message; 0 if it is not learned.

        Raises: ConfigError with file and line if the user's filter raises.
        """
        self._count(message["role"])
        weight, where = self.weights.get(message["role"], 0.0), f"{self.path}.filter"
        if weight and self.is_learned is not None and not call(self.is_learned, message, {}, where):
            return 0.0
        return weight

    def _count(self, role: str) -> None:
        self._num_messages[role] += 1
        is_due = self._num_messages.total() == WARN_AFTER_MESSAGES
        if is_due and not self._num_messages.keys() & self.weights.keys():
            roles, weighted = " and ".join(sorted(self._num_messages)), " and ".join(self.weights)
            text = "%s: %s has answered %d times, always as %s, and only %s has a weight: no answer is learned"
            logger.warning(text, self.path, self.env, WARN_AFTER_MESSAGES, roles, weighted)


def build_echo(algo: EchoAlgo, env: Environment, path: str = "orchestrator.algo") -> Echo:
    """Build the weights of an environment's messages; `path` is the config path of the section.

    Raises: ConfigError for a filter that does not exist, and for a single-turn environment.
    """
    if isinstance(env, SingleTurnEnv):
        raise ConfigError(
            f'{path}.type = "echo": {env.name} has one turn and never answers, so that there would be '
            'nothing to learn; use "grpo", or an environment of several turns.'
        )
    by_role = {"tool": algo.tool, "user": algo.user, "system": algo.system}
    is_learned = None if algo.filter is None else load_function(algo.filter, {}, f"{path}.filter")
    weights = {role: weight for role, weight in by_role.items() if weight is not None}
    return Echo(weights, is_learned, env.name, path)


class GenerationClient(Protocol):
    """The client of an engine (transports/engine/client.py) or of any chat server (chat.py)."""

    async def generate(self, request: GenerateRequest) -> list[Completion]: ...


@dataclass(frozen=True)
class Draw:
    """A task to be played: its number, its number of members, and the version it starts with."""

    group_id: int
    task: Task
    num_members: int
    version: int
    partials: Mapping[int, PartialRollout] = field(default_factory=dict)  # by member: what it continues
    name: str = "g"  # prefix of its rollout ids, as in `g12.3`; evals have other prefixes
    notes: dict[int, Any] = field(default_factory=dict)  # by member: `RolloutResult.note`, for `score_group`

    def rollout_id(self, member: int) -> str:
        return f"{self.name}{self.group_id}.{member}"


@dataclass(frozen=True)
class PlaySettings:
    """The settings that are the same for all turns of a player."""

    engine: GenerationClient
    renderer: Renderer
    sampling: SamplingSection
    seq_len: int
    seed: int = 0
    run_id: str = "run"
    interruption: Interruption | None = None  # saves turns of unfinished rollouts, and interrupts them
    echo: Echo | None = None  # weights of the environment's messages
    masks_older_versions: bool = False  # of a partial rollout, do not train what older weights sampled
    is_learned: bool = False  # its replies are trained by their log-probabilities
    max_support: int | None = None  # most tokens in a support, if top_p, top_k and min_p are replayed
    system_prompts: Mapping[str, str] = field(default_factory=dict)  # by environment
    models: Mapping[str, ChatModel] = field(default_factory=dict)  # frozen ones that environments may ask
    model_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by environment: what it calls them

    async def request_completions(
        self, request: GenerateRequest, version: int, *, is_learned: bool
    ) -> list[Completion]:
        """Send a request and check the completions; tokens without a version get `version`.

        Once the rollouts of the run are interrupted, this waits to be cancelled.

        Raises: EngineError, DataError.
        """
        request_id, interruption = request.request_id, self.interruption
        if interruption is not None:
            await interruption.begin_request(request_id)
        try:
            with boundary(EngineError, f"generate {request_id}"):
                completions = await self.engine.generate(request)
        finally:
            if interruption is not None:
                interruption.end_request(request_id)
        check_completions(completions, request.n)
        if is_learned and request.sampling.top_k is not None:  # `limit_support` sets it if anything cuts the support
            check_supports(completions)
        return [_with_version(completion, version) for completion in completions]

    def build_request(
        self,
        request_id: str,
        prompt_ids: Int32[np.ndarray, " prompt"],
        images: tuple[Image, ...],
        seed: int,
        version: int,
        *,
        is_learned: bool,
        num_completions: int = 1,
        session_id: str | None = None,
        routed_experts_start: int = 0,
        overrides: Mapping[str, Any] = NO_OVERRIDES,
    ) -> GenerateRequest:
        """Build the request for replies to a prompt; `overrides` are sampling settings of this turn.

        Raises: OutOfContext, EnvError as `sampling_params`.
        """
        return GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            n=num_completions,
            sampling=self.sampling_params(len(prompt_ids), seed, is_learned=is_learned, **overrides),
            cache_salt=str(version),
            session_id=session_id,
            images=images,
            image_token_id=self.renderer.image_token_id if images else None,
            routed_experts_start=routed_experts_start,
        )

    def sampling_params(
        self, num_prompt_tokens: int, seed: int, *, is_learned: bool = False, **overrides: Any
    ) -> SamplingParams:
        """The run's sampling, with max_tokens limited to what fits in seq_len.

        Raises: OutOfContext if nothing fits; EnvError if the reply is trained and its log-probabilities would be over
        a part of the vocabulary, or of changed logits, that the trainer cannot replay.
        """
        room = self.seq_len - num_prompt_tokens
        if room < 1:
            raise OutOfContext(
                f"{num_prompt_tokens} prompt tokens leave no room for a reply in seq_len = {self.seq_len}",
                reason=Reason.CONTEXT_FULL,
            )
        sampling = self.sampling
        room = min(room, overrides.pop("tokens_left", room))  # of a part of the episode
        max_tokens = overrides.pop("max_tokens", None) or sampling.max_completion_tokens or room
        if overrides.get("top_k") in (0, -1):  # the engines' spellings of no limit
            overrides["top_k"] = None
        if not overrides:
            params = self._learned_params if is_learned else self._params
        else:
            params = self._build_params(overrides)
            params = limit_support(params, self.max_support) if is_learned else params
        return msgspec.structs.replace(params, max_tokens=min(max_tokens, room), seed=seed)

    @cached_property
    def _params(self) -> SamplingParams:
        """What turns without settings of their own have in common."""
        return self._build_params({})

    @cached_property
    def _learned_params(self) -> SamplingParams:
        return limit_support(self._params, self.max_support)

    def _build_params(self, overrides: dict[str, Any]) -> SamplingParams:
        settings = self.sampling.model_dump(exclude={"max_completion_tokens"}) | overrides
        settings |= {name: as_tuple(settings[name]) for name in ("stop", "stop_token_ids", "bad_words")}
        settings["min_tokens"] = settings["min_tokens"] or 0
        settings["logit_bias"] = bias_by_token(settings["logit_bias"] or {}, self.renderer)
        if not settings["ignore_eos"]:
            settings["stop_token_ids"] = (*self.renderer.stop_ids, *settings["stop_token_ids"])
        return SamplingParams(**settings)

    def check_reply(self, completion: Completion) -> None:
        """Raises: EngineError if a reply is incomplete, or contains the placeholder of an image."""
        token_ids = completion.token_ids
        if completion.finish_reason == ABORTED or not len(token_ids):
            raise EngineError(f"the engine returned an incomplete reply of {len(token_ids)} tokens")
        placeholder = self.renderer.image_token_id
        if placeholder is not None and (token_ids == placeholder).any():
            raise EngineError(
                f"the policy sampled the placeholder of an image (token {placeholder}), for which there is no image; "
                "the reply cannot be trained and is sampled again"
            )

    def read_reply(self, request: GenerateRequest, completion: Completion) -> str:
        """The text of a reply of one turn, up to and including the stop text that ended it.

        Raises: EngineError as `check_reply`.
        """
        self.check_reply(completion)
        text = self.renderer.parse(completion.token_ids, request.prompt_ids).get("content") or ""
        return text_to_stop(text, completion, request.sampling.min_tokens)

    def is_unlearnable(self, temperature: float | None) -> bool:
        """Is a reply at this temperature greedy, so that it cannot be trained?"""
        return self.is_learned and temperature == 0 and self.sampling.temperature > 0

    def behavior_temperature(self, override: float | None = None) -> float:
        """The temperature of the reported logprobs; greedy replies report those of temperature 1."""
        temperature = self.sampling.temperature if override is None else override
        return temperature or 1.0


async def render_messages(
    renderer: Renderer, messages: list[Message], system_prompt: str | None, where: str
) -> tuple[Int32[np.ndarray, " tokens"], tuple[Image, ...]]:
    """Token ids and images of a task's messages, after a system prompt if there is one; `where` is for errors."""
    try:
        messages = with_system_prompt(messages, system_prompt)
        await load_images(renderer, messages)
        return renderer.render_prompt(messages), renderer.images_of(messages)
    except StrettoError:
        raise
    except Exception as error:  # the boundary of a rollout
        raise EnvError(f"{where}: {type(error).__name__}: {error}") from error


def with_system_prompt(messages: list[Message], prompt: str | None) -> list[Message]:
    """The messages behind a system message, unless they begin with one."""
    if prompt is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


async def load_images(renderer: Renderer, messages: Sequence[Message]) -> None:
    """Read the pictures of messages in a thread; rendering then finds their patches in a cache.

    A photograph takes a tenth of a second.

    Raises: DataError, ConfigError as `Renderer.images_of`.
    """
    if any(has_image(message) for message in messages if not isinstance(message.get("content"), str)):
        await asyncio.to_thread(renderer.images_of, messages)


def limit_support(params: SamplingParams, max_support: int | None) -> SamplingParams:
    """Sampling with a top_k of at most max_support, so that the trainer can replay it.

    Raises: EnvError if the trainer cannot replay it.
    """
    if params.logit_bias and params.temperature > 0:
        raise EnvError(
            f"a reply that is trained is sampled with {BIASED}; remove it, ban words with bad_words, or let an agent "
            "with is_trained = false reply"
        )
    given = {name: getattr(params, name) for name in UNRESTRICTED}
    if given == UNRESTRICTED or params.temperature == 0:
        return params
    if max_support is None:
        settings = ", ".join(
            f"{name} = {list(value) if isinstance(value, tuple) else value}"
            for name, value in given.items()
            if value != UNRESTRICTED[name]
        )
        raise EnvError(
            f"a reply that is trained is sampled with {settings}: the engine's log-probabilities would be over the "
            "tokens that are left, and the trainer's over the whole vocabulary; remove it, add "
            "[orchestrator.train.replay], or let an agent with is_trained = false reply"
        )
    if params.top_k is not None and params.top_k > max_support:
        raise EnvError(
            f"a reply that is trained is sampled with top_k = {params.top_k}, more than orchestrator.train.replay."
            f"max_tokens = {max_support}; lower it or raise that"
        )
    return msgspec.structs.replace(params, top_k=params.top_k or max_support)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A setting that is one value, several, or None, as a tuple."""
    if value is None or isinstance(value, str | int):
        return () if value is None else (value,)
    return tuple(value)


def bias_by_token(biases: Mapping[Any, float], renderer: Renderer) -> dict[int, float]:
    """logit_bias by token id; a key is a token id, or the text of one token.

    Raises: EnvError for a text that is not one token.
    """
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if isinstance(key, str) and not (key.isascii() and key.isdigit()):
            if not hasattr(renderer, "encode"):
                raise EnvError(f"logit_bias: {key!r} must be a token id, because the engine takes text only")
            ids = renderer.encode(key)
            if len(ids) != 1:
                raise EnvError(
                    f"logit_bias: {key!r} is {len(ids)} tokens ({list(map(int, ids))}), not one; name each by its id"
                )
            key = ids[0]
        found[int(key)] = found.get(int(key), 0.0) + bias
    return found


def text_to_stop(text: str, completion: Completion, min_tokens: int = 0) -> str:
    """A reply's text up to and including the stop text that ended it; its last token may go on behind.

    With min_tokens it is the last stop text of the reply, because earlier ones may not have counted.
    """
    stop = completion.stop_reason
    if not isinstance(stop, str) or stop not in text:
        return text
    return text[: (text.rfind(stop) if min_tokens else text.find(stop)) + len(stop)]


def check_completions(completions: Sequence[Completion], num_requested: int) -> None:
    """Check the number of completions and of their logprobs.

    Raises: EngineError, DataError if one is wrong.
    """
    if len(completions) != num_requested:
        raise EngineError(f"the engine returned {len(completions)} completions, {num_requested} were requested")
    for completion in completions:
        if len(completion.logprobs) != len(completion.token_ids):
            raise DataError(
                f"the engine gave {len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
            )


def check_supports(completions: Sequence[Completion]) -> None:
    """Check that completions come with the support of their tokens.

    Raises: EngineError if one has none.
    """
    if any(completion.support is None and len(completion.token_ids) for completion in completions):
        raise EngineError(
            "the engine does not return which tokens top_p, top_k, min_p, min_tokens and bad_words left, so nothing "
            "can be replayed; serve it with inference.enable_return_sampling_mask = true"
        )


def _with_version(completion: Completion, version: int) -> Completion:
    if completion.versions or not (num_tokens := len(completion.token_ids)):
        return completion
    return msgspec.structs.replace(completion, versions=(VersionSpan(version, 0, num_tokens),))
