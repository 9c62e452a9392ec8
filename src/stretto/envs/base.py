"""What an environment is, and how one is loaded.

An environment owns its tasks and its rewards and nothing else. The context that it is given records tokens, logprobs
and policy versions (`orchestrator/rollout/recorder.py`), so no environment can get them wrong. There are two kinds:

* `SingleTurnEnv`: one prompt, one reply, one score. All samples of a group are one request to the engine.
* any class with `tasks` and `async rollout(task, ctx)`, which may take as many turns as it likes.

`load_environment` takes the id of an environment that is bundled or an add-on's, the `module:attr` of a class or
function, or the name of a module that holds one environment. find.py says what ids mean.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, EnvError, StrettoError
from stretto.base.foreign import call_async, defined_in, definition_of, guarded, load_module
from stretto.data.messages import checked_messages, is_plain, short_repr
from stretto.data.values import checked_json, describe_value, with_whole_text
from stretto.envs import find
from stretto.envs.models import ChatModel, model_of
from stretto.envs.parameters import check_argument_types, check_methods, signature_of
from stretto.envs.result import MAX_REWARD, checked_result, checked_reward
from stretto.envs.result import RolloutResult as RolloutResult  # environments import all from here
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Task
from stretto.records.support import Support

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from stretto.config.sections.orchestrator import SamplingSection

Split = Literal["train", "eval"]
Message = dict[str, Any]
Prompt = list[Message] | str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy. `message` is the assistant message, to be appended to the history."""

    message: Message
    text: str
    """Its text; up to and including the stop text that ended it, even if its last token goes on."""
    token_ids: np.ndarray  # int32 [completion]
    finish_reason: str  # "stop" | "length"
    stop_reason: int | str | None = None
    """The stop text or the token of `stop_token_ids` that ended it; None for an end token of the model."""
    num_prompt_tokens: int = 0
    logprobs: np.ndarray | None = None
    """float32 [completion], nats under the policy that sampled; None if not recorded."""
    versions: tuple[VersionSpan, ...] = ()  # of the policy that sampled its tokens
    support: Support | None = None  # tokens that each of its tokens was drawn from; None: all, or not known
    turn: int = 0
    """Its number in the episode, all agents together, from 0: its place in `RolloutResult.turn_rewards`."""


class LimitReached(EnvError):
    """The episode has used up its turns, tokens or time: it gets no further reply.

    An environment may catch it and still give a reward. If it does not, the episode ends as truncated with reward 0.
    """


class OutOfContext(LimitReached):
    """The history leaves no room in `seq_len` for another reply."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode, None for no limit. An environment sets its own as `limits`."""

    max_turns: int | None = None
    """Replies, summed over all agents."""
    max_tokens: int | None = None
    """Sampled tokens, summed over all replies."""
    timeout_s: float | None = None
    """Seconds after which no turn begins."""


@dataclass(frozen=True)
class EpisodeInfo:
    """Which rollout of the run an episode is."""

    rollout_id: str
    group_id: int
    """Number of the draw of its task."""
    member: int
    """Number of the rollout in its group."""


