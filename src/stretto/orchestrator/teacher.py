"""Teachers: who scores the policy's rollouts, or plays them in its place.

    opd    a frozen teacher says how likely it finds each token of the policy's rollouts
    opsd   the policy itself does, after it was shown a demonstration
    sft    a frozen teacher plays; its tokens are learned as they are

The answers become part of the rollout (`Branch.ref_logprobs`, `Branch.is_frozen`) before it is in the ledger, so
a resumed run asks nothing twice. What is learned from them stands in algorithms/losses.py (`ref_kl`, `ce`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, EngineError, EnvError, StrettoError, boundary
from stretto.chat.render import Renderer
from stretto.config.distill import OpsdAlgo
from stretto.envs.base import Environment, tasks_of
from stretto.orchestrator.filters import failed
from stretto.orchestrator.scoring import is_counted
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.rollout import Branch, Group, Rollout, Task


class Scorer(Protocol):
    """An engine client (transports/engine/client.py), as far as it says how likely tokens are."""

    async def generate(self, request: GenerateRequest) -> list[Completion]: ...


class TeacherEngine(Scorer, Protocol):
    """The client of a frozen model's engines."""

    async def wait_ready(self, timeout_s: float) -> None: ...


class Tutor(Protocol):
    """What becomes of the groups of an environment that is not learned from its rewards alone."""

    async def finish(self, group: Group) -> Group:
        """The group as it is learned from.

        Raises: EngineError when too many groups in a row failed.
        """


class Tutors:
    """The tutors of a run, by environment, and the engines they ask."""

    def __init__(
        self,
        by_env: Mapping[str, Tutor] | None = None,
        engines: Mapping[str, TeacherEngine] | None = None,
        players: Mapping[str, Scorer] | None = None,
        *,
        ready_timeout_s: float = 600.0,
    ) -> None:
        """engines: by what messages call them; players: who plays in the policy's place, by environment."""
        self._by_env, self._engines, self._players = by_env or {}, engines or {}, players or {}
        self._ready_timeout_s = ready_timeout_s

    async def wait_ready(self) -> None:
        """Raises: EngineError when a teacher is not healthy in time."""
        await asyncio.gather(*(self._wait_for(name, engine) for name, engine in self._engines.items()))

    async def _wait_for(self, name: str, engine: TeacherEngine) -> None:
        try:
            await engine.wait_ready(self._ready_timeout_s)
        except EngineError as error:
            raise EngineError(f"[{name}] {error}") from error

    def player_of(self, env: str) -> Scorer | None:
        """Who plays an environment's rollouts; None: the policy."""
        return self._players.get(env)

    def teaches(self, env: str) -> bool:
        """Is somebody asked about an environment's groups?"""
        return env in self._by_env

    async def finish(self, group: Group) -> Group:
        """The group as it is learned from; unchanged where it has no tutor."""
        tutor = self._by_env.get(group.task.env)
        return group if tutor is None else await tutor.finish(group)


