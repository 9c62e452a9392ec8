"""What an environment is, and how one is found.

An environment owns its tasks and its rewards and nothing else: tokens, logprobs and policy versions are
recorded by the context it is given (`orchestrator/rollout.py`), so no environment can get them wrong. Two
kinds:

* `SingleTurnEnv`: one prompt, one reply, one score. All samples of a group are one request to the engine.
* any class with `tasks` and `async rollout(task, ctx)`: as many turns and calls of anything as it likes.

`load_environment` takes the id of a bundled environment, `module:attr` of a class or function of your own, or the
name of a module that holds one environment; what find.py says of ids.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, EnvError
from stretto.base.imports import load_module
from stretto.envs import find
from stretto.envs.foreign import calling, check_kinds, signature_of
from stretto.records.rollout import Task

if TYPE_CHECKING:
    from stretto.config.orchestrator import SamplingSection

Split = Literal["train", "eval"]
Message = dict[str, Any]

BUNDLED = {
    "alphabet-sort": "stretto.envs.alphabet_sort:AlphabetSort",
    "arithmetic": "stretto.envs.arithmetic:Arithmetic",
    "calculator": "stretto.envs.calculator:Calculator",
    "dataset": "stretto.envs.dataset:dataset",
    "python-code": "stretto.envs.python_code:PythonCode",
    "reasoning-gym": "stretto.envs.reasoning_gym:ReasoningGym",
    "reverse-text": "stretto.envs.reverse_text:ReverseText",
    "sort-letters": "stretto.envs.sort_letters:SortLetters",
    "tic-tac-toe": "stretto.envs.tic_tac_toe:TicTacToe",
    "wordle": "stretto.envs.wordle:Wordle",
}


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says about one episode."""

    reward: float
    agent_rewards: dict[str, float] = {}  # by agent, where several play and are paid differently
    metrics: dict[str, float] = {}
    is_truncated: bool = False  # the environment's own limit (turns, time) ended it; the reward is valid
    note: Any = None  # what `score_group` is to know of it; written down nowhere, None in worker processes


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy. `message` is the assistant message, ready to be appended to the history."""

    message: Message
    text: str
    token_ids: np.ndarray  # int32 [completion]
    finish_reason: str  # "stop" | "length"
    num_prompt_tokens: int = 0


class LimitReached(EnvError):
    """The episode has had its turns, tokens or time: there is no other reply.

    An environment may catch it to give a reward all the same; where none does, the episode ends as truncated,
    with reward 0.
    """


class OutOfContext(LimitReached):
    """The history leaves no room for another reply."""


@dataclass(frozen=True)
class Limits:
    """Where an episode ends at the latest; None: no limit. An environment states its own as `limits`."""

    max_turns: int | None = None
    """Replies, of all agents together."""
    max_tokens: int | None = None
    """Sampled tokens, of all replies together."""
    timeout_s: float | None = None
    """Seconds; no turn begins after them."""


@dataclass(frozen=True)
class Episode:
    """Which rollout of the run is played."""

    rollout_id: str
    group_id: int
    """The draw of its task."""
    member: int
    """Its number in the group."""


class RolloutContext(Protocol):
    """The policy, as an environment sees it during one episode."""

    async def generate(
        self, prompt_ids: np.ndarray, tools: list[dict] | None = None, **sampling: Any
    ) -> Reply:
        """Continue these tokens. A prompt that extends the tokens so far continues the same branch.

        Raises: LimitReached when a limit of the episode is reached, or nothing fits behind the prompt.
        """

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        """Answer these messages; new messages are appended to the tokens so far wherever the renderer can."""

    @property
    def sampling(self) -> SamplingSection | None:
        """How the policy is sampled here, in training or in an eval; None in worker processes."""

    @property
    def episode(self) -> Episode | None:
        """Which rollout this is; None in worker processes."""

    def keep(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Train on these sequences only, each its tokens and which of them are trained (bool).

        Of what was sampled and is in none of them nothing is trained. A sequence may end with given tokens.

        Raises: EnvError for a sequence that is not what the policy was given and sampled.
        """

    def agent(self, name: str, *, is_trained: bool = True) -> RolloutContext:
        """Another player of the same episode, with a history and a stream of samples of its own.

        The same name gives the same player. One that is not trained plays with the policy's weights too. Agents
        are paid by `RolloutResult.agent_rewards`; those not named there get `reward`.
        """


@dataclass(frozen=True)
class RunInfo:
    """What an environment may know of the run it is in; one whose class takes an argument `run` is given it.

    In worker processes everything has its default.
    """

    tokenizer: str | None = None
    """Directory of the policy's."""
    engine_urls: tuple[str, ...] = ()
    """Where the policy's engines answer, or the router before them."""
    model_urls: Mapping[str, str] = field(default_factory=dict)
    """Where other models answer, by name."""
    encode: Callable[[str], np.ndarray] | None = None
    """Text to int32 tokens, with nothing around them."""
    prompt_ids: Callable[[list[Message], list[dict] | None], np.ndarray] | None = None
    """int32 tokens of a prompt of messages, with tools, up to where the reply begins."""
    render: Callable[[list[Message], list[dict] | None], str] | None = None
    """Text of such a prompt."""
    seed: int = 0
    seq_len: int | None = None
    group_size: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_completion_tokens: int | None = None


@dataclass(frozen=True)
class TaskSource:
    """Tasks by index.

    `make(i)` is the same task in every process and every run. num_tasks None is endless.
    """

    make: Callable[[int], Task]
    num_tasks: int | None = None
    is_ordered: bool = False
    """They come in order of index in every epoch, and not shuffled."""
    fingerprint: int | None = None
    """Of what they are made from, where that may change: a resumed run must go on with the same."""

    def task(self, index: int) -> Task:
        """Task number `index`; a finite source starts over at its end."""
        return self.make(index if self.num_tasks is None else index % self.num_tasks)


