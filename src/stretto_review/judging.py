"""A worker process of `stretto rescore`: reads groups of a run's ledger, judges their replies, sends the results.

It gets lists of group numbers and sends one `Judged` per group. A function that blocks is interrupted at the limit; one
that ends the process, or cannot be interrupted, is found by the parent (pool.py).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pydantic import TypeAdapter

from stretto.base.errors import DataError, EnvError, StrettoError
from stretto.base.foreign import without_tracebacks
from stretto.chat.render import Renderer, build_renderer
from stretto.config.sections.algorithm import Algo, GrpoAlgo
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus
from stretto.vime.convert import response_start, sample_of
from stretto.vime.sample import Sample
from stretto_python.run import Run
from stretto_review.rewards import Score, began_at, columns_of, judge, load_rewards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from ctypes import c_double as Pulse

AT_ONCE = 64
"""Groups whose replies are judged side by side, for functions that wait."""


@dataclass(frozen=True)
class Job:
    """What all workers do."""

    run: Path
    rewards: tuple[str, ...]
    limit_s: float


class Reply(NamedTuple):
    """One judged reply. score: None if it could not be judged, for the reason in `error`."""

    member: int
    old: float
    score: float | None
    parts: dict[str, float]
    old_advantage: float
    advantage: float
    num_tokens: int
    num_characters: int
    error: str | None


class Judged(NamedTuple):
    """One group, and whether it has a signal under either reward; error: why it could not be read."""

    group_id: int
    env: str
    replies: list[Reply]
    had_signal: bool = False
    has_signal: bool = False
    error: str | None = None


@dataclass
class Credit:
    """The estimators of a run, by environment, and their options."""

    config: Mapping[str, Any]
    _known: dict[str, Algo] = field(default_factory=dict)

    def of(self, env: str) -> Algo:
        """The estimator of an environment; grpo if the run has left no configuration."""
        if env not in self._known:
            section = self.config.get("orchestrator") or {}
            named = (each for each in section.get("env") or () if (each.get("name") or each["id"]) == env)
            values = next((each["algo"] for each in named if each.get("algo")), section.get("algo"))
            self._known[env] = TypeAdapter(Algo).validate_python(values) if values else GrpoAlgo()
        return self._known[env]


class Replies:
    """The text of stored rollouts, as reward functions of the run get it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def renderer(self) -> Renderer:
        """Raises: DataError if the policy's tokenizer is not to be found."""
        if self.run.tokenizer is None:
            raise DataError(
                f"{self.run.dir}: the policy's tokenizer is not to be found from here, and without it tokens are no "
                "text; start it where the paths of the run's configuration lead to its model"
            )
        return build_renderer(self.run.tokenizer)

    def text_of(self, branch: Branch) -> str:
        """The reply in a branch: the content of its message, without special tokens."""
        return str(self.renderer.parse(branch.token_ids[response_start(branch) :]).get("content") or "")

    def prompt_of(self, branch: Branch) -> str:
        """The text before the first sampled token, as the policy saw it."""
        return self.renderer.decode(branch.token_ids[: response_start(branch)])

    def samples_of(self, rollout: Rollout, group_size: int) -> list[Sample]:
        """The samples of a rollout: of its last trained branch, or of each if each has a reward; [] without a reply."""
        branches = [(n, each) for n, each in enumerate(rollout.branches) if each.is_trained and each.is_sampled.any()]
        chosen = branches if any(each.reward is not None for _, each in branches) else branches[-1:]
        found = []
        for number, branch in chosen:
            sample = sample_of(rollout, self.text_of(branch), number, group_size=group_size)
            asked, sample.prompt = sample.prompt, self.prompt_of(branch)
            sample.metadata = {"prompt": asked or sample.prompt} | columns_of(rollout.task.data) | sample.metadata
            sample.reward = None
            found.append(sample)
        return found


class Judge:
    """Judges groups by number."""

    def __init__(self, job: Job, ledger: LedgerReader) -> None:
        """Raises: ConfigError for rewards that do not exist."""
        self._run, self._ledger, self._limit_s = Run(job.run), ledger, job.limit_s
        self._credit, self._replies = Credit(self._run.config), Replies(self._run)
        self._rewards = load_rewards(job.rewards, self._run.config, columns_in(ledger))

    async def judged(self, group_id: int) -> Judged:
        """A group with its new scores."""
        try:
            group = self._ledger.group(group_id)
            size = len(group.rollouts)
            samples = {each.member: self._replies.samples_of(each, size) for each in group.rollouts if each.branches}
        except DataError as error:
            return Judged(group_id, "", [], error=str(error))
        wanted = {member: each for member, each in samples.items() if each}
        flat = [sample for each in wanted.values() for sample in each]
        answers = iter(await judge(self._rewards, group.task, flat, limit_s=self._limit_s) if flat else ())
        found = {member: _mean([next(answers) for _ in each]) for member, each in wanted.items()}
        return compared(group, self._credit.of(group.task.env), found, {m: s[-1] for m, s in samples.items() if s})


