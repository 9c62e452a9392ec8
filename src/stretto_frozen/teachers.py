"""Teachers: models that score the policy's rollouts, or play them instead of the policy.

    opd    a frozen teacher gives its log-probability of each token of the policy's rollouts
    opsd   the policy itself does the same, with a demonstration as privileged context
    sft    a frozen teacher plays; its tokens are learned by cross-entropy

The teacher's part is in the rollout (`Branch.ref_logprobs`, `alternatives`, `is_frozen`) before the rollout is in the
ledger, so a resumed run requests nothing twice. The losses are in algorithms/losses.py (`ref_kl`, `ce`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, EngineError, EnvError, StrettoError
from stretto.base.foreign import guarded
from stretto.chat.render import Renderer
from stretto.config.sections.distill import OpsdAlgo
from stretto.envs.base import Environment, tasks_of
from stretto.orchestrator.rollout.play import GenerationClient
from stretto.orchestrator.rollout.player import failed_group
from stretto.records.alternatives import Alternatives
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.rollout import Branch, Group, Rollout, Task

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Int32


T = TypeVar("T")
Weighted = Mapping[str, tuple[T, float]]
"""Engines of teachers by name, with weights relative to each other."""


class ScoringTeacher:
    """One teacher, or several, that score all rollouts of a group at once, and groups concurrently.

    The log-probability of several is the weighted mean of theirs: the gradient of the reverse KL divergence to it is
    the weighted mean of the gradients of those to each of them. With top_k each also gives the tokens that it holds for
    likeliest at every sampled one.
    """

    def __init__(
        self,
        engines: Weighted[GenerationClient],
        *,
        top_k: int = 0,
        is_forward: bool = False,
        privileged_context: Callable[[Task], Int32[np.ndarray, " context"]] | None = None,
        max_failures: int = 32,
        image_token_id: int | None = None,
    ) -> None:
        """top_k: how many of its likeliest tokens a teacher gives; 0: none. is_forward: as in `Alternatives`.

        privileged_context: tokens before a task's rollouts that only the teacher sees, int32.

        image_token_id: the placeholder of images, the same for policy and teacher.
        """
        total = sum(weight for _, weight in engines.values())
        self._engines = {name: (engine, weight / total) for name, (engine, weight) in engines.items()}
        self._top_k, self._is_forward = top_k, is_forward
        self._privileged_context = privileged_context
        self._image_token_id = image_token_id
        self._max_failures, self._failed_in_a_row = max_failures, 0

    async def annotate(self, group: Group) -> Group:
        """The group with the teacher's logprobs in every trained branch of its counted members.

        If the teacher fails, after its retries, the whole group fails with the cause.

        Raises: EngineError after max_failures groups in a row, so that a run of several environments does not
        continue without the distilled ones.
        """
        try:
            context = (
                np.empty(0, np.int32) if self._privileged_context is None else self._privileged_context(group.task)
            )
            rollouts = await asyncio.gather(*(self._score_rollout(r, context) for r in group.rollouts))
        except StrettoError as error:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._max_failures:
                raise type(error)(f"{self._failed_in_a_row} groups in a row failed; teacher: {error}") from error
            return failed_group(group, f"{type(error).__name__}: teacher: {error}")
        self._failed_in_a_row = 0
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

    async def _score_rollout(self, rollout: Rollout, context: np.ndarray) -> Rollout:
        if not rollout.is_counted:
            return rollout
        numbered = list(enumerate(rollout.branches))
        every = await asyncio.gather(
            *(
                self._score_branch(engine, branch, f"{rollout.rollout_id}/{index}/{name}", context)
                for name, (engine, _) in self._engines.items()
                for index, branch in numbered
            )
        )
        size = len(numbered)
        scored = {name: every[i * size : (i + 1) * size] for i, name in enumerate(self._engines)}
        branches = tuple(self._merged([of_teacher[index] for of_teacher in scored.values()]) for index, _ in numbered)
        metrics = {**rollout.metrics, "teacher_kl": teacher_kl(branches)}
        if len(scored) > 1:
            metrics |= {f"teacher_kl/{name}": teacher_kl(of_teacher) for name, of_teacher in scored.items()}
        return msgspec.structs.replace(rollout, branches=branches, metrics=metrics)

    def _merged(self, scored: Sequence[Branch]) -> Branch:
        """A branch, given as each teacher has scored it, with the scores of all of them."""
        scores = [branch.ref_logprobs for branch in scored if branch.ref_logprobs is not None]
        alternatives = [branch.alternatives for branch in scored if branch.alternatives is not None]
        if len(scores) < 2:
            return scored[0]
        weights = np.array([weight for _, weight in self._engines.values()])
        mean = np.average(np.stack(scores), axis=0, weights=weights).astype(np.float32)
        return msgspec.structs.replace(
            scored[0], ref_logprobs=mean, alternatives=join_teachers(alternatives, weights) if alternatives else None
        )

    async def _score_branch(self, engine: GenerationClient, branch: Branch, name: str, context: np.ndarray) -> Branch:
        """A branch with what one teacher says of its tokens; as it is if it is not trained."""
        if not branch.is_trained:
            return branch
        request = GenerateRequest(
            request_id=name,
            prompt_ids=np.concatenate((context, branch.token_ids), dtype=np.int32),
            sampling=SamplingParams(max_tokens=1),
            cache_salt=name,  # the cache of another request must not be reused: it may be of older weights
            prompt_logprobs=True,
            top_prompt_logprobs=self._top_k,
            images=branch.images,
            image_token_id=self._image_token_id if branch.images else None,
        )
        [completion] = await engine.generate(request)
        scores = completion.prompt_logprobs
        if scores is None or len(scores) != len(request.prompt_ids):
            raise EngineError(
                f"{name}: the teacher did not give one log-probability for each of {len(request.prompt_ids)} tokens"
            )
        scores = scores[len(context) :].astype(np.float32)
        top_ids, top_logprobs = completion.top_prompt_ids, completion.top_prompt_logprobs
        alternatives = None
        if self._top_k:
            if top_ids is None or top_logprobs is None or top_ids.shape != (len(request.prompt_ids), self._top_k):
                raise EngineError(f"{name}: the teacher did not give {self._top_k} likeliest tokens for each token")
            alternatives = alternatives_of(
                branch.token_ids,
                np.flatnonzero(branch.is_sampled),
                scores,
                (top_ids[len(context) :], top_logprobs[len(context) :]),
                is_forward=self._is_forward,
            )
        if not (np.isfinite(scores).all() and (alternatives is None or np.isfinite(alternatives.logprobs).all())):
            raise EngineError(f"{name}: the teacher gave log-probabilities that are not finite")
        return msgspec.structs.replace(branch, ref_logprobs=scores, alternatives=alternatives)


class PlayingTeacher:
    """A teacher that plays: its replies are learned if their reward is at least min_reward."""

    def __init__(self, min_reward: float | None = None) -> None:
        self._min_reward = min_reward

    async def annotate(self, group: Group) -> Group:
        """The group with all branches marked as frozen, those of too small a reward as not trained."""
        return msgspec.structs.replace(group, rollouts=tuple(map(self._mark_rollout, group.rollouts)))

    def _mark_rollout(self, rollout: Rollout) -> Rollout:
        is_good = self._min_reward is None or rollout.reward >= self._min_reward
        branches = (
            msgspec.structs.replace(branch, is_frozen=True, versions=(), is_trained=branch.is_trained and is_good)
            for branch in rollout.branches
        )
        return msgspec.structs.replace(rollout, branches=tuple(branches))


def build_privileged_context(
    env: Environment, algo: OpsdAlgo, renderer: Renderer, place: str = "orchestrator.algo"
) -> Callable[[Task], Int32[np.ndarray, " context"]]:
    """Build the function that renders a task's demonstration as a system message, as tokens.

    `place` is the config path of the algo, for messages.

    Raises: ConfigError if the environment's first task has no demonstration.
    """

    def privileged_context(task: Task) -> np.ndarray:
        text = algo.template.replace("{demonstration}", demonstration_of(env, task, algo.demo_key))
        return renderer.render_leading([{"role": "system", "content": text}])

    try:
        privileged_context(tasks_of(env, "train").task(0))
    except EnvError as error:
        raise ConfigError(f'{place}.type = "opsd": {error}') from error
    return privileged_context


def demonstration_of(env: Environment, task: Task, key: str) -> str:
    """A task's demonstration, from its data or else from the environment.

    Raises: EnvError if neither has one.
    """
    text, where = task.data.get(key), f"environment {env.name}, task {task.task_id}"
    if text is None and (demonstration := getattr(env, "demonstration", None)) is not None:
        with guarded(EnvError, f"{where}, demonstration"):
            text = demonstration(task)
    if not isinstance(text, str) or not text:
        raise EnvError(
            f"{where}: no demonstration; its data needs the key {key!r} (demo_key), or the environment a method "
            "demonstration(task)"
        )
    return text


def alternatives_of(
    token_ids: Int[np.ndarray, " tokens"],
    positions: Int[np.ndarray, " rows"],
    logprobs: Float[np.ndarray, " tokens"],
    likeliest: tuple[Int[np.ndarray, "tokens top"], Float[np.ndarray, "tokens top"]],
    *,
    is_forward: bool,
) -> Alternatives:
    """What one teacher holds for likeliest at these positions: the token itself, and those of its likeliest others.

    logprobs: those of the tokens. likeliest: ids and log-probabilities.
    """
    ids = np.column_stack((token_ids[positions], likeliest[0][positions])).astype(np.int32)
    values = np.column_stack((logprobs[positions], likeliest[1][positions])).astype(np.float32)
    is_again = ids == ids[:, :1]
    is_again[:, 0] = False
    ids[is_again], values[is_again] = -1, 0.0
    num_rows = len(positions)
    return Alternatives(
        positions=positions.astype(np.int32),
        ids=ids[:, None],
        logprobs=values[:, None],
        weights=np.ones((num_rows, 1), np.float32),
        is_forward=np.full(num_rows, is_forward),
    )


def join_teachers(parts: Sequence[Alternatives], weights: Float[np.ndarray, " teachers"]) -> Alternatives:
    """Those of several teachers at the same positions; weights: their shares, with the sum 1."""
    return Alternatives(
        positions=parts[0].positions,
        ids=np.concatenate([part.ids for part in parts], axis=1),
        logprobs=np.concatenate([part.logprobs for part in parts], axis=1),
        weights=np.tile(weights.astype(np.float32), (len(parts[0].positions), 1)),
        is_forward=parts[0].is_forward,
    )


def teacher_kl(branches: Iterable[Branch]) -> float:
    """Estimate of the reverse KL divergence: mean log q - log teacher of sampled tokens, nats."""
    gaps = [(b.logprobs - b.ref_logprobs)[b.is_sampled] for b in branches if b.ref_logprobs is not None]
    values = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(values.mean()) if len(values) else 0.0