@runtime_checkable
class Environment(Protocol):
    """Anything with a name, tasks and episodes.

    Optional: `sft_rows(num_rows, seed) -> [{"messages": [...]}]`, `async close()` for what it has started, and
    `async score_group(group, notes) -> rewards or None` for rewards that need all members that did not fail; notes are
    those of their results.
    """

    name: str

    def tasks(self, split: Split) -> TaskSource:
        """The tasks to train on, or the held-out ones."""

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        """Play one episode."""


class SingleTurnEnv(ABC):
    """One prompt, one reply, one score; the group's samples share one request and one rendered prompt."""

    name: str

    @abstractmethod
    def tasks(self, split: Split) -> TaskSource:
        """The tasks to train on, or the held-out ones."""

    @abstractmethod
    def prompt(self, task: Task) -> list[Message] | Awaitable[list[Message]]:
        """Messages shown to the policy."""

    @abstractmethod
    def score(self, task: Task, text: str) -> float | RolloutResult | Awaitable[float | RolloutResult]:
        """Reward of a reply.

        `async def` when it asks somebody else; the members of a group are then scored at the same time.
        """

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        messages = self.prompt(task)
        if inspect.isawaitable(messages):
            messages = await messages
        reply = await ctx.chat(messages)
        return await scored(self.score(task, reply.text))


async def scored(score: float | RolloutResult | Awaitable[float | RolloutResult]) -> RolloutResult:
    """Any of the three things `score` may return, as a RolloutResult."""
    if inspect.isawaitable(score):
        score = await score
    return score if isinstance(score, RolloutResult) else RolloutResult(reward=float(score))


def load_environment(
    env_id: str,
    args: dict[str, Any] | None = None,
    name: str | None = None,
    run: RunInfo | None = None,
    *,
    in_worker: bool = False,
) -> Environment:
    """Build the environment `env_id` with keyword arguments `args`; `name` is what metrics call it.

    An environment that takes an argument `run` is given that, unless `args` has one.

    Raises: ConfigError for an unknown id, a module or attribute that is not there, arguments that do not fit, or
    with file and line of what raises.
    """
    args = dict(args or {})
    if needs_worker(env_id):
        if not in_worker:
            raise ConfigError(
                f"environment {env_id!r} is played by verifiers, in worker processes, which only rl and eval start."
            )
        env_id, args = find.as_verifiers(env_id, args)
    factory = _find_factory(env_id)
    signature = signature_of(factory, env_id)
    if env_id in BUNDLED and inspect.isclass(factory):
        check_kinds(factory, args, env_id)
    if run is not None and "run" in signature.parameters:
        args.setdefault("run", run)
    try:
        signature.bind(**args)
    except TypeError as cause:
        parameters = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
        known = ", ".join(parameters) or "none"
        raise ConfigError(
            f"environment {env_id!r}: {cause}; its arguments are {known}. Change `args`."
        ) from cause
    with calling(ConfigError, f"environment {env_id!r}"):
        env = factory(**args)
        if not isinstance(env, Environment):
            raise ConfigError(f"{env_id!r} made a {type(env).__name__}, which lacks name, tasks or rollout.")
        env.name = name or env.name
    return env


def tasks_of(env: Environment, split: Split) -> TaskSource:
    """The tasks of one side, checked: each is a Task under the environment's name in this run.

    Making one raises EnvError with file and line. Raises: ConfigError for what is no source of tasks.
    """
    where = f"environment {env.name!r}, tasks({split!r})"
    with calling(ConfigError, where):
        source = env.tasks(split)
    if not isinstance(source, TaskSource):
        raise ConfigError(
            f"{where} returned a {type(source).__name__}; return a TaskSource(make, num_tasks), where make(i) is the "
            "task of index i."
        )
    count = source.num_tasks
    if count is not None and (not isinstance(count, numbers.Integral) or count < 1):
        raise ConfigError(
            f"{where}: num_tasks = {count!r}; give at least 1, or None where there is no end of them."
        )

    def make(index: int) -> Task:
        with calling(EnvError, f"{where}, task {index}"):
            task = source.make(index)
        if not isinstance(task, Task):
            raise EnvError(f"{where}, task {index} is a {type(task).__name__}, not a Task")
        return task if task.env == env.name else msgspec.structs.replace(task, env=env.name)

    return replace(source, make=make)


def needs_worker(env_id: str) -> bool:
    """Is this an environment that runs in worker processes only?

    Raises: ConfigError for one that cannot run at all.
    """
    return env_id not in BUNDLED and find.is_verifiers(env_id)


def _find_factory(env_id: str) -> Callable[..., Any]:
    path = BUNDLED.get(env_id, env_id)
    if ":" not in path and (module := find.module_named(env_id)) is not None:
        return find.the_environment(load_module(module, f"environment {env_id!r}"), env_id)
    if ":" not in path:
        nearest = difflib.get_close_matches(env_id.replace("_", "-"), BUNDLED, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"bundled are {', '.join(sorted(BUNDLED))};"
        raise ConfigError(f"no environment {env_id!r}; {hint} your own is a module or `module:attr`.")
    module_name, attr = path.split(":", 1)
    module = load_module(module_name, f"environment {env_id!r}")
    if not hasattr(module, attr):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        nearest = difflib.get_close_matches(attr, names, n=1)
        hint = f"; did you mean {module_name}:{nearest[0]}?" if nearest else f"; it has {', '.join(names)}."
        raise ConfigError(f"environment {env_id!r}: module {module_name!r} has no {attr!r}{hint}")
    return getattr(module, attr)
