"""Plays one rollout of an environment with a stub engine, to find code that would fail only in a run.

The reply is the same fixed sentence each time, so its reward means nothing. The check is that the environment is built,
that its prompt is rendered, and that the reply is parsed and scored.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError

import numpy as np

from stretto.base.errors import EngineError, EnvError
from stretto.base.foreign import exits_are_errors
from stretto.chat.render import Renderer
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.config.sections.orchestrator import EnvSection, SamplingSection
from stretto.data.values import describe_value
from stretto.envs.base import Environment, RunInfo, TaskSource, tasks_of
from stretto.envs.models import Unreachable
from stretto.orchestrator.build import model_names, open_env, places_of, system_prompts
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import Group, RolloutStatus, Task

REPLY = "This is a reply to try your code."
TIMEOUT_S = 60.0
NOBODY = "http://127.0.0.1:9"
"""In place of the addresses of engines that do not run yet: nobody answers at the port of `discard`."""
_UNREACHABLE = (EngineError, TimeoutError, ConnectionError, socket.gaierror, URLError)
_UNREACHABLE_ELSEWHERE = frozenset({
    "aiohttp.ClientConnectionError", "httpx.TransportError", "httpcore.NetworkError", "httpcore.TimeoutException",
    "openai.APIConnectionError", "anthropic.APIConnectionError", "requests.ConnectionError", "requests.Timeout",
    "urllib3.HTTPError", "grpc.RpcError", "websockets.ConnectionClosed",
})  # fmt: skip
"""Base classes of libraries that need not be there: package and class."""


class StubEngine:
    """Answers every request with REPLY; each of its tokens has a probability of almost 1."""

    def __init__(self, renderer: Renderer) -> None:
        ids = [*renderer.encode(REPLY), *list(renderer.stop_ids)[:1]]
        self._ids = np.array(ids, dtype=np.int32)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The same completion for each sample, cut at max_tokens."""
        ids = self._ids[: request.sampling.max_tokens]
        reason = "stop" if len(ids) == len(self._ids) else "length"
        logprobs = np.zeros(len(ids), dtype=np.float32)
        completion = Completion(token_ids=ids, logprobs=logprobs, finish_reason=reason)
        return [completion] * request.n


async def open_and_play(cfg: OrchestratorConfig, section: EnvSection, renderer: Renderer, info: RunInfo) -> Group:
    """Build the environment of a section, and play one rollout of its first task.

    Raises: EnvError, ConfigError for an environment that is not built; TimeoutError.
    """
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-doctor-")))
        env = open_env(section, logs, stack, info)
        return (await play(cfg, section, env, same_task(env, tasks_of(env, "train"), "train"), renderer)).group


@dataclass(frozen=True)
class Played:
    """A group of one rollout, and the errors with which it failed."""

    group: Group
    failures: list[Exception]


async def play(
    cfg: OrchestratorConfig | EvalConfig,
    section: EnvSection,
    env: Environment,
    task: Task,
    renderer: Renderer,
    timeout_s: float = TIMEOUT_S,
) -> Played:
    """A group of one rollout of the task, which has failed if the code of the environment has."""
    failures: list[Exception] = []
    player = Player(
        engine=StubEngine(renderer),
        renderer=renderer,
        sampling=_plain(cfg.eval.sampling if isinstance(cfg, EvalConfig) else cfg.train.sampling),
        seq_len=cfg.seq_len,
        seed=cfg.seed,
        run_id="doctor",
        timeout_s=timeout_s,
        max_retries=0,
        system_prompts=system_prompts(section),
        model_names=model_names(section),
        models={name: Unreachable(name) for name in places_of(cfg)},
        failures=failures,
    )
    with exits_are_errors():
        group = await player.play(env, Draw(group_id=0, task=task, num_members=1, version=0))
    return Played(group, failures)


def same_task(env: Environment, source: TaskSource, split: str) -> Task:
    """The first task, made twice.

    Raises: EnvError if the second differs: a group, an epoch and a resumed run would play another task.
    """
    first, second = source.task(0), source.task(0)
    for name in ("task_id", "data"):
        one, other = getattr(first, name), getattr(second, name)
        if repr(one) != repr(other):
            raise EnvError(
                f"environment {env.name}, tasks({split!r}): make(0) gave two different tasks, with {name} "
                f"{describe_value(one)} and {describe_value(other)}; draw from random.Random(index), so that an index "
                "always gives the same task"
            )
    return first


def same_name_note(env: Environment, source: TaskSource, first: Task) -> tuple[str, ...]:
    """A note if another task has the name of the first; nothing fails by it, but the two are counted as one."""
    if source.num_tasks == 1:
        return ()
    second = source.task(1)
    if second.task_id != first.task_id or repr(second.data) == repr(first.data):
        return ()
    named = f"environment {env.name}: tasks 0 and 1 have the same task_id, {first.task_id!r}"
    return (f"{named}: curves, pools and pages take them for one task; make it unique, such as str(index)",)


def without_engines(info: RunInfo) -> RunInfo:
    """The facts of a run, with addresses at which nobody answers: a dry run sends nothing to engines."""
    models = {name: Unreachable(name) for name in info.model_urls}
    urls = dict.fromkeys(info.model_urls, NOBODY)
    return replace(info, engine_urls=(NOBODY,), model_urls=urls, models=models, directory=None)


def fault_of(name: str, played: Played) -> str:
    """Why the rollout was not played to its end, if only for want of a server that is not there; "" if it was.

    Raises: EnvError with the fault if the code of the environment has one.
    """
    rollout = played.group.rollouts[0]
    if rollout.status is not RolloutStatus.FAILED:
        return ""
    cause = rollout.error or "unknown"
    if any(is_unreachable(error) for error in played.failures):
        return f"{name}: NOT PLAYED to its end, which is right only if a server of the run is missing: {cause}"
    raise EnvError(f"{cause.removeprefix('EnvError: ')}; this is the first task, played with the reply {REPLY!r}")


def is_unreachable(error: BaseException | None) -> bool:
    """Whether an error says that a server did not answer, or is the consequence of such an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
        if isinstance(error, _UNREACHABLE) or names & _UNREACHABLE_ELSEWHERE:
            return True
        error = error.__cause__ or error.__context__
    return False


def _plain(sampling: SamplingSection) -> SamplingSection:
    return sampling.model_copy(update={"top_p": 1.0, "top_k": None, "min_p": 0.0})