class Teacher:
    """Scores groups; all samples of a group at once, and groups beside each other."""

    def __init__(
        self, engine: Scorer, *, hint: Callable[[Task], np.ndarray] | None = None, max_failures: int = 32
    ) -> None:
        """hint: tokens that the teacher sees before a task's rollouts, int32."""
        self._engine, self._hint = engine, hint
        self._max_failures, self._failed_in_a_row = max_failures, 0

    async def finish(self, group: Group) -> Group:
        """The group with the teacher's logprobs in every branch of its counted members.

        A teacher that fails, after its retries, fails the whole group, with the cause.

        Raises: EngineError after max_failures groups in a row, so that a run of several environments does not
        go on without those that are taught.
        """
        try:
            hint = np.empty(0, np.int32) if self._hint is None else self._hint(group.task)
            rollouts = await asyncio.gather(*(self._score_rollout(r, hint) for r in group.rollouts))
        except StrettoError as error:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._max_failures:
                raise type(error)(
                    f"{self._failed_in_a_row} groups in a row failed; teacher: {error}"
                ) from error
            return failed(group, f"{type(error).__name__}: teacher: {error}")
        self._failed_in_a_row = 0
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

    async def _score_rollout(self, rollout: Rollout, hint: np.ndarray) -> Rollout:
        if not is_counted(rollout):
            return rollout
        names = [f"{rollout.rollout_id}/{index}/teacher" for index in range(len(rollout.branches))]
        branches = await asyncio.gather(
            *(self._score_branch(branch, name, hint) for branch, name in zip(rollout.branches, names))
        )
        metrics = {**rollout.metrics, "teacher_kl": teacher_kl(branches)}
        return msgspec.structs.replace(rollout, branches=tuple(branches), metrics=metrics)

    async def _score_branch(self, branch: Branch, name: str, hint: np.ndarray) -> Branch:
        if not branch.is_trained:
            return branch
        request = GenerateRequest(
            request_id=name,
            prompt_ids=np.concatenate((hint, branch.token_ids), dtype=np.int32),
            sampling=SamplingParams(max_tokens=1),
            cache_salt=name,  # of weights that change nothing may be reused
            prompt_logprobs=True,
        )
        [completion] = await self._engine.generate(request)
        scores = completion.prompt_logprobs
        if scores is None or len(scores) != len(request.prompt_ids):
            raise EngineError(
                f"{name}: no log-probabilities of the {len(request.prompt_ids)} tokens of a prompt"
            )
        scores = scores[len(hint) :].astype(np.float32)
        if not np.isfinite(scores).all():
            raise EngineError(f"{name}: log-probabilities that are not finite")
        return msgspec.structs.replace(branch, ref_logprobs=scores)


class Author:
    """A teacher that plays: what it wrote is learned, down to a reward."""

    def __init__(self, min_reward: float | None = None) -> None:
        self._min_reward = min_reward

    async def finish(self, group: Group) -> Group:
        """The group with all branches as another model's, those of too small a reward as not trained."""
        return msgspec.structs.replace(group, rollouts=tuple(map(self._finish, group.rollouts)))

    def _finish(self, rollout: Rollout) -> Rollout:
        is_good = self._min_reward is None or rollout.reward >= self._min_reward
        branches = (
            msgspec.structs.replace(
                branch, is_frozen=True, versions=(), is_trained=branch.is_trained and is_good
            )
            for branch in rollout.branches
        )
        return msgspec.structs.replace(rollout, branches=tuple(branches))


def build_hint(
    env: Environment, algo: OpsdAlgo, renderer: Renderer, place: str = "orchestrator.algo"
) -> Callable[[Task], np.ndarray]:
    """What the policy is shown before a rollout of a task, as its own teacher: a system message, as tokens.

    `place` is where the algo stands, for messages.

    Raises: ConfigError when the environment's first task has no demonstration.
    """

    def hint(task: Task) -> np.ndarray:
        text = algo.template.replace("{demonstration}", demonstration_of(env, task, algo.demo_key))
        return renderer.render_leading([{"role": "system", "content": text}])

    try:
        hint(tasks_of(env, "train").task(0))
    except EnvError as error:
        raise ConfigError(f'{place}.type = "opsd": {error}') from error
    return hint


def demonstration_of(env: Environment, task: Task, key: str) -> str:
    """How a task can be solved, by its data or else by the environment.

    Raises: EnvError when neither knows.
    """
    found = task.data.get(key)
    if found is None and (make := getattr(env, "demonstration", None)) is not None:
        with boundary(EnvError, f"environment {env.name}, task {task.task_id}, demonstration"):
            found = make(task)
    if not isinstance(found, str) or not found:
        raise EnvError(
            f"environment {env.name}, task {task.task_id}: no demonstration; its data needs the key {key!r} "
            "(demo_key), or the environment a method demonstration(task)"
        )
    return found


def teacher_kl(branches: Iterable[Branch]) -> float:
    """Mean of log q - log teacher over sampled tokens, nats: an estimate of the reverse KL divergence."""
    gaps = [(b.logprobs - b.ref_logprobs)[b.is_sampled] for b in branches if b.ref_logprobs is not None]
    values = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(values.mean()) if len(values) else 0.0