class RolloutContext(Protocol):
    """The policy, as an environment sees it during one episode."""

    async def generate(
        self, prompt_ids: Int[np.ndarray, " prompt"], tools: list[dict] | None = None, **sampling: Any
    ) -> Reply:
        """Sample a reply that continues these tokens. A prompt that extends the tokens so far extends the branch.

        Several may be awaited at once.

        Raises: LimitReached if a limit of the episode is reached, or no reply fits after the prompt.
        """

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        """Sample a reply to these messages. New messages extend the tokens so far if the renderer can do that.

        Raises: LimitReached as `generate`.
        """

    @property
    def sampling(self) -> SamplingSection | None:
        """The sampling settings of this rollout, of training or of an eval; None in worker processes."""

    @property
    def episode(self) -> EpisodeInfo | None:
        """Which rollout this is."""

    def keep(self, sequences: Sequence[tuple[Int[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]]) -> None:
        """Train on these sequences only: pairs of tokens (int32) and a mask of those that are trained (bool).

        Sampled tokens that are in none of them are not trained. A sequence may end with given tokens.

        Raises: EnvError if a sequence is not what the policy was given and sampled.
        """

    def agent(self, name: str, *, is_trained: bool = True) -> RolloutContext:
        """Another agent of the same episode, with its own history and its own stream of samples.

        The same name gives the same agent. An agent that is not trained uses the policy's weights too. Agents
        get their rewards from `RolloutResult.agent_rewards`; those that are not named there get `reward`.
        """

    def conversation(self, number: int) -> RolloutContext:
        """Another conversation of this agent, with its own history and the same reward; number 0 is this one.

        The same number gives the same conversation. Turns of several may be awaited at once.
        """

    def model(self, name: str) -> ChatModel:
        """A frozen model beside the policy, [models.NAME]: `await ctx.model("judge").chat(messages)`.

        Raises: EnvError if the run has no model of this name.
        """


class NeedsTokenizer(ConfigError):
    """An environment that cannot be built where the policy's tokenizer is not."""


@dataclass(frozen=True)
class RunInfo:
    """What an environment may know of its run; passed as the argument `run` if the environment takes one.

    In worker processes all fields but `models` and `directory` have their defaults.
    """

    tokenizer: str | None = None
    """Directory of the policy's tokenizer."""
    engine_urls: tuple[str, ...] = ()
    """Addresses of the policy's engines, or of the router in front of them."""
    model_urls: Mapping[str, str] = field(default_factory=dict)
    """Addresses of other models, by name."""
    models: Mapping[str, ChatModel] = field(default_factory=dict)
    """Frozen models beside the policy, [models.NAME]."""
    encode: Callable[[str], np.ndarray] | None = None
    """Turns a text into int32 tokens, without special tokens or a template."""
    prompt_ids: Callable[[list[Message], list[dict] | None], np.ndarray] | None = None
    """Turns messages and tools into the int32 tokens of a prompt, up to where the reply begins."""
    render: Callable[[list[Message], list[dict] | None], str] | None = None
    """The same as text."""
    directory: str | None = None
    """Where environments may keep files that a resumed run finds again: RUN/episodes; None for a look at tasks."""
    policy_name: str = "actor"
    """Name of the policy for hooks."""
    table: Mapping[str, Any] = field(default_factory=dict)
    """The value of every flag of vime by attribute, out of what the run resolved."""
    seed: int = 0
    seq_len: int | None = None
    group_size: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_completion_tokens: int | None = None

    def model(self, name: str) -> ChatModel:
        """A frozen model beside the policy, for code that has no `ctx`, such as `score` of a single turn.

        Raises: ConfigError if the run has no model of this name.
        """
        return model_of(self.models, name, ConfigError)


@dataclass(frozen=True)
class TaskSource:
    """Tasks by index: `make(i)` gives the same task in every process and every run."""

    make: Callable[[int], Task]
    num_tasks: int | None = None
    """None if there is no end of them."""
    is_ordered: bool = False
    """True: every epoch has them in order of index. False: shuffled."""
    fingerprint: int | None = None
    """Checksum of the data that tasks are made from. A run that is resumed must find the same; None is not checked."""

    def task(self, index: int) -> Task:
        """Task number `index`; a finite source starts over at its end."""
        return self.make(index if self.num_tasks is None else index % self.num_tasks)


@runtime_checkable
class Environment(Protocol):
    """Anything with a name, tasks and episodes.

    Optional methods: `sft_rows(num_rows, seed) -> [{"messages": [...]}]`; `async close()`, to stop what it has
    started; `async score_group(group, notes) -> rewards or None`, for rewards that compare all members that did not
    fail (`notes` are the `note` of their results).
    """

    name: str

    def tasks(self, split: Split) -> TaskSource:
        """The tasks of one split: to train on, or held out."""

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        """Play one episode."""


class SingleTurnEnv(ABC):
    """One prompt, one reply, one score. The samples of a group share one request and one rendered prompt."""

    name: str

    @abstractmethod
    def tasks(self, split: Split) -> TaskSource:
        """The tasks of one split: to train on, or held out."""

    @abstractmethod
    def prompt(self, task: Task) -> Prompt | Awaitable[Prompt]:
        """The messages that the policy answers, or the text of a single message of the user."""

    @abstractmethod
    def score(self, task: Task, text: str) -> float | RolloutResult | Awaitable[float | RolloutResult]:
        """Reward of a reply. If it is `async`, the members of a group are scored at the same time."""

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        messages = self.prompt(task)
        if inspect.isawaitable(messages):
            messages = await messages
        messages = checked_prompt(messages, where_of(self, "prompt"))
        reply = await ctx.chat(messages)
        return await checked_score(self.score(task, reply.text), where_of(self, "score"))


def where_of(env: Environment, method: str, where: str | None = None) -> str:
    """For messages: the environment and its method (or `where`), and file and line of the method."""
    function = getattr(env, method)
    where = where or f"environment {env.name}: {method}"
    return f"{where} ({definition_of(getattr(function, '__func__', function))})"


def checked_prompt(prompt: Prompt, where: str) -> list[Message]:
    """What an environment's `prompt` returned, as messages; `where` is for errors.

    Raises: EnvError if it is neither text nor messages, or one of these is not valid.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": with_whole_text(prompt)}]
    if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(each, Mapping) for each in prompt):
        raise EnvError(
            f"{where} is {reprlib.repr(prompt)}; return a text, or a list of messages such as "
            '{"role": "user", "content": "..."}.'
        )
    return checked_messages(prompt, where)


async def checked_score(score: float | RolloutResult | Awaitable[float | RolloutResult], where: str) -> RolloutResult:
    """The return value of an environment's `score`, checked, as a RolloutResult; `where` is for messages.

    Raises: EnvError if it is no finite number and no valid RolloutResult.
    """
    if inspect.isawaitable(score):
        score = await score
    if isinstance(score, RolloutResult):
        return checked_result(score, where)
    return RolloutResult(reward=checked_reward(score, where, "its reward"))


async def prompt_of(env: Environment, task: Task, where: str) -> list[Message]:
    """What the `prompt` of an environment returns for a task, as messages; `where` is for errors.

    Raises: EnvError for whatever the environment raises, or a prompt that is not valid.
    """
    prompt = await call_async(lambda: env.prompt(task), where)  # type: ignore[attr-defined]
    if isinstance(prompt, list) and prompt and all(map(is_plain, prompt)):
        return [dict(message) for message in prompt]  # nothing is wrong, so no message is made
    return checked_prompt(prompt, where if isinstance(prompt, str) else where_of(env, "prompt", where))


@dataclass(frozen=True)
class Score:
    """What an environment says of a reply, or why it says nothing, and the time that it took."""

    result: RolloutResult | StrettoError
    time_s: float


async def score_replies(env: SingleTurnEnv, task: Task, texts: Mapping[str, str], scores: dict[str, Score]) -> None:
    """Score replies to a task, one after the other, by the rollout that each belongs to.

    scores: gets each score as soon as it is known; it has those so far if this is cancelled.
    """
    now = asyncio.get_running_loop().time
    result: RolloutResult | StrettoError
    for rollout_id, text in texts.items():
        where, began = f"environment {env.name}, rollout {rollout_id}, score", now()
        try:
            score = await call_async(partial(env.score, task, text), where)
            if isinstance(score, float | int) and -MAX_REWARD <= score <= MAX_REWARD:
                result = RolloutResult(reward=float(score))  # nothing is wrong, so no message is made
            else:
                result = await checked_score(score, where_of(env, "score", where))
        except StrettoError as error:
            result = error
        scores[rollout_id] = Score(result, now() - began)


async def play_episode(env: Environment, task: Task, ctx: RolloutContext, where: str) -> RolloutResult:
    """Play one episode of an environment and check its result; `where` is for messages.

    Raises: EnvError for whatever the environment raises, or a result that is not valid.
    """
    return checked_result(await call_async(lambda: env.rollout(task, ctx), where), where)


def load_environment(
    env_id: str,
    args: dict[str, Any] | None = None,
    name: str | None = None,
    run: RunInfo | None = None,
    *,
    in_worker: bool = False,
) -> Environment:
    """Build the environment `env_id` with keyword arguments `args`; `name` is its name in metrics.

    An environment that takes an argument `run` gets it, unless `args` has one.

    Raises: ConfigError for an unknown id, a module or attribute that does not exist, arguments that do not fit, and,
    with file and line, for whatever the environment's constructor raises.
    """
    args, path = dict(args or {}), env_id
    if needs_worker(env_id):
        if not in_worker:
            raise ConfigError(f"environment {env_id!r} is played in worker processes; only rl and eval start those.")
        path, args = find.worker_factory(env_id, args)
    factory = _find_factory(path)
    signature = signature_of(factory, env_id)
    if (find.path_of(env_id) is not None or find.hub_of(env_id) is not None) and inspect.isclass(factory):
        check_argument_types(factory, args, env_id)
    if inspect.isclass(factory):
        check_methods(factory, env_id)
    if run is not None and "run" in signature.parameters:
        args.setdefault("run", run)
    try:
        signature.bind(**args)
    except TypeError as cause:
        import difflib

        parameters = [str(p.replace(annotation=p.empty)) for n, p in signature.parameters.items() if n != "source"]
        known = ", ".join(parameters) or "none"
        wrong = next((name for name in args if name not in signature.parameters), "")
        near = difflib.get_close_matches(wrong, signature.parameters, n=1)
        way = f"Did you mean {near[0]!r}?" if near else "Change `args`."
        if inspect.isfunction(factory) and find.path_of(env_id) is None:
            way += f' A reward function is no environment: id = "dataset", args = {{ path = ..., reward = "{env_id}" }}'
        raise ConfigError(f"environment {env_id!r}: {cause}; its arguments are {known}. {way}") from cause
    with guarded(ConfigError, f"environment {env_id!r}"):
        env = factory(**args)
        if not isinstance(env, Environment):
            raise ConfigError(
                f"{env_id!r} made a {type(env).__name__}, which lacks name, tasks or rollout; derive it from "
                "SingleTurnEnv or MultiTurnEnv of stretto.envs, or write these three."
            )
        env.name = name or env.name
    return env


def tasks_of(env: Environment, split: Split) -> TaskSource:
    """The tasks of one split, checked: each is a Task that bears the environment's name in this run.

    Raises: ConfigError if `tasks` raises or returns no valid TaskSource. `make` of the result raises EnvError, with
    file and line.
    """
    where = f"environment {env.name!r}, tasks({split!r})"
    with guarded(ConfigError, where):
        source = env.tasks(split)
    if not isinstance(source, TaskSource):
        raise ConfigError(
            f"{where} returned a {type(source).__name__}; return a TaskSource(make, num_tasks), where make(i) is the "
            "task at index i."
        )
    count = source.num_tasks
    if count is not None and (not isinstance(count, numbers.Integral) or count < 1):
        raise ConfigError(f"{where}: num_tasks = {count!r}; give at least 1, or None if tasks have no end.")

    def make(index: int) -> Task:
        with guarded(EnvError, f"{where}, task {index}"):
            task = source.make(index)
        if not isinstance(task, Task):
            raise EnvError(
                f"{where}, task {index} is a {type(task).__name__}, not a Task; {definition_of(source.make)} must "
                'return Task(env=self.name, task_id="...", data={...})'
            )
        if not isinstance(task.task_id, str):
            raise EnvError(
                f"{where}, task {index}: task_id is {describe_value(task.task_id)}; give a text, such as "
                f"str({short_repr(task.task_id)})"
            )
        if not isinstance(task.data, Mapping):
            raise EnvError(
                f"{where}, task {index}: data is {describe_value(task.data)}; give a dictionary with texts as keys"
            )
        data = checked_json(task.data, f"{where}, task {index}: data")
        return msgspec.structs.replace(task, env=env.name, task_id=with_whole_text(task.task_id), data=data)

    return replace(source, make=make)


def needs_worker(env_id: str) -> bool:
    """Does this environment run in worker processes only?

    Raises: ConfigError if it cannot run at all.
    """
    if find.path_of(env_id) is not None:
        return False
    return find.hub_of(env_id) is not None or find.tasksets_of(env_id) is not None


def _own_name(env_id: str) -> list[str]:
    """The name with a colon that a file, or a module with a dot before its class, should have been given."""
    if env_id.endswith(".py") and Path(env_id).expanduser().is_file():
        return [f"{env_id}:{name}" for name in defined_in(load_module(env_id, f"environment {env_id!r}"))[-1:]]
    module, _, attr = env_id.rpartition(".")
    return [f"{module}:{attr}"] if module and Path(module.replace(".", "/") + ".py").is_file() else []


def _find_factory(env_id: str) -> Callable[..., Any]:
    path = find.path_of(env_id) or env_id
    if ":" not in path and (found := find.find_module(env_id)) is not None:
        return find.environment_class(load_module(found, f"environment {env_id!r}"), env_id)
    if ":" not in path:
        import difflib

        nearest = [*_own_name(env_id), *difflib.get_close_matches(env_id.replace("_", "-"), find.names(), n=1)]
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"bundled are {', '.join(find.names())};"
        raise ConfigError(
            f"no environment {env_id!r}; {hint} name your own as a module or `module:attr`{find.unread()}."
        )
    module_name, attr = path.split(":", 1)
    find.check_hub_name(env_id)
    module = load_module(module_name, f"environment {env_id!r}")
    if not hasattr(module, attr):
        import difflib

        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        nearest = difflib.get_close_matches(attr, names, n=1)
        hint = f"did you mean {module_name}:{nearest[0]}?" if nearest else f"it has {', '.join(names)}."
        raise ConfigError(f"environment {env_id!r}: module {module_name!r} has no {attr!r}; {hint}")
    return getattr(module, attr)
