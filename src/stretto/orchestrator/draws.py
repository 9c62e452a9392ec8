"""Tasks become groups of rollouts: drawn into free slots, played, given credit, judged, and handed to the buffer.

Runs beside the loop (loop.py), which ships what the buffer chooses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from stretto.base.errors import ConfigError, EnvError, StrettoError
from stretto.base.watch import Watch
from stretto.config.algorithm import EchoAlgo
from stretto.config.orchestrator import OrchestratorSection
from stretto.orchestrator.batch_hooks import BatchHooks
from stretto.orchestrator.buffer import Buffer, Slot, SlotState
from stretto.orchestrator.echo import build_echo
from stretto.orchestrator.filters import settle
from stretto.orchestrator.interruption import Interruption
from stretto.orchestrator.own_rollouts import DataSource, OwnRollouts
from stretto.orchestrator.rollout import Draw, Player, kind_of
from stretto.orchestrator.scoring import is_counted
from stretto.orchestrator.tasks import TaskMix
from stretto.orchestrator.teacher import Tutors
from stretto.records.partial import Kept, Turn
from stretto.records.rollout import Group, Task

logger = logging.getLogger(__name__)


STARTED_AT_ONCE = 16
"""Rollouts; each takes up to a millisecond to render its prompt and write its request."""


class RunLog(Protocol):
    """The ledger (ledger/writer.py), as far as the loops write it."""

    def transaction(self) -> AbstractContextManager[None]: ...

    def task_drawn(self, group_id: int, task: Task) -> None: ...

    def turn_played(self, group_id: int, member: int, turn: Turn) -> None: ...

    def forget_turns(self, group_id: int, member: int) -> None: ...

    def rollouts_started(self, group_id: int, members: Sequence[int], version: int) -> None: ...

    def group_finished(self, group: Group) -> None: ...

    def group_dropped(self, group_id: int, reason: str) -> None: ...

    def batch_shipped(self, step: int, group_ids: list[int]) -> None: ...

    def step_trained(self, step: int, metrics: dict[str, float]) -> None: ...

    def checkpoint_saved(self, step: int) -> None: ...

    def next_draw(self) -> int: ...

    def open_draws(self) -> list[int]: ...

    def event(self, kind: str, data: dict) -> None: ...


@dataclass
class Cursor:
    """Where drawing goes on: first the draws that an earlier life left unfinished, then new ones."""

    next_draw: int
    redraws: deque[tuple[int, Task]]
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)  # by group and member: their turns so far

    def take(self, mix: TaskMix) -> tuple[int, Task, bool]:
        """The next draw number, its task, and whether it is new to the ledger."""
        if self.redraws:
            return *self.redraws.popleft(), False
        self.next_draw += 1
        return self.next_draw - 1, mix.draw(self.next_draw - 1), True


@dataclass(eq=False)
class Draws:
    """Everything between a task and a finished group."""

    cfg: OrchestratorSection
    mix: TaskMix
    cursor: Cursor
    player: Player
    buffer: Buffer
    ledger: RunLog
    watch: Watch
    tutors: Tutors = field(default_factory=Tutors, kw_only=True)  # of environments that are distilled
    hooks: BatchHooks | None = field(default=None, kw_only=True)
    own: OwnRollouts | None = field(default=None, kw_only=True)  # in the place of the environments' rollouts
    vocab_size: int | None = field(default=None, kw_only=True)  # what gibberish is measured against

    def __post_init__(self) -> None:
        self.interruption = Interruption()
        self._failed_in_a_row: Counter[str] = Counter()  # groups, by environment
        self._flags: Counter[str] = Counter()  # rollouts that each filter flagged since the last batch
        names = [env.name or env.id for env in self.cfg.env]
        self._players = {name: player_of(self.player, self.cfg, name) for name in names}
        for name in names:
            if (engine := self.tutors.player_of(name)) is not None:
                self._players[name] = replace(self._players[name], engine=engine)
            elif self.cfg.partial_rollout:
                self._players[name] = replace(
                    self._players[name],
                    journal=self.ledger,
                    interruption=self.interruption,
                    keeps_replies=self.tutors.teaches(name),
                    masks_kept=self.cfg.mask_offpolicy_in_partial_rollout,
                )
        for name, env in self.mix.envs.items():
            if isinstance(algo := self.cfg.algo_of(name), EchoAlgo):
                self._players[name] = replace(
                    self._players[name], echo=build_echo(algo, env, self.cfg.algo_path(name))
                )

    async def run(self, tasks: asyncio.TaskGroup, start: int) -> None:
        """Draw and play until no more groups are wanted; `start` is the step that the run continues after."""
        if self.own is None:
            await self._draw_groups(tasks)
        else:
            await self._follow_own(self.own, start)

    def take_flags(self) -> Counter[str]:
        """Rollouts that each filter flagged since the last call."""
        flags, self._flags = self._flags, Counter()
        return flags

    async def _draw_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Start a group for every slot that becomes free."""
        while await self.buffer.admit():
            with self.ledger.transaction():  # one commit for slots that became free together
                slots = list(self._draw_some())
            for slot in slots:
                slot.job = tasks.create_task(self._play_group(slot), name=f"group {slot.group_id}")
            await asyncio.sleep(0)  # they start, and everybody else has a turn, before the next ones

    async def _follow_own(self, own: OwnRollouts, start: int) -> None:
        """Call the user's rollout function whenever there is room for a batch; what it does not return is dropped."""
        source = DataSource(
            lambda: self._draw(is_extra=True), self.cfg.group_size, asyncio.get_running_loop()
        )
        num_empty = 0  # calls in a row
        for number in itertools.count(start):
            put_back = sum(slot.state is SlotState.RUNNING for slot in source.slots.values())
            if not await self.buffer.admit(self.buffer.bounds.groups_per_batch, put_back):
                return
            try:
                played = await own.play(number, source, lambda: self.buffer.version)
            except StrettoError as error:
                source.kept.clear()
                played = [
                    (slot, own.failed(slot, error, self.cfg.group_size)) for slot in source.slots.values()
                ]
                source.slots.clear()
                if not played:
                    raise  # it did not even take a task
            num_empty = 0 if played else num_empty + 1
            if num_empty >= self.cfg.max_failed_groups:
                times = f"{num_empty} times in a row (max_failed_groups)"
                raise EnvError(
                    f"{own.hook.where} returned no group {times}; it must return groups of data_source.get_samples"
                )
            for slot, group in played:
                if slot.state is SlotState.RUNNING:  # it may have become too old meanwhile, or the run ends
                    self._take_in(slot, group)
            for slot in [source.slots.pop(each) for each in list(source.slots) if each not in source.kept]:
                if slot.state is SlotState.RUNNING:
                    self.buffer.drop(slot, "not returned by rollout_function")
            await asyncio.sleep(0)

    def _draw_some(self) -> Iterator[Slot]:
        """Groups for free slots, as many as start without keeping the event loop."""
        num_rollouts = 0
        while self.buffer.may_admit() and num_rollouts < STARTED_AT_ONCE:
            slot = self._draw()
            num_rollouts += self.cfg.group_size_of(slot.task.env)
            yield slot

    def _draw(self, *, is_extra: bool = False) -> Slot:
        """The next task, in the ledger and in a slot."""
        group_id, task, is_new = self.cursor.take(self.mix)
        if is_new:
            self.ledger.task_drawn(group_id, task)
        members = range(self.cfg.group_size_of(task.env))
        kept = self._kept_of(group_id, members)
        self.ledger.rollouts_started(group_id, members, self.buffer.version)
        is_frozen = self.tutors.player_of(task.env) is not None
        return self.buffer.start(group_id, task, is_frozen=is_frozen, kept=kept, is_extra=is_extra)

    def _kept_of(self, group_id: int, members: Sequence[int]) -> dict[int, Kept]:
        """What members of a draw go on from, unless it has become too old while the draw waited for a slot."""
        oldest = self.buffer.bounds.oldest_version(self.buffer.next_step)
        kept = {}
        for member in members:
            turns = self.cursor.kept.pop((group_id, member), None)
            if turns is None:
                continue
            if turns.first_version >= oldest:
                kept[member] = turns
                continue
            logger.info("rollout g%d.%d begins anew: its tokens are too old now", group_id, member)
            self.ledger.forget_turns(group_id, member)
        return kept

    async def _play_group(self, slot: Slot) -> None:
        """Roll out one group, give it credit, judge it, and hand it to the buffer."""
        env = slot.task.env
        draw = Draw(slot.group_id, slot.task, self.cfg.group_size_of(env), slot.version, slot.kept)
        group = await self._players[env].play(self.mix.envs[env], draw)
        if self.interruption.is_on and not all(map(is_counted, group.rollouts)):
            # What met its deadline or the engine's end goes on after a resume.
            await self.interruption.forever()
        group = await self.tutors.finish(group)
        self._take_in(slot, group)

    def _take_in(self, slot: Slot, group: Group) -> None:
        """Credit, judgement and the buffer, for a group that was played."""
        env = slot.task.env
        settled = settle(group, self.cfg, self.vocab_size, self.hooks)
        self.ledger.group_finished(settled.group)
        self.watch.progress(f"group {slot.group_id} finished")
        if settled.has_failed:
            self._on_failed_group(settled.group)
            self.buffer.fail(slot)
            return
        self._failed_in_a_row[env] = 0
        rejected = settled.verdict.rejected
        self._flags.update(settled.verdict.flags)
        self.buffer.finish(slot, settled.group, has_signal=settled.has_signal, rejected=rejected)
        if rejected is not None:
            self._on_rejected_group(env, rejected)

    def _on_rejected_group(self, env: str, rejected: str) -> None:
        """Raises: ConfigError when too many groups were rejected without a batch."""
        limit = self.cfg.max_rejected_batches * self.buffer.bounds.groups_per_batch
        if self.buffer.num_rejected >= limit:
            raise ConfigError(
                f"{limit} groups were rejected without making a batch (max_rejected_batches = "
                f"{self.cfg.max_rejected_batches}), the last one, of {env}, by {rejected}: tasks are too easy or too "
                "hard for this policy, or its range is too wide."
            )

    def _on_failed_group(self, group: Group) -> None:
        """Raises: the error that says who must act, when too many groups in a row have failed."""
        env = group.task.env
        self._failed_in_a_row[env] += 1
        count = self._failed_in_a_row[env]
        cause = group.rollouts[-1].error or "unknown"
        logger.warning("group %d failed (%d of %s in a row): %s", group.group_id, count, env, cause)
        if count >= self.cfg.max_failed_groups:
            raise kind_of(cause)(
                f"{count} groups in a row failed (max_failed_groups); the last one, "
                f"group {group.group_id} of {env}: {cause}"
            )


def player_of(player: Player, cfg: OrchestratorSection, name: str) -> Player:
    """The player with an environment's own sampling and deadline."""
    section = cfg.env_of(name)
    assert section is not None, f"no environment {name}"
    timeout_s = section.rollout_timeout_s or player.timeout_s
    return replace(player, sampling=cfg.sampling_of(name), timeout_s=timeout_s)