def columns_in(ledger: LedgerReader) -> list[str]:
    """Names of what the first task of a run has for functions that name columns."""
    rows = ledger.rows("SELECT data FROM draws ORDER BY group_id LIMIT 1")
    return ["prompt", *columns_of(rows[0]["data"])] if rows else []


def _mean(scores: list[Score | EnvError]) -> Score | EnvError:
    """The score of a rollout with several samples."""
    if failed := [each for each in scores if isinstance(each, EnvError)]:
        return failed[0]
    values = [each for each in scores if isinstance(each, Score)]
    names = dict.fromkeys(name for each in values for name in each.parts)
    parts = {name: sum(each.parts.get(name, 0.0) for each in values) / len(values) for name in names}
    return Score(sum(each.value for each in values) / len(values), parts)


def compared(group: Group, algo: Algo, found: Mapping[int, Score | EnvError], samples: Mapping[int, Sample]) -> Judged:
    """A group under both rewards, by the members that have a score."""
    scores = {member: each for member, each in found.items() if isinstance(each, Score)}
    failed = RolloutStatus.FAILED
    both = [r if r.member in scores else msgspec.structs.replace(r, status=failed, branches=()) for r in group.rollouts]
    old, had_signal = assign_advantages(msgspec.structs.replace(group, rollouts=tuple(both)), algo)
    anew = [_with_reward(r, scores[r.member].value) if r.member in scores else r for r in both]
    new, has_signal = assign_advantages(msgspec.structs.replace(group, rollouts=tuple(anew)), algo)
    replies = []
    for rollout, before, after in zip(group.rollouts, old.advantages, new.advantages):
        if (score := found.get(rollout.member)) is None:
            continue
        error = str(score) if isinstance(score, EnvError) else None
        value, parts = (score.value, score.parts) if isinstance(score, Score) else (None, {})
        sizes = rollout.num_sampled_tokens, len(samples[rollout.member].response)
        replies.append(Reply(rollout.member, rollout.reward, value, parts, before, after, *sizes, error))
    return Judged(group.group_id, group.task.env, replies, had_signal, has_signal)


def _with_reward(rollout: Rollout, reward: float) -> Rollout:
    """A rollout with one reward for all of it."""
    branches = tuple(msgspec.structs.replace(branch, reward=None) for branch in rollout.branches)
    return msgspec.structs.replace(rollout, reward=reward, agent_rewards={}, branches=branches, turns=())


# -- the process --


def work(wire: Connection, job: Job, pulse: Pulse) -> None:
    """Judge what the parent asks for until it closes the wire. pulse: when this process last did something."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with LedgerReader(Run(job.run).dir) as ledger, without_tracebacks():
        try:
            judge = Judge(job, ledger)
        except StrettoError as error:
            wire.send(error)
            return
        wire.send(None)
        asyncio.run(_answer(wire, judge, job.limit_s, pulse))


async def _answer(wire: Connection, judge: Judge, limit_s: float, pulse: Pulse) -> None:
    with _interrupted_when_blocked(limit_s, pulse):
        while (asked := await asyncio.to_thread(_received, wire)) is not None:
            for start in range(0, len(asked), AT_ONCE):
                calls = [judge.judged(group_id) for group_id in asked[start : start + AT_ONCE]]
                for call in asyncio.as_completed(calls):
                    wire.send(await call)


def _received(wire: Connection) -> list[int] | None:
    try:
        asked: list[int] = wire.recv()
        return asked
    except EOFError:
        return None


@contextmanager
def _interrupted_when_blocked(limit_s: float, pulse: Pulse) -> Iterator[None]:
    """Raise TimeoutError in code that blocks the event loop for longer than the limit."""
    loop = asyncio.get_running_loop()

    def arm(after_s: float = limit_s) -> None:
        pulse.value = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, after_s)

    def stop(number: int, frame: FrameType | None) -> None:
        begun = began_at(frame)
        left_s = limit_s if begun is None else begun + limit_s - time.monotonic()
        arm(left_s if left_s > 0 else limit_s)  # the next function may be called before the event loop has a turn
        if left_s <= 0:
            raise TimeoutError(f"it blocked for longer than {limit_s:g} s (--timeout)")

    def beat() -> None:
        arm()
        handle[0] = loop.call_later(min(limit_s / 4, 1.0), beat)

    handle: list[asyncio.Handle] = [loop.call_soon(beat)]
    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        handle[0].cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
